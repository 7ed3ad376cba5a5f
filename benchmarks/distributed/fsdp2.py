"""The same model and step with PyTorch FSDP2: `fully_shard`, mixed precision, eager experts over all ranks.

1. Weights are float32 and sharded; FSDP2 gathers them in the dtype of the run and reduces gradients in float32, one
   group of parameters per layer. Experts lie on the rank that computes them (ep = ranks), cast by `fully_shard` on a
   mesh of one rank.
2. Loss, clipping and fused AdamW as moec's step has them: sums over all ranks, one norm, no decay for vectors. Routers
   are rebalanced by the counts of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.distributed.eager_experts import spread_experts
from moec.compiler.plan import Plan
from moec.models.k3.model import K3Model
from moec.runtime.optimizer import parameter_groups
from moec.runtime.state import StepState

Step = Callable[[dict[str, Tensor]], Tensor]


def fsdp2_step(model: K3Model, plan: Plan, dtype: torch.dtype, device: torch.device) -> Step:
    """step(this rank's rows) -> loss over all ranks. model: float32 weights, all of them; it is sharded in place."""
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (1, world), mesh_dim_names=("edp", "ep"))
    kinds = {name: kind for kind, names in parameter_groups(StepState.from_module(model)).items() for name in names}
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    spread = spread_experts(model, mesh["ep"].get_group())
    for experts in spread:
        fully_shard(experts, mesh=mesh["edp"], mp_policy=policy)
    for layer in model.layers:
        fully_shard([layer.attention, layer.feed_forward], mesh=mesh["ep"], mp_policy=policy)  # type: ignore[list-item]
    fully_shard(model, mesh=mesh["ep"], mp_policy=policy)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    own = {id(parameter) for experts in spread for parameter in experts.parameters()}
    optimizer = _optimizer(named, kinds, plan)

    def step(batch: dict[str, Tensor]) -> Tensor:
        valid = (batch["labels"][:, 1:] != -100).sum().float()
        dist.all_reduce(valid)
        # FSDP2 averages what it reduces, so the loss counts `world` times.
        loss = model(**batch, inverse_tokens=world / valid).loss
        loss.backward()
        _clip(named.values(), own, world, plan.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        for router in model.routers().values():
            dist.all_reduce(router.histogram)
        model.update_balance()
        total = loss.detach()
        dist.all_reduce(total)
        return total / world

    return step


def _optimizer(named: dict[str, nn.Parameter], kinds: dict[str, str], plan: Plan) -> torch.optim.AdamW:
    options = plan.optimizer
    decays = {"decay": options.weight_decay, "no_decay": 0.0}
    groups = [
        {"params": [parameter for name, parameter in named.items() if kinds[name] == kind], "weight_decay": decay}
        for kind, decay in decays.items()
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True)


@torch.no_grad()
def _clip(parameters: object, own: set[int], world: int, bound: float) -> None:
    """One norm over all elements of all ranks; gradients of experts are sums already, of a loss that counts `world`
    times."""
    dense, experts = [], []
    for parameter in parameters:  # type: ignore[attr-defined]
        if parameter.grad is not None:
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            (experts if id(parameter) in own else dense).append(gradient)
    if experts:
        torch._foreach_mul_(experts, 1 / world)
    gradients = [*dense, *experts]
    norm = torch.stack(torch._foreach_norm(gradients)).square().sum()
    dist.all_reduce(norm)
    torch._foreach_mul_(gradients, (bound / (norm.sqrt() + 1e-6)).clamp(max=1.0))
