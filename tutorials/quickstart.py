"""A site tunes a black box with the help of three others, in an ordinary BoTorch loop.

Four laboratories look for the minimum of the same function (Branin, bundled with BoTorch). Three of
them have 20 observations each and send one summary over a public feature map: a fixed number of
sums, no data point. The fourth starts with 4 observations and asks for 12 more.

    python tutorials/quickstart.py [--seed 0] [--queries 12]
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from botorch import fit_gpytorch_mll
from botorch.acquisition import LogExpectedImprovement
from botorch.exceptions.warnings import InputDataWarning
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin
from botorch.utils.sampling import draw_sobol_samples, manual_seed
from gpytorch.mlls import ExactMarginalLogLikelihood
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from botorch_fed.models import (
    BasisGP,
    QuadratureFourierFeatures,
    StationaryKernel,
    Summary,
    summarize,
)
from botorch_fed.rng import generator

# Public choices, made by all sites before anybody looks at data: inputs in the unit square,
# outcomes divided by 50 and centred, one kernel, one noise variance, one feature map.
UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
KERNEL = StationaryKernel(math.inf, [0.3, 0.5])
NOISE_VAR = 1e-4
CENTRE, SCALE = -50.0, 50.0
PROBLEM = Branin(negate=True).double()


def objective(X: Tensor) -> Tensor:
    """What a site measures at points of the unit square, on the public scale: `n x 1`."""
    lower, upper = PROBLEM.bounds
    return ((PROBLEM(lower + X * (upper - lower)) - CENTRE) / SCALE).unsqueeze(-1)


def regrets(
    make_model: Callable[[Tensor, Tensor], Model], X: Tensor, queries: int, label: str
) -> Tensor:
    """Distance of the best value to the optimum after each query, in the function's own units."""
    Y = objective(X)
    quiet = not Console().is_terminal
    for _ in track(range(queries), description=label, transient=True, disable=quiet):
        model = make_model(X, Y)
        acquisition = LogExpectedImprovement(model, best_f=Y.max())
        candidate, _ = optimize_acqf(acquisition, UNIT, q=1, num_restarts=8, raw_samples=128)
        X, Y = torch.cat([X, candidate]), torch.cat([Y, objective(candidate)])
    best = CENTRE + SCALE * Y.squeeze(-1).cummax(dim=0).values[-queries:]
    return PROBLEM.optimal_value - best


def main(argv: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Run the comparison, print it, and return the regrets of each method."""
    parser = argparse.ArgumentParser(description="A site tunes a black box with three others.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--queries", type=int, default=12)
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore", InputDataWarning)  # BoTorch's hint to standardise
    console = Console()
    feature_map = QuadratureFourierFeatures.from_kernel(KERNEL, UNIT, tol=1e-3)

    # What the other sites do: summarise, pack, send. Only the packed vector leaves them.
    messages = []
    for site in range(3):
        X = generator(args.seed, "site", site).uniform(20, 2)
        summary = summarize(feature_map, X, objective(X), noise_var=NOISE_VAR)
        messages.append(summary.pack())
    received = [Summary.unpack(message, basis=feature_map.fingerprint) for message in messages]

    def helped(X: Tensor, Y: Tensor) -> Model:
        return BasisGP(X, Y, feature_map=feature_map, noise_var=NOISE_VAR, summaries=received)

    def alone(X: Tensor, Y: Tensor) -> Model:
        model = SingleTaskGP(X, Y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        return model

    marks = sorted({1, min(5, args.queries), args.queries})
    table = Table("the fourth site", title="Regret: value above the minimum, lower is better")
    for mark in marks:
        table.add_column(f"{mark} quer{'y' if mark == 1 else 'ies'}", justify="right")
    table.add_column("seconds", justify="right")
    X = draw_sobol_samples(UNIT, n=4, q=1, seed=args.seed).squeeze(1)
    results = {}
    for label, make_model in {
        "alone (SingleTaskGP)": alone,
        "with three summaries (BasisGP)": helped,
    }.items():
        start = time.perf_counter()
        with manual_seed(args.seed):
            results[label] = regrets(make_model, X, args.queries, label)
        values = [f"{float(results[label][mark - 1]):.3f}" for mark in marks]
        table.add_row(label, *values, f"{time.perf_counter() - start:.1f}")
    console.print(table)
    console.print(
        f"Each other site sent {messages[0].numel():,} numbers, once. No observation left a site.\n"
        "[bold]An aggregate is not a privacy guarantee[/bold]: from one summary of few "
        "observations they can be recovered.",
        highlight=False,
    )
    return results


if __name__ == "__main__":
    main()
