"""Writes artefacts of several models into the folder given: what the test of equal processes compares."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from moec.compiler.plan import CachePlan, CacheRule, Plan
from moec.emit import emit
from moec.models.build import build
from moec.models.huggingface.adapter import from_config
from moec.models.huggingface.tiny import tiny_config

PACKED = Plan(batch=2, length=32, packing=True, cache=CachePlan(policy=(CacheRule("recompute", "layers.1"),)))


def main(out: Path) -> None:
    """One folder per model, with its weights."""
    for preset in ("k3-tiny", "k3-dsa-tiny"):
        torch.manual_seed(0)
        emit(build(preset).train(), PACKED, out / preset, with_weights=True)
    torch.manual_seed(0)
    model = from_config(tiny_config("deepseek_v3")).train()
    emit(model, Plan(batch=2, length=32, dynamic="length", min_length=8), out / "deepseek_v3", with_weights=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
