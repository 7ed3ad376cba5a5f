"""Help for tracing with a symbolic length, where torch's shape solver cannot prove what is always true."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class TrustTopK(TorchFunctionMode):
    """A symbolic number of choices is not compared with the size: the solver cannot prove min(k, n) <= n."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        k = next((value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.SymInt)), None)
        if func not in (torch.topk, Tensor.topk) or k is None:
            return func(*args, **(kwargs or {}))
        with k.node.shape_env.suppress_guards():
            return func(*args, **(kwargs or {}))
