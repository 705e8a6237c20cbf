"""One meaning of `budget` for all studies: evaluations of each site, the initial ones included."""

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

    Protocols count rounds; each study derives them from its budget in `rounds_for`. The names of
    the sites are needed where the number of initial points depends on the data of each site:
    without names, no site has any.
    """

    budget: int
    active: tuple[AgentId, ...] | None = None  # who queries; all

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
        """The budget with which a study of these settings has so many rounds.

        Args:
            rounds: The number of rounds after the initial points.
            names: The sites; empty if they are not known.
            settings: Keywords of the study.
        """
        study = super().__new__(cls)
        for item in fields(cls):  # type: ignore[arg-type]
            made: Callable[[], Any] | Any = item.default_factory
            if made is not MISSING:
                settings = {item.name: made(), **settings}
        vars(study).update(settings)
        return study._budget_of(rounds, names)

    def _budget_of(self, rounds: int, names: tuple[AgentId, ...]) -> int | str:
        return rounds + self.initial_for(names)

    def initial_for(self, names: tuple[AgentId, ...]) -> int:
        """How many evaluations a site makes before the first round, at most."""
        return 0

    def rounds_for(self, names: tuple[AgentId, ...]) -> int:
        """How many rounds follow the initial points: as many as the budget has left."""
        initial = self.initial_for(names)
        if initial > self.budget:
            raise InputDataError(
                f"budget = {self.budget} has no room for {initial} initial points: write "
                f"budget = {initial + 1} or more, or fewer initial points (num_initial)."
            )
        return self.budget - initial

    def evaluated(self, names: tuple[AgentId, ...], state: Any) -> int:
        """How many evaluations a site has been asked for when the server is in a state, at most."""
        return self.initial_for(names) + state.t - 1 if state.t > 0 else 0

    def evaluations_for(self, names: tuple[AgentId, ...]) -> int:
        """How many evaluations all sites make together, at most."""
        return self.budget * len(names if self.active is None else self.active)

    def _check_budget(self) -> None:
        if isinstance(self.budget, bool) or not isinstance(self.budget, int) or self.budget < 1:
            raise InputDataError(
                f"Expected budget >= 1, the number of evaluations of each site, got {self.budget}."
            )


def no_round(budget: int, initial: int, alone: str) -> InputDataError:
    """Why a study that never gets beyond its initial points is refused.

    Args:
        budget: Its budget.
        initial: How many initial points it has.
        alone: What to write for sites that search alone on purpose.
    """
    return InputDataError(
        f"budget = {budget} leaves no round after {initial} initial points, so that nothing would "
        f"ever be sent: write budget = {initial + 1} or more. Sites that search alone on purpose "
        f"have {alone}."
    )


def note_one_site(names: tuple[AgentId, ...]) -> None:
    """Log a warning where a site has nobody to exchange messages with."""
    if len(names) == 1:
        logger.warning("the study has one site, %r: nobody reads its messages", names[0])


def renamed(budget: int | str) -> str:
    """What to write in the place of the former `rounds`."""
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
    """How many of its initial points the site with the fewest observations lacks.

    Args:
        starts: How many initial points a site without data evaluates.
        names: The sites; empty if they are not known.
        active: Who queries; None for all.
        counts: How many observations each site has already.
    """
    querying = names if active is None else active
    least = min((counts.get(name, 0) for name in querying), default=0)
    return max(0, starts - least)
