"""Settings for all tests."""

from __future__ import annotations

import os

# Small tensors: with one thread per worker, workers that run side by side do not wait for each other's threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
