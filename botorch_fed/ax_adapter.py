r"""Ax experiments as sites of a federation, and our models inside Ax's modular BoTorch.

*Door A*. A site whose black box is an Ax experiment takes part in any protocol. `AxSite` is a
`Site` whose trials are answered by the experiment's::

    Ax asks for a trial      the site's node gives it an open trial of the site, or a new one
    a trial is completed     the site is told its value, as the metric has it (Outcome has the
                             sign)
    a trial has failed       the same point is a new trial, up to attempts; then the site's trial
                             has failed, and its point is not asked again
    abandoned or stopped     the site's trial has failed
    everybody else's trials  attached as own data (attached by hand, Sobol's, of an earlier run)

A round waits for one query of each site. Who asks for several trials at once gets them: they count
for the next rounds. Which trial of the site one of Ax's belongs to stands in the
latter's generator run, thus in Ax's own JSON. The node in that JSON is a name only; what the site
must not lose lies in its log. A snapshot of Ax that is older than the log can have lost a trial:
its point is proposed again.

`AxFederation` puts several such sites and the server into one process. There is no loop and no
thread: whenever a client asks for a trial, rounds are exchanged as far as completed trials reach.
`Client.run_trials` keeps its thread until it ends, so it is for a site whose peers are elsewhere.
As Ax's default strategy does, the sites of an `AxFederation` begin in the centre of the space where
the study says nothing else (`initialize_with_center`). Sites at machines of their own do where
their study has the centre as its `default`.

*Door B*. `register()` makes `ContextBasisGP`, `ContextMessagePriorGP`, `ContextMixture`,
`ContextThompsonSampling` and the mixture acquisition functions known to
`Generators.BOTORCH_MODULAR` and to Ax's JSON. What was received lies in `contexts` by name, and
only the name is in options: Ax deep-copies options and cannot save tensors. A context is of one
metric: an experiment with several names the metric of each, and its other metrics get models of
their own data. `modular_spec` uses Ax's default transforms of inputs (they lead to our unit cube,
integers by (k - lower) / (upper - lower)) and none that learns from outcomes. A fitted model is
used again while the data are the same, even if its context has moved; acquisition functions see
the new one at once. `BasisGP` by itself, without received summaries, works in Ax's own specs too,
its feature map among the model's options.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self
from weakref import WeakValueDictionary

import torch
from botorch.acquisition.input_constructors import acqf_input_constructor
from botorch.acquisition.objective import PosteriorTransform, ScalarizedPosteriorTransform
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform, Standardize
from botorch.posteriors.posterior import Posterior
from botorch.sampling.pathwise.paths import SamplePath
from botorch.utils.datasets import SupervisedDataset
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Size, Tensor

from botorch_fed.acquisition import (
    MixtureEI,
    MixturePI,
    MixtureUCB,
    ThompsonSampling,
    weight_path,
)
from botorch_fed.constraints import LinearConstraint
from botorch_fed.engines.inprocess import InProcess, refusal_code
from botorch_fed.errors import ProtocolError
from botorch_fed.federation.base import (
    Agent,
    AgentId,
    DealsPoints,
    Exchanged,
    KeepsSecrets,
    Outgoing,
    secrets_in,
    site_folder,
    with_stores,
)
from botorch_fed.federation.drive import Round, drive
from botorch_fed.federation.hub import HUB_EVENTS, finished_rounds, hub_log
from botorch_fed.federation.site import Site
from botorch_fed.federation.trial import MAX_VALUE, SITE_EVENTS
from botorch_fed.models import (
    BasisGP,
    FeatureMap,
    LocalSharedMixture,
    MessagePriorGP,
    Summary,
    feature_map_from_tensors,
)
from botorch_fed.models.features import feature_map_kinds
from botorch_fed.models.mixture import component_path
from botorch_fed.rng import generator
from botorch_fed.run import Study, make_agent
from botorch_fed.space import Outcome, Parameter, SearchSpace
from botorch_fed.storage.log import FileLog, Log
from botorch_fed.storage.store import MemoryBlobs

try:
    from ax.adapter.registry import Generators, MBM_X_trans_base
    from ax.adapter.transforms.derelativize import Derelativize
    from ax.api.client import Client
    from ax.core.data import Data
    from ax.core.experiment import Experiment
    from ax.core.generator_run import GeneratorRun
    from ax.core.parameter import ChoiceParameter, FixedParameter, ParameterType, RangeParameter
    from ax.core.search_space import SearchSpaceDigest
    from ax.core.trial_status import TrialStatus
    from ax.core.types import ComparisonOp, TParameterization
    from ax.exceptions.core import DataRequiredError
    from ax.exceptions.generation_strategy import GenerationStrategyCompleted
    from ax.generation_strategy.external_generation_node import ExternalGenerationNode
    from ax.generation_strategy.generation_strategy import GenerationStrategy
    from ax.generation_strategy.generator_spec import GeneratorSpec
    from ax.generation_strategy.transition_criterion import TransitionCriterion
    from ax.generators.torch.botorch_modular.surrogate import (
        Surrogate,
        SurrogateSpec,
        submodel_input_constructor,
    )
    from ax.generators.torch.botorch_modular.utils import ModelConfig, fit_botorch_model
    from ax.storage.botorch_modular_registry import register_acquisition_function, register_model
    from ax.storage.json_store.decoder import object_from_json
    from ax.storage.json_store.registry import CORE_DECODER_REGISTRY, CORE_ENCODER_REGISTRY
except ImportError as error:
    raise ImportError('ax_adapter needs Ax: pip install "botorch_fed[ax]"') from error

logger = logging.getLogger(__name__)
TAG = "botorch_fed"  # the entry of a generator run that says whose point it is
_SITES: WeakValueDictionary[str, AxSite] = WeakValueDictionary()  # who is alive, for nodes

Status = Literal["done", "open", "failed", "dropped", "wanted"]

# Of a fit: in 50 dimensions random features gain less than 0.05 of evidence in 500 more.
FIT_STEPS = 100


class RoundOpen(DataRequiredError):
    """There is no point to propose now: other sites, or own trials, are still at work."""


# ------------------------------------------------------------------ search spaces


def search_space(client: Client, *, centre: float = 0.0, scale: float = 1.0) -> SearchSpace:
    """The canonical search space of an Ax experiment; the objective's sign included.

    Parameter constraints are its constraints. Choices with an order take one column, others are
    one-hot; fixed parameters are left out. Several objectives, their thresholds, and outcome
    constraints are outcomes by the names of their metrics.

    Args:
        client: A client with an experiment and its objectives.
        centre: What counts as a zero of the one outcome, see `Outcome`: public, never learnt.
        scale: What counts as one.
    """
    experiment = client._experiment  # Ax has no public name for it
    outcomes = _outcomes(experiment)
    parameters = [_parameter(p) for p in experiment.search_space.parameters.values()]
    searched = tuple(p for p in parameters if p is not None)
    if len(outcomes) == 1:
        one = Outcome(centre, scale, outcomes[0].minimize)
        return SearchSpace(searched, one, _constraints(experiment))
    if (centre, scale) != (0.0, 1.0):
        raise InputDataError("centre and scale are for one outcome: leave them out.")
    return SearchSpace(searched, constraints=_constraints(experiment), outcomes=outcomes)


@dataclass(frozen=True)
class AxMap:
    """Between points of the unit cube and the parameters of one Ax experiment.

    Args:
        space: The federation's search space.
        values: For each choice, what Ax calls each of its values.
        fixed: Parameters of the experiment that are not searched.
        metrics: The metric of each outcome of the space.
    """

    space: SearchSpace
    values: Mapping[str, Mapping[str, Any]]
    fixed: Mapping[str, Any]
    metrics: tuple[str, ...]

    @classmethod
    def of(cls, experiment: Experiment, space: SearchSpace) -> AxMap:
        """The map of an experiment; `InputDataError` unless its search space is the given one."""
        metrics = _metrics(experiment, space)
        theirs = experiment.search_space.parameters
        parameters = {name: _parameter(p) for name, p in theirs.items()}
        own = {name: p for name, p in parameters.items() if p is not None}
        searched = [p for p in space.parameters if p.kind != "fixed"]
        names = [p.name for p in searched]
        if own.keys() != set(names):
            raise InputDataError(
                f"The experiment has the parameters {sorted(own)}, the federation "
                f"{sorted(names)}: they must have the same names."
            )
        for parameter in searched:
            if _ordered(own[parameter.name], parameter) != parameter:
                raise InputDataError(
                    f"Parameter {parameter.name!r} is {own[parameter.name]} in the experiment and "
                    f"{parameter} in the federation: kind, bounds, scale and values must agree."
                )
        unknown = [c for c in _canonical(space, experiment) if c not in space.constraints]
        if unknown:
            raise InputDataError(
                f"The experiment has the parameter constraint '{unknown[0]}', the federation has "
                f"not: give its search space constraints=('{unknown[0]}', …), at all sites."
            )
        values = {
            name: {str(v): v for v in p.values}
            for name, p in theirs.items()
            if isinstance(p, ChoiceParameter)
        }
        fixed = {name: p.value for name, p in theirs.items() if isinstance(p, FixedParameter)}
        for p in space.parameters:
            if p.kind == "fixed" and fixed.get(p.name, p.values[0]) != p.values[0]:
                raise InputDataError(
                    f"Parameter {p.name!r} is fixed at {fixed[p.name]!r} in the experiment and at "
                    f"{p.values[0]!r} in the federation: the values must agree."
                )
        return cls(space, values, fixed, metrics)

    def to_ax(self, X: Tensor) -> list[TParameterization]:
        """An `n x d` tensor in the unit cube to parameterizations; bounds are never left."""
        points: list[TParameterization] = []
        for point in self.space.from_unit(X):
            named = {
                p.name: self.values[p.name][str(point[p.name])]
                if p.name in self.values
                else point[p.name]
                for p in self._searched
            }
            points.append({**named, **self.fixed})
        return points

    def from_ax(self, parameters: TParameterization) -> Tensor:
        """A parameterization to a `1 x d` tensor; `InputDataError` outside the bounds."""
        point: dict[str, Any] = {}
        for p in self._searched:
            known = {str(value): value for value in p.values}
            given = parameters[p.name]
            point[p.name] = known.get(str(given), given)
        return self.space.to_unit([point])

    def outcome(self, values: Mapping[str, float]) -> float | dict[str, float]:
        """The value of the one metric, or those of all outcomes by name."""
        numbers = [values[metric] for metric in self.metrics]
        return self.space.by_name(numbers) if self.space.outcomes else numbers[0]

    def error(self, sems: Mapping[str, float]) -> float | dict[str, float] | None:
        """Standard errors as `outcome` gives values; None unless all metrics have one."""
        known = all(math.isfinite(sems[metric]) for metric in self.metrics)
        return self.outcome(sems) if known else None

    @property
    def _searched(self) -> list[Parameter]:
        return [p for p in self.space.parameters if p.kind != "fixed"]


def _outcomes(experiment: Experiment) -> tuple[Outcome, ...]:
    """Objectives and outcome constraints, by the names of their metrics."""
    config = experiment.optimization_config
    if config is None:
        raise InputDataError("The experiment has no objective: call client.configure_optimization.")
    if config.objective.is_scalarized_objective:
        raise InputDataError(
            f"The objective {config.objective.expression!r} is a weighted sum of metrics: report "
            "the sum as a metric, or configure several objectives."
        )
    worst = _bounds(getattr(config, "objective_thresholds", ()))
    found = {}
    for name, weight in config.objective.metric_weights:
        ends = [end for end in worst.get(name, (None, None)) if end is not None]
        reference = ends[0] if ends else None
        found[name] = Outcome.objective(name, minimize=weight < 0, reference=reference)
    for name, (lower, upper) in _bounds(config.outcome_constraints).items():
        found[name] = Outcome.constraint(name, lower=lower, upper=upper)
    return tuple(found.values())


def _bounds(constraints: Sequence[Any]) -> dict[str, tuple[float | None, float | None]]:
    """Lower and upper bounds of metrics."""
    found: dict[str, tuple[float | None, float | None]] = {}
    for one in constraints:
        if one.relative or [weight for _, weight in one.metric_weights] != [1]:
            raise InputDataError(
                f"The outcome constraint {one.expression!r} is relative to a status quo, or about "
                "several metrics: write an absolute bound of one metric, such as 'latency <= 20'."
            )
        (name,) = one.metric_names
        lower, upper = found.get(name, (None, None))
        if one.op == ComparisonOp.LEQ:
            upper = one.bound
        else:
            lower = one.bound
        found[name] = lower, upper
    return found


def _metrics(experiment: Experiment, space: SearchSpace) -> tuple[str, ...]:
    """The metric of each outcome of a space; `InputDataError` unless both mean the same."""
    theirs = _outcomes(experiment)
    if not space.outcomes:
        if len(theirs) > 1:
            raise InputDataError(
                f"The experiment has {[one.words for one in theirs]}, the federation one metric: "
                "leave its space out, or give the space these outcomes, at all sites."
            )
        ((metric, minimize),) = ((one.name, one.minimize) for one in theirs)
        if minimize != space.outcome.minimize:
            raise InputDataError(
                f"The experiment {'mini' if minimize else 'maxi'}mises {metric!r}, the federation "
                "does the opposite: set minimize in the search space's Outcome."
            )
        return (metric,)
    ours = {one.name: replace(one, centre=0.0, scale=1.0) for one in space.metrics}
    decisive = {name: one for name, one in ours.items() if one.role != "tracking"}
    if decisive != {one.name: one for one in theirs}:
        words = [_words_of(one) for one in theirs], [_words_of(one) for one in decisive.values()]
        raise InputDataError(
            f"The experiment has the outcomes {words[0]}, the federation {words[1]}: they must "
            "agree."
        )
    unknown = sorted(ours.keys() - {metric.name for metric in experiment.metrics.values()})
    if unknown:
        raise InputDataError(
            f"The experiment has no metric {unknown[0]!r}, which the federation records: add it by "
            "client.configure_metrics."
        )
    return tuple(ours)


def _words_of(outcome: Outcome) -> str:
    worst = "" if outcome.reference is None else f", worst {outcome.reference:g}"
    return f"{outcome.words}{worst}"


def _parameter(theirs: Any) -> Parameter | None:
    """Our form of a parameter of Ax; None for a fixed one."""
    if isinstance(theirs, FixedParameter):
        return None
    if getattr(theirs, "is_fidelity", False) or getattr(theirs, "is_hierarchical", False):
        raise InputDataError(
            f"Parameter {theirs.name!r} is a fidelity or has dependents, which a federation's "
            "search does not know: fix it, search the flat space, or use `modular_spec`, where Ax "
            "itself handles it."
        )
    if isinstance(theirs, ChoiceParameter):
        return _choice(theirs)
    if not isinstance(theirs, RangeParameter) or theirs.logit_scale or theirs.digits is not None:
        raise InputDataError(
            f"Parameter {theirs.name!r} is no range on a linear or log scale, without rounding, "
            "and no choice: a federation has no map for it."
        )
    scale: Literal["log", "linear"] = "log" if theirs.log_scale else "linear"
    if theirs.parameter_type == ParameterType.INT:
        return Parameter.integer(theirs.name, int(theirs.lower), int(theirs.upper), scale=scale)
    return Parameter.real(theirs.name, theirs.lower, theirs.upper, scale=scale)


def _choice(theirs: Any) -> Parameter:
    """A choice with its values; two texts have no order that says anything."""
    text = theirs.parameter_type == ParameterType.STRING
    ordered = bool(theirs.is_ordered) and not (text and len(theirs.values) == 2)
    log = ordered and bool(getattr(theirs, "log_scale", False))
    return Parameter.choice(
        theirs.name, theirs.values, ordered=ordered, scale="log" if log else "linear"
    )


def _constraints(experiment: Experiment) -> tuple[LinearConstraint, ...]:
    """The parameter constraints of an experiment."""
    return tuple(
        LinearConstraint(tuple(one.constraint_dict.items()), one.bound, one.is_equality)
        for one in experiment.search_space.parameter_constraints
    )


def _canonical(space: SearchSpace, experiment: Experiment) -> tuple[LinearConstraint | str, ...]:
    """The same in the form that a space gives them."""
    return SearchSpace(space.parameters, constraints=_constraints(experiment)).constraints


def _ordered(parameter: Parameter, wanted: Parameter) -> Parameter:
    """A choice in the order of another: Ax sorts the values as it likes.

    Texts that name numbers or booleans stand for them.
    """
    if wanted.kind == "choice" and {*map(str, parameter.values)} == {*map(str, wanted.values)}:
        return replace(wanted, name=parameter.name)
    return parameter


# ------------------------------------------------------------------ trials


@dataclass(frozen=True)
class ArmResult:
    """What an experiment knows of one arm of one trial."""

    key: str
    status: Status
    parameters: Mapping[str, Any]
    tag: tuple[str, int] | None
    values: Mapping[str, float]
    sems: Mapping[str, float]  # NaN where there is none


def arms_of(experiment: Experiment, metrics: tuple[str, ...]) -> list[ArmResult]:
    """All arms of all trials, with their values of some metrics."""
    values = {metric: _values(experiment, metric, "mean") for metric in metrics}
    sems = {metric: _values(experiment, metric, "sem") for metric in metrics}
    arms = []
    for index, trial in experiment.trials.items():
        names = {arm.signature: arm.name for arm in trial.arms}  # a generator run's have none
        for run in trial.generator_runs:
            tag = (run.gen_metadata or {}).get(TAG)
            for arm in run.arms:
                name = names[arm.signature]
                found = {k: known.get((index, name), math.nan) for k, known in values.items()}
                arms.append(
                    ArmResult(
                        f"{index}/{name}",
                        _status(trial.status, found),
                        dict(arm.parameters),
                        None if tag is None else (str(tag[0]), int(tag[1])),
                        found,
                        {k: known.get((index, name), math.nan) for k, known in sems.items()},
                    )
                )
    return arms


def _values(
    experiment: Experiment, metric: str, column: Literal["mean", "sem"]
) -> dict[tuple[int, str], float]:
    """The last value of the metric, or its standard error, of every trial and arm with one."""
    df = experiment.lookup_data().df
    if not len(df):
        return {}
    df = df[df["metric_name"] == metric]
    if "step" in df.columns:
        df = df.sort_values("step", kind="stable", na_position="first")
    rows = zip(df["trial_index"], df["arm_name"], df[column], strict=True)
    return {(int(index), str(arm)): float(number) for index, arm, number in rows}


def _status(status: TrialStatus, values: Mapping[str, float]) -> Status:
    measured = all(abs(v) <= MAX_VALUE for v in values.values())  # false for NaN: without data
    if status == TrialStatus.COMPLETED:
        return "done" if measured else "failed"
    if status == TrialStatus.FAILED:
        return "failed"
    if status == TrialStatus.EARLY_STOPPED and measured:
        return "done"  # the last value of its curve counts, as in Ax's own models
    if status in (TrialStatus.CANDIDATE, TrialStatus.STAGED, TrialStatus.RUNNING):
        return "open"
    return "dropped"  # abandoned, stopped early without a value, stale


# ------------------------------------------------------------------ a site


class _ReadingSite(Site):
    """A site that reads its experiment before it answers a request."""

    def __init__(self, read: Callable[[], None], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._read = read

    def respond(self, request: bytes, *, defer: bool = False) -> bytes:
        self._read()
        return super().respond(request, defer=defer)


class AxSite:
    """One agent whose trials are those of an Ax experiment.

    Any engine may ask `site` to respond; the experiment's trials come from `node`.

    Args:
        name: The agent's name.
        agent: The site's side of the protocol.
        space: The federation's search space.
        run: The run's name.
        log: What the site must not lose; default in memory. Its own.
        attempts: How many trials of one point may fail before its evaluation has failed.

    Attributes:
        site: The site.
        finished: Whether the protocol is over, if the engine says so.
    """

    def __init__(
        self,
        name: AgentId,
        agent: Agent[Any],
        space: SearchSpace,
        *,
        run: str = "run",
        log: Log | None = None,
        attempts: int = 2,
    ) -> None:
        if attempts < 1:
            raise InputDataError(f"A point needs at least one attempt, got {attempts}.")
        self.name = name
        self.space = space
        self.finished = False
        self.exchange: Callable[[], object] | None = None  # goes on with the rounds, if it can
        self._attempts = attempts
        self._experiment: Experiment | None = None
        self._map: AxMap | None = None
        self._left_out: set[str] = set()  # arms that cannot be attached
        self.site: Site = _ReadingSite(self._read_if_joined, name, agent, None, run=run, log=log)
        self.key = f"{run}/{name}/{self.site.token}"
        _SITES[self.key] = self

    def __repr__(self) -> str:
        return f"AxSite({self.name!r}, {self.site!r})"

    def node(
        self,
        name: str = "Federated",
        transition_criteria: Sequence[TransitionCriterion] | None = None,
    ) -> FederatedGenerationNode:
        """A node for a generation strategy of Ax, e.g. after a Sobol node."""
        return FederatedGenerationNode(self.key, name, transition_criteria)

    def join(self, client: Client) -> None:
        """Take a client's experiment as the objective.

        A client without a generation strategy gets one; one that has one must have this site's node
        in it.
        """
        self.bind(client._experiment)
        strategy = client._maybe_generation_strategy
        if strategy is None:
            client.set_generation_strategy(
                GenerationStrategy(name="Federated", nodes=[self.node()])
            )
        elif self.key not in {getattr(node, "site", None) for node in strategy._nodes}:
            raise InputDataError(
                f"The client's generation strategy has no node of site {self.name!r}: put "
                "site.node() into it, or leave the strategy to us."
            )

    def bind(self, experiment: Experiment) -> None:
        """Take an experiment as the objective."""
        if experiment is not self._experiment:
            self._map = AxMap.of(experiment, self.space)
            self._experiment = experiment

    @property
    def joined(self) -> bool:
        """Whether it has an experiment."""
        return self._experiment is not None

    @property
    def map(self) -> AxMap:
        """Between the unit cube and the experiment's parameters."""
        if self._map is None:
            raise ProtocolError(f"Site {self.name!r} has no experiment: call join(client) first.")
        return self._map

    # -------------------------------------------------------------- what trials say

    def read(self) -> None:
        """Tell the site what has become of its trials, and attach the experiment's others."""
        fates = self._fates()
        for number, (fate, done) in fates.items():
            if done is not None:
                self.site.tell(number, self.map.outcome(done.values), self.map.error(done.sems))
            elif fate == "dropped":
                self.site.fail(number, "its trial failed, or was abandoned or stopped")
        for arm in self._all_arms():
            if arm.status == "done" and (arm.tag is None or arm.tag[0] != self.key):
                self._attach(arm)

    def _read_if_joined(self) -> None:
        if self.joined:
            self.read()

    def wanted(self) -> list[int]:
        """Trials of the site that are to be evaluated and that no trial of Ax is about."""
        return [number for number, (fate, _) in self._fates().items() if fate == "wanted"]

    def parameters(self, trial: int) -> TParameterization:
        """The point of an open trial as Ax names it."""
        (point,) = self.map.to_ax(self.site.point(trial))
        return point

    def _fates(self) -> dict[int, tuple[Status, ArmResult | None]]:
        """What has become of the open trials, and the arms of those that are done."""
        arms: dict[int, list[ArmResult]] = {}
        for arm in self._all_arms():
            if arm.tag is not None and arm.tag[0] == self.key:
                arms.setdefault(arm.tag[1], []).append(arm)
        return {trial.id: self._fate(arms.get(trial.id, [])) for trial in self.site.pending()}

    def _fate(self, arms: Sequence[ArmResult]) -> tuple[Status, ArmResult | None]:
        for arm in arms:
            if arm.status == "done":
                return arm.status, arm
        if any(arm.status == "open" for arm in arms):
            return "open", None
        failed = sum(arm.status == "failed" for arm in arms)
        over = failed >= self._attempts or any(arm.status == "dropped" for arm in arms)
        return "dropped" if over else "wanted", None

    def _attach(self, arm: ArmResult) -> None:
        if arm.key in self._left_out:
            return
        try:
            X, outcome = self.map.from_ax(dict(arm.parameters)), self.map.outcome(arm.values)
            self.site.attach(X, outcome, self.map.error(arm.sems), label=arm.key)
        except InputDataError as error:
            self._left_out.add(arm.key)
            logger.warning("trial %s of site %r is left out: %s", arm.key, self.name, error)

    def _all_arms(self) -> list[ArmResult]:
        metrics = self.map.metrics
        assert self._experiment is not None
        return arms_of(self._experiment, metrics)


