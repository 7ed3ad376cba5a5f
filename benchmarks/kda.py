"""KDA on one GPU: errors against float64, launches, times and peak memory of our kernels, by shape.

    python benchmarks/kda.py check                     errors beside those of the eager reference in bfloat16
    python benchmarks/kda.py time --out FOLDER         the table, and results/kda.json rows
    python benchmarks/kda.py profile --tokens 16384    time of every kernel
    python benchmarks/kda.py tune                      time of every kernel under other launch settings
    python benchmarks/kda.py table                     results/kda.json as the table of docs/performance/kda.md

Shapes are B=1 and "mixed" gates: channels that forget within a token beside some that remember about 1500. "core" has
no convolution and no output norm, as the public kernels; "stage" is the whole of moec::kda.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from gpu_timing import kernels, launches, median_ms, peak_mib
from torch import Tensor

import moec.codegen.triton  # noqa: F401  registers the kernels
from moec.codegen.triton import kda_launch
from moec.codegen.triton.kda_arguments import Inputs, Launch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.kernels import kda_cases

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 130, 1000, 4096)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "time", "profile", "tune", "table"))
    parser.add_argument("--tokens", type=int, nargs="*", default=[4096, 16384, 65536])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--form", choices=("core", "stage"), nargs="*", default=["core", "stage"])
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="of check and tune: I N, every N-th case")
    parser.add_argument("--launch", type=Path, default=None, help="file that tune writes and check and time read")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    {"check": _check, "time": _time, "profile": _profile, "tune": _tune, "table": _table}[options.what](options)


def timed_inputs(tokens: int, heads: int, width: int, form: str) -> list[Any]:
    """Arguments of `moec::kda` on the GPU, bfloat16; gates as in the module's docstring."""
    generator = torch.Generator("cuda").manual_seed(0)
    columns = heads * width

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    stage = form == "stage"
    taps = [random(columns, 4).float() * 0.5 if stage else None for _ in range(3)]
    shift = -9 * torch.rand(columns, generator=generator, device="cuda")
    rates = 0.1 * torch.randn(heads, generator=generator, device="cuda")
    return [
        *(random(1, tokens, columns) for _ in range(4)), random(1, tokens, heads), rates, shift, *taps,
        random(1, tokens, columns) if stage else None, torch.ones(width, device="cuda") if stage else None, None,
        heads, heads, "bounded", -5.0, 1e-6, 1e-5, "sigmoid", width**-0.5, 64,
    ]  # fmt: skip


CHECKS: list[tuple[int, dict[str, Any]]] = [
    *((length, {"heads": 2, "value_heads": 2}) for length in LENGTHS),
    (1000, {"gates": "bound"}),
    (1000, {"gates": "slow"}),
    (1000, {"gates": "fast", "conv": False, "norm": False}),
    (1000, {"packed": True, "batch": 2}),
    (1000, {"width": 64, "value_width": 64}),
    (1000, {"width": 64, "value_width": 128, "value_heads": 2}),
    (1000, {"width": 256, "value_width": 256, "state": True}),
    (1000, {"width": 256, "packed": True, "state": True}),
    (1000, {"value_width": 256, "value_heads": 2, "taps": 6}),
    (1000, {"kind": "softplus", "packed": True}),
    (1000, {"kind": "softplus", "scalar": True, "value_heads": 2, "activation": "silu"}),
]


def _check(options: argparse.Namespace) -> None:
    first, step = options.part
    for length, settings in CHECKS[first::step]:
        settings = {"width": 128, "value_width": 128} | settings
        arguments = kda_cases.inputs(length, dtype=torch.bfloat16, device="cuda", **settings)
        grad = kda_cases.grad_for(arguments)
        truth = kda_cases.reference(arguments, grad)
        runs = [_results(arguments, grad, _launch(options)) for _ in range(2)]
        same = all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
        ours = kda_cases.errors(runs[0], truth)
        eager = kda_cases.errors(kda_cases.results(arguments, grad, kernels=False), truth)
        worst = max(ours, key=lambda name: ours[name] / max(eager[name], 1e-9))
        print(
            f"T={length} {settings}: repeatable {same}, worst {worst} {ours[worst]:.1e} eager {eager[worst]:.1e};",
            {name: f"{ours[name]:.1e}/{eager[name]:.1e}" for name in ours},
            flush=True,
        )


def _results(arguments: list[Any], grad: Tensor, launch: Launch | None) -> list[Tensor]:
    """Output, final state and gradients, as `kda_cases.results` gives them, in some launch."""
    inputs, grad_final = Inputs(*arguments), kda_cases.state_grad_for(arguments)
    if not grad_final:
        return [kda_launch.forward(inputs, launch), *kda_launch.backward(grad, inputs, launch)]
    grads = kda_launch.backward_with_state(grad, grad_final[0], inputs, launch)
    return [*kda_launch.forward_with_state(inputs, launch), *grads]


def _time(options: argparse.Namespace) -> None:
    rows = []
    for form in options.form:
        for tokens in options.tokens:
            arguments = timed_inputs(tokens, options.heads, options.width, form)
            grad = torch.randn_like(arguments[2])
            row = _row(f"T{tokens} H{options.heads} K{options.width} mixed {form}", arguments, grad, _launch(options))
            rows.append(row)
            print(json.dumps(row), flush=True)
            del arguments, grad
            torch.cuda.empty_cache()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "kda.json").write_text(json.dumps(rows, indent=1) + "\n")


