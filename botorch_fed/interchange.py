r"""Trials to and from Ax experiments and Optuna studies.

::

    from_optuna(study, space)      trials of an Optuna study
    from_ax(client, space)         trials of an Ax experiment
    as_data(trials, space)         what a study takes as `data`
    to_optuna(trials, space)       an Optuna study with these trials, in any storage of Optuna
    to_ax(trials, space)           an Ax client with them, which goes on by Ax's own strategy
    save_trials(result, to, out)   the trials of all sites as files of one of them, or as a table
    load_trials(source, …)         those of a storage of Optuna or a file of Ax

`RunResult.trials` and `Site.trials` give the trials of a site. What is exchanged is a site's own:
none of these functions sends anything.

Values are as measured, and directions must agree: nothing is negated. Objectives of Optuna are
those of the space by their metric names, or else in its order. Its trials have the other outcomes
as user attributes by their names, a standard error as ``sem``, and the reason of a failure as
``reason``. A trial that was pruned or stopped early has the last value that it reported, as in the
samplers of Optuna and the models of Ax; in a space with a fidelity Optuna's steps are its values.

Example:
    >>> history = from_optuna(optuna.load_study(study_name="last spring", storage=url), space)
    >>> study = FTS(budget=20, data={"north": as_data(history, space)})
    >>> result = run(study, objectives, space=space, seed=0)
    >>> to_optuna(result.trials("north"), space, study_name="north", storage=url)
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from botorch_fed.federation.trial import MAX_VALUE, Trial
from botorch_fed.space import Outcome, Parameter, SearchSpace, Value

if TYPE_CHECKING:
    import optuna
    from ax.api.client import Client

    from botorch_fed.run import RunResult

CONSTRAINTS = "constraints"  # the system attribute by which Optuna knows feasible trials


def as_data(trials: Iterable[Trial], space: SearchSpace) -> tuple[Tensor, Tensor]:
    """Points in the unit cube `n x d` and outcomes `n x m` of all trials with values.

    Curves are in it, one row for each fidelity. Trials that are open or have failed are not:
    `data` of a study has values only, and no standard errors. `Site.attach` takes these.

    Args:
        trials: The trials of one site.
        space: The search space, in which all of them must lie.
    """
    points, rows = [], []
    for trial in trials:
        if not trial.values:
            continue
        missing = [one.name for one in space.metrics if one.name not in trial.values]
        if missing:
            raise InputDataError(
                f"Trial {_name(trial)} has no value of {missing[0]!r}, but of "
                f"{sorted(trial.values)}."
            )
        if trial.curve and space.fidelity is None:
            raise InputDataError(
                f"Trial {_name(trial)} has a curve, the space no fidelity: give "
                "replace(trial, curve=()), or name the fidelity in SearchSpace(fidelity=)."
            )
        points.append(_point(trial, space))
        rows.append([trial.values[one.name] for one in space.metrics])
        for at, value in trial.curve:
            assert space.fidelity is not None
            parameters = {**trial.parameters, space.fidelity.name: at}
            points.append(_point(replace(trial, parameters=parameters), space))
            rows.append([value])
    X = torch.cat([torch.zeros(0, space.dim, dtype=torch.float64), *points])
    Y = torch.tensor(rows, dtype=torch.float64)
    return X, Y.reshape(len(X), len(space.metrics))


def _point(trial: Trial, space: SearchSpace) -> Tensor:
    """The point of a trial in the unit cube, `1 x d`; `InputDataError` if it is not there."""
    try:
        return space.to_unit([trial.parameters])
    except InputDataError as error:
        raise InputDataError(
            f"Trial {_name(trial)}: {error} Leave the trial out, or change the space."
        ) from error


def _check_extra(package: str, extra: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f'this needs {package}: pip install "botorch_fed[{extra}]"') from error


def _name(trial: Trial) -> str:
    return f"{trial.id} ({trial.label})" if trial.label else str(trial.id)


# ------------------------------------------------------------------ Optuna


def to_optuna(
    trials: Iterable[Trial],
    space: SearchSpace,
    *,
    study_name: str | None = None,
    storage: Any = None,
) -> optuna.Study:
    """A new Optuna study with the trials of one site.

    Optuna's samplers and plots know which trials meet the bounds of outcomes. Constraints of
    points, which Optuna has no form for, are the user attribute ``constraints`` of the study.

    Args:
        trials: The trials; those that are open become running ones.
        space: Their search space.
        study_name: The name of the study in its storage.
        storage: As in `optuna.create_study`: a URL such as ``"sqlite:///optuna.db"``.
    """
    _check_extra("optuna", "optuna")
    import optuna

    objectives = [space.metrics[place] for place in space.objectives]
    ready = [_to_optuna(trial, space) for trial in trials]  # before there is a study
    study = optuna.create_study(
        study_name=study_name,
        storage=storage,
        directions=["minimize" if one.minimize else "maximize" for one in objectives],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names([one.name for one in objectives])
    if space.constraint_words:
        study.set_user_attr("constraints", list(space.constraint_words))
    study.add_trials(ready)
    return study


def _to_optuna(trial: Trial, space: SearchSpace) -> optuna.trial.FrozenTrial:
    from optuna.trial import TrialState, create_trial

    _point(trial, space)
    attributes: dict[str, Any] = {}
    system: dict[str, Any] = {}
    values = None
    state = {"open": TrialState.RUNNING, "failed": TrialState.FAIL}.get(
        trial.status, TrialState.COMPLETE
    )
    if trial.values:
        attributes |= {
            one.name: trial.values[one.name] for one in space.metrics if one.role != "objective"
        }
        values = [trial.values[space.metrics[place].name] for place in space.objectives]
        if space.outcome_constraints:
            system[CONSTRAINTS] = _excesses(trial, space)
    if trial.sems:
        attributes["sem"] = dict(trial.sems) if space.outcomes else trial.sem
    if trial.reason:
        attributes["reason"] = trial.reason
    if any(at % 1 for at, _ in trial.curve):
        raise InputDataError(
            f"Trial {_name(trial)} has values at fidelities that are no integers, as Optuna's "
            "steps are: export replace(trial, curve=())."
        )
    return create_trial(
        state=state,
        values=values,
        params=dict(trial.parameters),
        distributions={p.name: _distribution(p) for p in space.parameters},
        user_attrs=attributes,
        system_attrs=system,
        intermediate_values={int(at): value for at, value in trial.curve},
    )


def _excesses(trial: Trial, space: SearchSpace) -> list[float]:
    """By how much each bound of an outcome is exceeded; at most 0 where it is met."""
    found = []
    for place in space.outcome_constraints:
        one = space.metrics[place]
        value = trial.values[one.name]
        found += [] if one.lower is None else [one.lower - value]
        found += [] if one.upper is None else [value - one.upper]
    return found


def _distribution(parameter: Parameter) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    low, high, log = parameter.lower, parameter.upper, parameter.scale == "log"
    if parameter.values:
        return CategoricalDistribution(parameter.values)
    if parameter.kind == "integer":
        return IntDistribution(int(low), int(high), log=log)
    return FloatDistribution(low, high, log=log)


def from_optuna(study: optuna.Study, space: SearchSpace) -> list[Trial]:
    """The trials of an Optuna study, labelled by the name of the study and their numbers.

    Args:
        study: The study, of any sampler and storage.
        space: The search space that they are meant for. A parameter that is fixed in it may be
            missing; whether points lie in it, `as_data` and `Site.attach` say.
    """
    from optuna.study import StudyDirection

    order = _objectives_in_order(study.metric_names, len(study.directions), space)
    for one, direction in zip(order, study.directions, strict=True):
        if one.minimize != (direction == StudyDirection.MINIMIZE):
            raise _opposite(f"Optuna study {study.study_name!r}", one)
    return [
        _from_optuna(frozen, order, space, study.study_name)
        for frozen in study.get_trials(deepcopy=False)
    ]


def _objectives_in_order(
    names: Sequence[str] | None, count: int, space: SearchSpace
) -> list[Outcome]:
    """The objectives of a space as Optuna has them: by their names, or else in the same order."""
    ours = [space.metrics[place] for place in space.objectives]
    if len(ours) != count:
        raise InputDataError(
            f"The Optuna study has {count} objectives, the space {[one.words for one in ours]}: an "
            "outcome that is no objective of it is a user attribute of its trials."
        )
    known = {one.name: one for one in ours}
    if names is None or count == 1:
        return ours
    if set(names) != set(known):
        raise InputDataError(
            f"The Optuna study has the objectives {list(names)}, the space {list(known)}: the "
            "names must be the same."
        )
    return [known[name] for name in names]


def _opposite(what: str, outcome: Outcome) -> InputDataError:
    other = "maximises" if outcome.minimize else "minimises"
    return InputDataError(
        f"{what} {other} what the space has as '{outcome.words}': set minimize in the Outcome."
    )


def _from_optuna(
    frozen: optuna.trial.FrozenTrial, order: Sequence[Outcome], space: SearchSpace, name: str
) -> Trial:
    from optuna.trial import TrialState

    parameters = dict(frozen.params or frozen.system_attrs.get("fixed_params", {}))
    label, steps = f"{name}/{frozen.number}", sorted(frozen.intermediate_values.items())
    if not frozen.state.is_finished():
        return Trial(frozen.number, parameters, label=label)
    pruned = frozen.state == TrialState.PRUNED
    measured = frozen.values
    if pruned and steps and len(order) == 1:
        measured = [steps[-1][1]]
    values = {} if measured is None else {o.name: y for o, y in zip(order, measured, strict=True)}
    for one in space.metrics:
        if values and one.role != "objective":
            if one.name not in frozen.user_attrs and not pruned:
                raise InputDataError(
                    f"Trial {label} has no value of {one.name!r}: Optuna keeps it as a user "
                    f"attribute, trial.set_user_attr({one.name!r}, …)."
                )
            values[one.name] = _number(frozen.user_attrs.get(one.name, math.nan), one.name, label)
    sem = frozen.user_attrs.get("sem")
    sems = sem if isinstance(sem, Mapping) or sem is None else {space.outcome.name: sem}
    curve: list[tuple[float, float]] = []
    if space.fidelity is not None:
        target = space.shared.from_unit(torch.zeros(1, space.shared.dim, dtype=torch.float64))[0]
        end = steps[-1][0] if pruned and steps else target[space.fidelity.name]
        end = parameters.setdefault(space.fidelity.name, end)
        curve = [(float(at), value) for at, value in steps if at < end]
    reason = frozen.user_attrs.get("reason", "") or ("pruned" if pruned else "failed")
    return _answered(frozen.number, parameters, values, sems or {}, reason, label, space, curve)


def _number(value: object, name: str, label: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputDataError(
            f"Trial {label} has {value!r} as its user attribute {name!r}: expected a number."
        )
    return float(value)


def _answered(
    number: int,
    parameters: Mapping[str, Value],
    values: Mapping[str, float],
    sems: Mapping[str, float],
    reason: str,
    label: str,
    space: SearchSpace,
    curve: Sequence[tuple[float, float]] = (),
) -> Trial:
    """A trial with values, or one that has failed where an outcome has none."""
    ordered = {one.name: values.get(one.name, math.nan) for one in space.metrics}
    if not all(abs(value) <= MAX_VALUE for value in ordered.values()):  # false for NaN
        return Trial(number, parameters, "failed", reason=reason, label=label)
    one = space.outcome.name if len(space.objectives) == 1 else ""
    return Trial(
        number,
        parameters,
        "completed",
        ordered.get(one),
        sems.get(one),
        label=label,
        values=ordered,
        sems=dict(sems),
        curve=tuple(curve),
    )


# ------------------------------------------------------------------ Ax


def to_ax(trials: Iterable[Trial], space: SearchSpace, *, name: str | None = None) -> Client:
    """A new Ax client with the trials of one site.

    Its search space, objectives, bounds of outcomes and constraints are those of the space, and
    `Client.get_next_trials` goes on by Ax's own strategy. Ax itself decides whether an ordered
    choice of numbers is on a log scale.

    Args:
        trials: The trials; those that are open become running ones.
        space: Their search space.
        name: The name of the experiment.
    """
    _check_extra("ax", "ax")
    from ax.api.client import Client

    _refuse_for_ax(space)
    ready = [_allowed_by_ax(trial, space) for trial in trials]  # before there is a client
    client = Client()
    client.configure_experiment(
        parameters=[_config(p) for p in space.parameters],
        parameter_constraints=[str(one) for one in space.constraints],
        name=name,
    )
    objectives = [space.metrics[place] for place in space.objectives]
    client.configure_optimization(
        objective=", ".join(f"{'-' * one.minimize}{one.name}" for one in objectives),
        outcome_constraints=_bounds(space),
    )
    client.configure_tracking_metrics([o.name for o in space.metrics if o.role == "tracking"])
    for trial in ready:
        index = client.attach_trial(dict(trial.parameters))
        if trial.status == "failed":
            client.mark_trial_failed(index, trial.reason or None)
        elif trial.values:
            client.complete_trial(index, {k: _with_sem(trial, k) for k in trial.values})
    return client


def _allowed_by_ax(trial: Trial, space: SearchSpace) -> Trial:
    """A trial, unless it is outside of the space or its constraints, where Ax has no trials."""
    _point(trial, space)
    broken = space.violated(trial.parameters)
    if broken is not None:
        raise InputDataError(
            f"Trial {_name(trial)} violates {broken}, and Ax takes no such trial: leave it out."
        )
    return trial


def _with_sem(trial: Trial, metric: str) -> float | tuple[float, float]:
    value, sem = trial.values[metric], trial.sems.get(metric, math.nan)
    return value if math.isnan(sem) else (value, sem)


def _refuse_for_ax(space: SearchSpace) -> None:
    if space.fidelity is not None:
        raise InputDataError(
            f"The space has the fidelity {space.fidelity.name!r}, and Ax's client takes none: give "
            "space.shared, and the trials at the target."
        )
    if space.feasible is not None:
        raise InputDataError(
            "The space has a function feasible, which an Ax experiment has no form for: give "
            "replace(space, feasible=None), and look at what Ax proposes."
        )


def _config(parameter: Parameter) -> Any:
    from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig

    if not parameter.values:
        number: type[int] | type[float] = int if parameter.kind == "integer" else float
        return RangeParameterConfig(
            name=parameter.name,
            bounds=(number(parameter.lower), number(parameter.upper)),
            parameter_type="int" if number is int else "float",
            scaling=parameter.scale,
        )
    kinds: dict[type, Any] = {bool: "bool", int: "int", float: "float", str: "str"}
    found = {kinds[type(value)] for value in parameter.values}
    kind = found.pop() if len(found) == 1 else "float"
    values: list[Any] = list(parameter.values)
    return ChoiceParameterConfig(
        name=parameter.name,
        values=[float(value) for value in values] if kind == "float" else values,
        parameter_type=kind,
        is_ordered=parameter.kind == "ordinal",
    )


def _bounds(space: SearchSpace) -> list[str]:
    """Bounds of outcomes, and the worst values of several objectives, as Ax reads them."""
    found = []
    for one in space.metrics:
        lower, upper = one.lower, one.upper
        if one.reference is not None:
            lower, upper = (None, one.reference) if one.minimize else (one.reference, None)
        found += [] if lower is None else [f"{one.name} >= {lower!r}"]
        found += [] if upper is None else [f"{one.name} <= {upper!r}"]
    return found


def from_ax(client: Client, space: SearchSpace) -> list[Trial]:
    """The trials of an Ax experiment, one for each arm.

    Their labels are its name, if it has one, and that of the arm.

    Args:
        client: A client with an experiment and its objectives.
        space: The search space that they are meant for, as in `from_optuna`. Its outcomes are the
            metrics of the same names; a single one is the objective of the experiment.
    """
    from botorch_fed.ax_adapter import arms_of

    _refuse_for_ax(space)
    experiment = client._experiment  # Ax has no public name for it
    name = experiment.name if experiment.has_name else ""
    what = f"The Ax experiment {name!r}" if name else "The Ax experiment"
    metrics = _metrics_of(experiment, space, what)
    trials = []
    for number, arm in enumerate(arms_of(experiment, tuple(metrics.values()))):
        label = f"{name}/{arm.key}" if name else ""
        if arm.status == "open":
            trials.append(Trial(number, arm.parameters, label=label))
            continue
        done = arm.status == "done"
        values = {name: arm.values[metric] for name, metric in metrics.items() if done}
        sems = {name: arm.sems[metric] for name, metric in metrics.items()}
        known = {name: sem for name, sem in sems.items() if not math.isnan(sem)}
        reason = experiment.trials[int(arm.key.split("/")[0])].status_reason or "failed"
        trials.append(_answered(number, arm.parameters, values, known, reason, label, space))
    return trials


def _metrics_of(experiment: Any, space: SearchSpace, what: str) -> dict[str, str]:
    """The metric of each outcome by its name; `InputDataError` if one is missing or turned."""
    config = experiment.optimization_config
    if config is None:
        raise InputDataError(f"{what} has no objective: call client.configure_optimization.")
    weights = dict(config.objective.metric_weights)
    names = {one.name: one.name for one in space.metrics}
    if not space.outcomes:
        if len(weights) != 1:
            raise InputDataError(
                f"{what} has the objectives {sorted(weights)}, the space one outcome: name them in "
                "SearchSpace(outcomes=)."
            )
        names = dict.fromkeys(names, next(iter(weights)))
    missing = sorted({*names.values()} - {metric.name for metric in experiment.metrics.values()})
    if missing:
        raise InputDataError(
            f"{what} has no metric {missing[0]!r}: its metrics are "
            f"{sorted(metric.name for metric in experiment.metrics.values())}."
        )
    for place in space.objectives:
        one = space.metrics[place]
        weight = weights.get(names[one.name])
        if weight is not None and one.minimize != (weight < 0):
            raise _opposite(what, one)
    return names


# ------------------------------------------------------------------ files


def save_trials(
    result: RunResult, to: str, out: str | Path, sites: Sequence[str] = ()
) -> dict[str, int]:
    """Write the answered trials of a result where another program reads them.

    Args:
        result: Of a run or of a site.
        to: ``"csv"``, one table as `RunResult.to_dataframe` has it; ``"optuna"``, a new study for
            each site, of the site's name; ``"ax"``, a client for each site as a JSON file. Ax has
            no trials that violate constraints of points: they are left out.
        out: The file of the table; the storage of the studies, a URL or a file of SQLite; or the
            folder of the clients.
        sites: The sites; default all.

    Returns: The number of trials of each site that were written.
    """
    trials = {site: result.trials(site) for site in sites or result.names}
    if result.part == "hub":
        raise InputDataError(
            "The hub's side of a run has no points and outcomes: export at the sites."
        )
    if not any(trials.values()):
        raise InputDataError("There is no answered trial yet: export later.")
    if to == "csv":
        table = result.to_dataframe()
        table = table[table["site"].isin(list(trials))]
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(out, index=False)
    elif to == "optuna":
        _save_optuna(trials, result.space, _storage(out))
    elif to == "ax":
        trials = {
            site: [one for one in found if result.space.violated(one.parameters) is None]
            for site, found in trials.items()
        }
        clients = {site: to_ax(found, result.space, name=site) for site, found in trials.items()}
        Path(out).mkdir(parents=True, exist_ok=True)
        for site, client in clients.items():
            client.save_to_json_file(str(Path(out) / f"{quote(site, safe=' ')}.json"))
    else:
        raise InputDataError(f"Expected to='csv', 'optuna' or 'ax', got {to!r}.")
    return {site: len(found) for site, found in trials.items()}


def _save_optuna(trials: Mapping[str, list[Trial]], space: SearchSpace, storage: str) -> None:
    _check_extra("optuna", "optuna")
    import optuna

    for trial in (one for found in trials.values() for one in found):
        _to_optuna(trial, space)  # refused before anything is written
    with _opened("Optuna", storage):
        there = optuna.get_all_study_names(storage)
    twice = sorted({*trials} & {*there})
    if twice:
        raise InputDataError(
            f"{storage} has a study {twice[0]!r} already: name another storage, or delete the "
            "study there."
        )
    for site, found in trials.items():
        to_optuna(found, space, study_name=site, storage=storage)


def load_trials(
    source: str | Path, kind: str, space: SearchSpace, study: str | None = None
) -> list[Trial]:
    """The trials of a finished or running study of another program, each with a label.

    Args:
        source: Of Optuna the storage, a URL or a file of SQLite; of Ax the JSON file of a client.
        kind: ``"optuna"`` or ``"ax"``.
        space: The search space that they are meant for.
        study: The name of Optuna's study, where the storage has several.
    """
    if "://" not in str(source) and not Path(source).is_file():
        raise InputDataError(f"There is no file {source}.")
    if kind == "ax":
        _check_extra("ax", "ax")
        from ax.api.client import Client

        with _opened("Ax", source):
            client = Client.load_from_json_file(str(source))
        found = from_ax(client, space)
        return [replace(t, label=t.label or f"{Path(source).stem}/{t.id}") for t in found]
    if kind != "optuna":
        raise InputDataError(f"Expected kind='optuna' or 'ax', got {kind!r}.")
    _check_extra("optuna", "optuna")
    import optuna

    storage = _storage(source)
    with _opened("Optuna", storage):
        names = optuna.get_all_study_names(storage)
    if study is None and len(names) == 1:
        study = names[0]
    if study not in names:
        got = "none" if study is None else repr(study)
        raise InputDataError(f"Expected the name of a study in {storage}, {names}, got {got}.")
    return from_optuna(optuna.load_study(study_name=study, storage=storage), space)


def _storage(place: str | Path) -> str:
    """Optuna's name of a storage: a URL as it is, or that of a file of SQLite."""
    return str(place) if "://" in str(place) else f"sqlite:///{place}"


@contextmanager
def _opened(program: str, source: str | Path) -> Iterator[None]:
    """Errors of another program's reader, of whatever class, name what could not be read."""
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputDataError(f"{program} cannot open {source} ({why}).") from error


__all__ = [
    "as_data",
    "from_ax",
    "from_optuna",
    "load_trials",
    "save_trials",
    "to_ax",
    "to_optuna",
]
