"""Settings of the whole suite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=30)
settings.load_profile("ci")
# Cholesky bits differ between one thread and two, and parallel test processes fight for cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed_of_global_generator() -> None:
    """BoTorch draws from PyTorch's global generator; its tests start from one state."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first: a worker that is left with one of them at the end works alone."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