def _row(shape: str, arguments: list[Any], grad: Tensor, launch: Launch | None) -> dict[str, Any]:
    import triton

    inputs = Inputs(*arguments)

    def forward() -> object:
        return kda_launch.forward(inputs, launch)

    def both() -> object:
        return kda_launch.forward(inputs, launch), kda_launch.backward(grad, inputs, launch)

    return {
        "op": "kda", "shape": shape, "variant": "moec", "fwd_ms": median_ms(forward, 15),
        "fwdbwd_ms": median_ms(both, 15), "peak_mib": peak_mib(both), "launches_fwd": launches(forward),
        "launches_fwdbwd": launches(both), "ok": None, "error": None,
        "card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
    }  # fmt: skip


def _profile(options: argparse.Namespace) -> None:
    for form in options.form:
        for tokens in options.tokens:
            arguments = timed_inputs(tokens, options.heads, options.width, form)
            grad = torch.randn_like(arguments[2])
            ops = torch.ops.moec
            for name, run in (
                ("forward", lambda: ops.kda_triton(*arguments)),  # noqa: B023
                ("backward", lambda: ops.kda_triton_backward(grad, *arguments)),  # noqa: B023
            ):
                found = kernels(run, 5)
                print(form, tokens, name, f"sum {sum(t for _, t in found.values()):.0f} us", flush=True)
                for kernel, (count, spent) in sorted(found.items(), key=lambda item: -item[1][1]):
                    print(f"    {spent:9.1f} us  {count}x {kernel[:70]}", flush=True)


def _table(options: argparse.Namespace) -> None:
    print(table(json.loads((Path(__file__).parent / "results" / "kda.json").read_text())))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown of result rows."""
    lines = [
        "| shape | variant | forward ms | forward+backward ms | peak MiB | launches |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        times = f"{row['fwd_ms']:.2f} | {row['fwdbwd_ms']:.2f}"
        launches = " / ".join(_or_dash(row[name]) for name in ("launches_fwd", "launches_fwdbwd"))
        lines.append(f"| {row['shape']} | {row['variant']} | {times} | {_or_dash(row['peak_mib'])} | {launches} |")
    return "\n".join(lines)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"chunk_warps": 4, "chunk_channels": 64, "chunk_registers": None, "values_warps": 4, "values_channels": 128},
    {"chunk_warps": 4, "chunk_registers": None, "keys_channels": 64, "keys_registers": None, "rows_rows": 16},
    {"chunk_channels": 64, "keys_warps": 4, "keys_registers": None, "prepare_channels": 128, "prepare_rows": 64},
    {
        "keys_warps": 4,
        "keys_channels": 16,
        "prepare_warps": 2,
        "rows_warps": 2,
        "rows_rows": 16,
        "back_output_warps": 2,
    },
    {"keys_warps": 4, "keys_channels": 16, "keys_registers": 168, "values_warps": 4, "scan_stages": 2},
    {"keys_channels": 16, "values_channels": 128, "conv_warps": 2, "conv_rows": 8},
]
# The fields of a launch that each kernel reads; both scans share theirs.
FIELDS = {
    "kda_prepare": ("prepare_warps", "prepare_channels", "prepare_rows"),
    "kda_forward_chunk": ("chunk_warps", "chunk_channels", "chunk_registers", "inverse_precision"),
    "scan": ("scan_columns", "scan_warps", "scan_stages"),
    "forward_output": ("output_warps",),
    "backward_output": ("back_output_warps", "back_output_columns"),
    "kda_backward_values": ("values_warps", "values_channels"),
    "kda_backward_keys": ("keys_warps", "keys_channels", "keys_columns", "keys_registers"),
    "kda_backward_rows": ("rows_warps", "rows_rows"),
    "conv": ("conv_rows", "conv_repeats", "conv_warps"),
}


def _tune(options: argparse.Namespace) -> None:
    first, step = options.part
    arguments = timed_inputs(options.tokens[0], options.heads, options.width, options.form[0])
    inputs, grad = Inputs(*arguments), torch.randn_like(arguments[2])
    results: list[tuple[dict[str, Any], dict[str, float]]] = []
    for changes in SETTINGS[first::step]:
        launch = dataclasses.replace(inputs.launch, **changes)
        try:
            found = kernels(lambda: kda_launch.backward(grad, inputs, launch), 5)  # noqa: B023
        except Exception as error:
            print(changes, type(error).__name__, str(error)[:200], flush=True)
            continue
        spent = {name: time for name, (_, time) in found.items() if name.startswith("kda")}
        print(changes, {name: f"{time:.0f}" for name, time in spent.items()}, flush=True)
        results.append((dataclasses.asdict(launch), spent))
    best: dict[str, Any] = {}
    for kernel, fields in FIELDS.items():
        launch_fields, _ = min(results, key=lambda r: sum(time for name, time in r[1].items() if kernel in name))
        best |= {name: launch_fields[name] for name in fields}
    print("best", json.dumps(best), flush=True)
    if options.launch is not None:
        options.launch.write_text(json.dumps(best))


def _launch(options: argparse.Namespace) -> Launch | None:
    """The launch of a `tune` before this; None for that of the head dimensions."""
    if options.launch is None or not options.launch.exists():
        return None
    return Launch(**json.loads(options.launch.read_text()))


if __name__ == "__main__":
    main()
