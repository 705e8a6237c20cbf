r"""Advice before a run: what settings buy, in numbers, from public facts alone.

    section     of                                   what it says
    schedules   FTS, DPFTSDE, FedGP                  messages used, and the condition of the bound
    features    all                                  error, information and width by feature counts
    releases    DPFTSDE, FedGP with noise            epsilon, signal over noise and agreement by
                                                     sampling, releases, features and regions
    support     FedGP                                what a support set of a size misses
    bandit      PrivateUCB                           features, noise, blocks, declared horizons

Nothing is evaluated and nothing spent. The numbers are those by which the methods decide
(`search.noisy.Outlook`, `search.bandit_basis`), the accountant's, and the terms of the papers'
bounds [Dai2020FTS]_, [Dubey2021]_.

.. [Dai2020FTS] Z. Dai, B. K. H. Low, P. Jaillet. Federated Bayesian optimization via Thompson
   sampling. NeurIPS 2020.
.. [Dubey2021] A. Dubey. No-regret algorithms for private Gaussian process bandit optimization.
   AISTATS 2021.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from botorch.exceptions.errors import InputDataError

from botorch_fed.acquisition import InverseSquare, MixingSchedule, Polynomial
from botorch_fed.acquisition.theory import (
    information_gain,
    published_feature_counts,
    theory_beta,
    theory_condition,
)
from botorch_fed.aggregation.noisy import NoisySum
from botorch_fed.models import InducingFeatures, StationaryKernel
from botorch_fed.models.earned_prior import reference_points
from botorch_fed.privacy import (
    BlockSum,
    PoissonSampling,
    PrefixSum,
    epsilon,
    noise_multiplier_for,
)
from botorch_fed.search.bandit_basis import feature_count
from botorch_fed.search.noisy import CLOSE, EARLY, MIN_RELIABILITY, Outlook
from botorch_fed.space import SearchSpace
from botorch_fed.studies import DPFTSDE, FTS, Federation, FedGP, PrivateUCB

SectionName = Literal["schedules", "features", "releases", "support", "bandit"]
SECTIONS: tuple[SectionName, ...] = get_args(SectionName)
OF: dict[type[Federation], tuple[SectionName, ...]] = {
    FTS: ("schedules", "features"),
    DPFTSDE: ("schedules", "features", "releases"),
    FedGP: ("schedules", "features", "releases", "support"),
    PrivateUCB: ("features", "bandit"),
}
SCHEDULES: tuple[tuple[str, MixingSchedule], ...] = (
    ("1 - 1/sqrt(t), FTS synthetic, DP-FTS-DE, FBO-FedGP", Polynomial(0.5)),
    ("1 - 1/t, DP-FTS-DE real", Polynomial(1.0)),
    ("1 - 1/t^2, FTS real", InverseSquare()),
)
NUM_POINTS = 1000  # of the discretised domain in the condition
SAMPLING = (1.0, 0.5, 0.35, 0.25, 0.15)
SUPPORTS = (4, 8, 16, 32, 64)
FAILURE = 0.1  # of a width
LATER = 100  # times the rounds, of a horizon that is declared on the safe side
KNOWN = 0.1  # what a block is to find out on the public scale
Cell = float | int | str | None


@dataclass(frozen=True)
class Section:
    """A table, and what follows from it.

    Attributes:
        name: Which it is.
        title: What the table shows.
        columns: Their names.
        rows: A cell for each column; None where there is nothing to say.
        says: Sentences.
    """

    name: SectionName
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    says: tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    """What `advise` has found.

    Attributes:
        facts: The public facts that it was found from.
        sections: By topic.
    """

    facts: Facts
    sections: tuple[Section, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(_as_text, self.sections))

    def section(self, name: SectionName) -> Section:
        """The section of that name."""
        for found in self.sections:
            if found.name == name:
                return found
        raise InputDataError(
            f"There is no section {name!r} here, but {[one.name for one in self.sections]}."
        )


@dataclass(frozen=True, kw_only=True)
class Facts:
    r"""The public facts of a study.

    Attributes:
        agents: `N`.
        dim: Inputs.
        budget: `T`, evaluations of each agent.
        num_features: `M`, numbers of a message.
        num_regions: `P` of distributed exploration.
        sampling_rate: `q`.
        releases: How many sums are released.
        epsilon: Of the whole run; None with `noise_multiplier`, or without privacy.
        noise_multiplier: `z`.
        delta: Beside epsilon.
        lengthscale: Of the shared kernel, in the unit cube.
        noise_var: Variance of an outcome on the public scale.
        norm_bound: `B`, of the function.
        outcome_bound: `Y`, half the public range.
    """

    agents: int = 10
    dim: int = 2
    budget: int = 50
    num_features: int = 20
    num_regions: int = 1
    sampling_rate: float = 1.0
    releases: int = 2
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    lengthscale: float = 0.2
    noise_var: float = 0.05
    norm_bound: float = 1.0
    outcome_bound: float = 2.0

    def __post_init__(self) -> None:
        for name in ("agents", "dim", "budget", "num_features", "num_regions", "releases"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputDataError(f"{name} must be an integer of at least 1, got {value!r}.")
        for name in ("lengthscale", "noise_var", "norm_bound", "outcome_bound"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise InputDataError(f"{name} must be positive and finite, got {value}.")
        if not 0 < self.sampling_rate <= 1:
            raise InputDataError(f"sampling_rate must lie in (0, 1], got {self.sampling_rate}.")
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise InputDataError(
                "Give epsilon or noise_multiplier: each follows from the other, got both."
            )
        if self.budget < 2:
            raise InputDataError(f"Advice is about two evaluations or more, got {self.budget}.")

    @property
    def private(self) -> bool:
        """Whether noise is asked for."""
        return self.epsilon is not None or self.noise_multiplier is not None

    def multiplier(self, *, rate: float, releases: int, adjacency: Any = "zero-out") -> float:
        """`z`, the one given or the one that keeps to epsilon."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.epsilon is not None
        return noise_multiplier_for(
            epsilon=self.epsilon,
            delta=self.delta,
            sampling_rate=rate,
            num_releases=releases,
            adjacency=adjacency,
        )


