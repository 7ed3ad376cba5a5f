"""A compiled training step that runs the KDA kernels, in the interpreter, beside one that runs the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
SCRIPT = f"""
import dataclasses, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
import moec
from moec.compiler import lower
from moec.compiler.plan import Plan
from moec.models.build import build
import moec.driver
from tests.spine import SMALL

config = dataclasses.replace(SMALL, kda_head_dim=16)
ids = torch.randint(0, config.vocab_size, (1, 10), generator=torch.Generator().manual_seed(1))
ops, weights = (torch.ops.moec.kda.default, torch.ops.moec.kda_backward.default), []
kernels = {{op: lower.IMPLEMENTATIONS[op] for op in ops}}
for fits in (False, True):
    for op, (kernel,) in kernels.items():
        lower.IMPLEMENTATIONS[op] = (dataclasses.replace(kernel, refusal=lambda node: "" if fits else "no"),)
    torch.manual_seed(0)
    model = build(config)
    step = moec.compile(model, Plan(batch=1, length=10))
    for op in ("kda", "kda_backward"):
        assert step.log.lowering[f"moec.{{op}}.default"].startswith("triton" if fits else "reference")
    step(ids, ids)
    weights.append([weight.detach().clone() for weight in model.parameters()])
print(max(float((a - b).abs().max()) for a, b in zip(*weights)))
"""


@pytest.mark.slow
def test_a_step_with_the_kernels_updates_weights_as_the_reference_does() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, cwd="/")
    assert found.returncode == 0, found.stderr[-3000:]
    assert float(found.stdout.splitlines()[-1]) < 1e-5
