from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.transfer_builders import RECIPES, Halves
from benchmarks.transfer_tasks import candidates

TABLES = Path(__file__).parent / "outcome_tables"  # of sizes; losses are in `transfer_tables`
PARTS = Path(__file__).parent / ".cache" / "outcome_tables"  # of unfinished tables

# ------------------------------------------------------------------ sizes of models


def boosting_nodes(half: Halves, **settings: Any) -> int:
    """Nodes of all trees of a boosted ensemble."""
    from sklearn.ensemble import GradientBoostingClassifier

    model = GradientBoostingClassifier(random_state=0, **settings).fit(half[0], half[1])
    return sum(tree.tree_.node_count for tree in model.estimators_.ravel())


def forest_nodes(half: Halves, **settings: Any) -> int:
    """Nodes of 30 extremely randomised trees."""
    from sklearn.ensemble import ExtraTreesClassifier

    model = ExtraTreesClassifier(30, bootstrap=True, random_state=0, **settings)
    return sum(tree.tree_.node_count for tree in model.fit(half[0], half[1]).estimators_)


SIZES: Mapping[str, Callable[..., int]] = {
    "boosting-credit": boosting_nodes,
    "trees-support2": forest_nodes,
}


def build(name: str) -> None:
    """Tabulate the logarithm of the number of nodes; finished sites are not computed again."""
    target = TABLES / f"{name}.npz"
    if target.exists():
        print(f"{name}: there already")
        return
    recipe = RECIPES[name]
    settings = recipe.space.from_unit(candidates(recipe))
    rows: list[NDArray[np.float32]] = []
    for site, scorer in enumerate(recipe.scorers()):
        part = PARTS / recipe.space.fingerprint[:12] / f"{name}-{site}.npy"
        if not part.exists():
            began = time.process_time()
            (half,) = scorer.args[1]  # type: ignore[attr-defined] # a partial of `averaged`
            counts = [SIZES[name](half, **point) for point in settings]
            part.parent.mkdir(parents=True, exist_ok=True)
            np.save(part, np.log10(counts).astype(np.float32))
            print(f"{name}: site {site}, {time.process_time() - began:.0f} s", flush=True)
        rows.append(np.load(part))
    TABLES.mkdir(exist_ok=True)
    draft = TABLES / f".{name}.draft.npz"
    np.savez_compressed(
        draft, log_nodes=np.stack(rows), fingerprint=np.array(recipe.space.fingerprint)
    )
    draft.replace(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("names", nargs="*")
    for name in parser.parse_args().names:
        build(name)
