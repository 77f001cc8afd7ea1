"""What all tests of the torch engine share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Random tensors of a test do not depend on the tests before it; a GPU's do, because a thread may capture a graph."""
    torch.default_generator.manual_seed(20)
