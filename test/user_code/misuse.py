"""Mistakes of a user; every line that says so is to be reported, and no other."""

from __future__ import annotations

import torch

from botorch_fed.acquisition import Polynomial, maximize
from botorch_fed.models import BasisGP, Summary, summarize
from botorch_fed.privacy import (
    Budget,
    Event,
    GaussianSum,
    Ledger,
    epsilon,
    noise_multiplier_for,
)
from botorch_fed.privacy.audit import audit
from botorch_fed.rng import generator
from botorch_fed.run import RunResult, run
from botorch_fed.search.thompson import Strategy
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.studies import FTS, FedGP, PrivateUCB
from botorch_fed.test_functions import SyntheticGPAgents

X = torch.zeros(3, 1).double()
PROBLEM = SyntheticGPAgents(3, seed=0)


class NoStudy:
    """Has a budget, and neither server nor agent."""

    budget = 3


def wrong(result: RunResult) -> None:
    FTS(budget="20")  # wrong
    FTS(budget=20, message="means")  # wrong
    Strategy(schedule=0.5)  # wrong
    Polynomial("0.5")  # wrong
    FedGP(budget=3, channel="telephone")  # wrong
    PrivateUCB(budget=3, trust="some")  # wrong
    Parameter.real("x", "0", 1.0)  # wrong
    SearchSpace([Parameter.real("x", 0, 1)])  # wrong
    BasisGP(X, X, feature_map="rff")  # wrong
    summarize("rff", X, X, noise_var=0.1)  # wrong
    Summary.unpack(X, basis=3)  # wrong
    maximize(X, 2, generator=generator(0))  # wrong
    generator(0.5)  # wrong
    epsilon(sampling_rate="1", noise_multiplier=1.0, num_releases=1, delta=1e-5)  # wrong
    noise_multiplier_for(epsilon=1.0, delta=1e-5, sampling_rate=1.0)  # wrong
    Ledger(budget=2.0)  # wrong
    Ledger(budget=Budget(1.0, 1e-5)).spend(1.0)  # wrong
    Event("1")  # wrong
    GaussianSum(num_agents=4, dim=3, clip_norm="1", noise_multiplier=1.0)  # wrong
    audit(3)  # wrong
    run(NoStudy(), PROBLEM, seed=0)  # wrong
    run(FTS(budget=3), {"a": 3}, seed=0)  # wrong
    run(FTS(budget=3), PROBLEM)  # wrong
    result.best(3)  # wrong
    text: str = result.bytes_per_round()  # wrong
    print(text)
