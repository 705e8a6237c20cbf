"""The messages that count as contributions: those with numbers or encrypted bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def carries(message: Any) -> bool:
    """Whether a message holds numbers or encrypted bytes, beside settings and status.

    Args:
        message: A dataclass of a protocol, or a part of one.
    """
    if isinstance(message, Tensor):
        return message.numel() > 0
    if isinstance(message, bytes):
        return len(message) > 0
    if isinstance(message, Mapping):
        return any(map(carries, message.values()))
    if isinstance(message, tuple | list):
        return any(map(carries, message))
    if is_dataclass(message):
        return any(carries(getattr(message, item.name)) for item in fields(message))
    return isinstance(message, float)
