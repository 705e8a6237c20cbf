"""Speed and accuracy of the models, each figure against its peer in the same run.

    python -m benchmarks.models [--json] [--threads 2] [--quick | --smoke]

Keys of ``--json``:

    speedup_vs_matheron             SingleTaskGP with Matheron paths at its best settings / BasisGP:
                                    ingest, posterior and 16 paths; n = 2,000, M = 100, d = 6,
                                    1,000 test points
    posterior_time_ratio_n1e6_vs_n1e2  prediction after ingest of 10^6 and of 10^2 observations
    peak_mb_n1e6                    peak memory of streaming 10^6 observations in chunks of 10,000,
                                    beyond imports, in a process of its own
    summary_update_speedup          recompute / update after one observation, n_i = 500, S = 64,
                                    on one thread, as agents compute (the table has both)
    max_dev_dense                   largest deviation from dense Bayesian linear regression
    max_dev_pitc                    largest deviation from centralised dense PITC
    import_extra_s                  import botorch_fed.models beyond import botorch, seconds

``--quick`` has fewer repeats and at most 10^5 observations; ``--smoke`` runs everything once, so
small that the figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import torch
from botorch.models import SingleTaskGP
from botorch.sampling.pathwise import draw_matheron_paths
from botorch.sampling.pathwise.prior_samplers import draw_kernel_feature_paths
from gpytorch.kernels import RBFKernel
from linear_operator import settings as linear_settings
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.processes import in_own_process, in_this_process
from botorch_fed.models import (
    BasisGP,
    FeatureMap,
    InducingFeatures,
    LocalBlock,
    RandomFourierFeatures,
    Summary,
    WeightPosterior,
    summarize,
)
from botorch_fed.rng import generator

NUM_DATA, NUM_FEATURES, DIM, NUM_TEST, NUM_PATHS = 2000, 100, 6, 1000, 16
NOISE = 0.01
SIZES = [10**2, 10**3, 10**4, 10**5, 10**6]  # observations that are streamed
OWN_SIZES = [100, 200, 500, 1000]  # observations of one agent
IMPORTS = 5
SMOKE = {
    "NUM_DATA": 60,
    "NUM_TEST": 20,
    "STREAM_CHUNK": 100,
    "SIZES": [10**2],
    "OWN_SIZES": [500],
    "IMPORTS": 1,
    "in_own_process": in_this_process,
}


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Median wall time in milliseconds, after one warm-up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def data(n: int, d: int, *path: int | str) -> tuple[Tensor, Tensor]:
    stream = generator(0, "benchmark", *path)
    X = stream.uniform(n, d)
    return X, (6 * X).sin().sum(dim=-1, keepdim=True) + 0.1 * stream.normal(n, 1)


def kernel(d: int, lengthscale: float) -> RBFKernel:
    result = RBFKernel(ard_num_dims=d).double()
    result.lengthscale = torch.full((1, d), lengthscale, dtype=torch.float64)
    return result


# ------------------------------------------------------------------ against SingleTaskGP


def matheron(repeats: int) -> tuple[dict[str, float], float]:
    """Milliseconds of every variant, and the speed-up over the fastest of the peer."""
    X, Y = data(NUM_DATA, DIM, "matheron")
    test_X = generator(0, "benchmark", "test").uniform(NUM_TEST, DIM)
    k = kernel(DIM, 0.6)
    phi = RandomFourierFeatures.draw(k, NUM_FEATURES, generator=generator(0, "features"))
    paths = torch.Size([NUM_PATHS])

    def ours() -> None:
        model = BasisGP(X, Y, feature_map=phi, noise_var=NOISE)
        with torch.no_grad():
            posterior = model.posterior(test_X.unsqueeze(-2))
            assert posterior.mean.isfinite().all() and posterior.variance.isfinite().all()
            draw_matheron_paths(model, paths)(test_X)

    def peer(joint: bool, num_features: int) -> Callable[[], None]:
        def prior(model: SingleTaskGP, sample_shape: torch.Size) -> object:
            return draw_kernel_feature_paths(
                model, sample_shape=sample_shape, num_features=num_features
            )

        def work() -> None:
            model = SingleTaskGP(X, Y, covar_module=k, outcome_transform=None)
            model.likelihood.noise = NOISE
            model.eval()
            with torch.no_grad():
                # One batch of q = 1 points, or one joint posterior; variances are read from both.
                posterior = model.posterior(test_X if joint else test_X.unsqueeze(-2))
                assert posterior.mean.isfinite().all() and posterior.variance.isfinite().all()
                draw_matheron_paths(model, paths, prior_sampler=prior)(test_X)

        return work

    def iterative() -> None:
        # A cheaper setting of the peer: conjugate gradients instead of Cholesky factors.
        with (
            linear_settings.max_cholesky_size(1),
            linear_settings.fast_computations(True, True, True),
        ):
            peer(joint=True, num_features=100)()

    own = f"BasisGP, M = {NUM_FEATURES}"
    works: dict[str, Callable[[], None]] = {own: ours}
    for joint in (False, True):
        for num_features in (1024, 100):
            shape = "joint" if joint else "batch"
            name = f"SingleTaskGP, {shape} posterior, paths with {num_features} features"
            works[name] = peer(joint, num_features)
    works["SingleTaskGP, conjugate gradients"] = iterative
    # Interleaved, so that a busy machine treats all of them alike.
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(median_ms(work, 5 if name == own else 1))
    rows = {name: statistics.median(values) for name, values in times.items()}
    best = min(ms for name, ms in rows.items() if name != own)
    return rows, best / rows[own]


# ------------------------------------------------------------------ growth with n

STREAM_CHUNK = 10_000


def streamed(phi: FeatureMap, n: int) -> Summary:
    """Ingest `n` observations as they come, never holding more than one chunk."""
    total = Summary.zero(phi)
    for part in range(0, n, STREAM_CHUNK):
        X, Y = data(min(STREAM_CHUNK, n - part), DIM, "stream", part)
        total = total + summarize(phi, X, Y, noise_var=NOISE)
    return total


def resident_peak() -> float:
    """High-water mark of this process in megabytes (`ru_maxrss` would include the parent's)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def peak_megabytes(n: int) -> float:
    """Peak memory of streaming `n` observations beyond imports, in a process of its own."""
    code = (
        "from benchmarks.models import resident_peak, shared_map, streamed\n"
        "streamed(shared_map(), 1)\n"
        "before = resident_peak()\n"
        f"streamed(shared_map(), {n})\n"
        "print(resident_peak() - before)\n"
    )
    return float(*in_own_process(code))


def shared_map() -> FeatureMap:
    """The features of the growth curve."""
    stream = generator(0, "features")
    return RandomFourierFeatures.draw(kernel(DIM, 0.6), NUM_FEATURES, generator=stream)


def growth(sizes: list[int], repeats: int) -> dict[int, tuple[float, float, float]]:
    """By `n`: seconds of ingest, milliseconds of a prediction, peak megabytes of the ingest."""
    phi = shared_map()
    test_X = generator(0, "benchmark", "test").uniform(NUM_TEST, DIM)

    def predictor(total: Summary) -> Callable[[], None]:
        model = BasisGP.from_summary(total, feature_map=phi)

        def predict() -> None:
            with torch.no_grad():
                posterior = model.posterior(test_X.unsqueeze(-2))
                assert posterior.mean.isfinite().all() and posterior.variance.isfinite().all()

        return predict

    predictor(streamed(phi, STREAM_CHUNK))()  # what every process pays once
    curve, predictors = {}, {}
    for n in sizes:
        start = time.perf_counter()
        total = streamed(phi, n)
        seconds = time.perf_counter() - start
        predictors[n] = predictor(total)
        curve[n] = (seconds, 0.0, peak_megabytes(n))
    # Interleaved, so that a busy machine treats all sizes alike.
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for _ in range(20 * repeats):
        for n in sizes:
            start = time.perf_counter()
            predictors[n]()
            times[n].append(1e3 * (time.perf_counter() - start))
    return {n: (curve[n][0], statistics.median(times[n]), curve[n][2]) for n in sizes}


# ------------------------------------------------------------------ one new observation


def update(repeats: int, sizes: list[int]) -> dict[int, tuple[float, float]]:
    """By `n_i`: milliseconds of recomputing a PITC summary and of updating it, S = 64."""
    phi = InducingFeatures(kernel(DIM, 0.6), generator(0, "support").uniform(64, DIM))
    result = {}
    for n in sizes:
        X, Y = data(n + 1, DIM, "update")
        block = LocalBlock.from_data(phi, X[:n], Y[:n], noise_var=NOISE)

        def recompute(X: Tensor = X, Y: Tensor = Y) -> Summary:
            return summarize(phi, X, Y, noise_var=NOISE)

        def extend(block: LocalBlock = block, x: Tensor = X[n:], y: Tensor = Y[n:]) -> Summary:
            return block.extend(x, y, noise_var=NOISE).summary

        gap = (recompute().gram - extend().gram).abs().max() / recompute().gram.abs().max()
        assert float(gap) < 1e-8, f"update and recompute differ by {float(gap):.1e}"
        result[n] = (median_ms(recompute, 10 * repeats), median_ms(extend, 50 * repeats))
    return result


# ------------------------------------------------------------------ accuracy


def dense_deviation() -> float:
    """Largest deviation of mean and covariance from dense regression on the same features."""
    phi = RandomFourierFeatures.draw(
        kernel(2, 0.4), NUM_FEATURES, generator=generator(0, "features")
    )
    X, Y = data(300, 2, "dense")
    test_X = generator(0, "benchmark", "dense test").uniform(50, 2)
    posterior = BasisGP(X, Y, feature_map=phi, noise_var=NOISE).posterior(test_X)
    K = phi(X) @ phi(X).mT + NOISE * torch.eye(300, dtype=torch.float64)
    k = phi(test_X) @ phi(X).mT
    mean = k @ torch.linalg.solve(K, Y)
    covariance = phi(test_X) @ phi(test_X).mT - k @ torch.linalg.solve(K, k.mT)
    gaps = [posterior.mean - mean, posterior.distribution.covariance_matrix - covariance]
    return max(float(gap.detach().abs().max()) for gap in gaps)


def pitc_deviation() -> float:
    """Largest deviation of summed summaries from centralised PITC, over four settings."""
    worst = 0.0
    for agents, n, size, d, ell, noise in [
        (4, 6, 8, 2, 0.5, 1e-2),
        (10, 4, 8, 2, 0.3, 1e-2),
        (6, 10, 12, 3, 0.7, 1e-4),
        (4, 5, 8, 10, 1.5, 1e-2),
    ]:
        phi = InducingFeatures(kernel(d, ell), generator(3, "support").uniform(size, d))
        parts = [data(n, d, "pitc", i) for i in range(agents)]
        total = sum((summarize(phi, *p, noise_var=noise) for p in parts), Summary.zero(phi))
        test_X = generator(4, "test").uniform(20, d)
        location, root = WeightPosterior.from_total(total).predict(phi(test_X))
        covariance = root @ root.mT + phi.residual(test_X)

        Z = phi.inducing_points
        K_ZZ = phi.covariance(Z) + phi.jitter * torch.eye(size, dtype=torch.float64)
        X = torch.cat([p[0] for p in parts])
        Y = torch.cat([p[1] for p in parts])
        half = torch.linalg.solve(K_ZZ, phi.covariance(Z, X))
        Q = phi.covariance(X, Z) @ half
        blocks = torch.block_diag(*[torch.ones(n, n, dtype=torch.float64)] * agents)
        full = Q + blocks * (phi.covariance(X) - Q) + noise * torch.eye(len(X)).double()
        cross = phi.covariance(test_X, Z) @ half
        mean = cross @ torch.linalg.solve(full, Y)
        expected = phi.covariance(test_X) - cross @ torch.linalg.solve(full, cross.mT)
        gaps = [location - mean, covariance - expected]
        worst = max(worst, *(float(gap.abs().max()) for gap in gaps))
    return worst


def import_seconds() -> float:
    """What importing the models adds to importing BoTorch, best of five processes."""
    code = (
        "import time, botorch; start = time.perf_counter(); import botorch_fed.models; "
        "print(time.perf_counter() - start)"
    )
    return min(float(*in_own_process(code)) for _ in range(IMPORTS))


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and accuracy of the models.")
    parser.add_argument("--json", action="store_true", help="print one line of figures")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch, both sides")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, n up to 10^5")
    parser.add_argument("--smoke", action="store_true", help="does everything run?")
    args = parser.parse_args()
    args.threads = 1 if args.smoke else args.threads
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    with patch.dict(globals(), SMOKE if args.smoke else {}):
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """All figures, and their tables."""
    repeats = 1 if args.quick or args.smoke else 5
    sizes = SIZES[:-1] if args.quick else SIZES

    curve = growth(sizes, repeats)
    rows, speedup = matheron(repeats)
    updates = {}
    for threads in sorted({args.threads, 1}):
        torch.set_num_threads(threads)
        for n, pair in update(repeats, OWN_SIZES).items():
            updates[n, threads] = pair
    recompute_ms, extend_ms = updates[500, 1]
    torch.set_num_threads(args.threads)
    figures = {
        "speedup_vs_matheron": round(speedup, 1),
        "posterior_time_ratio_n1e6_vs_n1e2": round(curve[sizes[-1]][1] / curve[100][1], 3),
        "peak_mb_n1e6": round(curve[sizes[-1]][2], 1),
        "summary_update_speedup": round(recompute_ms / extend_ms, 1),
        "max_dev_dense": dense_deviation(),
        "max_dev_pitc": pitc_deviation(),
        "import_extra_s": round(import_seconds(), 3),
    }
    if args.json:
        print(json.dumps(figures))
        return
    console = Console()
    versions = ", ".join(f"{p} {version(p)}" for p in ("torch", "gpytorch", "botorch"))
    console.print(f"{versions}; Python {platform.python_version()}; {args.threads} threads")
    table = Table(
        "model",
        "ms",
        title=f"Ingest, posterior, 16 paths: n = {NUM_DATA:,}, d = {DIM}, 1,000 points",
    )
    for name, ms in rows.items():
        table.add_row(name, f"{ms:,.1f}")
    console.print(table)
    table = Table("n", "ingest, s", "prediction, ms", "peak, MB", title="Growth with the data")
    for n, (seconds, ms, megabytes) in curve.items():
        table.add_row(f"{n:,}", f"{seconds:.3f}", f"{ms:.2f}", f"{megabytes:.1f}")
    console.print(table)
    table = Table(
        "n_i", "threads", "recompute, ms", "update, ms", "ratio", title="One observation, S = 64"
    )
    for (n, threads), (slow, fast) in updates.items():
        row = (f"{n:,}", str(threads), f"{slow:.2f}", f"{fast:.2f}", f"{slow / fast:.1f}")
        table.add_row(*row)
    console.print(table)
    table = Table("figure", "value", title="Figures")
    for name, value in figures.items():
        table.add_row(name, f"{value:g}")
    console.print(table)


if __name__ == "__main__":
    main()
