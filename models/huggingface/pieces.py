"""Where the tensors of a published checkpoint lie in the parameters of a transformers model.

transformers knows how to turn its parameters back into what is published (it stacks experts, for example). It does so
here with tensors that have no data, and each result tells by its offset which part of the parameter it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moec.compiler.errors import CheckpointError
from moec.compiler.pieces import Piece


def published_pieces(model: nn.Module) -> list[Piece]:
    """A piece for every tensor that `model.save_pretrained` would write.

    Raises CheckpointError for a parameter whose published form is not made of its elements in order.
    """
    from transformers.core_model_loading import revert_weight_conversion

    pieces = []
    for path, value in model.state_dict().items():
        empty = torch.empty(value.shape, dtype=value.dtype, device="meta")
        with torch.no_grad(), _Views():
            published: dict[str, Tensor] = revert_weight_conversion(model, {path: empty})  # type: ignore[arg-type]
        for name, part in published.items():
            whole = part if part is empty else part._base
            if whole is not empty or not part.is_contiguous():
                raise CheckpointError(
                    f"{path} is published as {name} in another order of its elements",
                    hint="load the checkpoint with from_pretrained, and save it under the model's own names",
                )
            pieces.append(Piece(name, tuple(part.shape), path, int(part.storage_offset())))
    return pieces


class _Views(TorchFunctionMode):
    """Lets parts stay views of the whole."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))
