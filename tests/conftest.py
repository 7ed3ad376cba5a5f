"""Settings for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

# Small tensors: with one thread per worker, workers that run side by side do not wait for each other's threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what it runs in the background with Ctrl-C ignored, and tests of interrupts would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """torch.compile has compiled nothing before the test, and nothing stays of it."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
