"""The maps that protocols choose when none is given: the same everywhere and in every release."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

from botorch_fed.federation.server import FederatedServer
from botorch_fed.models import KLFeatures, feature_map_from_tensors
from botorch_fed.search import transfer
from botorch_fed.search.thompson import Strategy
from botorch_fed.search.transfer import TransferSearch, default_private_features
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.studies import DPFTSDE, FTS, PrivateUCB, default_feature_map

# Frozen: what the published seeds and points give. Another value here is another seeded run.
PRIVATE = {
    1: "8d4abdbf212e9c359f2a3aa24e8e5e2601e24ae214a44e82fc14bf46d4879210",
    2: "882a4c9d56218b0293e19cc9e9f7700c0b27b3162a979111e13d2ec9e0c37379",
    3: "ed0722aa97c920608444aaf2f0d78666de70ae50c831b49da8a37fa94ae08414",
    4: "b8d6cd81a365b17bafcc44d20b4a490bca0a8de5100efa31b49015e26334962d",
    6: "4a66abec63ec81b31e3f5bacb5d0fd68cc7329db365bccdaa6cf8fc7df5be7c3",
    10: "df613cdfc9413b22e884b42a0766cdb0b09b2593cef5a9855f3d8c683eadda47",
}
SHARED = {
    1: "e7022f50e490473b65cc2373c28212828b850ecec2900a7626bedae1b9c774d5",
    2: "a21853fa1fba4eefd4a3197acfe50f8c24b83c3c1ebb4df4be7bbdb86efe9c4a",
    3: "9bae5b0e36ee32da9abae3074479b7dff4d5954a3409c0148d375527499406a8",
    4: "0eccde42d016b2b1648cf595e81ec52affe1055293504e3b14abe12567d5d11d",
}
TRANSFER = {
    1: "ca4c2eb15cb1ce4caa137e7a3a833b9d722cde1990a64d4f58bc00377fe265ae",
    2: "800776324dd6cb077e485b72a4588385d7347e989824606060966c7ee743e9bd",
    3: "68797d813066530301d92060aa838bb7deb034aafce70882386cd265a5a820be",
    4: "9cced14004b874922c9c57ba1d8c47ab3a4665a0aa74a92b9f99bfe25e6019c4",
    10: "9432d16c28f1becf7bb92bd2426649fd783b34ee34cbf6c00ce0c2fca6f4520c",
}
WARPED = "e25ffd1c6aa08e78f27153ccfa2070069920b30e760a85f2cefa00cf010b7895"


def cube(dim: int) -> SearchSpace:
    return SearchSpace(tuple(Parameter.real(f"x{j}", 0.0, 1.0) for j in range(dim)))


RATES = SearchSpace((Parameter.real("a", 1e-4, 1.0), Parameter.real("b", 0.0, 1.0)))


def answers() -> dict[str, str]:
    """Fingerprints of all maps that protocols choose when none is given."""
    found = {f"private {d}": default_private_features(cube(d)) for d in PRIVATE}
    found |= {f"shared {d}": default_feature_map(cube(d)) for d in SHARED}
    found |= {f"transfer {d}": transfer.default_feature_map(cube(d)) for d in TRANSFER}
    found["warped"] = default_feature_map(RATES)
    return {name: phi.fingerprint for name, phi in found.items()}


KNOWN = {
    **{f"private {d}": known for d, known in PRIVATE.items()},
    **{f"shared {d}": known for d, known in SHARED.items()},
    **{f"transfer {d}": known for d, known in TRANSFER.items()},
    "warped": WARPED,
}
# Elsewhere compilers fuse multiplications and additions, also in SciPy's normal quantiles.
same_arithmetic = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="other rounding in ndtri"
)


@same_arithmetic
def test_fingerprints_of_the_default_maps() -> None:
    assert answers() == KNOWN


OLD, WIDE = {"ATEN_CPU_CAPABILITY": "default"}, {"ATEN_CPU_CAPABILITY": "avx2"}


@same_arithmetic
@pytest.mark.parametrize(
    ("threads", "settings"),
    [
        ("1", {**OLD, "MKL_CBWR": "COMPATIBLE", "OPENBLAS_CORETYPE": "Prescott"}),
        ("2", {**WIDE, "MKL_CBWR": "AVX2", "OPENBLAS_CORETYPE": "Haswell"}),
        pytest.param("1", {**OLD, "OPENBLAS_CORETYPE": "SkylakeX"}, marks=pytest.mark.nightly),
    ],
)
def test_fingerprints_are_those_of_other_processors(threads: str, settings: dict[str, str]) -> None:
    code = "from test.search.test_default_maps import KNOWN, answers; print(answers() == KNOWN)"
    counts = {f"{name}_NUM_THREADS": threads for name in ("OMP", "MKL", "OPENBLAS")}
    counts["OMP_WAIT_POLICY"] = "passive"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **settings, **counts},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "True", done.stderr


def test_entries_of_the_default_maps() -> None:
    phi = default_private_features(cube(2))
    assert isinstance(phi, KLFeatures)
    assert phi.projection[:2, :3].tolist() == [
        pytest.approx([0.5201915232, 2.893166945e-06, 1.836237475e-05], abs=1e-9),
        pytest.approx([0.2531073855, 0.1496594637, -0.4894809651], abs=1e-9),
    ]
    shared = default_feature_map(cube(2)).to_tensors()["random_fourier/frequencies"]
    assert shared[:2].flatten().tolist() == pytest.approx(
        [-4.695189148301851, 1.701502425902062, 3.7634522602607783, 14.326291109286517], rel=1e-12
    )


@pytest.mark.parametrize("dim", [4, 6, 10])
def test_a_small_basis_has_an_optimum_between_the_bounds_of_every_input(dim: int) -> None:
    phi = default_private_features(cube(dim))
    X = transfer.reference_points(dim)
    Phi = phi(X) - phi(X).mean(dim=0)
    hills = -(X - 0.6).square()
    hills = hills - hills.mean(dim=0)
    left = hills - Phi @ torch.linalg.lstsq(Phi, hills).solution
    assert bool((left.square().sum(dim=0) < 0.1 * hills.square().sum(dim=0)).all())


@pytest.mark.filterwarnings("ignore::botorch_fed.privacy.SignalWarning")
def test_protocols_send_these_maps() -> None:
    space, names = cube(2), ("ann", "bob")
    shared, private = default_feature_map(space), default_private_features(space)
    few = default_private_features(space, num_features=6, lengthscale=0.2)  # of four records
    of_study = (
        (FTS(budget=2, strategy=Strategy(), every=1), shared),
        (FTS(budget=2, strategy=TransferSearch()), transfer.default_feature_map(space)),
        (DPFTSDE(budget=5, epsilon=9.0), private),
        (PrivateUCB(budget=4, epsilon=9.0), few),
    )
    for study, phi in of_study:
        server: Any = study.server(space, names)
        hub = isinstance(server, FederatedServer)
        sent = server.hub.terms.setup.basis if hub else server.setup.features
        assert feature_map_from_tensors(sent).fingerprint == phi.fingerprint
