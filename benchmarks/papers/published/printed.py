"""What the four papers print, as far as it is compared: their numbers, not ours.

Recorded curves are those of the authors' published code and logs.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

# FTS: best validation AUC on landmine after 50 queries, 6 fields x 5 runs, pooled error .008.
FTS_LANDMINE_TS = 0.821
FTS_LANDMINE = {50: 0.819, 100: 0.827, 150: 0.826, 200: 0.825}  # by length of a message
FTS_LANDMINE_RGPE = (0.80, 0.82)
FTS_LANDMINE_ERROR = 0.008

# DP-FTS-DE: 1 - AUC on landmine after 60 queries, 29 agents.
DP_LANDMINE = {
    "ts": 0.2375,
    "fts": 0.2346,
    "fts-de": 0.2314,
    (0.35, 1.0): 0.2319,
    (0.25, 1.0): 0.2349,
    (0.10, 1.0): 0.2376,
}
# epsilon by the moments accountant, synthetic: N = 200, T = 40, delta = N^-1.1.
DP_EPSILON = {
    (0.15, 1.0): 5.93,
    (0.25, 1.0): 9.91,
    (0.5, 1.0): 20.12,
    (0.25, 1.2): 7.39,
    (0.25, 1.5): 5.22,
}
DP_EPSILON_LANDMINE = 15.17  # q = .35, z = 1, T = 60
# Shares of clipped vectors: DP-FTS with S = 8 and DP-FTS-DE with S = 11 on synthetic functions,
# and both on real tasks with S = 22 for the latter.
DP_CLIPPED = {"dp-fts": 0.0031, "dp-fts-de-2": 0.0080}
DP_CLIPPED_REAL = {"dp-fts": 0.0102, "dp-fts-de": 0.0109}

# FBO-FedGP: average ranks of Table 5 over the twenty functions.
FEDGP_RANKS = {
    "EPPBO": 3.425,
    "FMTBO": 4.80,
    "FTS": 4.95,
    "FEPPBO": 3.925,
    "FCSBO": 2.75,
    "FBO-FedGP": 1.15,
}
FEDGP_TABLE1 = Path(__file__).with_name("fbo_fedgp_table1.csv")


@cache
def fedgp_table1() -> dict[str, dict[str, float]]:
    """Table 1 of FBO-FedGP, mean best values of ten runs: by column and function, ``F01`` …"""
    with FEDGP_TABLE1.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    columns = [name for name in rows[0] if name != "function"]
    return {
        column: {f"F{int(row['function'][1:]):02d}": float(row[column]) for row in rows}
        for column in columns
    }