def advise(
    study: Federation | None = None,
    *,
    space: SearchSpace | None = None,
    agents: int | None = None,
    sections: Sequence[SectionName] | None = None,
    **facts: Any,
) -> Advice:
    """What settings buy, before a run.

    Args:
        study: A study, from which facts are taken that are not given; with `space`.
        space: Its search space.
        agents: How many agents it has.
        sections: Which; default those of the study's kind, or all that the facts allow for.
        facts: Further or other facts, as `Facts` names them.

    Example:
        >>> advice = advise(agents=50, dim=2, budget=30, epsilon=2.0, num_features=20)
        >>> print(advice.section("releases").says[0])  # doctest: +SKIP
    """
    known = {} if study is None else facts_of(study, space, agents or Facts.agents)
    if agents is not None:
        known["agents"] = agents
    names = {one.name for one in fields(Facts)}
    if unknown := sorted({*facts} - names):
        raise InputDataError(f"Advice knows no facts {unknown}: it knows {sorted(names)}.")
    if facts.get("epsilon") is not None:
        known.pop("noise_multiplier", None)
    if facts.get("noise_multiplier") is not None:
        known.pop("epsilon", None)
    found = Facts(**{**known, **facts})
    usual: Sequence[SectionName] = SECTIONS if study is None else _sections_of(study)
    chosen = tuple(usual if sections is None else sections)
    if strangers := [name for name in chosen if name not in SECTIONS]:
        raise InputDataError(f"There are no sections {strangers}, but {list(SECTIONS)}.")
    if not found.private:
        if sections is not None and {"releases", "bandit"} & {*chosen}:
            raise InputDataError(
                "What noise does needs epsilon or noise_multiplier, one of the two."
            )
        chosen = tuple(name for name in chosen if name not in ("releases", "bandit"))
    return Advice(found, tuple(_MAKERS[name](found) for name in chosen))


