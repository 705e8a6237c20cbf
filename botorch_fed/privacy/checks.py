"""Checks and words of settings that all mechanisms and ledgers share."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
from botorch.exceptions.errors import InputDataError


def set_number(value: Any, name: str) -> None:
    """Make a field of a frozen dataclass a finite float, lest another precision be computed in."""
    number = getattr(value, name)
    if isinstance(number, bool) or not isinstance(number, (int, float, np.floating)):
        raise InputDataError(f"{name} must be a number, got {type(number).__name__}.")
    if not math.isfinite(number):
        raise InputDataError(f"{name} must be finite, got {number}.")
    object.__setattr__(value, name, float(number))


def check_count(what: str, value: Any, least: int = 1, most: float = math.inf) -> None:
    """Raise unless it is an integer in a range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        span = f"from {least} on" if most == math.inf else f"from {least} to {most}"
        raise InputDataError(f"{what} must be an int {span}, got {value!r}.")


def check_between(what: str, value: float, low: float, high: float) -> None:
    """Raise unless it is a number in a closed range."""
    if not low <= value <= high:  # refuses NaN as well
        least, most = (
            f"{x:g}".replace("e-0", "e-").replace("+", "").replace("e0", "e") for x in (low, high)
        )
        raise InputDataError(f"{what} must lie between {least} and {most}, got {value}.")


def check_choice(what: str, value: Any, choices: Any) -> None:
    """Raise unless it is one of the values of a Literal."""
    if value not in get_args(choices):
        raise InputDataError(f"{what} must be one of {get_args(choices)}, got {value!r}.")


def check_path(path: Any) -> None:
    """Raise unless it can address random numbers."""
    if not all(isinstance(item, (int, str)) for item in path):
        raise InputDataError(f"A path is a tuple of int and str, got {path!r}.")


def described(value: Any, *names: str) -> str:
    """The name of its class and some of its settings, numbers in short."""
    settings = {name: getattr(value, name) for name in names}
    words = [
        f"{name}={x:g}" if isinstance(x, float) else f"{name}={x!r}" for name, x in settings.items()
    ]
    return f"{type(value).__name__}({', '.join(words)})"
