"""Factors of running sums that the package does not ship, to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from botorch_fed.privacy.tree import PrefixSum, _Root


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ExactRoot(PrefixSum):
    """The square root whose noise is all kept, whatever the horizon: four buffers approach it."""

    @cached_property
    def _factor(self) -> _Root:
        return _Root(self.horizon)
