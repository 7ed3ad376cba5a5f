"""The output head and cross entropy on one GPU: errors, times, peak memory and launches, ours beside others.

    python benchmarks/linear_cross_entropy.py probe                  what the library can do
    python benchmarks/linear_cross_entropy.py check                  errors beside eager bfloat16, against float64
    python benchmarks/linear_cross_entropy.py time --out FOLDER      rows added to linear_cross_entropy.json
    python benchmarks/linear_cross_entropy.py profile                time of every kernel
    python benchmarks/linear_cross_entropy.py tune                   our kernel under other launch settings
    python benchmarks/linear_cross_entropy.py table                  results/linear_cross_entropy.json as a table

N = 16384 tokens, 163840 classes, bfloat16, the mean over all tokens, gradients of both hidden and weight in bfloat16.
Several words run one after the other; what would begin after `--seconds` is left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_timing import kernels, launches, median_ms, peak_mib
from torch import Tensor

import moec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
TOKENS, CLASSES, WIDTHS = 16384, 163840, (4096, 7168)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
STARTED = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(WHAT), nargs="+")
    parser.add_argument("--widths", type=int, nargs="*", default=list(WIDTHS))
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    for word in options.what:
        if time.monotonic() - STARTED > options.seconds:
            print(f"left out: {word}", flush=True)
            continue
        try:
            WHAT[word](options)
        except Exception as error:
            print(f"{word}: {type(error).__name__}: {str(error)[:600]}", flush=True)
        print(f"[{time.monotonic() - STARTED:.0f} s] {word} done", flush=True)


def _probe(options: argparse.Namespace) -> None:
    """Whether the library adds a product of bfloat16 to a float32 matrix in place."""
    total = torch.ones(256, 512, device="cuda")
    a, b = (torch.randn(n, m, device="cuda", dtype=torch.bfloat16) for n, m in ((256, 128), (128, 512)))
    truth = 1 + a.double() @ b.double()
    torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    print(f"float32 += bfloat16 product: error {distance(total, truth):.1e}", flush=True)


def ours(rows: int | None = None) -> Loss:
    columns = None if rows is None else CLASSES
    return lambda x, w, y: moec.linear_cross_entropy(x, w, y, rows=rows, columns=columns)


def eager(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((x @ w.t()).float(), y)


def liger(dtype: torch.dtype | None) -> Loss:
    def run(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy(x, w, y, accum_dtype=dtype)

    return run


VARIANTS: dict[str, Loss] = {
    "moec": ours(),
    "liger, fp32 sums": liger(torch.float32),
    "liger, bf16 sums": liger(None),
    "moec, 8192 rows a chunk": ours(8192),
    "moec, 4096 rows a chunk": ours(4096),
    "eager": eager,
    "moec, 16384 rows a chunk": ours(16384),
    "moec, 2048 rows a chunk": ours(2048),
}


def inputs(tokens: int, width: int, classes: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight and labels on the GPU; logits have a deviation of about one."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, device="cuda", dtype=dtype)
    weight = torch.randn(classes, width, generator=generator, device="cuda", dtype=dtype).mul_(width**-0.5)
    return hidden, weight, torch.randint(0, classes, (tokens,), generator=generator, device="cuda")


def gradients(loss: Loss, x: Tensor, w: Tensor, y: Tensor, scale: float = 1.0) -> list[Tensor]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    value = loss(x, w, y) * scale
    return [value.detach(), *torch.autograd.grad(value.sum(), (x, w))]


def distance(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


CHECKS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"columns": 5000},
    {"reduction": "none", "columns": 5000},
    {"softcap": 3.0, "logit_scale": 2.0},
    {"z_loss": 1e-2, "label_smoothing": 0.1},
]


def _check(options: argparse.Namespace) -> None:
    """Odd sizes, some labels ignored, a scale of 1000 from above; then the timed size, of more than 2^31 logits."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, w, y = inputs(1003, 512, 16411, dtype)
        y[::7] = -100
        for form in CHECKS if dtype == torch.bfloat16 else (CHECKS[0], CHECKS[4]):
            plain = {name: value for name, value in form.items() if name != "columns"}

            def exact(x: Tensor, w: Tensor, y: Tensor, form: dict[str, Any] = plain) -> Tensor:
                return _formula(x, w, y, **form)

            def mine(x: Tensor, w: Tensor, y: Tensor, form: dict[str, Any] = form) -> Tensor:
                return moec.linear_cross_entropy(x, w, y, rows=400, **form)

            truth = gradients(exact, x.double(), w.double(), y, 1e3)
            found = [distance(a, b) for a, b in zip(gradients(mine, x, w, y, 1e3), truth, strict=True)]
            base = [distance(a, b) for a, b in zip(gradients(exact, x, w, y, 1e3), truth, strict=True)]
            text = ", ".join(f"{a:.1e}/{b:.1e}" for a, b in zip(found, base, strict=True))
            good = all(a <= 1.5 * b + 1e-6 for a, b in zip(found, base, strict=True))
            print(f"{'ok ' if good else 'BAD'} {str(dtype)[6:]} {form}: loss, dx, dw ours/eager {text}", flush=True)
    x, w, y = inputs(TOKENS, options.widths[0], CLASSES)
    found = gradients(ours(), x, w, y)
    for variant in ("moec, 16384 rows a chunk", "eager"):
        differences = [distance(a, b) for a, b in zip(found, gradients(VARIANTS[variant], x, w, y), strict=True)]
        text = ", ".join(f"{value:.1e}" for value in differences)
        print(f"moec beside {variant}, {TOKENS} tokens and {CLASSES} classes: loss, dx, dw {text}", flush=True)


