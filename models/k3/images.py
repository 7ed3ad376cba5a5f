"""Image tokens: features from a vision tower take the places of placeholder tokens (Kimi K3 report, 2.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from moec.compiler.errors import BatchError
from moec.compiler.fake import is_fake


def place_images(embeddings: Tensor, features: Tensor, input_ids: Tensor, image_token: int) -> Tensor:
    """Replace the embeddings of placeholders by features, in reading order.

    embeddings [B, T, D]; features [n, D], one row per placeholder of the whole batch; input_ids int64 [B, T].
    Raises BatchError when the numbers differ (checked in eager mode; a compiled step checks its batch itself).
    """
    placeholder = input_ids == image_token
    if not torch.compiler.is_compiling() and not is_fake(input_ids):
        _check_count(placeholder, features)
    if features.shape[0] == 0:
        return embeddings
    order = placeholder.flatten().cumsum(0).view_as(input_ids) - 1
    placed = features.to(embeddings.dtype)[order.clamp(0, features.shape[0] - 1)]
    return torch.where(placeholder.unsqueeze(-1), placed, embeddings)


def _check_count(placeholder: Tensor, features: Tensor) -> None:
    wanted = int(placeholder.sum())
    if wanted != features.shape[0]:
        raise BatchError(
            f"{features.shape[0]} image features for {wanted} placeholder tokens",
            where="image_features",
            why="each placeholder in input_ids takes one row of image_features",
            hint="expand the placeholder of an image to as many tokens as it has features",
        )