# ------------------------------------------------------------------ the node


class FederatedGenerationNode(ExternalGenerationNode):
    """Proposes the points of an `AxSite`, which must be alive in this process.

    Points are never deduplicated by Ax, which would replace a repeated one by a random point. The
    node and its JSON hold the site's key only.

    Args:
        site: The site's key.
        name: The node's name in its strategy.
        transition_criteria: When another node follows.
    """

    def __init__(
        self,
        site: str,
        name: str = "Federated",
        transition_criteria: Sequence[TransitionCriterion] | None = None,
    ) -> None:
        super().__init__(
            name=name, should_deduplicate=False, transition_criteria=transition_criteria
        )
        self.site = site
        self._given: list[int] = []  # since the last update; not yet trials of Ax

    def update_generator_state(self, experiment: Experiment, data: Data) -> None:
        """Read the trials, and exchange rounds as far as they reach; also without data."""
        self._given = []
        site = self._live()
        site.bind(experiment)
        site.read()
        if site.exchange is not None:
            site.exchange()

    def get_next_candidate(self, pending_parameters: list[TParameterization]) -> TParameterization:
        """The next point that the agent waits for.

        Raises:
            RoundOpen: There is none until trials are completed, here or at other sites.
            GenerationStrategyCompleted: The protocol is over.
        """
        left = self._left() or self._new()
        if left:
            self._given.append(left[0])
            self._live().site.take(left[0])
            return self._live().parameters(left[0])
        site = self._live()
        if site.finished:
            raise GenerationStrategyCompleted(f"The run of site {site.name!r} is over.")
        raise RoundOpen(
            f"Site {site.name!r} has nothing to propose: complete its trials, or wait for the "
            "other sites, and ask again."
        )

    def new_trial_limit(self, raise_generation_errors: bool = False) -> int:
        """How many trials can be proposed now."""
        self.update_generator_state(self.experiment, self.experiment.lookup_data())
        site = self._live().site
        return len(self._left()) + (site.left if self._may_ask(site) else 0)

    def _left(self) -> list[int]:
        return [trial for trial in self._live().wanted() if trial not in self._given]

    def _new(self) -> list[int]:
        """A new trial of the site, if it has one."""
        site = self._live().site
        return [trial.id for trial in site.ask()] if site.left and self._may_ask(site) else []

    def _may_ask(self, site: Site) -> bool:
        """Whether a round waits for this site, which is not at work for it already."""
        return site.waiting and (bool(self._given) or not site.pending())

    def _live(self) -> AxSite:
        site = _SITES.get(self.site)
        if site is None:
            raise ProtocolError(
                f"Site {self.site!r} is not alive in this process: make its AxFederation or AxSite "
                "with the same folder first, and keep it."
            )
        return site

    def _gen(self, experiment: Experiment, **kwargs: Any) -> GeneratorRun:
        fixed = kwargs.get("fixed_features")
        if fixed is not None and fixed.parameters:
            raise UnsupportedError("A federation's point cannot have fixed parameters.")
        run = super()._gen(experiment=experiment, **kwargs)
        run._gen_metadata = {
            **(run.gen_metadata or {}),
            TAG: [self._live().key, self._given[-1]],
        }
        return run

    @classmethod
    def deserialize_init_args(
        cls, args: dict[str, Any], decoder_registry: Any = None, class_decoder_registry: Any = None
    ) -> dict[str, Any]:
        """What Ax's decoder passes to the constructor."""
        criteria = object_from_json(
            args["transition_criteria"],
            decoder_registry=decoder_registry or CORE_DECODER_REGISTRY,
            **(
                {"class_decoder_registry": class_decoder_registry} if class_decoder_registry else {}
            ),
        )
        return {"site": args["site"], "name": args["name"], "transition_criteria": criteria}