def facts_of(study: Federation, space: SearchSpace | None, agents: int = 10) -> dict[str, Any]:
    """The public facts that a study, its search space and the number of its agents say."""
    known: dict[str, Any] = {"budget": study.budget, "agents": agents}
    for name in ("epsilon", "noise_multiplier", "num_regions", "outcome_bound", "noise_var"):
        value = getattr(study, name, None)
        if value is not None:
            known[name] = value
    if getattr(study, "delta", None) is not None:
        known["delta"] = study.delta  # type: ignore[attr-defined]
    sampling = getattr(study, "sampling", None)
    if isinstance(sampling, PoissonSampling):
        known["sampling_rate"] = sampling.rate
    if space is None:
        return known
    space.refuse_several(
        "Advice of a study", "give facts by name, num_features those of all outcomes together."
    )
    known["dim"] = space.dim
    hub = study.server(space, tuple(f"site{i}" for i in range(agents))).hub
    if hub.terms.basis is not None:
        known["num_features"] = hub.terms.basis.num_features
        known["lengthscale"] = float(hub.terms.basis.lengthscale.min())
    if isinstance(hub.terms.aggregation, NoisySum):
        plan = hub.terms.aggregation.plan(hub.terms)
        known["delta"] = plan.delta
        known["releases"] = max(1, len(plan.planned))
    return known


def _sections_of(study: Federation) -> tuple[SectionName, ...]:
    for kind, names in OF.items():
        if isinstance(study, kind):
            return names
    return ("schedules", "features")


# ------------------------------------------------------------------ schedules


def _schedules(facts: Facts) -> Section:
    T = facts.budget
    rows: list[tuple[Cell, ...]] = []
    broken = []
    for name, schedule in SCHEDULES:
        used = sum(1 - schedule(t) for t in range(1, T + 1))
        report = theory_condition(
            schedule, beta=lambda t: _beta(facts, t), num_points=NUM_POINTS, num_rounds=T
        )
        first = report.first_violation
        ratio = float(report.ratios[first - 1]) if first else None
        rows.append((name, used, first, ratio, float(report.ratios[-1])))
        if first:
            broken.append(f"{name.split(',')[0]} from t = {first} on ({ratio:.3g} times too large)")
    says = [
        f"A message decides so many of {T} queries on average; with 1 - 1/t^2 less than one more "
        "after the second."
    ]
    if broken:
        says.append(
            "The bound of FTS asks for (1 - p_t) c_t <= (1 - p_1) c_1. It is violated by "
            + "; ".join(broken)
            + ". With p_1 := p_2 the left side grows with c_t from the first round to the second, "
            "so that the bound covers none of the papers' own schedules."
        )
    return Section(
        "schedules",
        f"Mixing schedules over {T} queries, beta_t with gamma of {facts.num_features} features",
        ("p_t", "by messages", "violated at t", "ratio there", f"ratio at {T}"),
        tuple(rows),
        tuple(says),
    )


def _beta(facts: Facts, t: int) -> float:
    return theory_beta(
        t,
        bound=facts.norm_bound,
        noise_std=math.sqrt(facts.noise_var),
        information_gain=lambda n: information_gain(
            facts.num_features, n, noise_var=facts.noise_var
        ),
        delta=FAILURE,
    )


# ------------------------------------------------------------------ features


def _features(facts: Facts) -> Section:
    T, rows = facts.budget, []
    needed = math.ceil(1 / facts.noise_var)
    for M in _around(facts.num_features):
        here = replace(facts, num_features=M)
        rows.append(
            (
                M,
                8 * M,
                1 / math.sqrt(M),
                math.sqrt(facts.noise_var),
                information_gain(M, T, noise_var=facts.noise_var),
                _beta(here, T),
            )
        )
    counts = published_feature_counts(T, facts.dim)
    says = [
        "Random features of a kernel err by 1/sqrt(M). More of them are worth it while that is "
        f"above the deviation of an outcome, up to {needed} here; quadrature and eigenfunctions "
        "need far fewer. In a sum with noise each number costs signal (releases), and of an agent "
        f"with fewer than M / 2 observations, {facts.num_features // 2} here, a drawn message is "
        'mostly its prior: send means (message="mean").',
        f"Published counts for private bandits, T = {T}, d = {facts.dim}: "
        + ", ".join(f"{count:,.0f} ({name})" for name, count in counts.items())
        + ".",
    ]
    return Section(
        "features",
        f"Feature counts after {T} outcomes",
        ("M", "bytes", "random features err", "noise", "gamma_T at most", "beta_T"),
        tuple(rows),
        tuple(says),
    )


