"""How large a model is, counted from its (usually meta) parameters."""

from __future__ import annotations

from dataclasses import dataclass

from moec.models.k3.model import K3Model
from moec.models.k3.moe import Experts


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters, the router's correction biases among them.

    total: all. active: those that one token meets, top_k of the routed experts. active_in_layers: the same without
    the input embedding, of which a token reads one row.
    """

    total: int
    active: int
    active_in_layers: int


def count_parameters(model: K3Model) -> Counts:
    """Count a model on any device, meta included."""
    tensors = [*model.parameters(), *(router.correction_bias for router in model.routers().values())]
    total = sum(tensor.numel() for tensor in tensors)
    routed = sum(p.numel() for module in model.modules() if isinstance(module, Experts) for p in module.parameters())
    unused = 0 if routed == 0 else routed // model.config.experts * (model.config.experts - model.config.top_k)
    return Counts(total, total - unused, total - unused - model.embed.weight.numel())
