"""What a query of the default search costs a site, and how that grows.

    python -m benchmarks.transfer_cost [--json]      two minutes
    python -m benchmarks.transfer_cost --smoke       seconds

A site with 50 observations in six dimensions makes its report and finds its next point, with what
50 others have said (rows of weights, and their sum), beside BoTorch's own step on the same data:
`SingleTaskGP`, `fit_gpytorch_mll`, `LogExpectedImprovement`, `optimize_acqf`. Medians of CPU
milliseconds, all in one process and one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from gpytorch.mlls import ExactMarginalLogLikelihood
from rich.console import Console
from torch import Tensor

from botorch_fed.rng import generator
from botorch_fed.search.transfer import (
    Advice,
    TransferSearch,
    bounded,
    default_feature_map,
    pack_report,
    prior_of_sum,
    unpack_sum,
)
from botorch_fed.space import Parameter, SearchSpace

DIM = 6
SPACE = SearchSpace(tuple(Parameter.real(f"x{j}", 0.0, 1.0) for j in range(DIM)))
OBSERVATIONS = (10, 20, 50)
SITES = (2, 10, 50, 200)


def history(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Observations of a smooth function with an interior optimum, `n x d` and `n x 1`."""
    X = generator(seed, "cost", "X").uniform(count, DIM)
    wiggle = 0.3 * torch.sin(6 * X).sum(dim=-1, keepdim=True)
    return X, wiggle - (X - 0.6).square().sum(dim=-1, keepdim=True)


def cpu_ms(step: Callable[[], object], repeats: int) -> float:
    """Median CPU milliseconds of a step, one run before not counted."""
    step()
    spent = []
    for _ in range(repeats):
        begin = time.process_time()
        step()
        spent.append(1e3 * (time.process_time() - begin))
    return round(statistics.median(spent), 1)


def ours(count: int, num_sites: int, *, summed: bool) -> Callable[[], object]:
    """A report and a point, with rows of others or with their sum."""
    search, phi = TransferSearch(), default_feature_map(SPACE)
    X, Y = history(count, 0)
    said = [search.report(SPACE, phi, *history(20, 1 + n % 8), None) for n in range(num_sites)]
    rows = torch.stack([row for row in said if row is not None])
    own = pack_report(phi, search.report(SPACE, phi, X, Y, None))
    total = own + torch.stack([pack_report(phi, row) for row in rows]).sum(dim=0)
    M = phi.num_features

    def heard() -> Advice:
        if summed:
            others = unpack_sum(total, own)
            prior = prior_of_sum(phi, others.weights, others.num_sites)
            trust = others.trust
        else:
            prior = prior_of_sum(phi, bounded(phi, rows[:, :M]).sum(dim=0), len(rows))
            trust = rows[:, M:].sum(dim=0)
        assert prior is not None
        return Advice(prior, trust)

    def step() -> object:
        advice = heard()
        point = search.point(
            SPACE, X, Y, advice, chosen=X[:0], candidates=None, stream=generator(0, "cost")
        )
        return point, search.report(SPACE, phi, X, Y, advice)

    return step


def alone(count: int) -> Callable[[], object]:
    """Our step without messages."""
    X, Y = history(count, 0)
    search = TransferSearch(listen=False)
    return lambda: search.point(
        SPACE, X, Y, None, chosen=X[:0], candidates=None, stream=generator(0, "cost")
    )


def botorch_alone(count: int) -> Callable[[], object]:
    """BoTorch's step."""
    X, Y = history(count, 0)

    def step() -> object:
        model = SingleTaskGP(X, Y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        acquisition = LogExpectedImprovement(model, best_f=Y.max())
        bounds = torch.stack([torch.zeros(DIM), torch.ones(DIM)]).double()
        return optimize_acqf(acquisition, bounds, q=1, num_restarts=10, raw_samples=512)

    return step


def measured(*, smoke: bool) -> dict[str, dict[str, float]]:
    """All figures: by observations, and by sites at the most observations."""
    counts, sites, repeats = (OBSERVATIONS, SITES, 15) if not smoke else ((5,), (2, 3), 1)
    most = counts[-1]
    found = {
        "alone_by_observations": {str(n): cpu_ms(alone(n), repeats) for n in counts},
        "with_50_messages_by_observations": {
            str(n): cpu_ms(ours(n, 50 if not smoke else 3, summed=False), repeats) for n in counts
        },
        "rows_by_sites": {str(s): cpu_ms(ours(most, s, summed=False), repeats) for s in sites},
        "sum_by_sites": {str(s): cpu_ms(ours(most, s, summed=True), repeats) for s in sites},
        "botorch_by_observations": {
            str(n): cpu_ms(botorch_alone(n), max(1, repeats // 3)) for n in counts
        },
    }
    found["botorch_over_alone"] = {
        str(n): round(
            found["botorch_by_observations"][str(n)]
            / max(found["alone_by_observations"][str(n)], 0.1),
            1,
        )
        for n in counts
    }
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = measured(smoke=options.smoke)
    finally:
        torch.set_num_threads(threads)
    if options.json:
        print(json.dumps(found))
        return
    console = Console()
    for name, figures in found.items():
        console.print(f"{name}: " + ", ".join(f"{n}: {value}" for n, value in figures.items()))


if __name__ == "__main__":
    main()