def _node_to_dict(node: FederatedGenerationNode) -> dict[str, Any]:
    return {
        "__type": type(node).__name__,
        "site": node.site,
        "name": node.name,
        "transition_criteria": list(node.transition_criteria),
    }


CORE_ENCODER_REGISTRY[FederatedGenerationNode] = _node_to_dict
CORE_DECODER_REGISTRY[FederatedGenerationNode.__name__] = FederatedGenerationNode


# ------------------------------------------------------------------ a federation


class _Waiting(Exception):
    """Too few sites have answered: the round is exchanged again later."""


class AxFederation:
    """Several Ax experiments as the sites of one federation, in one process.

    Every client works as always: ``get_next_trials``, ``complete_trial``. `get_next_trials` raises
    `RoundOpen` while the round waits for others, and Ax's `GenerationStrategyCompleted` at the end.
    It is for one thread at a time.

    Args:
        protocol: Its settings, e.g. `FTS(budget=20, every=1)` or `FedGP(budget=20)`.
        clients: Clients by the names of their sites; or the names alone, whose clients `join`
            later: on loading from JSON, the federation must be there first.
        space: The search space; default that of the first client, with an outcome that has centre 0
            and scale 1.
        seed: Fixes all random numbers but those of privacy.
        run: The run's name.
        folder: Keeps the run from its first message on; the same folder goes on with it.
        quorum: How many sites must answer before a round goes on; default all. The replies of the
            others count when their trials are completed.
        attempts: How many trials of a point may fail before its evaluation has failed.
        initialize_with_center: Whether sites without data evaluate the centre of the space first,
            as Ax's default strategy does. A study with a default, a design, candidates or a
            published search begins as it says.

    Example:
        >>> federation = AxFederation(FTS(budget=20, every=1), {"a": a, "b": b}, seed=0)
        >>> for index, point in a.get_next_trials(max_trials=1).items():
        ...     a.complete_trial(index, raw_data={"loss": train(**point)})
    """

    def __init__(
        self,
        protocol: Study,
        clients: Mapping[AgentId, Client] | Sequence[AgentId],
        *,
        seed: int,
        space: SearchSpace | None = None,
        run: str = "run",
        folder: str | Path | None = None,
        quorum: int | None = None,
        attempts: int = 2,
        initialize_with_center: bool = True,
    ) -> None:
        names = tuple(clients)
        if space is None:
            if not isinstance(clients, Mapping) or not clients:
                raise InputDataError("Names alone need their search space: pass space=….")
            space = search_space(next(iter(clients.values())))
        if initialize_with_center and hasattr(protocol, "from_centre"):
            protocol = protocol.from_centre(space)
        if isinstance(protocol, DealsPoints):
            protocol = protocol.dealt_by(seed)
        home = None if folder is None else Path(folder).resolve()
        self._log = Log(HUB_EVENTS) if home is None else hub_log(home)
        if home is not None:
            protocol = with_stores(protocol, names, partial(secrets_in, home))
            if isinstance(protocol, KeepsSecrets) and not len(self._log):
                protocol.provision(space)
        self.names = names
        self.space = space
        self._run = run
        self._quorum = len(names) if quorum is None else quorum
        self._server = protocol.server(space, names)
        blobs = MemoryBlobs()  # the server sends them again after a restart
        self.sites: dict[AgentId, AxSite] = {}
        for name in names:
            agent = make_agent(protocol, name, space, seed, blobs)
            self.sites[name] = site = _site(name, agent, space, run, home, attempts)
            site.exchange = self.step
        self._engine = InProcess(site.site for site in self.sites.values())
        if isinstance(clients, Mapping):
            for name, client in clients.items():
                self.join(name, client)

    def __repr__(self) -> str:
        return f"AxFederation({len(self.names)} sites, {self.rounds} exchanges)"

    def join(self, name: AgentId, client: Client) -> None:
        """Give a site its client."""
        self.sites[name].join(client)

    def step(self) -> int:
        """Exchange rounds until trials are needed; returns how many were finished.

        Safe to call at any time; clients call it when they ask for trials.
        """
        before = self.rounds
        if self.finished:
            return 0
        absent = [name for name, site in self.sites.items() if not site.joined]
        if absent:
            raise ProtocolError(f"Sites {absent[:8]} have no client: call join(name, client).")
        try:
            drive(
                self._server,
                self._exchanged,
                run=self._run,
                log=self._log,
                on_round=_logged,
            )
        except _Waiting:
            return self.rounds - before
        for site in self.sites.values():
            site.finished = True
        return self.rounds - before

    @property
    def rounds(self) -> int:
        """How many exchanges are finished."""
        return finished_rounds(self._log)

    @property
    def finished(self) -> bool:
        """Whether the protocol is over."""
        return all(site.finished for site in self.sites.values())

    def history(self, name: AgentId) -> tuple[Tensor, Tensor]:
        """What a site was asked and has told: `n x d` points, `n x m` values of the metrics."""
        seen = [o for o in self.sites[name].site.observations() if o.status == "completed"]
        if not seen:
            return torch.zeros(0, self.space.dim).double(), torch.zeros(
                0, len(self.space.metrics)
            ).double()
        return torch.cat([o.X for o in seen]), torch.cat([o.Y for o in seen])

    def close(self) -> None:
        """Release the files of the hub and of the sites."""
        self._engine.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchanged(self, outgoing: Outgoing) -> Exchanged:
        """One attempt of a round; `_Waiting` while too many sites are at work."""
        exchanged = self._engine(outgoing)
        if not outgoing.defer and len(self._busy(exchanged)) > len(self.names) - self._quorum:
            raise _Waiting
        return exchanged

    def _busy(self, exchanged: Exchanged) -> list[AgentId]:
        return [
            name for name, answer in exchanged.replies.items() if refusal_code(answer) == "busy"
        ]


