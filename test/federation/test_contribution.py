"""Which messages count as contributions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from botorch_fed.aggregation import sum_messages
from botorch_fed.aggregation.stream import Play
from botorch_fed.federation.contribution import carries
from botorch_fed.federation.terms import Contribution, Order

SOME, NONE = torch.ones(2).double(), torch.zeros(0).double()


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Contribution(SOME), True),
        (Contribution(None), False),
        (sum_messages.KeyMessage(b"key"), True),
        (sum_messages.DecryptionShare(None), False),
        (sum_messages.Upload(b"sum", True), True),
        (sum_messages.Upload(None, True), False),
        (sum_messages.SumOrder(3, "next", True, "sum", 0, ("a", "b")), False),
        (sum_messages.Keys(0, ({"a": b"part"},)), True),
        (Order(1, "next", True), False),
        (Play(1, "next", True, SOME.unsqueeze(0)), True),
        (Contribution(NONE), False),
        ((1, "two", True, None), False),
        ([0.0], True),
    ],
)
def test_numbers_and_sealed_bytes_are_messages(message: Any, expected: bool) -> None:
    assert carries(message) is expected
