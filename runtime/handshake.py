"""Before the first step: is every rank about to run the same thing?

1. What has to be equal is a few sections of lines: versions, plan, program, the collectives that it carries, weights
   and buffers (`agreement`). Every rank sends the digest of each section to all.
2. If a digest differs, the sections themselves are exchanged, and every rank raises the same AgreedError, which names
   the section, the line, and two ranks. Otherwise nothing else is sent.

A rank that does not come is an error after the time that `connect` gives to collectives.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from moec.compiler.errors import AgreedError
from moec.runtime.checksum import checksum
from moec.runtime.control import gathered, gathered_texts
from moec.runtime.differences import Sections, digest, first_difference, versions
from moec.runtime.state import StepState

_SAME = "start every rank with the same model, plan and versions; nothing has been changed yet"


def agreement(
    plan: Mapping[str, Any], program: str, collectives: Iterable[tuple[str, str, str, int]], state: StepState
) -> dict[str, list[str]]:
    """What all ranks have to have in common, as sections of lines.

    plan: nested values. program: the text that runs. collectives: (op, role, dtype, elements) in program order.
    """
    weights = [
        f"{path}: {weight.dtype} {list(state.whole_shape(path))}, {'' if path in state.exp_avg else 'not '}trained"
        for path, weight in state.weights.items()
    ]
    return {
        "versions": list(versions()),
        "plan": lines_of(plan),
        "program": program.splitlines(),
        "collectives": [f'{op} on "{role}" of {count} {dtype}' for op, role, dtype, count in collectives],
        "weights": weights,
        "buffers": [
            f"{path}: {value.dtype} {list(value.shape)}, values {checksum(value):08x}"
            for path, value in state.buffers.items()
        ],
    }


def shake_hands(sections: Sections, world: int, device: torch.device, hint: str = _SAME) -> None:
    """Compare the sections of all ranks; raises AgreedError on every rank when they differ.

    The names of the sections are the same on every rank. device: where collectives run. hint: what to do then.
    """
    own = [torch.frombuffer(bytearray(digest(lines)), dtype=torch.uint8) for lines in sections.values()]
    digests = gathered(torch.stack(own).to(device), world)
    if bool((digests == digests[0]).all()):
        return
    texts = gathered_texts(json.dumps({name: list(lines) for name, lines in sections.items()}), world, device)
    raise AgreedError(
        f"ranks are about to run different steps: {first_difference([json.loads(text) for text in texts])}",
        hint=hint,
    )


def lines_of(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Nested values as lines "field.field: value"."""
    lines = []
    for name, value in values.items():
        lines += lines_of(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [f"{prefix}{name}: {value}"]
    return lines