def _around(count: int) -> list[int]:
    return sorted({max(1, count // 4), max(1, count // 2), count, 2 * count, 4 * count})


# ------------------------------------------------------------------ releases


def _outlook(facts: Facts, multiplier: float) -> Outlook:
    """Of means over the agents of a release: noise of z over their expected number."""
    taking_part = facts.sampling_rate * facts.agents / facts.num_regions
    return Outlook(
        taking_part,
        facts.num_features,
        multiplier / taking_part,
        (1.0,) * facts.releases,
    )


def _releases(facts: Facts) -> Section:
    rows: list[tuple[Cell, ...]] = []

    def add(what: str, here: Facts) -> Outlook:
        z = here.multiplier(rate=here.sampling_rate, releases=here.releases)
        spent = epsilon(
            noise_multiplier=z,
            sampling_rate=here.sampling_rate,
            num_releases=here.releases,
            delta=here.delta,
        ).epsilon
        outlook = _outlook(here, z)
        rows.append(
            (
                what,
                z,
                spent,
                outlook.ratio(EARLY),
                outlook.ratio(CLOSE),
                outlook.reliability(EARLY),
            )
        )
        return outlook

    base = add("as it is", facts)
    tried: dict[str, float] = {}
    for rate in SAMPLING:
        if rate != facts.sampling_rate:
            name = f"q = {rate:g}"
            tried[name] = add(name, replace(facts, sampling_rate=rate)).reliability(EARLY)
    for count in sorted({1, 2, 4, 8, facts.budget} - {facts.releases}):
        name = f"{count} releases"
        tried[name] = add(name, replace(facts, releases=count)).reliability(EARLY)
    for M in _around(facts.num_features):
        if M != facts.num_features:
            add(f"M = {M}", replace(facts, num_features=M))
    for P in (1, 2, 4):
        if P != facts.num_regions:
            add(f"P = {P}, apart", replace(facts, num_regions=P))
    for N in (2 * facts.agents, 10 * facts.agents):
        add(f"N = {N}", replace(facts, agents=N))
    now = base.reliability(EARLY)
    says = []
    if now < MIN_RELIABILITY:
        taking_part = base.enough_agents(EARLY, MIN_RELIABILITY)
        enough = math.ceil(taking_part * facts.num_regions / facts.sampling_rate)
        says.append(
            f"Agreement of {now:.0%} is below {MIN_RELIABILITY:.0%}, at which sites listen: "
            f"{enough} agents would do at this noise."
        )
    else:
        says.append(f"Sites listen: agreement is {now:.0%}, above {MIN_RELIABILITY:.0%}.")
    best = max(tried, key=lambda name: tried[name])
    if tried[best] > 1.05 * now:
        says.append(f"Of samplings and numbers of releases {best} is best: {tried[best]:.0%}.")
    else:
        says.append("No other sampling or number of releases is better at the same privacy.")
    says.append(
        "A larger M pays while what it adds to the agreement of messages exceeds its factor in the "
        "noise's squared norm: twice the features want 1.4 times the signal over noise. A region "
        "apart from the others has 1/P of the agents, so that P pays if messages agree P times as "
        "much within regions."
    )
    return Section(
        "releases",
        f"Releases at delta = {facts.delta:g}, one agent zeroed; signal over noise where messages "
        f"agree by {EARLY:g} (early) and {CLOSE:g} (late)",
        ("setting", "z", "epsilon", "early", "late", "agreement of all"),
        tuple(rows),
        tuple(says),
    )


# ------------------------------------------------------------------ support sets


def _support(facts: Facts) -> Section:
    """What support sets miss, measured on the reference points of the cube."""
    kernel = StationaryKernel(math.inf, [facts.lengthscale] * facts.dim)
    points = reference_points(facts.dim)
    rows: list[tuple[Cell, ...]] = []
    for size in SUPPORTS:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # points too many are shown on purpose
            phi = InducingFeatures(kernel, points[:size])
            missing = 1 - phi(points).square().sum(dim=-1)
        worst, mean = float(missing.max().clamp_min(0)), float(missing.mean().clamp_min(0))
        rows.append((size, worst, mean, size * (size + 3) // 2))
    T = facts.budget
    rule = math.ceil(math.log(T) ** 1.25)
    enough = [row[0] for row in rows if float(row[2] or 0.0) < 0.1]
    says = [
        f"The published rule ceil((ln T)^1.25) gives {rule} points for T = {T}. "
        + (
            f"{enough[0]} points miss less than a tenth of the prior variance on average."
            if enough
            else f"Even {SUPPORTS[-1]} points miss more than a tenth of the prior variance at this "
            "length scale: a sum over them says little between the points."
        )
    ]
    return Section(
        "support",
        f"Support sets, length scale {facts.lengthscale:g} in {facts.dim} dimensions: prior "
        "variance that is missed",
        ("|S|", "at worst", "on average", "numbers in a sum"),
        tuple(rows),
        tuple(says),
    )


# ------------------------------------------------------------------ private bandits


def _bandit(facts: Facts) -> Section:
    T = facts.budget * facts.agents
    z = facts.multiplier(rate=1.0, releases=1, adjacency="replace-one")
    mechanism = PrefixSum(
        num_features=1, outcome_bound=facts.outcome_bound, horizon=T, noise_multiplier=z
    )
    std = mechanism.noise_std(T)
    later = math.sqrt(_squared_column(LATER * T) / _squared_column(T))
    epochs = [_squared_column(2**k) ** 2 for k in range(T.bit_length())]
    anew = math.sqrt(sum(epochs)) / _squared_column(T)
    m = feature_count(facts.dim, records=T, noise_std=std)
    block = BlockSum(outcome_bound=facts.outcome_bound, noise_multiplier=z).noise_std
    plays = math.ceil(max(block / KNOWN, facts.noise_var / KNOWN**2))
    rows: tuple[tuple[Cell, ...], ...] = (
        ("noise multiplier z, one record replaced", z),
        (f"noise in a number of the sum of {T:,} records", std),
        ("features that noise leaves room for", m),
        ("information of a direction over its noise", T / m / (std * math.sqrt(m))),
        ("gamma_T of so many features at most", information_gain(m, T, noise_var=facts.noise_var)),
        (f"noise if {LATER} times the rounds are declared, over that", later),
        ("public actions: noise in the sum of a block", block),
        (f"plays until an action is known to {KNOWN:g}", plays),
        ("actions that can be known so well", T // plays),
    )
    says = [
        f"Of an unknown end declare a late one: a horizon {LATER} times as long costs "
        f"{later - 1:.0%} more noise. To begin anew, with twice the rounds each time, takes "
        f"{anew:.2g} times the noise, because every epoch's sum has its own.",
    ]
    if T / m / (std * math.sqrt(m)) < 1:
        says.append(
            "There is less information than noise in every direction: private actions are not "
            'learnt. Public actions (trust="public") need noise on outcomes only.'
        )
    return Section(
        "bandit",
        f"A private bandit of {T:,} records at delta = {facts.delta:g}",
        ("number", "value"),
        rows,
        tuple(says),
    )


def _squared_column(horizon: int) -> float:
    r""":math:`\sum_{k < T} f_k^2` of the square root, in whose units noise grows with the horizon.

    :math:`(\ln T + \gamma + 4 \ln 2) / \pi`, within 7 % at one and 1e-3 from eight on.
    """
    return (math.log(horizon) + 0.5772156649015329 + 4 * math.log(2)) / math.pi


_MAKERS: dict[SectionName, Callable[[Facts], Section]] = {
    "schedules": _schedules,
    "features": _features,
    "releases": _releases,
    "support": _support,
    "bandit": _bandit,
}


# ------------------------------------------------------------------ words


def said(cell: Cell) -> str:
    """A cell as text."""
    if cell is None:
        return "never"
    return (
        f"{cell:.3g}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else cell
    )


def _as_text(section: Section) -> str:
    cells = [section.columns, *([said(cell) for cell in row] for row in section.rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(section.columns))]
    lines = ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([section.title, *(line.rstrip() for line in lines), *section.says])
