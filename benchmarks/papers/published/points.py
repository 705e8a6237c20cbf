"""Operating points of the papers, and whether runs sit on them: a row is "paper" only if it does.

A `Published` point names the rows that claim to be a paper's, and what the paper prints there. Its
`misses` compares that with what stored lines have; `called` is the label that a row may have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.papers.published import printed

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Quantity:
    """What a paper prints of an operating point.

    Attributes:
        name: What it is.
        printed: Its value in the paper.
        low: The smallest value of ours that counts as the same.
        high: The largest.
        of: What a stored line has; the mean over lines is compared.
    """

    name: str
    printed: float
    low: float
    high: float
    of: Callable[[Line], float]

    def measured(self, lines: Sequence[Line]) -> float:
        """The mean over lines."""
        return float(np.mean([self.of(line) for line in lines]))

    def met(self, lines: Sequence[Line]) -> bool:
        """Whether it is the printed one."""
        return self.low <= self.measured(lines) <= self.high


@dataclass(frozen=True)
class Published:
    """An operating point.

    Attributes:
        paper: Whose.
        where: Figure or table.
        entry: The file of results, from `benchmarks/papers/results`, without its ending.
        row: The row that claims to be the paper's.
        quantities: What the paper prints there.
        otherwise: What the row is called if it is elsewhere.
        departs: In what the row is known to differ, whatever its figures are.
    """

    paper: str
    where: str
    entry: str
    row: str
    quantities: tuple[Quantity, ...]
    otherwise: str
    departs: str = ""

    def misses(self, lines: Sequence[Line]) -> list[str]:
        """In what lines are elsewhere: printed quantities, all of them without lines."""
        known = [self.departs] if self.departs else []
        return known + [q.name for q in self.quantities if not lines or not q.met(lines)]

    def called(self, lines: Sequence[Line]) -> str:
        """The label of the row."""
        return self.otherwise if self.misses(lines) else "paper"


def _clipped(value: float) -> Quantity:
    """Shares up to three times the printed one count as the same: they depend on the starts."""
    return Quantity("share clipped", value, value / 3, 3 * value, lambda line: line["clipped"])


def _epsilon(value: float) -> Quantity:
    half = 0.006  # two printed digits
    return Quantity("ε", value, value - half, value + half, lambda line: line["moments_epsilon"])


def _auc_error(value: float) -> Quantity:
    """Within two of the recorded standard errors of .005."""
    return Quantity(
        "1 − AUC after 60", value, value - 0.01, value + 0.01, lambda line: 1 - line["best"]["60"]
    )


def _best(value: float, smallest: float) -> Quantity:
    """Distances to the function's smallest value within a sixth count as the same."""
    reach = (value - smallest) / 6
    return Quantity(
        "best value", value, value - reach, value + reach, lambda line: line["best"][-1]
    )


_DP, _FTS = "DP-FTS-DE", "FTS"
_WHOLE = "starts in the whole cube"
_AUC, _WITHIN = printed.FTS_LANDMINE[100], 2 * printed.FTS_LANDMINE_ERROR
POINTS: tuple[Published, ...] = (
    Published(
        _FTS,
        "Fig. 2, landmine",
        "fts/landmine",
        "fts-paper",
        (
            Quantity(
                "AUC after 50",
                _AUC,
                _AUC - _WITHIN,
                _AUC + _WITHIN,
                lambda line: line["best"]["50"],
            ),
        ),
        "the paper's search, another objective",
    ),
    *(
        Published(
            _DP,
            "Fig. 2a",
            f"dp_fts_de/{entry}",
            row,
            (_epsilon(printed.DP_EPSILON[0.25, 1.0]), _clipped(printed.DP_CLIPPED[row])),
            otherwise,
        )
        for entry, otherwise in (
            ("synthetic-raw", "the paper's search, more clipped"),
            ("synthetic", "the paper's search, our scale"),
        )
        for row in ("dp-fts", "dp-fts-de-2")
    ),
    *(
        Published(
            _DP,
            "Fig. 3, landmine",
            f"dp_fts_de/{entry}",
            row,
            (
                _epsilon(printed.DP_EPSILON_LANDMINE),
                _clipped(printed.DP_CLIPPED_REAL["dp-fts-de"]),
                _auc_error(printed.DP_LANDMINE[0.35, 1.0]),
            ),
            "the paper's search, our starts",
            departs,
        )
        for entry, row, departs in (
            ("landmine-table", "paper-q.35-z1-own-region", ""),
            ("landmine-table", "paper-q.35-z1", _WHOLE),
            ("landmine", "paper", _WHOLE),
        )
    ),
    *(
        Published(
            _DP,
            f"Fig. 3, {name.removesuffix('-paper')}",
            f"dp_fts_de/{name}",
            row,
            (_clipped(printed.DP_CLIPPED_REAL["dp-fts-de"]),),
            "the paper's search, our starts",
            departs,
        )
        for name, row, departs in (
            ("har-paper", "paper-q.35-z1-own-region", ""),
            ("digits-paper", "paper-q.35-z1-own-region", "digits for EMNIST"),
            ("har", "paper-q.35-z1-own-region", "3 starts"),
            ("har", "paper-q.35-z1", _WHOLE),
            ("digits", "paper-q.35-z1", _WHOLE),
        )
    ),
    Published(
        "private bandits",
        "Table 1, Camelback",
        "private_ucb/table1",
        "camelback-none",
        (Quantity("regret without privacy", 519, 440, 600, lambda line: line["regret"]),),
        "our environment",
    ),
    *(
        Published(
            "FBO-FedGP",
            f"Table 1, F{function}",
            f"fed_gp/{entry}-F{function:02d}",
            row,
            (_best(printed.fedgp_table1()["FBO-FedGP"][f"F{function:02d}"], smallest),),
            otherwise,
            departs,
        )
        for entry, row, otherwise, departs in (
            ("cec2005", "sequential", "the published algorithms, our settings", ""),
            ("published", "exact-local", "the published order and support", "exact local models"),
            ("cec2005", "faithful", "the published search, our settings and rounds", "all at once"),
        )
        for function, smallest in ((1, -450.0), (2, -450.0), (9, -330.0))
    ),
)


def label(entry: str, row: str, lines: Sequence[Line]) -> str:
    """What a row of a summary is called: its name, and where it claims to be a paper's, whether."""
    found = [point for point in POINTS if (point.entry, point.row) == (entry, row)]
    return f"{row} ({found[0].called(lines)})" if found else row
