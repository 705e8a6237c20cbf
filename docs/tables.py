"""Writes `who_sees_what.rst` from `sees` and `price` of the studies: `python docs/tables.py`."""

from __future__ import annotations

import sys
import textwrap
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from botorch_fed.federation.disclosure import FRAMES, Price, Row, Sees  # noqa: E402
from botorch_fed.privacy import DistributedGaussianSum, GaussianSum, SignalWarning  # noqa: E402
from botorch_fed.search.region import RegionSearch  # noqa: E402
from botorch_fed.search.support import SupportSearch  # noqa: E402
from botorch_fed.search.thompson import Strategy  # noqa: E402
from botorch_fed.space import Parameter, SearchSpace  # noqa: E402
from botorch_fed.studies import DPFTSDE, FTS, FedGP, PrivateUCB  # noqa: E402

PAGE = Path(__file__).parent / "who_sees_what.rst"
AGENTS, BUDGET = 40, 12
NAMES = tuple(f"site{n}" for n in range(AGENTS))
SPACE = SearchSpace((Parameter.real("x", 0.0, 1.0), Parameter.real("y", 0.0, 1.0)))
SUPPORT = SupportSearch(support_size=6)
SHARED = DPFTSDE(budget=BUDGET, epsilon=2.0, delta=1e-3, trust="distributed")


def _distributed(dim: int, num_agents: int) -> DistributedGaussianSum:
    return DistributedGaussianSum(
        dim=dim, num_agents=num_agents, clip_norm=20.0, noise_multiplier=8.0
    )


def _central(dim: int, num_agents: int) -> GaussianSum:
    return GaussianSum(
        dim=dim, num_agents=num_agents, clip_norm=20.0, noise_multiplier=8.0, weight=1.0
    )


STUDIES: dict[str, Any] = {
    "FTS(budget=12)": FTS(budget=BUDGET),
    'FTS(budget=12, message="summary", strategy=Strategy(transfer="rgpe"), every=1)': FTS(
        budget=BUDGET, message="summary", strategy=Strategy(transfer="rgpe"), every=1
    ),
    "DPFTSDE(budget=12, epsilon=2.0, delta=1e-3)": DPFTSDE(budget=BUDGET, epsilon=2.0, delta=1e-3),
    'DPFTSDE(budget=12, epsilon=2.0, delta=1e-3, trust="distributed")': SHARED,
    'DPFTSDE(budget=12, epsilon=2.0, delta=1e-3, trust="distributed", channel="ckks")': replace(
        SHARED, channel="ckks"
    ),
    'DPFTSDE(budget=12, epsilon=2.0, delta=1e-3, trust="distributed", channel="plain")': replace(
        SHARED, channel="plain"
    ),
    'DPFTSDE(budget=12, noise_kind="none")': DPFTSDE(budget=BUDGET, noise_kind="none"),
    "FedGP(budget=12)": FedGP(budget=BUDGET),
    'FedGP(budget=12, channel="ckks")': FedGP(budget=BUDGET, channel="ckks"),
    'FedGP(budget=12, channel="plain")': FedGP(budget=BUDGET, channel="plain"),
    'FedGP(budget=12, search=RegionSearch(), channel="plain")': FedGP(
        budget=BUDGET, search=RegionSearch(), channel="plain"
    ),
    'FedGP(budget=12, search=…, mechanism=distributed, noise_at="agent")': FedGP(
        budget=BUDGET, search=SUPPORT, mechanism=_distributed, noise_at="agent"
    ),
    'FedGP(budget=12, search=…, mechanism=distributed, noise_at="agent", channel="plain")': FedGP(
        budget=BUDGET, search=SUPPORT, mechanism=_distributed, noise_at="agent", channel="plain"
    ),
    'FedGP(budget=12, search=…, mechanism=central, noise_at="server", channel="plain")': FedGP(
        budget=BUDGET, search=SUPPORT, mechanism=_central, noise_at="server", channel="plain"
    ),
    **{
        f'PrivateUCB(budget=12, epsilon=1.0, trust="{trust}")': PrivateUCB(
            budget=BUDGET, epsilon=1.0, trust=trust
        )
        for trust in ("joint", "local", "public")
    },
    'PrivateUCB(budget=12, trust="none")': PrivateUCB(budget=BUDGET, trust="none"),
}
INTRODUCTION = f"""Who sees what
=============

``python docs/tables.py`` writes this page from the studies: ``study.sees(space, names)`` lists the
messages and their readers, ``study.price(space, names)`` is the privacy cost of a run.
``botorch-fed run study.toml --dry-run`` prints both for a study file before any evaluation, and
every result has ``result.sees`` and ``result.price``. The numbers are for {AGENTS} sites with two
parameters and {BUDGET} evaluations each. :doc:`threat_model` has the assumptions about the parties.

Frames around the messages of every protocol:

"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION + _table(FRAMES)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SignalWarning)
        for title, study in STUDIES.items():
            sees, price = study.sees(SPACE, NAMES), study.price(SPACE, NAMES)
            parts.append(_section(title, sees, price))
    return "\n".join(parts)


def _section(title: str, sees: Sees, price: Price | None) -> str:
    head = f"``{title}``"
    words = [sentence for sentence in (sees.stays, sees.trust, *sees.limits) if sentence]
    cost = "There is no privacy guarantee." if price is None else f"Price: {price}."
    text = textwrap.fill(" ".join([*words, cost]), 100)
    return f"{head}\n{'-' * len(head)}\n\n{text}\n\n{_table(sees.rows)}"


def _table(rows: tuple[Row, ...]) -> str:
    lines = [
        ".. list-table::",
        "   :header-rows: 1",
        "   :widths: 12 10 44 22 12",
        "",
        *_cells("message", "from", "content", "readers", "reveals"),
    ]
    for row in rows:
        lines += _cells(row.message, row.sender, row.content, row.who, row.reveals)
    return "\n".join(lines) + "\n"


def _cells(*values: str) -> list[str]:
    return [f"   {'*' if i == 0 else ' '} - {value}" for i, value in enumerate(values)]


if __name__ == "__main__":
    PAGE.write_text(page())
