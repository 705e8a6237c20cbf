r"""The demo: what sites that join later gain from those that are done, and what privacy costs.

::

    fts, federation   two newcomers begin with what six finished sites say
    fed-gp            the same from an encrypted sum; beside it, the sum in the clear
    dp-fts-de         the same under differential privacy, with 54 finished sites and six newcomers
    private-ucb       a private bandit; beside it, the same without privacy, and random play

Sites tune a small neural network, trained by stochastic gradient descent, on their own skewed
shares of scikit-learn's digits (`NetworkTuning`). Those that are done have searched alone, by
BoTorch's LogEI. A newcomer has no observation of its own. Every seed has other shares of the data
and is one unit of the statistics: outcomes are means over a seed's newcomers, differences are
paired by seed, and p values are adjusted by Holm's method over the evaluations at which two arms
are compared.
"""

from __future__ import annotations

import math
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table
from torch import Tensor

from botorch_fed.federation.points import spread_points
from botorch_fed.federation.registry import study_class
from botorch_fed.privacy import SignalWarning
from botorch_fed.run import RunResult, run
from botorch_fed.space import SearchSpace
from botorch_fed.studies import FTS, PrivateUCB
from botorch_fed.test_functions import KernelBandit, NetworkTuning
from botorch_fed.test_functions.sklearn_tuning import Solver

LEVEL = 0.05
ROUNDING = 1e-12  # differences below are of equal numbers
EPSILON, DELTA = 2.0, 1e-5  # of the newcomers' story
MOST_SITES = 200  # among which the least number is looked for
EPOCHS, FULL_EPOCHS = 20, 200  # of training here, and by scikit-learn itself, with Adam
BANDITS = 4  # agents that play
BANDIT_EPSILON = 1.0
REWARD_VAR = 4.0  # the largest variance of a reward of 0 or 1 on the public scale
TOLD, ALONE, SOBOL, DEFAULT = "with messages", "alone, LogEI", "Sobol points", "default first"
CLEAR, NO_NOISE, FULL = "sum in the clear", "without noise", "default, Adam, 10 x epochs"
BANDIT = "private-ucb"
PRIVATE, PUBLIC, RANDOM = "private", "not private", "random"


@dataclass(frozen=True)
class Scene:
    """How large a story is.

    Attributes:
        finished: Sites that are done; none for bandits.
        newcomers: Sites that begin; for bandits, agents that play.
        history: Evaluations of each finished site.
        budget: Evaluations of each newcomer; for bandits, rounds.
        repeats: Number of seeds.
    """

    finished: int
    newcomers: int
    history: int
    budget: int
    repeats: int


SCENES = {
    "fts": Scene(6, 2, 12, 5, 16),
    "federation": Scene(6, 2, 12, 5, 16),
    "fed-gp": Scene(6, 2, 12, 5, 16),
    "dp-fts-de": Scene(54, 6, 6, 5, 6),
    BANDIT: Scene(0, BANDITS, 0, 128, 8),
}


# ------------------------------------------------------------------ statistics


@dataclass(frozen=True)
class Difference:
    """A mean difference of two arms after some evaluations, paired by seed.

    Attributes:
        after: The number of evaluations.
        mean: Over seeds.
        low: Lower end of its 95 % interval; None with one seed.
        high: Upper end.
        p: Two-sided, of Student's t, adjusted over the evaluations; None with one seed.
    """

    after: int
    mean: float
    low: float | None
    high: float | None
    p: float | None

    @property
    def sign(self) -> int:
        """1 for ahead, -1 for behind, 0 for no significant difference."""
        if self.p is None or self.p >= LEVEL:
            return 0
        return 1 if self.mean > 0 else -1

    @property
    def shown(self) -> str:
        """In a cell of a table."""
        if self.low is None or self.high is None or self.p is None:
            return f"{self.mean:+.3f}"
        return f"{self.mean:+.3f}\n± {(self.high - self.low) / 2:.3f}\np {self.p:.1g}"


