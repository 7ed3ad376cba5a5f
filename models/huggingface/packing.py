"""Whether the layers of a model can keep packed documents apart."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from moec.models.huggingface.attention import keeps_own_attention
from moec.models.huggingface.linear_attention import REPLACEMENTS
from moec.models.huggingface.swaps import forward_of


def packing_refusal(model: Any) -> str:
    """Why packed documents would leak from one to the next, naming module and layer kind; '' when they do not."""
    for path, module in model.named_modules():
        # A model is named after what is in it; its layers are what counts.
        kind = "" if isinstance(module, PreTrainedModel) else _stateful_kind(module)
        owner = model.get_submodule(path.rpartition(".")[0]) if isinstance(module, nn.Conv1d) else module
        if kind and not _is_served(owner):
            return (
                f"{path} ({type(module).__name__}, layer kind {kind!r}) carries state along the row, and moec has no "
                "op for it that stops at a document's end"
            )
    own = keeps_own_attention(model)
    if own and model.config.model_type not in _MASKS_FROM_POSITIONS:
        return f"attention runs the model's own implementation ({own}), whose masks are not known to stop at documents"
    return ""


def _stateful_kind(module: nn.Module) -> str:
    if isinstance(module, nn.Conv1d):
        return "conv1d"
    name = type(module).__name__.lower()
    return next((kind for kind in _STATEFUL if kind in name and "norm" not in name), "")


def _is_served(module: nn.Module) -> bool:
    """True if what the module's forward does along the row goes through functions that know documents."""
    names = set(forward_of(module).__code__.co_names)
    return bool(names & REPLACEMENTS.keys()) and not any(word in name for name in names for word in _SCANS)


_STATEFUL = ("mamba", "rglru", "lightning", "rwkv", "recurrent", "deltanet", "deltaattention", "shortconv", "lstm")
_SCANS = ("scan", "ssm", "ssd")

# These build their masks from position ids, which restart with each document.
_MASKS_FROM_POSITIONS = ("glm_moe_dsa", "deepseek_v32")
