"""Routed experts on one GPU: errors, times, peak memory and launches, ours beside others.

    python benchmarks/experts.py check                  errors beside PyTorch in the same dtype, against float64
    python benchmarks/experts.py time --out FOLDER      rows added to experts.json
    python benchmarks/experts.py profile                time of every kernel
    python benchmarks/experts.py table                  results/experts.json as a table

16384 tokens, bfloat16, SwiGLU, expert choices and weights given, dispatch and weighted sum included, gradients of the
tokens, both weights and the router weights; `up` is the first grouped product alone, on rows that are sorted already.
Several words run one after the other; what would begin after `--seconds` is left out.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_timing import kernels, launches, median_ms, peak_mib
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
STARTED = time.monotonic()
SWIGLU = "gate, up: gate * sigmoid(gate) * up"


@dataclass(frozen=True)
class Shape:
    experts: int
    choices: int
    routing: str = "uniform"
    tokens: int = 16384
    width: int = 3584
    hidden: int = 3072
    backward: bool = True

    @property
    def name(self) -> str:
        sizes = "" if (self.width, self.hidden) == (3584, 3072) else f" {self.width}x{self.hidden}"
        return f"N{self.tokens} E{self.experts} k{self.choices} {self.routing}{sizes}"


SMALL = Shape(16, 4, "zipf", tokens=512, width=512, hidden=256)
SHAPES = (
    Shape(64, 8),
    Shape(256, 8),
    Shape(256, 8, "zipf"),
    Shape(896, 16, backward=False),  # with gradients it does not fit one card
    Shape(64, 8, "zipf"),
    Shape(256, 8, width=2304, hidden=1024),
    Shape(128, 8, width=2048, hidden=768),
    Shape(512, 10, width=2048, hidden=512),
)


@dataclass
class Operands:
    x: Tensor
    up: Tensor
    down: Tensor
    indices: Tensor
    weights: Tensor
    grad: Tensor

    def leaves(self) -> tuple[Tensor, ...]:
        return self.x, self.up, self.down, self.weights


def operands(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Operands:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*sizes: int, scale: float = 1.0) -> Tensor:
        made = torch.empty(sizes, device="cuda", dtype=dtype)
        return made.normal_(0, scale, generator=generator)

    scores = -torch.empty(shape.tokens, shape.experts, device="cuda").exponential_(generator=generator).log_()
    if shape.routing == "zipf":  # the popularity of the r-th expert is 1/r
        ranks = torch.randperm(shape.experts, generator=generator, device="cuda") + 1
        scores -= ranks.log()
    return Operands(
        random(shape.tokens, shape.width),
        random(shape.experts, 2 * shape.hidden, shape.width, scale=shape.width**-0.5),
        random(shape.experts, shape.width, shape.hidden, scale=shape.hidden**-0.5),
        scores.topk(shape.choices, 1).indices.int(),
        torch.rand(shape.tokens, shape.choices, generator=generator, device="cuda"),
        random(shape.tokens, shape.width),
    )


class _Kernels(torch.autograd.Function):
    """The launches one after the other, as the ops of a compiled step run them; the pre-activation is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        kernels, epilogue = _launches()
        order, position, offsets = kernels.slots(indices, up.shape[0])
        rows = kernels.spread(x, position, indices.shape[1])
        pre, act = kernels.up(rows, up, offsets, transposed=False, interleaved=False, epilogue=epilogue)
        del rows
        ctx.save_for_backward(x, up, down, weights, order, position, offsets)
        ctx.pre = [pre]
        return kernels.combine(
            kernels.linear(act, down, offsets, transposed=False), position, weights, indices.shape[1]
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernels, epilogue = _launches()
        x, up, down, weights, order, position, offsets = ctx.saved_tensors
        pre = ctx.pre.pop()  # freed once it is used, as in a compiled step
        choices = weights.shape[1]
        rows = kernels.spread(grad, position, choices)
        grad_pre, act, grad_weights = kernels.down_backward(
            rows, down, offsets, pre, order=order, weights=weights, transposed=False, interleaved=False,
            epilogue=epilogue,
        )  # fmt: skip
        grad_down = kernels.weight_gradient(rows, act, offsets, transposed=False)
        del rows, act, pre
        grad_up = kernels.weight_gradient(grad_pre, kernels.spread(x, position, choices), offsets, transposed=False)
        grad_x = kernels.combine(kernels.linear(grad_pre, up, offsets, transposed=True), position, None, choices)
        return grad_x, grad_up, grad_down, grad_weights, None


def _launches() -> tuple[Any, Any]:
    from moec.codegen.triton import expert_launch
    from moec.codegen.triton.epilogue_printer import epilogue_of

    return expert_launch, epilogue_of(SWIGLU)


def ours(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    return _Kernels.apply(x, up, down, weights, indices)  # type: ignore[no-any-return]


def grouped(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """Sort, gather, two grouped products of the library around the activation, back, weighted sum."""
    flat = indices.flatten().long()
    order = flat.argsort(stable=True)
    offsets = flat.bincount(minlength=up.shape[0]).cumsum(0).int()
    pre = F.grouped_mm(x.index_select(0, order // indices.shape[1]), up.transpose(1, 2), offs=offsets)
    gate, value = pre.chunk(2, -1)
    rows = F.grouped_mm((F.silu(gate) * value).contiguous(), down.transpose(1, 2), offs=offsets)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    rows = rows.index_select(0, place).view(*indices.shape, -1)
    return (rows.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    torch._dynamo.config.recompile_limit = 64  # one for each shape, with and without gradients
    return torch.compile(grouped, dynamic=False)  # type: ignore[no-any-return]


def liger(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    return LigerFusedMoEFunction.apply(x, up, down, indices, weights)  # type: ignore[no-any-return]


def loop(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for expert in range(up.shape[0]):
        token, choice = (indices == expert).nonzero(as_tuple=True)
        gate, value = (x[token] @ up[expert].t()).chunk(2, -1)
        rows = (F.silu(gate) * value) @ down[expert].t()
        y = y.index_add(0, token, (rows * weights[token, choice, None]).to(x.dtype))
    return y


VARIANTS: dict[str, Callable[..., Tensor]] = {
    "moec": ours,
    "torch.compile, grouped_mm": lambda *given: _compiled()(*given),
    "eager, grouped_mm": grouped,
    "liger": liger,
    "eager, loop over experts": loop,
}


def _deep_gemm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Callable[[], Tensor]:
    """Groups are padded to what it asks for beforehand, which is not timed."""
    import deep_gemm

    step = deep_gemm.get_mk_alignment_for_contiguous_layout()
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1)).long()
    padded = (counts + step - 1) // step * step
    expert = torch.repeat_interleave(torch.arange(len(counts), device="cuda"), counts)
    place = torch.arange(rows.shape[0], device="cuda") + ((padded - counts).cumsum(0) - (padded - counts))[expert]
    total = int(padded.sum())
    x, layout = rows.new_zeros(total, rows.shape[1]), torch.full((total,), -1, dtype=torch.int32, device="cuda")
    x[place], layout[place] = rows, expert.int()
    y = rows.new_empty(total, weight.shape[1])

    def run() -> Tensor:
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x, weight, y, layout)
        return y

    return run


def _up(rows: Tensor, weight: Tensor, offsets: Tensor) -> Callable[[], Tensor]:
    return lambda: _launches()[0].linear(rows, weight, offsets, transposed=False)  # type: ignore[no-any-return]


def _up_of_torch(rows: Tensor, weight: Tensor, offsets: Tensor) -> Callable[[], Tensor]:
    return lambda: F.grouped_mm(rows, weight.transpose(1, 2), offs=offsets)


def _dense(rows: Tensor, weight: Tensor, offsets: Tensor) -> Callable[[], Tensor]:
    return lambda: rows @ weight[0].t()


UP_VARIANTS = {
    "moec": _up,
    "torch grouped_mm": _up_of_torch,
    "DeepGEMM, padding not timed": _deep_gemm,
    "one dense product of the size": _dense,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(WHAT), nargs="+")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    for word in options.what:
        try:
            WHAT[word](options)
        except Exception as error:
            print(f"{word}: {type(error).__name__}: {str(error)[:600]}", flush=True)
        print(f"[{time.monotonic() - STARTED:.0f} s] {word} done", flush=True)


def gradients(function: Callable[..., Tensor], given: Operands) -> tuple[Tensor, ...]:
    """The output and the gradients of all leaves."""
    leaves = [leaf.detach().requires_grad_() for leaf in given.leaves()]
    y = function(*leaves, given.indices)
    return y.detach(), *torch.autograd.grad(y, leaves, given.grad)


def distance(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def _check(options: argparse.Namespace) -> None:
    for shape in (SMALL, replace(SMALL, routing="uniform", tokens=1003, experts=60), replace(SMALL, tokens=1)):
        given = operands(shape)
        exact = Operands(*(value.double() if value.is_floating_point() else value for value in vars(given).values()))
        truth = gradients(loop, exact)
        for name in ("moec", "eager, grouped_mm"):
            errors = [distance(a, b) for a, b in zip(gradients(VARIANTS[name], given), truth, strict=True)]
            print(f"{shape.name}: {name}: y, dx, dup, ddown, dp {', '.join(f'{e:.1e}' for e in errors)}", flush=True)


def _time(options: argparse.Namespace) -> None:
    path = None if options.out is None else options.out / "experts.json"
    rows = json.loads(path.read_text()) if path is not None and path.exists() else []
    for row in _rows(options.commit):
        if time.monotonic() - STARTED > options.seconds:
            print("the rest is left out", flush=True)
            break
        rows.append(row)
        print(json.dumps({name: row[name] for name in list(row)[:9]}), flush=True)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(rows, indent=1) + "\n")


def _rows(commit: str) -> Iterator[dict[str, Any]]:
    for shape in SHAPES:
        given = operands(shape)
        for variant, function in VARIANTS.items():
            if variant != "eager, loop over experts" or shape.experts <= 64:
                yield _of_experts(shape, given, variant, function, commit)
                torch.cuda.empty_cache()
        if shape.width == SHAPES[0].width:
            kernels = _launches()[0]
            _, position, offsets = kernels.slots(given.indices, shape.experts)
            rows = kernels.spread(given.x, position, shape.choices)
            for variant, prepare in UP_VARIANTS.items():
                yield _of_up(shape, variant, functools.partial(prepare, rows, given.up, offsets), commit)
            del rows
        del given
        torch.cuda.empty_cache()


def _empty(op: str, shape: Shape, variant: str, commit: str) -> dict[str, Any]:
    import triton

    return {
        "op": op, "shape": shape.name, "variant": variant, "fwd_ms": None, "fwdbwd_ms": None, "peak_mib": None,
        "launches_fwd": None, "launches_fwdbwd": None, "ok": None, "error": None,
        "card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "date": datetime.date.today().isoformat(), "commit": commit,
    }  # fmt: skip


@functools.cache
def _is_right(variant: str) -> bool:
    """On a small shape, against float32."""
    given = operands(SMALL)
    exact = Operands(*(value.float() if value.is_floating_point() else value for value in vars(given).values()))
    truth, found = gradients(loop, exact), gradients(VARIANTS[variant], given)
    return all(distance(a, b) < 2e-2 for a, b in zip(found, truth, strict=True))


def _of_experts(
    shape: Shape, given: Operands, variant: str, function: Callable[..., Tensor], commit: str
) -> dict[str, Any]:
    row = _empty("experts", shape, variant, commit)

    def forward() -> object:
        with torch.no_grad():
            return function(*given.leaves(), given.indices)

    def both() -> object:
        return gradients(function, given)

    try:
        row["ok"] = _is_right(variant)
        row["fwd_ms"] = median_ms(forward)
        row["launches_fwd"] = launches(forward)
        if shape.backward:
            row["fwdbwd_ms"], row["peak_mib"] = median_ms(both), peak_mib(both)
            row["launches_fwdbwd"] = launches(both)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return row


def _of_up(shape: Shape, variant: str, prepare: Callable[[], Callable[[], Tensor]], commit: str) -> dict[str, Any]:
    row = _empty("up", shape, variant, commit)
    try:
        run = prepare()
        row["fwd_ms"], row["launches_fwd"] = median_ms(run), launches(run)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return row


def _profile(options: argparse.Namespace) -> None:
    for shape in SHAPES[:2]:
        given = operands(shape)
        gradients(ours, given)
        found = kernels(functools.partial(gradients, ours, given))
        print(f"{shape.name}: {sum(t for _, t in found.values()):.0f} us", flush=True)
        for name, (count, spent) in sorted(found.items(), key=lambda item: -item[1][1])[:14]:
            print(f"    {spent:9.1f} us  {count}x {name[:90]}", flush=True)
        del given
        torch.cuda.empty_cache()


def _table(options: argparse.Namespace) -> None:
    path = ROOT / "benchmarks" / "results" / "experts.json"
    print("\n".join(f"| {' | '.join(row)} |" for row in table(json.loads(path.read_text()))))


def table(rows: list[dict[str, Any]], op: str = "experts") -> list[list[str]]:
    """Cells of a table, the title first; shapes in the order of the run."""
    if op == "up":
        cells = [["shape", "variant", "ms", "TFLOP/s"]]
    else:
        cells = [["shape", "variant", "forward ms", "forward+backward ms", "peak MiB", "launches", "check"]]
    for row in rows:
        if row["op"] != op:
            continue
        times = [f"{row[name]:.1f}" if row[name] is not None else "-" for name in ("fwd_ms", "fwdbwd_ms")]
        if op == "up":
            (shape,) = (shape for shape in SHAPES if shape.name == row["shape"])
            work = 4 * shape.tokens * shape.choices * shape.width * shape.hidden
            rate = "-" if row["fwd_ms"] is None else f"{work / row['fwd_ms'] / 1e9:.0f}"
            cells.append([row["shape"], row["variant"], row["error"] or times[0], rate])
            continue
        counts = "-" if row["launches_fwd"] is None else f"{row['launches_fwd']} / {row['launches_fwdbwd'] or '-'}"
        verdict = row["error"] or {True: "right", False: "wrong", None: "-"}[row["ok"]]
        cells.append([row["shape"], row["variant"], *times, str(row["peak_mib"] or "-"), counts, verdict])
    return cells


WHAT = {"check": _check, "time": _time, "profile": _profile, "table": _table}

if __name__ == "__main__":
    main()
