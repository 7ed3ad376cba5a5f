"""The expert kernels against a loop in float64; run by test_experts_interpreted.py and test_experts_gpu.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moec.codegen.triton import expert_launch as kernels
from moec.codegen.triton.expert_launch import LAUNCH, Launch, Tile
from tests.kernels.expert_cases import ACTIVATIONS, CASES, LARGE, Case, Operands, operands, reference

TINY = Tile(rows=32, columns=32, depth=16, group=2, stages=1, warps=4)
# Blocks that are cut short, several tiles and slot blocks, even for the sizes an interpreter can do.
SMALL = Launch(narrow=TINY, wide=TINY, slots=16, row=16)
# Of the norm: float32 sums in another order; float16 and bfloat16 round what is kept.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def ours(case: Case, given: Operands, launch: Launch) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients by the kernels; act made again from pre is the same, sums are added to what is there."""
    epilogue = ACTIVATIONS[case.activation].epilogue
    order, position, offsets = kernels.slots(given.indices, case.experts, launch)
    router = {"order": order, "weights": given.weights}
    before = router if case.before else {}
    form = {"interleaved": case.interleaved, "epilogue": epilogue, "launch": launch}
    plain = {"transposed": case.transposed, "launch": launch}
    turned = {"transposed": not case.transposed, "launch": launch}
    choices = case.choices

    rows = kernels.spread(given.x, position, choices, launch=launch)
    pre, act = kernels.up(rows, given.up, offsets, given.up_bias, transposed=case.transposed, **before, **form)
    assert distance(kernels.activate(pre, **before, **form), act) <= BOUNDS[act.dtype] / 10
    nothing, again = kernels.up(
        rows, given.up, offsets, given.up_bias, transposed=case.transposed, keep_pre=False, **before, **form
    )
    assert not nothing.numel()
    assert torch.equal(again, act)
    results = kernels.linear(act, given.down, offsets, given.down_bias, **plain)
    y = kernels.combine(results, position, None if case.before else given.weights, choices, launch)

    grad_rows = kernels.spread(given.grad, position, choices, launch=launch)
    grad_pre, weighted, grad_weights = kernels.down_backward(
        grad_rows, given.down, offsets, pre, transposed=case.transposed,
        down_bias=None if case.before else given.down_bias, **router, **form,
    )  # fmt: skip
    found = {
        "x": kernels.combine(kernels.linear(grad_pre, given.up, offsets, **turned), position, None, choices, launch),
        "weights": grad_weights,
        "up": kernels.weight_gradient(grad_pre, rows, offsets, **plain),
        "down": kernels.weight_gradient(grad_rows, weighted, offsets, **plain),
    }
    into = torch.ones(given.up.shape, dtype=torch.float32, device=given.up.device)
    added = kernels.weight_gradient(grad_pre, rows, offsets, into=into, **plain)
    assert added is into
    assert distance(added - 1, found["up"]) <= BOUNDS[act.dtype]
    if given.down_bias is not None:
        found["up_bias"] = kernels.bias_gradient(grad_pre, offsets, launch=launch)
        found["down_bias"] = kernels.bias_gradient(grad_rows, offsets, launch=launch, **({} if case.before else router))
    return y, found


def errors(case: Case, dtype: torch.dtype, launch: Launch, device: str = "cpu") -> dict[str, tuple[float, float]]:
    """Relative errors of the output and of every gradient, against float64: ours, and those of PyTorch in `dtype`."""
    given = operands(case, dtype, device)
    y, grads = ours(case, given, launch)
    wanted, truth = reference(case, given, torch.float64)
    plain, plain_grads = reference(case, given, dtype)
    assert grads.keys() == truth.keys()
    found = {"y": (distance(y, wanted), distance(plain, wanted))}
    return found | {
        name: (distance(grads[name], truth[name]), distance(plain_grads[name], truth[name])) for name in truth
    }


def distance(found: Tensor, truth: Tensor) -> float:
    """|found - truth| / |truth|; infinite for anything that is not finite, or not zero where the truth is zero."""
    assert found.shape == truth.shape, (found.shape, truth.shape)
    scale = float(truth.double().norm())
    error = float((found.double() - truth.double()).norm())
    return error / scale if scale else (0.0 if error == 0 else float("inf"))