def _formula(
    x: Tensor, w: Tensor, y: Tensor, reduction: str = "mean", softcap: float = 0.0, logit_scale: float = 1.0,
    z_loss: float = 0.0, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    logits = (x @ w.t()).to(torch.promote_types(x.dtype, torch.float32)) * logit_scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    losses = F.cross_entropy(logits, y, reduction="none", label_smoothing=label_smoothing)
    losses = losses + z_loss * logits.logsumexp(1).square() * (y != -100)
    return losses if reduction == "none" else losses.sum() / (1 if reduction == "sum" else (y != -100).sum())


def _time(options: argparse.Namespace) -> None:
    path = None if options.out is None else options.out / "linear_cross_entropy.json"
    rows = json.loads(path.read_text()) if path is not None and path.exists() else []
    for variant in options.variants:
        for width in options.widths:
            if time.monotonic() - STARTED > options.seconds:
                print(f"left out: {variant} at H={width}", flush=True)
                continue
            rows.append(_row(variant, width, options.commit))
            print(json.dumps(rows[-1]), flush=True)
            torch.cuda.empty_cache()
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(rows, indent=1) + "\n")


def _row(variant: str, width: int, commit: str) -> dict[str, Any]:
    import triton

    row: dict[str, Any] = {
        "op": "linear_cross_entropy", "shape": f"N{TOKENS} H{width} V{CLASSES}", "variant": variant, "fwd_ms": None,
        "fwdbwd_ms": None, "peak_mib": None, "launches_fwd": None, "launches_fwdbwd": None, "ok": None, "error": None,
        "card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "date": datetime.date.today().isoformat(), "commit": commit,
    }  # fmt: skip
    loss = VARIANTS[variant]
    try:
        x, w, y = inputs(1024, 512, 16384)
        truth = gradients(eager_in_float32, x, w, y)
        row["ok"] = all(distance(a, b) < 2e-2 for a, b in zip(gradients(loss, x, w, y), truth, strict=True))
        x, w, y = inputs(TOKENS, width, CLASSES)

        def forward() -> object:
            with torch.no_grad():
                return loss(x, w, y)

        def both() -> object:
            return gradients(loss, x, w, y)

        row["fwdbwd_ms"], row["fwd_ms"] = median_ms(both), median_ms(forward)
        row["peak_mib"] = peak_mib(both)
        row["launches_fwd"], row["launches_fwdbwd"] = (launches(f) for f in (forward, both))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return row


def eager_in_float32(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return eager(x.float(), w.float(), y)


def _profile(options: argparse.Namespace) -> None:
    for width in options.widths:
        x, w, y = inputs(TOKENS, width, CLASSES)
        for variant in ("moec", "moec, 8192 rows a chunk"):
            found = kernels(lambda: gradients(VARIANTS[variant], x, w, y))  # noqa: B023
            print(f"H={width} {variant}: {sum(t for _, t in found.values()):.0f} us", flush=True)
            for name, (count, spent) in sorted(found.items(), key=lambda item: -item[1][1])[:8]:
                print(f"    {spent:9.1f} us  {count}x {name[:90]}", flush=True)


def _tune(options: argparse.Namespace) -> None:
    from moec.codegen.triton.loss_launch import Launch, TritonKernels, sum_backward
    from moec.compiler.dialect.head import Head

    x, w, y = inputs(4096, 512, CLASSES)
    head, ones = Head(x, w, y), torch.ones(4096, device="cuda")
    logits = x @ w.t()
    for block, warps in ((8192, 16), (4096, 8), (8192, 8), (16384, 16), (16384, 32), (4096, 16)):
        work = TritonKernels(Launch(block=block, warps=warps))
        spent = median_ms(lambda: work.losses_and_gradient(head, logits, slice(0, 4096), ones, None), 5)  # noqa: B023
        rate = 2 * logits.numel() * 2 / spent / 1e9
        print(f"block {block} warps {warps}: {spent:.3f} ms, {rate:.2f} TB/s if read once and written once", flush=True)
    slope, one = torch.ones(CLASSES, 4096, device="cuda"), torch.ones((), device="cuda")
    for block in (2048, 4096, 8192):
        launch = Launch(copy_block=block)
        run = lambda: sum_backward(one, one, one, slope, one, torch.bfloat16, launch)  # noqa: B023, E731
        print(
            f"scaled copy, block {block}: {median_ms(run, 5):.3f} ms, floor {slope.numel() * 6 / 4.2e9:.3f}", flush=True
        )


def _table(options: argparse.Namespace) -> None:
    path = ROOT / "benchmarks" / "results" / "linear_cross_entropy.json"
    print("\n".join(f"| {' | '.join(row)} |" for row in table(json.loads(path.read_text()))))


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Cells of a table, the title first."""
    cells = [["shape", "variant", "forward ms", "forward+backward ms", "peak MiB", "launches", "check"]]
    for row in sorted(rows, key=lambda row: (len(row["shape"]), row["shape"], row["fwdbwd_ms"] or 1e9)):
        times = [f"{row[name]:.1f}" if row[name] is not None else "-" for name in ("fwd_ms", "fwdbwd_ms")]
        launches = "-" if row["launches_fwd"] is None else f"{row['launches_fwd']} / {row['launches_fwdbwd']}"
        verdict = row["error"] or {True: "right", False: "wrong", None: "-"}[row["ok"]]
        peak = "-" if row["peak_mib"] is None else str(row["peak_mib"])
        cells.append([row["shape"], row["variant"], *times, peak, launches, verdict])
    return cells


WHAT = {"probe": _probe, "check": _check, "time": _time, "profile": _profile, "tune": _tune, "table": _table}

if __name__ == "__main__":
    main()
