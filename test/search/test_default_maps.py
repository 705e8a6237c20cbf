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
    1: "3f0cd0e0d3562c30cc0e6325e3d50db0ece70caa198df26af883b9fab89a7ffc",
    2: "706b41825f6ee779ed68089d376e86a9239a78f5f1e2097d1422ebe35d45ce6a",
    3: "4659b1ad9e9e21dd18b54551900946722c0dca16972e66b11648e9dadbb76718",
    4: "684792e42ea7e194c952c04c7861107080893029938220042471ba94376f2a45",
    6: "8b4f4aafbb2f7128d82cc8752bf870f309f65aced726f27854cdaeafc32160f4",
    10: "bb746f1064d7599ab846504a587585eb788c8641d224fec3762478328c131e77",
}
SHARED = {
    1: "e7022f50e490473b65cc2373c28212828b850ecec2900a7626bedae1b9c774d5",
    2: "a21853fa1fba4eefd4a3197acfe50f8c24b83c3c1ebb4df4be7bbdb86efe9c4a",
    3: "9bae5b0e36ee32da9abae3074479b7dff4d5954a3409c0148d375527499406a8",
    4: "0eccde42d016b2b1648cf595e81ec52affe1055293504e3b14abe12567d5d11d",
}
TRANSFER = {
    1: "b599800e148b6ad6f36b11204a567a23ed271528d16f45291ce0edceee5854be",
    2: "20e478afed2865698381c51c6a3b290d7d87f95870ef458628927b09cb2c6e60",
    3: "e3e76519a30514024a0b71d0b53ff4042128a1eeb8879ca2a6f75595c0f43c12",
    4: "1a550eb2de79aa948b059a0a1ed55ac857c424eed82c58d959cc47d634c2a247",
    10: "15703b1875b24a3f92e915fd801ded82cd3751fae56487deba266e14e1d9280c",
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
        pytest.approx([0.5201874928, 1.61632635e-05, -8.81419006e-06], abs=1e-9),
        pytest.approx([0.2530861460, 0.1496610576, -0.4894742724], abs=1e-9),
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