def _logged(round_: Round) -> None:
    logger.info("exchange %d: %d sites replied", round_.serial, len(round_.replied))


def _site(
    name: AgentId,
    agent: Agent[Any],
    space: SearchSpace,
    run: str,
    folder: Path | None,
    attempts: int,
) -> AxSite:
    if folder is None:
        return AxSite(name, agent, space, run=run, attempts=attempts)
    log = FileLog(site_folder(folder, name), SITE_EVENTS)
    try:
        return AxSite(name, agent, space, run=run, log=log, attempts=attempts)
    except BaseException:
        log.close()
        raise


# ------------------------------------------------------------------ door B: contexts


@dataclass(frozen=True, eq=False)
class Context:
    r"""What a site has received about one metric, for models and acquisition functions inside Ax.

    Attributes:
        feature_map: The shared basis, over the unit cube.
        outcome: The public map of the metric; everything received is about its larger-is-better
            scale. For a metric that is no objective, any sign that the sites agree on.
        weights: Received weight vectors, `N x M`.
        summaries: Received summaries.
        mean: The public constant mean :math:`\mu` they are relative to.
        local_weight: :math:`w` of `ContextMixture`.
        seed: Of draws of the own model.
    """

    feature_map: FeatureMap
    outcome: Outcome = Outcome()  # noqa: RUF009 - frozen
    weights: Tensor | None = None
    summaries: tuple[Summary, ...] = ()
    mean: float = 0.0
    local_weight: float = 0.5
    seed: int = 0

    def options(self, input_transform: InputTransform | None) -> dict[str, Any]:
        """Options of a model over the basis."""
        return {
            "feature_map": self.feature_map,
            "mean": self.mean,
            "input_transform": input_transform,
            "outcome_transform": PublicOutcome(self.outcome),
        }