def poisoned() -> None:
    """NaN, or the largest integer, in whatever is allocated and not written."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


MANY = ("384 experts", "896 experts, 16 choices")
# Rows of each expert: none for some, the first or the last, all but one, all.
COUNTS = ((3, 0, 17, 21, 0, 9), (0, 1, 7, 8, 9, 0), (0, 0, 50, 0, 0, 0), (0, 0, 0, 0, 0, 0))


def padding(launch: Launch, counts: Sequence[int]) -> None:
    """Rows behind the last group, as an exchange leaves them, hold anything: they give zeros and no gradient."""
    case = CASES["weights before, invented"]
    given = operands(case, torch.float32)
    offsets = torch.tensor(counts).cumsum(0).int()
    end = int(offsets[-1])
    rows = torch.randn(end + 40, case.width, generator=torch.Generator().manual_seed(1))
    rows[end:] = float("nan")
    epilogue = ACTIVATIONS[case.activation].epilogue
    form = {"transposed": False, "interleaved": False, "epilogue": epilogue, "launch": launch}
    pre, act = kernels.up(rows, given.up, offsets, given.up_bias, **form)
    assert given.up_bias is not None
    groups = [
        part.double() @ given.up[expert].double().t() + given.up_bias[expert].double()
        for expert, part in enumerate(rows[:end].split(list(counts)))
    ]
    assert distance(pre, torch.cat([*groups, torch.zeros(40, pre.shape[1])])) <= BOUNDS[torch.float32]
    assert not act[end:].any()
    grad_pre, again, nothing = kernels.down_backward(rows, given.down, offsets, pre, **form)
    assert not nothing.numel()
    assert not grad_pre[end:].any()
    assert distance(again[:end], act[:end]) <= BOUNDS[torch.float32]
    grad_pre[end:] = float("nan")
    left, right = (part.split(list(counts)) for part in (grad_pre[:end].double(), rows[:end].double()))
    truth = torch.stack([a.t() @ b for a, b in zip(left, right, strict=True)])
    found = kernels.weight_gradient(grad_pre, rows, offsets, transposed=False, launch=launch)
    assert distance(found, truth) <= BOUNDS[torch.float32]
    sums = torch.stack([part.sum(0) for part in left])
    assert distance(kernels.bias_gradient(grad_pre, offsets, launch=launch), sums) <= BOUNDS[torch.float32]


def many_experts(name: str, launch: Launch) -> None:
    """Sort and product where most experts have no row or one; the other kernels would take minutes here."""
    case = CASES[name]
    given = operands(case, torch.float32)
    order, position, offsets = kernels.slots(given.indices, case.experts, launch)
    chosen = given.indices.flatten()
    assert torch.equal(order, chosen.argsort(stable=True))
    assert torch.equal(position[order], torch.arange(chosen.numel()))
    assert torch.equal(offsets.long(), chosen.bincount(minlength=case.experts).cumsum(0))
    rows = kernels.spread(given.x, position, case.choices, launch=launch)
    found = kernels.linear(rows, given.up, offsets, given.up_bias, transposed=case.transposed, launch=launch)
    matrices = (given.up.transpose(1, 2) if case.transposed else given.up)[chosen[order]].double()
    truth = torch.bmm(matrices, given.x[order // case.choices].double().unsqueeze(2)).squeeze(2)
    if given.up_bias is not None:
        truth += given.up_bias[chosen[order]]
    assert distance(found, truth) <= BOUNDS[torch.float32]


def placed_elsewhere(dtype: torch.dtype, launch: Launch, device: str) -> None:
    """The same bits in a second run, and with the experts in another order."""
    case = CASES["plain"] if device == "cpu" else LARGE["plain"]
    given = operands(case, dtype, device)
    y, grads = ours(case, given, launch)
    again, grads_again = ours(case, given, launch)
    place = torch.randperm(case.experts, generator=torch.Generator().manual_seed(3)).to(device)
    back = place.argsort()
    moved, moved_grads = ours(
        case, replace(given, indices=place[given.indices], up=given.up[back], down=given.down[back]), launch
    )
    assert torch.equal(y, again)
    assert torch.equal(y, moved)
    for name, grad in grads.items():
        assert torch.equal(grad, grads_again[name]), name
        assert torch.equal(grad, moved_grads[name][place] if name in ("up", "down") else moved_grads[name]), name


def main(device: str, dtype: torch.dtype, names: Sequence[str]) -> None:
    """Prints the errors of every case that is named."""
    poisoned()
    cases, launch = (CASES, SMALL) if device == "cpu" else (LARGE, LAUNCH)
    if "padding" in names:
        for counts in COUNTS:
            padding(launch, counts)
    if "placement" in names:
        placed_elsewhere(dtype, launch, device)
    many = [name for name in names if device == "cpu" and name in MANY]
    for name in many:
        many_experts(name, launch)
    whole = [name for name in names if name in cases and name not in many]
    print(json.dumps({name: errors(cases[name], dtype, launch, device) for name in whole}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3:])
