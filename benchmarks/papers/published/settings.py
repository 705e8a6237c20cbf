r"""Settings as published: of [Dai2021]_, and how an agent searches in [Dai2020FTS]_ and FBO-FedGP.

.. [Dai2020FTS] Z. Dai, B. K. H. Low, P. Jaillet. Federated Bayesian optimization via Thompson
   sampling. NeurIPS 2020.
.. [Dai2021] Z. Dai, B. K. H. Low, P. Jaillet. Differentially private federated Bayesian
   optimization with distributed exploration. NeurIPS 2021.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from benchmarks.papers.published.fbo_fedgp import PaperFedGP
from benchmarks.papers.published.features import PaperCosine
from benchmarks.papers.published.own_gp import PaperFollowing, PaperStrategy
from botorch_fed.acquisition import (
    ExplorationSchedule,
    InverseSquare,
    MixingSchedule,
    Polynomial,
    SoftmaxSchedule,
)
from botorch_fed.models import StationaryKernel
from botorch_fed.privacy import PoissonSampling
from botorch_fed.rng import generator
from botorch_fed.search.support import SupportSearch
from botorch_fed.studies import DPFTSDE, FTS


def paper_strategy(schedule: MixingSchedule | None = None, *, beta: float = 1.0) -> PaperStrategy:
    r"""What an agent does in [Dai2020FTS]_: its own wider samples, or a message.

    Messages need a basis and a kind of their own: `paper_messages`, or `paper_fts` for all.
    """
    return PaperStrategy(
        schedule=InverseSquare() if schedule is None else schedule,
        beta=beta,
        prior_until=0,
        own="thompson",
        warp=False,
        min_distance=0.0,
        num_features=200,
    )


def paper_features(dim: int, num_features: int = 100, *, seed: int = 0) -> PaperCosine:
    """The basis of the experiments: length scale 0.01, cosines with random phases.

    Args:
        dim: Dimension of the unit cube.
        num_features: :math:`M`.
        seed: Public.
    """
    kernel = StationaryKernel(math.inf, [0.01] * dim)
    return PaperCosine.draw(kernel, num_features, generator=generator(seed, "paper features"))


def paper_messages(dim: int, num_features: int = 100, *, seed: int = 0) -> dict[str, Any]:
    """What is sent in [Dai2020FTS]_, as settings of `FTS`: samples over features of no warp."""
    basis = paper_features(dim, num_features, seed=seed)
    return {"message": "sample", "feature_map": basis, "noise_var": 1e-6}


def paper_fts(
    dim: int,
    *,
    budget: int,
    schedule: MixingSchedule | None = None,
    beta: float = 1.0,
    num_features: int = 100,
    seed: int = 0,
    **options: Any,
) -> FTS:
    r"""[Dai2020FTS]_ to the letter, on outcomes as they are measured (`SearchSpace.outcome`).

    Args:
        dim: Dimension of the unit cube.
        budget: Evaluations of an agent.
        schedule: :math:`p_t`, default :math:`1 - t^{-2}`.
        beta: :math:`\beta_t`, of the own step.
        num_features: :math:`M`.
        seed: Public, of the features.
        options: Further settings of `FTS`.
    """
    strategy = paper_strategy(schedule, beta=beta)
    messages = paper_messages(dim, num_features, seed=seed)
    return FTS(**{"budget": budget, "strategy": strategy, **messages, **options})


def paper_search(**changes: Any) -> SupportSearch:
    """The published search: PITC, so that all go to the same point in a shared step."""
    return replace(SupportSearch(support_size=8, prediction="pitc"), **changes)


def paper_fedgp(**changes: Any) -> PaperFedGP:
    r"""Algorithms 1 and 2 of FBO-FedGP: :math:`c = 1/2` and `|S|` of 8, 16 or 32, as printed.

    What is not printed are the settings with the best average rank in pilot runs on F12 and F17-F20
    (`tune` of `benchmarks.papers.fed_gp`).
    """
    tuned: dict[str, Any] = {
        "support_size": 32,
        "clusters": 4,
        "lengthscale": 1.0,
        "noise_var": 1e-3,
        "beta": 1.0,
    }
    return PaperFedGP(**{**tuned, **changes})


def paper_following() -> PaperFollowing:
    """What an agent does in [Dai2021]_: :math:`1 - p_t = 1/t`, its own GP by maximum likelihood."""
    return PaperFollowing(
        schedule=Polynomial(1.0),
        follow=0,
        spread=0.0,
        warp=False,
        min_distance=0.0,
        num_features=100,
    )


def paper_settings(
    dim: int,
    *,
    rounds: int = 60,
    num_regions: int = 4,
    clip_norm: float = 22.0,
    sampling_rate: float = 0.35,
    noise_multiplier: float | None = 1.0,
    exploration: ExplorationSchedule | None = None,
    num_features: int = 100,
    num_initial: int = 10,
    seed: int = 0,
    **options: Any,
) -> DPFTSDE:
    r"""The settings of [Dai2021]_ for its real tasks; published noise, so labelled everywhere.

    Args:
        dim: Dimension of the unit cube.
        rounds: :math:`T`, after the initial points.
        num_regions: :math:`P`.
        clip_norm: The paper's `S`; a vector is clipped to :math:`S / \sqrt P`.
        sampling_rate: :math:`q`.
        noise_multiplier: :math:`z`; None for FTS-DE.
        exploration: Default the paper's softmax, :math:`T_c = 10`, :math:`T_d = 30`.
        num_features: :math:`M`, cosines with random phases, length scale 0.01.
        num_initial: Points at the start.
        seed: Public, of the features.
        options: Further settings of `DPFTSDE`, or others in the place of the paper's.
    """
    settings: dict[str, Any] = {
        "budget": rounds + num_initial,
        "noise_multiplier": noise_multiplier,
        "releases": "all",
        "num_regions": num_regions,
        "exploration": SoftmaxSchedule(15, 10, 30) if exploration is None else exploration,
        "sampling": PoissonSampling(sampling_rate),
        "noise_kind": "none" if noise_multiplier is None else "paper",
        "message": "sample",
        "clip_norm": clip_norm / math.sqrt(num_regions),
        "feature_map": paper_features(dim, num_features, seed=seed),
        "noise_var": 1e-6,
        "num_initial": num_initial,
        "strategy": paper_following(),
    }
    return DPFTSDE(**{**settings, **options})
