"""The fitted lines of collectives as a file of `compiler/hardware`, which the cost model reads."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path

import torch
import yaml

from benchmarks.distributed.jobs import ROOT

FOLDER = ROOT / "compiler" / "hardware"
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def write_links(name: str, fits: Mapping[str, Mapping[str, float]], ranks: int, folder: Path = FOLDER) -> Path:
    """Write NAME_links.yaml. fits: collective -> latency, bytes_per_second and the mean relative error."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    errors = ", ".join(f"{kind} {fits[kind]['error']:.0%}" for kind in _KINDS)
    lines = [
        f"# Measured by `python -m benchmarks.distributed --parts bandwidth --links {name}` on {ranks} ranks, {card},",
        f"# torch {torch.__version__}, {datetime.date.today().isoformat()}. seconds = latency + received bytes / rate;",
        f"# mean error of the lines: {errors}.",
    ]
    links = {
        kind: {"latency": float(f"{fits[kind]['latency']:.3g}"), "bytes_per_second": float(f"{rate:.4g}")}
        for kind in _KINDS
        for rate in [fits[kind]["bytes_per_second"]]
    }
    path = folder / f"{name}_links.yaml"
    path.write_text("\n".join(lines) + "\n" + yaml.safe_dump({"links": links}, sort_keys=False))
    return path