def differences(mine: Tensor, theirs: Tensor, marks: Sequence[int]) -> list[Difference]:
    """Differences of two arms at some numbers of evaluations.

    Args:
        mine: Means of the first arm, `seeds x evaluations`.
        theirs: Those of the second, for the same seeds.
        marks: Numbers of evaluations, from 1 on.
    """
    from scipy.special import stdtr, stdtrit

    gaps = torch.stack([mine[:, t - 1] - theirs[:, t - 1] for t in marks], dim=-1).double()
    means, count = gaps.mean(dim=0).tolist(), len(gaps)
    if count < 2:
        return [Difference(t, mean, None, None, None) for t, mean in zip(marks, means, strict=True)]
    errors = (gaps.std(dim=0) / math.sqrt(count)).tolist()
    reach = float(stdtrit(count - 1, 0.975))
    p_values = [
        2 * float(stdtr(count - 1, -abs(mean) / error))
        if error > ROUNDING
        else float(abs(mean) < ROUNDING)
        for mean, error in zip(means, errors, strict=True)
    ]
    return [
        Difference(t, mean, mean - reach * error, mean + reach * error, p)
        for t, mean, error, p in zip(marks, means, errors, holm(p_values), strict=True)
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values: valid for all tests together."""
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda k: p_values[k])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = least
    return adjusted


# ------------------------------------------------------------------ what a story found


@dataclass(frozen=True, eq=False)
class Story:
    """What a demo has found.

    Attributes:
        seeds: The seeds.
        arms: Outcomes of each arm, `seeds x evaluations`, larger is better; the first is the one
            that the verdict is about.
        controls: The arms that it has to beat, by name with what they are in a sentence; the first
            is always judged, another one if it is stronger.
        beside: Arms that it need not beat, likewise: they show the price of encryption or noise, or
            what a larger budget buys.
        marks: Numbers of evaluations at which arms are compared.
        unit: What is counted: evaluations or rounds.
        facts: Further lines, of messages and of privacy.
        first: The run of the first seed.
        others: Runs to compare it with in a report.
    """

    seeds: Sequence[int]
    arms: Mapping[str, Tensor]
    controls: Mapping[str, str]
    beside: Mapping[str, str]
    marks: Sequence[int]
    unit: str
    facts: Sequence[str]
    first: RunResult
    others: Mapping[str, RunResult]

    @property
    def mine(self) -> str:
        """The arm that the verdict is about."""
        return next(iter(self.arms))

    def against(self, name: str) -> list[Difference]:
        """The first arm minus another one."""
        return differences(self.arms[self.mine], self.arms[name], self.marks)

    @property
    def strongest(self) -> str:
        """The control with the largest mean over seeds and marks."""
        places = [t - 1 for t in self.marks]
        return max(self.controls, key=lambda name: float(self.arms[name][:, places].mean()))

    @property
    def verdict(self) -> list[str]:
        """What can be said, and what cannot."""
        if len(self.seeds) < 2:
            return ["One seed shows nothing: use --repeats 2 or more."]
        usual = next(iter(self.controls))
        lines = [self._judged(self.controls[usual], usual)]
        if self.strongest != usual:
            what = f"the strongest control ({self.controls[self.strongest]})"
            lines.append(self._judged(what, self.strongest))
        lines += [self._judged(what, name) for name, what in self.beside.items()]
        return lines

    def _judged(self, what: str, name: str) -> str:
        found = self.against(name)
        if all(abs(one.mean) < ROUNDING and one.p == 1.0 for one in found):
            return f"The same as {what}."
        parts = []
        for sign, word in ((1, "ahead of"), (-1, "behind")):
            those = [one for one in found if one.sign == sign]
            if those:
                size = ", ".join(f"{one.mean:+.3f}" for one in those)
                counts = ", ".join(str(one.after) for one in those)
                largest = max(one.p or 0.0 for one in those)
                parts.append(
                    f"{word} {what} after {counts} of {self.marks[-1]} {self.unit} "
                    f"({size}; largest p {largest:.1g})"
                )
        if not parts:
            return f"No significant difference from {what}."
        said = ", and ".join(parts)
        level = ", ".join(str(one.after) for one in found if not one.sign)
        rest = f"; no significant difference after {level}" if level else ""
        return f"{said[0].upper()}{said[1:]}{rest}."

    @property
    def tables(self) -> list[Table]:
        """Means of all arms, and differences."""
        means = self._table(f"Means over {len(self.seeds)} seed(s)")
        for name, curve in self.arms.items():
            cells = [f"{float(curve[:, t - 1].mean()):.3f}" for t in self.marks]
            means.add_row(name, *cells, style="bold" if name == self.mine else "")
        gaps = self._table(f"{self.mine.capitalize()}, minus each other arm; 95 % interval, p")
        for name in [*self.controls, *self.beside]:
            cells = [one.shown for one in self.against(name)]
            gaps.add_row(name, *cells)
            gaps.add_section()
        return [means, gaps]

    def _table(self, title: str) -> Table:
        """An empty table with a column for each mark."""
        return Table(Column(self.unit, no_wrap=True), *map(str, self.marks), title=title)

    @property
    def document(self) -> dict[str, Any]:
        """For ``--json``: every number of every seed."""
        return {
            "seeds": list(self.seeds),
            "unit": self.unit,
            "arms": {
                name: [[round(value, 6) for value in row] for row in curve.tolist()]
                for name, curve in self.arms.items()
            },
            "against": {
                name: {str(one.after): asdict(one) for one in self.against(name)}
                for name in [*self.controls, *self.beside]
            },
            "strongest_control": self.strongest,
            "verdict": self.verdict,
            "facts": list(self.facts),
            "privacy": self.first.privacy,
        }


Arms = dict[str, list[float]]  # means over a seed's newcomers, by evaluation
Job = tuple[Callable[[int, Path | None], Arms], int, Path | None]
Progress = Callable[[Iterable[tuple[int, Arms]], int], Iterable[tuple[int, Arms]]]


def scene_of(protocol: str, *, repeats: int | None = None, budget: int | None = None) -> Scene:
    """The scene of a protocol, with a user's wishes."""
    scene = SCENES[protocol]
    return replace(scene, repeats=repeats or scene.repeats, budget=budget or scene.budget)


def introduction(protocol: str, scene: Scene) -> str:
    """What is done, in some sentences."""
    if protocol == BANDIT:
        return (
            f"{scene.newcomers} agents each choose one of 25 actions in each of {scene.budget} "
            "rounds. One action is good, and rewards are 0 or 1. Every reward is protected. The "
            "outcome is the mean chance of a reward up to a round."
        )
    return (
        f"{scene.finished} sites have tuned a neural network on their own skewed shares of "
        f"scikit-learn's digits, {scene.history} evaluations each, alone: the learning rate, the "
        "momentum, the weight decay, the hidden units and the batch size of stochastic gradient "
        f"descent. {scene.newcomers} sites begin with none. The outcome is the newcomers' best "
        f"validation accuracy so far, after {EPOCHS} epochs of training."
    )


def play(
    protocol: str,
    scene: Scene,
    folder: Path,
    *,
    seed: int = 0,
    workers: int = 1,
    progress: Progress = lambda ended, total: ended,
) -> Story:
    """The story of a protocol.

    Args:
        protocol: A name of `SCENES`.
        scene: Its size.
        folder: Where the runs of the first seed are saved.
        seed: The first seed.
        workers: Number of processes.
        progress: Wraps the seeds as they end.
    """
    play_seed: Callable[[int, Path | None], Arms] = (
        partial(_bandit_seed, scene) if protocol == BANDIT else partial(_late_seed, protocol, scene)
    )
    seeds = range(seed, seed + scene.repeats)
    jobs = [(play_seed, one, folder if one == seed else None) for one in seeds]
    ended = dict(progress(_ended(jobs, workers), len(jobs)))
    arms = {
        name: torch.tensor([ended[one][name] for one in seeds], dtype=torch.float64)
        for name in ended[seed]
    }
    if protocol == BANDIT:
        return _bandit_story(scene, seeds, arms, folder)
    return _late_story(protocol, scene, seeds, arms, folder)


def _ended(jobs: Sequence[Job], workers: int) -> Iterator[tuple[int, Arms]]:
    """The seeds with their arms, as they end."""
    if workers == 1:
        yield from map(_work, jobs)
        return
    with get_context("spawn").Pool(min(workers, len(jobs)), _worker) as pool:  # its end ends them
        yield from pool.imap_unordered(_work, jobs)


def _work(job: Job) -> tuple[int, Arms]:
    play_seed, seed, folder = job
    with warnings.catch_warnings():  # the story says what signal there was
        warnings.simplefilter("ignore", SignalWarning)
        return seed, play_seed(seed, folder)


def _worker() -> None:
    """One thread each; an interrupt is for the process that has started them."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _saved(results: Mapping[str, RunResult], folder: Path | None) -> None:
    """Save runs under their arms' names; nothing without a folder."""
    if folder is None:
        return
    for name, result in results.items():
        result.save(folder / _file_name(name))


def _file_name(arm: str) -> str:
    return arm.replace(", ", "-").replace(" ", "-")


# ------------------------------------------------------------------ newcomers


def _late_problem(
    scene: Scene, seed: int, epochs: int = EPOCHS, solver: Solver = "sgd"
) -> NetworkTuning:
    return NetworkTuning(scene.finished + scene.newcomers, epochs=epochs, solver=solver, seed=seed)


def _late_names(scene: Scene) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those who are done, and those who begin."""
    names = tuple(f"agent{n}" for n in range(scene.finished + scene.newcomers))
    return names[: scene.finished], names[scene.finished :]


def _late_studies(protocol: str, **common: Any) -> dict[str, Any]:
    """The study of newcomers with messages, and those that show its price."""
    kind = study_class(protocol)
    if protocol == "dp-fts-de":
        private = kind(epsilon=EPSILON, delta=DELTA, **common)
        bare = kind(noise_kind="none", **common)
        return {TOLD: private, NO_NOISE: bare}
    if protocol == "fed-gp":
        return {TOLD: kind(**common), CLEAR: kind(channel="plain", **common)}
    return {TOLD: kind(**common)}


def _late_seed(protocol: str, scene: Scene, seed: int, folder: Path | None) -> Arms:
    """All arms of one seed."""
    problem, (done, new) = _late_problem(scene, seed), _late_names(scene)
    play_alone = partial(run, problem=problem, seed=seed, progress=False)
    # A site alone begins with a Sobol sequence of its own, another one in every seed.
    points = {
        name: spread_points(problem.space, scene.budget, seed=1000 * (place + 1) + seed)
        for place, name in enumerate((*done, *new))
    }
    few = FTS(budget=scene.history).initial
    own = {name: X[:few] for name, X in points.items()}
    default = problem.space.to_unit([problem.default])
    first = {name: torch.cat([default, X[: few - 1]]) for name, X in points.items()}
    alone = replace(FTS(budget=scene.history).alone(), initial_design=own)
    history = play_alone(replace(alone, active=done))
    data = {name: history.history(name) for name in done}
    begin = replace(alone, budget=scene.budget, active=new)
    studies = {
        **_late_studies(protocol, budget=scene.budget, data=data, active=new),
        ALONE: replace(begin, budget=max(scene.budget, scene.history)),
        SOBOL: replace(begin, initial_design=points),
        DEFAULT: replace(begin, initial_design=first),
    }
    results = {name: play_alone(study) for name, study in studies.items()}
    _saved({name: results[name] for name in (TOLD, ALONE, DEFAULT)}, folder)
    arms = {name: _mean_best(result, new) for name, result in results.items()}
    arms[FULL] = [_full_score(scene, seed)] * scene.budget  # of one evaluation
    return arms


def _full_score(scene: Scene, seed: int) -> float:
    """Of scikit-learn's own default, mean over newcomers."""
    full = _late_problem(scene, seed, FULL_EPOCHS, "adam")
    place = full.space.to_unit([full.default])
    scores = [float(full.evaluate(scene.finished + n, place)) for n in range(scene.newcomers)]
    return sum(scores) / len(scores)


def _mean_best(result: RunResult, names: Sequence[str]) -> list[float]:
    mean: list[float] = torch.stack([result.best(name) for name in names]).mean(dim=0).tolist()
    return mean


def _late_story(
    protocol: str, scene: Scene, seeds: Sequence[int], arms: Mapping[str, Tensor], folder: Path
) -> Story:
    first, alone, default = (
        RunResult.load(folder / _file_name(name)) for name in (TOLD, ALONE, DEFAULT)
    )
    beside = {
        CLEAR: "the sum in the clear",
        NO_NOISE: "the sum without noise",
        FULL: f"scikit-learn's default, {FULL_EPOCHS} epochs of Adam",
    }
    return Story(
        seeds=seeds,
        arms=arms,
        controls={
            ALONE: "BoTorch's LogEI alone",
            DEFAULT: "scikit-learn's default for gradient descent first, then LogEI",
            SOBOL: "Sobol points",
        },
        beside={name: what for name, what in beside.items() if name in arms},
        marks=range(1, scene.budget + 1),
        unit="evaluations",
        facts=[_reached(arms), *_message_facts(first, _late_names(scene)[0])],
        first=first,
        others={ALONE: _beginning(alone, scene.budget), DEFAULT: default},
    )


def _beginning(result: RunResult, count: int) -> RunResult:
    """The first evaluations of each site, to be compared with runs that have no more."""
    rows = [[row for row in result.records if row["agent"] == name] for name in result.names]
    return replace(result, records=[row for mine in rows for row in mine[:count]], budget=count)


def _reached(arms: Mapping[str, Tensor]) -> str:
    """How many evaluations a site alone needs for what messages give the first one."""
    level, alone = float(arms[TOLD][:, 0].mean()), arms[ALONE].mean(dim=0).tolist()
    after = next((t for t, value in enumerate(alone, start=1) if value >= level), None)
    needs = f"needs {after} evaluations" if after else f"needs more than {len(alone)} evaluations"
    return f"LogEI alone {needs} for what a newcomer with messages has after one ({level:.3f})."


def _message_facts(result: RunResult, done: Sequence[str]) -> list[str]:
    """What the sites that are done have sent, and what became of it."""
    assert result.sees is not None
    rows = [row for row in result.contributions() if row["site"] in done]
    sent = max(row["bytes_up"] for row in rows)
    facts = [f"Each finished site sent {sent:,} bytes in all, and no observation."]
    account = result.privacy or {}
    if "signal" in account:
        facts += [account["signal"], _least_sites(result.space)]
    if result.sees.encrypted:
        facts.append(
            f"The server carried {sum(row['bytes_up'] for row in result.rounds):,} bytes of "
            "ciphertext, keys and receipts, and can read none of the messages in them."
        )
    return facts


def _least_sites(space: SearchSpace) -> str:
    """How many sites it takes until anything is released, to one newcomer."""
    newcomer = "agent0"
    settings = {"epsilon": EPSILON, "delta": DELTA, "budget": 1, "active": (newcomer,)}
    study = study_class("dp-fts-de")(**settings)

    def released(count: int) -> bool:
        price = study.price(space, tuple(f"agent{n}" for n in range(count)))
        return price.guarantee.epsilon > 0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)
        least = next((count for count in range(2, MOST_SITES) if released(count)), MOST_SITES)
    return (
        f"With fewer than {least} sites nothing would be released at epsilon = {EPSILON:g} and "
        f"delta = {DELTA:g}, and nothing spent: everybody would search alone."
    )


