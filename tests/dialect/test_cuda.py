"""The references on a CUDA device: the CPU's numbers, and no waiting for the device on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moec.compiler.dialect import DEFINITIONS
from tests.dialect.contract import documents, rand, replaced, run
from tests.dialect.test_delta_rule import inputs
from tests.dialect.test_kda import CASES, arguments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

IDS = documents([1, 40, 29], [70])
DELTA, DELTA_PER_HEAD = inputs(70), inputs(70, per_head_gate=True, gate="extreme")
CALLS: list[tuple[str, Sequence[Any]]] = [
    ("rms_norm", (rand(4, 5, 8), rand(8), 1e-5)),
    ("gated_norm", (rand(4, 5, 8), rand(4, 5, 8, seed=1), rand(8), 1e-5, "silu")),
    ("l2_norm", (rand(4, 5, 8), 1e-6)),
    ("gated_mlp_act", (rand(4, 5), rand(4, 5, seed=1), "situ", 4.0, 25.0)),
    ("sigmoid_gate", (rand(4, 5), rand(4, 5, seed=1))),
    ("short_conv", (rand(2, 70, 6), rand(6, 4), IDS, "silu")),
    ("delta_rule", (*DELTA[:5], IDS, DELTA[5], 0.4, 32)),
    ("delta_rule", (*DELTA_PER_HEAD[:5], IDS, DELTA_PER_HEAD[5], 0.4, 32)),
    *(("kda", tuple(arguments(70, **sizes, document_ids=IDS).values())) for sizes in CASES.values()),
    ("depth_mix", ([rand(4, 8), rand(4, 8, seed=1)], rand(8), rand(8, seed=2), 1e-5)),
]


@pytest.mark.parametrize(("name", "args"), CALLS, ids=[f"{i}-{name}" for i, (name, _) in enumerate(CALLS)])
def test_same_numbers_without_a_host_sync(name: str, args: Sequence[Any]) -> None:
    operator = DEFINITIONS[name].op
    on_device = [
        value.cuda() if isinstance(value, Tensor) and not value.requires_grad else value
        for value in replaced(args, lambda value: value.detach().cuda().requires_grad_())
    ]
    run(operator, on_device, torch.ones_like)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run(operator, on_device, torch.ones_like)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = run(operator, args, torch.ones_like)
    for values, others in zip(found, expected, strict=True):
        torch.testing.assert_close([value.cpu() for value in values], others, atol=1e-10, rtol=1e-10)
