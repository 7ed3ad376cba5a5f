"""The losses over a vocabulary for use in any PyTorch code, with the kernels of a GPU registered."""

from __future__ import annotations

import moec.codegen.triton  # noqa: F401  registers the kernels
from moec.compiler.dialect import linear_cross_entropy, token_log_probs

__all__ = ["linear_cross_entropy", "token_log_probs"]
