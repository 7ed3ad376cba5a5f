"""Make a model from a preset or a configuration."""

from __future__ import annotations

import torch

from moec.compiler.default_dtype import default_dtype
from moec.models.k3.config import K3Config
from moec.models.k3.model import K3Model
from moec.models.presets import preset


def build(model: str | K3Config, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> K3Model:
    """A freshly initialised model, from torch's global random state.

    model: a preset's name or a config. dtype: of the matrices; what needs float32 stays at it (A_log, dt_bias,
    convolutions, head norms, correction biases). On device "meta", or within a FakeTensorMode, nothing is allocated.
    """
    config = preset(model) if isinstance(model, str) else model
    with default_dtype(dtype), torch.device(device):
        return K3Model(config)
