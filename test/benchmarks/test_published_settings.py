"""What an agent does in the papers: own draws, their width, and messages."""

from __future__ import annotations

import pytest
import torch
from botorch.exceptions.errors import InputDataError

from benchmarks.papers.published.settings import paper_fts, paper_strategy
from botorch_fed.acquisition import ThompsonSampling
from botorch_fed.models import OwnHyperparameters, own_gp
from botorch_fed.rng import generator
from botorch_fed.run import run
from botorch_fed.space import Outcome
from botorch_fed.test_functions import SyntheticGPAgents

X = generator(0, "x").uniform(5, 1)
Y = torch.sin(6 * X)
MODEL = own_gp(X, Y, OwnHyperparameters(torch.full((1,), 0.2).double(), 1.0, 1e-4, 0.0, 5))
POINTS = torch.linspace(0, 1, 7, dtype=torch.float64).reshape(7, 1, 1)


def drawn(beta: float) -> torch.Tensor:
    """Values of own steps with one stream of random numbers."""
    made = paper_strategy(beta=beta).acquisition(MODEL, X, X[:0], generator(1, "draw"))
    assert isinstance(made, ThompsonSampling)
    return made(POINTS).detach()


def test_the_own_step_is_as_wide_as_beta_says() -> None:
    mean = MODEL.posterior(POINTS).mean.flatten().detach()
    assert torch.allclose(drawn(0.0), mean)
    assert not torch.allclose(drawn(1.0), mean, atol=1e-2)
    assert torch.allclose(drawn(3.0) - mean, 3 * (drawn(1.0) - mean), atol=1e-8)


def test_a_width_is_a_number_from_zero_on() -> None:
    with pytest.raises(InputDataError, match="not negative"):
        paper_strategy(beta=-1.0)


def test_the_paper_to_the_letter_runs() -> None:
    problem = SyntheticGPAgents(3, seed=0)
    problem.space = type(problem.space)(problem.space.parameters, Outcome())
    data = {f"agent{n}": problem.observations(n, 8, seed=0) for n in range(3)}
    options = {"data": data, "active": ("agent0",), "candidates": problem.points}
    study = paper_fts(1, budget=3, beta=2.0, num_features=8, **options)
    terms = study.terms(problem.space, ("agent0", "agent1", "agent2"))
    assert terms.search.messages.kind == "sample"
    assert terms.basis.kernel.lengthscale.tolist() == [0.01]
    result = run(study, problem, seed=0, progress=False)
    assert [line["agent"] for line in result.records] == ["agent0"] * 3
