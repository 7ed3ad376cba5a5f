"""Which dtype a computation and a parameter use.

Norms, gates, softmaxes and routing run in float32 whatever the dtype of the matrices; a float64 model runs in float64
throughout, so that it can serve as its own reference.
"""

from __future__ import annotations

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """x in the dtype that sensitive computations use: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def precise_dtype() -> torch.dtype:
    """Dtype of parameters that stay at float32 in a half-precision model: A_log, dt_bias, convolutions, head norms."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)
