"""The `budget` of all studies: evaluations of each site, the initial ones included."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, Self

from botorch.exceptions.errors import InputDataError

from botorch_fed.federation.base import AgentId

logger = logging.getLogger(__name__)


class Budgeted:
    """A study whose `budget` counts the evaluations of each site that queries.

    Protocols count rounds; each study derives them from its budget in `rounds_for`. Methods take
    the names of the sites because the number of initial points may depend on the data of each
    site. Without names, no site has data.
    """

    budget: int
    active: tuple[AgentId, ...] | None = None  # the sites that query; None for all

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Refuse the former keyword `rounds`, with the budget of the same number of rounds."""
        if "rounds" in settings:
            raise InputDataError(cls._renamed(settings))
        return super().__new__(cls)

    @classmethod
    def _renamed(cls, settings: dict[str, Any]) -> str:
        rounds = settings.pop("rounds")
        if isinstance(rounds, bool) or not isinstance(rounds, int):
            return renamed("the number of evaluations")
        return renamed(cls.budget_of(rounds, (), settings))

    @classmethod
    def budget_of(
        cls, rounds: int, names: tuple[AgentId, ...], settings: dict[str, Any]
    ) -> int | str:
        """The budget with which a study of these settings has `rounds` rounds.

        Args:
            rounds: The number of rounds after the initial points.
            names: The sites; empty if not given.
            settings: Keywords of the study.
        """
        study = super().__new__(cls)
        for item in fields(cls):  # type: ignore[arg-type]
            factory: Callable[[], Any] | Any = item.default_factory
            if factory is not MISSING:
                settings = {item.name: factory(), **settings}
        vars(study).update(settings)
        return study._budget_of(rounds, names)

    def _budget_of(self, rounds: int, names: tuple[AgentId, ...]) -> int | str:
        return rounds + self.initial_for(names)

    def initial_for(self, names: tuple[AgentId, ...]) -> int:
        """Upper bound on the evaluations of a site before the first round."""
        return 0

    def rounds_for(self, names: tuple[AgentId, ...]) -> int:
        """The number of rounds after the initial points: the rest of the budget."""
        initial = self.initial_for(names)
        if initial > self.budget:
            raise InputDataError(
                f"budget = {self.budget} has no room for {initial} initial points: write "
                f"budget = {initial + 1} or more, or fewer initial points (num_initial)."
            )
        return self.budget - initial

    def evaluated(self, names: tuple[AgentId, ...], state: Any) -> int:
        """Upper bound on the evaluations requested from a site up to a state of the server."""
        return self.initial_for(names) + state.t - 1 if state.t > 0 else 0

    def evaluations_for(self, names: tuple[AgentId, ...]) -> int:
        """Upper bound on the evaluations of all sites together."""
        return self.budget * len(names if self.active is None else self.active)

    def _check_budget(self) -> None:
        if isinstance(self.budget, bool) or not isinstance(self.budget, int) or self.budget < 1:
            raise InputDataError(
                f"Expected budget >= 1, the number of evaluations of each site, got {self.budget}."
            )


def no_round(budget: int, initial: int, alone: str) -> InputDataError:
    """The error of a study without a round after its initial points.

    Args:
        budget: The budget.
        initial: The number of initial points.
        alone: The setting with which sites search alone.
    """
    return InputDataError(
        f"budget = {budget} leaves no round after {initial} initial points, so that no message "
        f"would ever be sent: write budget = {initial + 1} or more. For sites that search alone "
        f"write {alone}."
    )


def note_one_site(names: tuple[AgentId, ...]) -> None:
    """Log a warning if a study has one site, which has no peer to exchange messages with."""
    if len(names) == 1:
        logger.warning("the study has one site, %r: nobody reads its messages", names[0])


def renamed(budget: int | str) -> str:
    """The replacement of the former setting `rounds`."""
    return (
        "rounds is now budget, evaluations per site with the initial ones: write "
        f"budget = {budget}."
    )


def missing_points(
    starts: int,
    names: tuple[AgentId, ...],
    active: tuple[AgentId, ...] | None,
    counts: dict[AgentId, int],
) -> int:
    """The number of initial points that the site with the fewest observations lacks.

    Args:
        starts: The number of initial points of a site without data.
        names: The sites; empty if not given.
        active: The sites that query; None for all.
        counts: The number of observations of each site.
    """
    querying = names if active is None else active
    least = min((counts.get(name, 0) for name in querying), default=0)
    return max(0, starts - least)