# ------------------------------------------------------------------ bandits


def _bandit_seed(scene: Scene, seed: int, folder: Path | None) -> Arms:
    """Mean rewards up to each round."""
    problem = KernelBandit(scene.newcomers, seed=seed)

    def offered(name: str, t: int) -> Tensor:
        return problem.decision_set(int(name.removeprefix("agent")), t)

    common: dict[str, Any] = {
        "budget": scene.budget,
        "decision_sets": offered,
        "noise_var": REWARD_VAR,
    }
    studies = {
        PRIVATE: PrivateUCB(epsilon=BANDIT_EPSILON, delta=DELTA, **common),
        PUBLIC: PrivateUCB(trust="none", **common),
    }
    results = {name: run(s, problem, seed=seed, progress=False) for name, s in studies.items()}
    _saved(results, folder)
    sets = [
        [offered(name, t) for t in range(1, scene.budget + 1)] for name in results[PRIVATE].names
    ]
    expected = torch.stack([torch.stack([problem.values(X).mean() for X in one]) for one in sets])
    means = {name: _mean_reward(result) for name, result in results.items()}
    means[RANDOM] = expected.mean(dim=0)
    rounds = torch.arange(1, scene.budget + 1)
    return {name: (mean.cumsum(0) / rounds).tolist() for name, mean in means.items()}


def _mean_reward(result: RunResult) -> Tensor:
    """The chance of a reward in each round, mean over agents."""
    rows = [
        [row["true"] for row in result.records if row["agent"] == name] for name in result.names
    ]
    return torch.tensor(rows, dtype=torch.float64).mean(dim=0)


def _bandit_story(
    scene: Scene, seeds: Sequence[int], arms: Mapping[str, Tensor], folder: Path
) -> Story:
    first, public = (RunResult.load(folder / _file_name(name)) for name in (PRIVATE, PUBLIC))
    marks = sorted({max(1, scene.budget // part) for part in (8, 4, 2, 1)})
    return Story(
        seeds=seeds,
        arms=arms,
        controls={RANDOM: "random play"},
        beside={PUBLIC: "the same bandit without privacy"},
        marks=marks,
        unit="rounds",
        facts=["Newcomers have no story here: all agents of a bandit share one function."],
        first=first,
        others={PUBLIC: public},
    )
