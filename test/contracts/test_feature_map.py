"""What every feature map promises."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.exceptions.warnings import InputDataWarning

from botorch_fed.models import (
    AdditiveFeatures,
    FeatureMap,
    InducingFeatures,
    RandomFourierFeatures,
    StationaryKernel,
    feature_map_from_tensors,
    features,
    register_feature_map,
)
from botorch_fed.models.features import PolynomialFeatures
from botorch_fed.rng import generator
from test.cases import MAPS, inducing, uniform


def polynomial() -> FeatureMap:
    half_width = torch.tensor([0.5, 0.6], dtype=torch.float64)
    return PolynomialFeatures(0.5, half_width, constant_scale=3.0, scale=0.4)


def trend_and_inducing() -> FeatureMap:
    return AdditiveFeatures([polynomial(), inducing()], [range(2), range(2)])


maps = pytest.mark.parametrize("make", [*MAPS, polynomial, trend_and_inducing])


@maps
@pytest.mark.parametrize("batch_shape", [(), (2,), (2, 3), (0,)])
@pytest.mark.parametrize("q", [0, 1, 4])
def test_shapes(make: Callable[[], FeatureMap], batch_shape: tuple[int, ...], q: int) -> None:
    phi = make()
    X = uniform(*batch_shape, q, 2)
    assert phi(X).shape == (*batch_shape, q, phi.num_features)
    assert phi(X).dtype == torch.float64
    assert phi.residual(X).shape == (*batch_shape, q, q)
    assert phi.covariance(X).shape == (*batch_shape, q, q)


@maps
def test_batch_is_a_loop(make: Callable[[], FeatureMap]) -> None:
    phi, X = make(), uniform(3, 4, 2)
    torch.testing.assert_close(phi(X), torch.stack([phi(x) for x in X]), rtol=1e-12, atol=1e-12)
    expected = torch.stack([phi.residual(x) for x in X])
    torch.testing.assert_close(phi.residual(X), expected, rtol=1e-12, atol=1e-12)


@maps
def test_features_and_residual_make_a_prior_below_the_kernels_variance(
    make: Callable[[], FeatureMap],
) -> None:
    phi, X = make(), uniform(50, 2)
    norms = phi(X).square().sum(dim=-1)
    variance = phi.outputscale.sum()
    assert bool((norms <= variance * (1 + 1e-12)).all())
    assert bool((phi.residual(X).diagonal() >= -1e-12 * variance).all())
    if phi.has_residual:
        total = phi(X) @ phi(X).mT + phi.residual(X)
        torch.testing.assert_close(total, phi.covariance(X), rtol=1e-12, atol=1e-12)
    else:
        assert not bool(phi.residual(X).any())


@maps
def test_serial_form_is_the_same_map(make: Callable[[], FeatureMap]) -> None:
    phi, X = make(), uniform(5, 2)
    tensors = phi.to_tensors()
    assert all(type(value) is torch.Tensor for value in tensors.values())
    assert all(bool(value.isfinite().all()) for value in tensors.values())
    for other in [
        feature_map_from_tensors(tensors),
        copy.deepcopy(phi),
        pickle.loads(pickle.dumps(phi)),
    ]:
        assert type(other) is type(phi)
        assert other.fingerprint == phi.fingerprint
        assert torch.equal(other(X), phi(X))
        assert torch.equal(other.residual(X), phi.residual(X))


@maps
def test_fingerprint_changes_with_every_tensor(make: Callable[[], FeatureMap]) -> None:
    phi = make()
    checked = 0
    for name, value in phi.to_tensors().items():
        if not value.is_floating_point():
            continue  # a smoothness or a group cannot move by one bit
        tensors = phi.to_tensors()
        moved = value.clone().reshape(-1)
        up = torch.tensor(torch.inf, dtype=torch.float64)
        moved[-1] = torch.nextafter(moved[-1], up)
        tensors[name] = moved.reshape(value.shape)
        other = feature_map_from_tensors(tensors).fingerprint
        assert len(other) == 64
        assert other != phi.fingerprint, name
        checked += 1
    assert checked >= 3


@maps
def test_new_hyperparameters_make_a_new_basis_with_gradients(
    make: Callable[[], FeatureMap],
) -> None:
    phi, X = make(), uniform(6, 2)
    _, upper = phi.lengthscale_range
    ell = torch.minimum(phi.lengthscale * 1.1, upper).requires_grad_()
    scale = (phi.outputscale * 2).requires_grad_()
    other = phi.with_hyperparameters(ell, scale)
    assert other.fingerprint != phi.fingerprint
    torch.testing.assert_close(other.lengthscale, ell)
    gradients = torch.autograd.grad(other(X).square().sum() + other(X)[..., 0].sum(), [ell, scale])
    assert all(bool(g.isfinite().all()) and bool(g.any()) for g in gradients)

    # The original, by length scale and variance, to rounding.
    same = other.with_hyperparameters(phi.lengthscale, phi.outputscale)
    torch.testing.assert_close(same(X), phi(X), rtol=1e-9, atol=1e-9)


@maps
def test_gradients_to_points(make: Callable[[], FeatureMap]) -> None:
    phi = make()
    X = uniform(3, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: phi(x), (X,))
    if phi.has_residual:
        assert torch.autograd.gradcheck(lambda x: phi.residual(x), (X,))


@maps
def test_stays_in_float64(make: Callable[[], FeatureMap]) -> None:
    phi, X = make(), uniform(3, 2)
    before = phi(X)
    with pytest.warns(InputDataWarning, match="stays in float64"):
        phi.float()
    assert torch.equal(phi(X), before)
    assert phi(X.float()).dtype == torch.float64


@maps
def test_has_no_state_to_save(make: Callable[[], FeatureMap]) -> None:
    # A model's state_dict holds hyperparameters only; a map serialises itself.
    assert not make().state_dict()


@maps
@pytest.mark.parametrize("shape", [(2,), (3, 1), (3, 3), ()])
def test_wrong_last_dimension(make: Callable[[], FeatureMap], shape: tuple[int, ...]) -> None:
    with pytest.raises(BotorchTensorDimensionError, match=r"batch_shape x q x 2.*got shape"):
        make()(torch.zeros(shape, dtype=torch.float64))


@maps
def test_damaged_serial_form_is_refused(make: Callable[[], FeatureMap]) -> None:
    tensors = make().to_tensors()
    for name in tensors:
        rest = {key: value for key, value in tensors.items() if key != name}
        with pytest.raises((InputDataError, BotorchTensorDimensionError)):
            feature_map_from_tensors(rest)
    for name, value in tensors.items():
        if value.is_floating_point() and value.numel():
            damaged = value.clone().reshape(-1)
            damaged[0] = torch.nan
            with pytest.raises(InputDataError):
                feature_map_from_tensors({**tensors, name: damaged.reshape(value.shape)})


@maps
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex128])
def test_serial_form_of_another_type_is_refused(
    make: Callable[[], FeatureMap], dtype: torch.dtype
) -> None:
    tensors = make().to_tensors()
    for name, value in tensors.items():
        if value.dtype == torch.float64:
            with pytest.raises((InputDataError, UnsupportedError)):
                feature_map_from_tensors({**tensors, name: value.to(dtype)})
        with pytest.raises((InputDataError, BotorchTensorDimensionError, UnsupportedError)):
            feature_map_from_tensors({**tensors, name: value.reshape(-1)[:0]})


def test_unknown_tag_is_refused() -> None:
    with pytest.raises(InputDataError, match="tagged with one of"):
        feature_map_from_tensors({"os/system": torch.zeros(1)})
    with pytest.raises(InputDataError, match="tagged with one of"):
        feature_map_from_tensors({})


def test_a_map_of_ones_own_is_rebuilt_once_it_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(features, "_KINDS", dict(features._KINDS))

    class Halved(RandomFourierFeatures):
        def to_tensors(self) -> dict[str, torch.Tensor]:
            tensors = super().to_tensors().items()
            return {name.replace("random_fourier", "halved"): value for name, value in tensors}

        def _features(self, X: torch.Tensor) -> torch.Tensor:
            return super()._features(X / 2)

    kernel = StationaryKernel(float("inf"), [0.3, 0.3])
    phi = RandomFourierFeatures.draw(kernel, 10, generator=generator(0))
    own = Halved(kernel, phi.frequencies)
    with pytest.raises(InputDataError, match=r"got \['halved'\].*needs register_feature_map"):
        feature_map_from_tensors(own.to_tensors())
    assert register_feature_map("halved")(Halved) is Halved
    # The inherited `_from_tensors` builds the class on which it is called.
    rebuilt = feature_map_from_tensors(own.to_tensors())
    assert type(rebuilt) is Halved
    assert rebuilt.fingerprint == own.fingerprint
    X = uniform(4, 2)
    assert torch.equal(rebuilt(X), own(X))
    assert not torch.equal(rebuilt(X), phi(X))
    register_feature_map("halved")(Halved)  # again, as a notebook does

    with pytest.raises(
        InputDataError, match=r"'halved' is registered for .*Halved: choose another"
    ):
        register_feature_map("halved")(InducingFeatures)
    with pytest.raises(InputDataError, match="registered for RandomFourierFeatures"):
        register_feature_map("random_fourier")(Halved)  # what ships cannot be replaced
    with pytest.raises(InputDataError, match="lower-case letters"):
        register_feature_map("a/b")
    with pytest.raises(InputDataError, match="int is no FeatureMap"):
        register_feature_map("number")(int)  # type: ignore[type-var]