contexts: dict[str, Context] = {}  # by the names that options hold


def _context(name: str) -> Context:
    try:
        return contexts[name]
    except KeyError:
        raise ProtocolError(
            f"There is no context {name!r}: set ax_adapter.contexts[{name!r}] first, also after "
            "loading a strategy."
        ) from None


class PublicOutcome(OutcomeTransform):
    """`Outcome` as an outcome transform: fixed, agreed, never learnt from data.

    Args:
        outcome: The public map.
    """

    _is_linear = True

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome

    def subset_output(self, idcs: list[int]) -> PublicOutcome:
        """The same for every output."""
        return self

    def forward(
        self, Y: Tensor, Yvar: Tensor | None = None, X: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Metric to public scale."""
        return self.outcome.to_public(Y), None if Yvar is None else Yvar / self.outcome.scale**2

    def untransform(
        self, Y: Tensor, Yvar: Tensor | None = None, X: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Public scale to metric."""
        return self.outcome.from_public(Y), None if Yvar is None else Yvar * self.outcome.scale**2

    def untransform_posterior(self, posterior: Posterior, X: Tensor | None = None) -> Posterior:
        """A posterior on the public scale as one of the metric."""
        sign = -1.0 if self.outcome.minimize else 1.0
        weights = torch.tensor([sign * self.outcome.scale], dtype=torch.float64)
        return ScalarizedPosteriorTransform(weights, self.outcome.centre)(posterior)


class OwnMetricGP(SingleTaskGP):
    """The own model of a metric about which nothing was received, beside models of a context."""


def _inputs_of_metric(
    botorch_model_class: type[Model],
    model_config: ModelConfig,
    dataset: SupervisedDataset,
    search_space_digest: SearchSpaceDigest,
    surrogate: Surrogate,
) -> dict[str, Any]:
    """Ax's arguments of a model, if it is clear which metric a context is of."""
    metrics = sorted({name for data in surrogate.training_data for name in data.outcome_names})
    named = surrogate.surrogate_spec.metric_to_model_configs
    unknown = sorted(named.keys() - set(metrics))
    if unknown:
        raise UnsupportedError(
            f"There are contexts of the metrics {unknown}, but the experiment has data of "
            f"{metrics}: correct the names in modular_spec(context={{metric: name}})."
        )
    if len(metrics) > 1 and not named:
        raise UnsupportedError(
            f"A context is of one metric, but the experiment has {metrics}: say which, "
            "modular_spec(context={metric: name}). Metrics without a context get a model of "
            "their own data."
        )
    return _usual_inputs(botorch_model_class, model_config, dataset, search_space_digest, surrogate)


def _usual_inputs(botorch_model_class: type[Model], *rest: Any) -> dict[str, Any]:
    """Ax's arguments of a model of BoTorch."""
    make: Any = submodel_input_constructor.dispatch(Model)
    inputs: dict[str, Any] = make(botorch_model_class, *rest)
    return inputs


def _inputs_of_basis(
    botorch_model_class: type[Model],
    model_config: ModelConfig,
    dataset: SupervisedDataset,
    search_space_digest: SearchSpaceDigest,
    surrogate: Surrogate,
) -> dict[str, Any]:
    """Ax's arguments of a `BasisGP` whose options do not come from a context."""
    if model_config.model_options.get("summaries"):
        raise UnsupportedError(
            f"{botorch_model_class.__name__} in Ax's own options takes no summaries: they are on "
            "the public scale of the outcomes, which Ax's transforms leave. Put them into a "
            "context: modular_spec(ContextBasisGP, …)."
        )
    return _usual_inputs(botorch_model_class, model_config, dataset, search_space_digest, surrogate)


def _from_context(
    cls: type,
    training_data: SupervisedDataset,
    *,
    context: str = "default",
    fidelity_features: Sequence[int] = (),
    task_feature: int | None = None,
) -> dict[str, Any]:
    """Constructor arguments of a model from a dataset and a context's name."""
    if fidelity_features or task_feature is not None:
        what = "a fidelity" if fidelity_features else "a task parameter"
        raise UnsupportedError(
            f"{cls.__name__} has no model of {what}: what was received is a function of the other "
            "parameters. Fix the parameter at its target, or use SearchSpace(fidelity=) and a run, "
            "the trial service or a study file."
        )
    data = {"train_X": training_data.X, "train_Y": training_data.Y, "context": context}
    return data if training_data.Yvar is None else {**data, "train_Yvar": training_data.Yvar}


class ContextBasisGP(BasisGP):
    """`BasisGP` over the basis and summaries of a context, on the metric's own scale.

    Args:
        train_X: A `n x d` tensor of points.
        train_Y: A `n x 1` tensor of the metric's values.
        train_Yvar: A `n x 1` tensor of noise variances, if they are known.
        context: The context's name.
        input_transform: To the unit cube; Ax's `Normalize` over the declared bounds.
    """

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        context: str = "default",  # Ax does not see keyword-only arguments
        input_transform: InputTransform | None = None,
    ) -> None:
        source = _context(context)
        super().__init__(
            train_X,
            train_Y,
            train_Yvar,
            summaries=source.summaries,
            **source.options(input_transform),
        )

    construct_inputs = classmethod(_from_context)  # type: ignore[assignment, var-annotated]


