"""torch's default dtype for a while: that of new tensors for which none is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within the context tensors are made in `dtype`, a floating-point one; the dtype of before is back after it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
