"""Gradient clipping and AdamW over a `StepState`, as an emitted step calls them after its last microbatch.

    groups = parameter_groups(state)
    norm = clip_gradients(state, max_norm=1.0)
    adamw(state, groups["decay"], lr=lr, weight_decay=0.1, ...)
    adamw(state, groups["no_decay"], lr=lr, weight_decay=0.0, ...)

NaN policy: `clip_gradients` raises NonFiniteError when the global norm is not finite, before anything is scaled or
updated, so the weights, the masters and the moments are those of the last good step. It waits for the device once.

On several ranks each gradient element lives on one of them. The norm is over all elements: every rank sends the sum of
its squares, in float64, and gets the same total, so all scale by the same factor, or all raise the same error.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from moec.compiler.errors import NonFiniteError
from moec.runtime.control import gathered, summed
from moec.runtime.state import StepState

_FUSED_DEVICES = ("cpu", "cuda")
_NAMED_PATHS = 3


@torch.no_grad()
def clip_gradients(state: StepState, max_norm: float | None) -> Tensor:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)); returns the global L2 norm before scaling, a scalar.

    The formula is that of `torch.nn.utils.clip_grad_norm_`. max_norm=None only measures. With no gradient the norm is
    0. Raises NonFiniteError naming the step and the first parameters whose gradients hold NaN or infinity.
    """
    if state.world > 1:
        norm = _norm_over_ranks(state)
    elif state.gradients:
        norm = torch.nn.utils.get_total_norm(list(state.gradients.values()))
    else:
        return torch.zeros(())
    if not torch.isfinite(norm):
        raise _non_finite(state, norm)
    if max_norm is not None:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for members in _by_device_and_dtype(state.gradients).values():
            torch._foreach_mul_(
                [state.gradients[path] for path in members], factor.to(state.gradients[members[0]].device)
            )
    return norm


@torch.no_grad()
def adamw(
    state: StepState,
    group: Iterable[str],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW update (Loshchilov and Hutter, arXiv 1711.05101) of the paths in `group` that have a gradient.

    Semantics of `torch.optim.AdamW`, bias correction counted per parameter. Masters are updated where they exist and
    then rounded to the weights; nothing else is written. Weights may lie in memory in any way in which no two elements
    share it. Uses torch's fused update where the device has one.
    """
    active = {path: state.gradients[path] for path in group if path in state.gradients}
    for (device, _), paths in _by_device_and_dtype(active).items():
        fused = device.type in _FUSED_DEVICES
        counts = torch.tensor([float(state.updates[path]) for path in paths], device=device if fused else "cpu")
        targets = [state.masters[path] if path in state.masters else state.weights[path].detach() for path in paths]
        # The fused update walks memory, so a weight has to lie as its moments do.
        values = [
            target if target.stride() == moment.stride() else torch.empty_like(moment).copy_(target)
            for target, moment in zip(targets, (state.exp_avg[path] for path in paths), strict=True)
        ]
        if fused:  # which does not count its writes itself
            torch.autograd.graph.increment_version(targets)
        torch_adamw(
            values,
            [active[path] for path in paths],
            [state.exp_avg[path] for path in paths],
            [state.exp_avg_sq[path] for path in paths],
            [],
            list(counts.unbind()),
            foreach=not fused,
            fused=fused,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
        for path, target, value in zip(paths, targets, values, strict=True):
            if value is not target:
                target.copy_(value)
            state.updates[path] += 1
    rounded = [path for path in active if path in state.masters]
    if rounded:
        torch._foreach_copy_(
            [state.weights[path].detach() for path in rounded], [state.masters[path] for path in rounded]
        )


def parameter_groups(state: StepState) -> dict[str, list[str]]:
    """Trainable paths split into "decay" and "no_decay", each in module order.

    No decay for vectors and scalars (norms, biases), and by name for A_log, dt_bias, stacked biases, convolution
    weights and the vectors of attention residuals, which some models store with extra dimensions.
    """
    groups: dict[str, list[str]] = {"decay": [], "no_decay": []}
    for path in state.trainable:
        groups["decay" if _decays(path, state.weights[path]) else "no_decay"].append(path)
    return groups


_NO_DECAY_LEAF = re.compile(r"A_log|(.*_)?bias")
_NO_DECAY_OWNER = re.compile(r"(.*_)?conv(1d)?(_.*)?|(.*_)?res_(proj|norm)(_.*)?")


def _decays(path: str, weight: Tensor) -> bool:
    if weight.ndim <= 1:
        return False
    *_, owner, leaf = ("", *path.split("."))
    # Only the innermost module counts: a block named "conv" may hold ordinary projections.
    return not (_NO_DECAY_LEAF.fullmatch(leaf) or _NO_DECAY_OWNER.fullmatch(owner) or _NO_DECAY_OWNER.fullmatch(leaf))


def _by_device_and_dtype(tensors: Mapping[str, Tensor]) -> dict[tuple[torch.device, torch.dtype], list[str]]:
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = defaultdict(list)
    for path, tensor in tensors.items():
        groups[tensor.device, tensor.dtype].append(path)
    return groups


def _norm_over_ranks(state: StepState) -> Tensor:
    gradients = [gradient for gradient in state.gradients.values() if gradient.numel()]
    own = torch.zeros((), dtype=torch.float64, device=state.device)
    if gradients:
        own = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
    dtypes = {moment.dtype for moment in state.exp_avg.values()}
    return summed(own).sqrt().to(torch.float64 if torch.float64 in dtypes else torch.float32)


def _non_finite(state: StepState, norm: Tensor) -> NonFiniteError:
    bad = _non_finite_paths(state)
    named = ", ".join(bad[:_NAMED_PATHS]) + (f" and {len(bad) - _NAMED_PATHS} more" if len(bad) > _NAMED_PATHS else "")
    return NonFiniteError(
        f"step {state.step + 1}: the global gradient norm is {float(norm)}; no weight was changed",
        where=f"gradients of {named}" if bad else "the sum of squares, although every gradient is finite",
        why="NaN or infinity came out of forward or backward" if bad else "the gradients are too large for float32",
        hint="look at this batch, resume from the last checkpoint, or start again with a lower learning rate",
    )


def _non_finite_paths(state: StepState) -> list[str]:
    """Parameters whose gradients hold NaN or infinity, with the ranks that hold those elements if there are several."""
    bad = [path for path, gradient in state.gradients.items() if not torch.isfinite(gradient).all()]
    if state.world == 1:
        return bad
    own = torch.tensor([path in bad for path in state.trainable], dtype=torch.uint8, device=state.device)
    flags = gathered(own, state.world).tolist()
    named = []
    for path, column in zip(state.trainable, zip(*flags, strict=True), strict=True):
        ranks = [str(rank) for rank, flag in enumerate(column) if flag]
        named += [f"{path} (rank{'s' if ranks[1:] else ''} {', '.join(ranks)})"] if ranks else []
    return named