class ContextMessagePriorGP(MessagePriorGP):
    """`MessagePriorGP` with the weight vectors of a context as prior; see `ContextBasisGP`."""

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        context: str = "default",  # Ax does not see keyword-only arguments
        input_transform: InputTransform | None = None,
    ) -> None:
        source = _context(context)
        super().__init__(
            train_X,
            train_Y,
            train_Yvar,
            weights=_weights(source, context),
            **source.options(input_transform),
        )

    construct_inputs = classmethod(_from_context)  # type: ignore[assignment, var-annotated]


class ContextMixture(LocalSharedMixture):
    """`LocalSharedMixture` of an own GP and the model of a context's summaries.

    Arguments as of `ContextBasisGP`.
    """

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        context: str = "default",  # Ax does not see keyword-only arguments
        input_transform: InputTransform | None = None,
    ) -> None:
        source = _context(context)
        if not source.summaries:
            raise ProtocolError(f"Context {context!r} has no summaries for a shared model.")
        options = source.options(input_transform)
        transforms = {k: options[k] for k in ("outcome_transform", "input_transform")}
        local = SingleTaskGP(train_X, train_Y, train_Yvar, **transforms)
        total = sum(source.summaries[1:], start=source.summaries[0])
        shared = BasisGP.from_summary(total, **options)
        super().__init__(local, shared, source.local_weight)

    construct_inputs = classmethod(_from_context)  # type: ignore[assignment, var-annotated]


