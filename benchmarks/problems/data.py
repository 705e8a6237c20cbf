"""Data sets that are not bundled: a folder given by hand or by an environment variable."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

VARIABLE = "BOTORCH_FED_DATA"


def load_arrays(
    file: str, names: tuple[str, ...], *, folder: str | Path | None, origin: str
) -> dict[str, NDArray[np.generic]]:
    """Arrays of an `.npz` file, read without pickle.

    Args:
        file: The file's name, e.g. ``"landmine.npz"``.
        names: The arrays that it must hold.
        folder: Where it lies; default the folder named by ``BOTORCH_FED_DATA``.
        origin: Where the data come from, for the error message.

    Raises:
        FileNotFoundError: There is no such file; the message says where to get it.
        ValueError: The file lacks an array.
    """
    place = folder if folder is not None else os.environ.get(VARIABLE)
    hint = (
        f"{file} is not bundled. It holds the arrays {', '.join(names)}, made from {origin}. Pass "
        f"its folder as `data=`, or set {VARIABLE}."
    )
    if place is None:
        raise FileNotFoundError(hint)
    path = Path(place) / file
    if not path.is_file():
        raise FileNotFoundError(f"There is no {path}. {hint}")
    with np.load(path, allow_pickle=False) as archive:
        missing = sorted(set(names) - set(archive.files))
        if missing:
            raise ValueError(f"{path} lacks the arrays {missing}. {hint}")
        return {name: archive[name] for name in names}
