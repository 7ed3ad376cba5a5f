"""The spec of the emitted text: a right program holds, and each planted fault is named with its place."""

from __future__ import annotations

import pytest

import moec.compiler.dialect  # noqa: F401  (registers torch.ops.moec)
from moec import runtime
from moec.compiler.errors import PassError
from moec.compiler.spec_program import check_emitted

PROGRAM = '''"""A step."""

import torch

from moec import runtime

aten = torch.ops.aten
moec = torch.ops.moec
DEVICE = torch.device("cpu")


def layer_forward(w, hidden):
    """layers.0."""
    # norm
    norm = moec.rms_norm(hidden, w["norm.weight"], eps=1e-05)
    del hidden
    # mlp.up_proj
    up_proj = norm @ w["mlp.up_proj.weight"].t()
    a, b = aten.split.Tensor(up_proj, 2)
    del up_proj
    return a * b, [norm]


def forward(state, batch):
    hidden, saved = layer_forward(state.scope("layers.0"), batch["hidden"])
    return {"loss": hidden.sum()}, saved


def backward(state, saved):
    seed = torch.ones((), dtype=torch.float32, device=DEVICE)
    state.accumulate("norm.weight", seed)


def update(state, lr):
    runtime.adamw(state, runtime.parameter_groups(state)["decay"], lr=lr)


def step(state, batches, lr):
    totals = {}
    for batch in batches:
        results, saved = forward(state, batch)
        for name, value in results.items():
            totals[name] = totals[name] + value if name in totals else value
    return totals, update(state, lr)
'''


def fault(old: str, new: str) -> PassError:
    assert old in PROGRAM
    with pytest.raises(PassError) as caught:
        check_emitted(PROGRAM.replace(old, new, 1), runtime)
    return caught.value


def test_a_right_program_holds() -> None:
    check_emitted(PROGRAM, runtime)


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("moec.rms_norm(", "moec.rms_nrm(", "moec.rms_nrm"),
        ("aten.split.Tensor(", "aten.split.Tonsor(", "aten.split.Tonsor"),
        ("torch.float32", "torch.float33", "torch.float33"),
        ("runtime.adamw(", "runtime.adam(", "runtime.adam"),
    ],
)
def test_what_it_calls_exists(old: str, new: str, missing: str) -> None:
    error = fault(old, new)
    assert error.what == "after emission the emitted spec does not hold: every op exists"
    assert error.why.startswith(f"there is no {missing}; around it:")


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("norm @ w", "nrm @ w", "nrm"),
        ("    return a * b", "    return hidden * b", "hidden"),  # deleted before
        ("a, b = aten", "a, c = aten", "b"),
        ("    del up_proj\n", "    del up_proj, gone\n", "gone"),
        ("device=DEVICE)", "device=PLACE)", "PLACE"),
        ("totals[name] + value", "totals[name] + worth", "worth"),
        ("    hidden, saved = layer_forward(", "    hidden, saved = other_forward(", "other_forward"),
    ],
)
def test_what_it_reads_has_a_value(old: str, new: str, name: str) -> None:
    error = fault(old, new)
    assert "every name that is read has a value" in error.what
    assert error.why.startswith(f"{name} has no value there, or has been deleted")


def test_a_failure_shows_its_place() -> None:
    error = fault("norm @ w", "nrm @ w")
    assert error.where == "step.py:18 in layer_forward, module mlp.up_proj"
    lines = error.why.splitlines()[1:]
    assert len(lines) == 11
    assert lines[5].strip() == '18     up_proj = nrm @ w["mlp.up_proj.weight"].t()'
    assert fault("DEVICE = torch.device", "DEVICE = torch.devise").where == "step.py:9 in the preamble, module ?"
    assert "in backward, module ?" in fault('state.accumulate("norm.weight", seed)', "state.add(sed)").where


def test_text_that_is_no_python_and_missing_functions() -> None:
    assert "it is Python" in fault("def update(state, lr):", "def update(state, lr:").what
    assert fault("def backward(", "def backwards(").why.startswith("there is no backward;")