def _weights(source: Context, name: str) -> Tensor:
    if source.weights is None:
        raise ProtocolError(f"Context {name!r} has no weight vectors.")
    return source.weights


class ContextThompsonSampling(ThompsonSampling):
    """`ThompsonSampling` on a message of a context, or on a draw of the own model."""


class _InModelSpace(SamplePath):
    """A path over the unit cube, for points as the model gets them; times a sign."""

    def __init__(self, path: SamplePath, transform: InputTransform | None, sign: float) -> None:
        super().__init__()
        self.path = path
        self.transform = transform
        self.sign = sign

    def set_ensemble_as_batch(self, ensemble_as_batch: bool) -> None:
        self.path.set_ensemble_as_batch(ensemble_as_batch)

    def forward(self, X: Tensor) -> Tensor:
        """Values at `batch_shape x n x d` points."""
        X = X if self.transform is None else self.transform.transform(X)
        return self.sign * self.path(X)


def _thompson_inputs(
    model: Model,
    training_data: SupervisedDataset | Mapping[str, SupervisedDataset],
    posterior_transform: PosteriorTransform | None = None,
    X_pending: Tensor | None = None,
    constraints: Sequence[Callable[[Tensor], Tensor]] | None = None,
    context: str = "default",
    message: int | None = None,
) -> dict[str, Any]:
    """Arguments of `ContextThompsonSampling`.

    Args:
        model: The own model, of which a draw is made if no message is chosen.
        training_data: Its data; those of every metric where there are several.
        posterior_transform: Ax's, whose weight has the objective's sign.
        X_pending: Named, because Ax insists; draws do not depend on pending points.
        constraints: Outcome constraints, which are refused.
        context: The context's name.
        message: Which weight vector is followed.
    """
    source = _context(context)
    weights = getattr(posterior_transform, "weights", torch.ones(1))
    if constraints or model.num_outputs != 1 or weights.numel() != 1:
        raise UnsupportedError(
            "Thompson sampling follows one function: it takes one objective and no outcome "
            "constraints. Use qLogNoisyExpectedImprovement, or "
            "qLogNoisyExpectedHypervolumeImprovement for several objectives."
        )
    sign = float(weights.sign())
    if (sign < 0) != source.outcome.minimize:
        raise InputDataError(
            f"Ax {'mini' if sign < 0 else 'maxi'}mises the metric, the outcome of context "
            f"{context!r} says the opposite."
        )
    if message is None:  # a draw is on the metric's scale, over the model's own inputs
        sets = training_data.values() if isinstance(training_data, Mapping) else [training_data]
        stream = generator(source.seed, "ax", max(len(data.X) for data in sets))
        return {"path": _InModelSpace(component_path(model, Size(), stream), None, sign)}
    row = _weights(source, context)[message]
    path = weight_path(source.feature_map, row, mean=source.mean)  # larger is better already
    return {"path": _InModelSpace(path, getattr(model, "input_transform", None), 1.0)}


