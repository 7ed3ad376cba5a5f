"""Verify every model that fits, compiled against eager, on one device, and record the errors.

    python benchmarks/verify_models.py --device cuda --dtype float32 bfloat16

Models: the tiny presets, and the tiny Hugging Face configs where `transformers` is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from record import write_result

from moec import Plan
from moec.targets import build_target
from moec.verification import verify

PRESETS = ["k3-tiny", "k3-dsa-tiny"]


def main() -> int:
    """Verify all, print a line each, write `results/verify_DEVICE.json`; 1 when one is not equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, target in targets(Path(folder)).items():
            for dtype in options.dtype:
                if not options.only or name in options.only:
                    rows.append(check(name, target, dtype, options))
                    print(json.dumps(rows[-1]), flush=True)
    print(write_result(f"verify_{options.device}", " ".join(["python", *sys.argv]), rows))
    return 0 if all(row["equal"] for row in rows) else 1


def targets(folder: Path) -> dict[str, str]:
    """Name -> what `moec verify` takes."""
    found = {name: name for name in PRESETS}
    try:
        from moec.models.huggingface.tiny import TINY
    except ImportError:
        return found
    for name, config in TINY.items():
        path = folder / name / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps({"model_type": name, **config}))
        found[name] = str(path)
    return found


def check(name: str, target: str, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row: the largest error of each kind, or the error that stopped it."""
    torch.manual_seed(0)
    row: dict[str, Any] = {"model": name, "dtype": dtype, "device": options.device}
    started = time.perf_counter()
    try:
        model = build_target(target, dtype=getattr(torch, dtype), device=torch.device(options.device), seed=0)
        report = verify(model.train(), Plan(batch=2, length=64, packing=True), steps=options.steps)
    except Exception as error:
        traceback.print_exc()
        return row | {"equal": False, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    worst: dict[str, float] = {}
    for one in report.comparisons:
        worst[one.kind] = max(worst.get(one.kind, 0.0), one.error / one.bound if one.bound else one.error)
    if not report.equal:
        print(report)
    return row | {
        "equal": report.equal,
        "error_over_bound": worst,
        "comparisons": len(report.comparisons),
        "losses": report.losses,
        "seconds": round(time.perf_counter() - started, 1),
        "error": None,
    }


if __name__ == "__main__":
    sys.exit(main())
