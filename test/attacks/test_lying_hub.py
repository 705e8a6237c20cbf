"""A site with a study and nothing else, against a hub that lies in every field."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.errors import MessageError
from botorch_fed.federation.agent import bound_to
from botorch_fed.federation.registry import PROTOCOLS, study_class
from botorch_fed.federation.terms import Order, Setup, check_words, in_words
from botorch_fed.privacy import GaussianSum
from botorch_fed.space import Parameter, SearchSpace
from botorch_fed.storage.store import MemoryBlobs
from botorch_fed.studies import DPFTSDE, FTS, Federation, FedGP, PrivateUCB
from botorch_fed.wire.codec import encode
from test.attacks.lying_hub import attack
from test.faults.cases import NAMES, SQUARE, cases, gaussian

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = [name for name in cases() if name != "fts-late"]
KINDS = {
    ("FTS", "Relay"): "fts-search",
    ("DPFTSDE", "NoisySum"): "dp-fts-de",
    ("DPFTSDE", "SecureSum"): "dp-fts-de-distributed",
    ("PrivateUCB", "JointStream"): "ucb-joint",
    ("PrivateUCB", "LocalStream"): "ucb-local",
    ("PrivateUCB", "PublicStream"): "ucb-public",
    ("PrivateUCB", "Stream"): "ucb-none",
    ("FedGP", "SecureSum"): "fed-gp-threshold-noise",
}

LONG = ("dp-fts-de-distributed", "fed-gp-threshold-noise")  # each with more than 3,000 lies


def holds(name: str, *, every: int, least: int) -> None:
    """No lie weakens privacy, exceeds a limit, or crashes a site: fields, and whole campaigns."""
    found = attack(name, cases()[name], every=every)
    assert found.fields >= least
    assert found.lies - found.fields >= 700  # requests of campaigns, each of them well-formed
    assert found.verdicts["campaign held"] >= 15
    assert found.bad == []
    assert found.unnamed == []
    assert found.verdicts["refused"] >= least / 2
    assert found.peak_mb < 64


def test_every_kind_of_federation_is_lied_to() -> None:
    """A protocol or an aggregation that is new to the package is wanted here too."""
    made = {name: case.study for name, case in cases().items()}
    kinds = {
        (type(study).__name__, type(study.make_aggregation()).__name__)
        for study in made.values()
        if isinstance(study, FTS | DPFTSDE | FedGP | PrivateUCB)
    }
    assert kinds == set(KINDS)
    protocols = {type(made[name]) for name in KINDS.values()}
    named = {study_class(name) for name in PROTOCOLS} - {Federation}  # that of own parts
    assert protocols == named


@pytest.mark.parametrize("name", KINDS.values())
def test_a_lie_in_each_field_of_every_kind_of_federation(name: str) -> None:
    holds(name, every=5 if name in LONG else 2, least=200)


@pytest.mark.parametrize("name", [name for name in CASES if name not in KINDS.values()])
def test_some_lies_to_the_other_federations(name: str) -> None:
    holds(name, every=40, least=15)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_no_lie_weakens_privacy_exceeds_a_limit_or_crashes_a_site(name: str) -> None:
    holds(name, every=1, least=600)


# ------------------------------------------------------------------ the rule of the roster


def first(study: Any, setup: Setup, roster: tuple[str, ...] = NAMES) -> None:
    agent = bound_to(study.agent("bob", SQUARE, 1, MemoryBlobs()), roster)
    order: Any = Order(0, "nothing", False)
    if isinstance(study, FedGP):
        kind = agent.accepts[0]
        order = kind(0, "first", False, "sum", 0, setup.agents)
    agent.check(agent.start(), order, (agent.blobs.put(encode(setup)),))


def test_made_up_agents_would_take_a_sites_noise_away() -> None:
    """Each site adds its share of the noise: among a thousand agents a thousandth."""
    study: Any = cases()["fed-gp-agents-noise"].study
    many = (*NAMES, *(f"site {i}" for i in range(1000)))
    setup = study.terms(SQUARE, many).setup
    with pytest.raises(MessageError, match=r"differ in agents: this site's study has 3.*says 1003"):
        first(study, setup)


# ------------------------------------------------------------------ words of functions


def scaled(scale: float, dim: int, num_agents: int) -> GaussianSum:
    return GaussianSum(
        dim=dim, num_agents=num_agents, clip_norm=1.0, noise_multiplier=scale, weight=1.0
    )


class Made:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, dim: int, num_agents: int) -> GaussianSum:
        return scaled(self.scale, dim, num_agents)

    def bound(self, dim: int, num_agents: int) -> GaussianSum:
        return scaled(self.scale, dim, num_agents)


def enclosed(scale: float) -> Callable[[int, int], GaussianSum]:
    return lambda dim, num_agents: scaled(scale, dim, num_agents)


def with_default(scale: float) -> Callable[..., GaussianSum]:
    def make(dim: int, num_agents: int, noise: float = scale) -> GaussianSum:
        return scaled(noise, dim, num_agents)

    return make


@pytest.mark.parametrize(
    "make",
    [
        lambda scale: functools.partial(scaled, scale),
        lambda scale: functools.partial(functools.partial(scaled), scale),
        Made,
        lambda scale: Made(scale).bound,
        enclosed,
        with_default,
    ],
    ids=["partial", "partial of a partial", "object", "method", "closure", "default"],
)
def test_nothing_hides_inside_of_a_function(make: Callable[[float], Any]) -> None:
    here, there = in_words(make(20.0), "mechanism"), in_words(make(1e-6), "mechanism")
    assert here == in_words(make(20.0), "mechanism")
    with pytest.raises(MessageError, match=r"this site has 20, the hub has 1e-06"):
        check_words(here, there)


def test_another_function_of_the_same_name_is_another_word() -> None:
    lambdas: list[Any] = []
    lambdas.append(lambda dim, num_agents: scaled(20.0, dim, num_agents))
    lambdas.append(lambda dim, num_agents: scaled(1e-6, dim, num_agents))
    assert in_words(lambdas[0], "m") != in_words(lambdas[1], "m")


def test_a_hub_without_a_promise_is_refused_by_a_site_with_noise() -> None:
    study: Any = cases()["fed-gp-agents-noise"].study
    setup = study.server(SQUARE, NAMES).hub.terms.setup
    first_words = pytest.raises(
        MessageError, match=r"differ in promise: this site has .*the hub no"
    )
    with first_words:
        first(study, replace(setup, promise=None))
    assert gaussian(3, 3).num_agents == 3


# ------------------------------------------------------------------ spaces


@pytest.mark.parametrize(
    "parameters", [[Parameter.real("x", 0, 1)], Parameter.real("x", 0, 1), ("x",)]
)
def test_a_space_says_at_once_what_it_is_made_of(parameters: Any) -> None:
    with pytest.raises(InputDataError, match="Expected parameters as a tuple of Parameter"):
        SearchSpace(parameters)


def test_the_weight_of_a_site_with_many_records_is_kept() -> None:
    X: Tensor = torch.rand(1500, 2, dtype=torch.float64)
    study: Any = cases()["fed-gp-ckks"].study
    study = replace(study, data={"bob": (X, X.sum(dim=-1, keepdim=True))})
    search = study.make_search()
    assert search.horizon == study.budget + 1500
    assert search.bound(study.terms(SQUARE)) >= search.largest(1500)