def _fit_mixture(model: ContextMixture, mll_class: Any, mll_options: Any = None) -> None:
    """The own part is fitted; the shared one is what was received."""
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.local.likelihood, model.local))


def _fit_basis(model: BasisGP, mll_class: Any, mll_options: Any = None) -> None:
    mll = mll_class(likelihood=model.likelihood, model=model, **(mll_options or {}))
    fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": FIT_STEPS}})


def _map_to_dict(feature_map: FeatureMap) -> dict[str, Any]:
    return {"__type": FeatureMap.__name__, "tensors": feature_map.to_tensors()}


def _map_from_dict(tensors: Mapping[str, Tensor]) -> FeatureMap:
    return feature_map_from_tensors(tensors)


def register() -> None:
    """Make our models and acquisition functions known to Ax: to its fits and to its JSON.

    `modular_spec` calls it. It may be called again, and must be called before a strategy that uses
    them is loaded.
    """
    fit_botorch_model.register(BasisGP)(_fit_basis)  # by its own `custom_fit`
    fit_botorch_model.register(ContextMixture)(_fit_mixture)
    submodel_input_constructor.register(BasisGP)(_inputs_of_basis)
    for model in (ContextBasisGP, ContextMessagePriorGP, ContextMixture, OwnMetricGP):
        submodel_input_constructor.register(model)(_inputs_of_metric)
        register_model(model)
    register_model(BasisGP)
    for kind in feature_map_kinds():  # public: of no site's data
        CORE_ENCODER_REGISTRY[kind] = _map_to_dict
    CORE_DECODER_REGISTRY[FeatureMap.__name__] = _map_from_dict
    for acquisition in (ContextThompsonSampling, MixtureUCB, MixtureEI, MixturePI):
        register_acquisition_function(acquisition)


acqf_input_constructor(ContextThompsonSampling)(_thompson_inputs)


def modular_spec(
    model: type[Model],
    acquisition: type,
    *,
    context: str | Mapping[str, str] = "default",
    **acquisition_options: Any,
) -> GeneratorSpec:
    """A generator spec with scales that all sites agree on.

    Inputs pass Ax's default transforms and `Normalize` over the declared bounds; outcomes pass
    none that learns from data: `PublicOutcome` scales them. Of a curve the last value counts, also
    where a trial was stopped early: the step is no input, for the shared basis has none.

    Args:
        model: One of the context models.
        acquisition: The acquisition class.
        context: The context's name, for both. In an experiment with several metrics: for each
            metric with a context, that context's name. The others, objectives, outcome
            constraints or tracking metrics, get a `SingleTaskGP` of their own data. With
            `ContextThompsonSampling` the objective only can have a context.
        acquisition_options: Further options of the acquisition function.

    Example:
        >>> contexts["loss"], contexts["seconds"] = Context(phi, …), Context(phi, …)
        >>> spec = modular_spec(
        ...     ContextBasisGP,
        ...     qLogNoisyExpectedImprovement,
        ...     context={"loss": "loss", "seconds": "seconds"},
        ... )
    """
    register()
    options = dict(acquisition_options)
    if issubclass(acquisition, ContextThompsonSampling):
        options["context"] = _only_context(context)
    return GeneratorSpec(
        Generators.BOTORCH_MODULAR,
        generator_kwargs={
            "surrogate_spec": _surrogate_spec(model, context),
            "botorch_acqf_class": acquisition,
            "botorch_acqf_options": options,
            "transforms": [*MBM_X_trans_base, Derelativize],
        },
    )


def _surrogate_spec(model: type[Model], context: str | Mapping[str, str]) -> SurrogateSpec:
    def config(name: str) -> ModelConfig:
        return ModelConfig(botorch_model_class=model, model_options={"context": name})

    if isinstance(context, str):
        return SurrogateSpec(model_configs=[config(context)])
    names = list(context.values())
    if not names or len(set(names)) < len(names):
        raise InputDataError(
            f"context must give metrics a context each, got {dict(context)}: a context holds what "
            "was received about one metric."
        )
    own = ModelConfig(botorch_model_class=OwnMetricGP, outcome_transform_classes=[Standardize])
    return SurrogateSpec(
        model_configs=[own],
        metric_to_model_configs={metric: [config(name)] for metric, name in context.items()},
    )


def _only_context(context: str | Mapping[str, str]) -> str:
    if isinstance(context, str):
        return context
    if len(context) != 1:
        raise InputDataError(
            f"Thompson sampling follows a function of the objective, got the contexts of "
            f"{sorted(context)}: give that of the objective only."
        )
    return next(iter(context.values()))
