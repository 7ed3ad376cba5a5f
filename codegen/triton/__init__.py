"""Hand-written Triton kernels behind dialect ops; importing this package registers them with the lowering."""

from __future__ import annotations

from moec.codegen.triton import expert_ops, experts, kda, loss, route

__all__ = ["expert_ops", "experts", "kda", "loss", "route"]
