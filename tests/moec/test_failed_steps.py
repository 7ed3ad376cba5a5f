"""A step that fails leaves nothing behind: the next one gives the numbers it would have given without it."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import moec
from moec import runtime
from moec.compiler._torch_compat import TorchDispatchMode
from moec.compiler.errors import BatchError, ModelChangedError, NonFiniteError, UpdateError
from moec.compiler.plan import OptimizerPlan, Plan
from moec.step import CompiledStep

from ..spine import WIDTH, Language, Layer, batch_for, seeded, small_k3

PLAN = Plan(batch=2, length=6, accumulation=3, optimizer=OptimizerPlan(lr=1e-2, schedule="constant"))


class Noisy(Layer):
    """Draws random numbers, counts through a view of a buffer, and keeps a statistic that it reads before it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2, 3, dtype=torch.int64))
        self.register_buffer("mean", torch.linspace(0.5, 2, WIDTH))
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls[:, 0].add_(1)
        output = super().forward(hidden * self.mean.clone() + self.table)
        self.mean.lerp_(hidden.detach().mean((0, 1)), 0.1)
        return F.dropout(output, 0.2)


@pytest.fixture(scope="module")
def made() -> CompiledStep:
    return moec.compile(seeded(lambda: Language(Noisy(), Noisy())), PLAN)


@pytest.fixture
def step(made: CompiledStep) -> CompiledStep:
    """A step that has done one step; its program is shared, its state is its own."""
    state = runtime.StepState.from_module(seeded(lambda: Language(Noisy(), Noisy())))
    own = CompiledStep.of(made.program, state, made.folder, made.log, PLAN)
    torch.manual_seed(5)
    own(batch_for(PLAN, 7))
    return own


def everything(step: CompiledStep) -> dict[str, Any]:
    """All that a step may change, copied."""
    state = step.state
    tensors = {name: tensor.clone() for name, tensor in state.tensors().items()}
    return tensors | {"random": torch.get_rng_state(), "step": state.step, "updates": dict(state.updates)}


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    assert before.keys() == after.keys()
    return [
        name
        for name, value in before.items()
        if not (torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name])
    ]


@contextmanager
def failing(step: CompiledStep, function: str, call: int, failure: Callable[[], None]) -> Iterator[None]:
    """Within the context the program's function fails at its `call`th call."""
    program, original, calls = step.program, getattr(step.program, function), iter(range(1, 100))

    def run(*args: Any) -> Any:
        if next(calls) == call:
            failure()
        return original(*args)

    setattr(program, function, run)
    try:
        yield
    finally:
        setattr(program, function, original)


def an_error() -> None:
    raise RuntimeError("planted")


def an_interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def spoiled(step: CompiledStep) -> Iterator[None]:
    weight = step.state.weights["layers.1.down.weight"].detach()
    value = weight.clone()
    weight[0, 0] = float("nan")
    try:
        yield
    finally:
        weight.copy_(value)


def test_buffers_that_a_forward_writes_are_known(step: CompiledStep) -> None:
    assert set(step.written) == {f"layers.{layer}.{name}" for layer in (0, 1) for name in ("calls", "mean")}
    assert set(moec.load(step.folder, seeded(lambda: Language(Noisy(), Noisy()))).written) == set(step.written)


@pytest.mark.parametrize(
    ("function", "call", "failure", "kind"),
    [
        ("forward", 1, an_error, RuntimeError),
        ("layer_forward", 4, an_error, RuntimeError),
        ("layer_backward", 3, an_error, RuntimeError),
        ("layer_backward", 4, an_interrupt, KeyboardInterrupt),
        ("update", 1, an_error, RuntimeError),
    ],
)
def test_an_error_inside_of_a_step_leaves_everything_as_it_was(
    step: CompiledStep, function: str, call: int, failure: Callable[[], None], kind: type[BaseException]
) -> None:
    before, twin = everything(step), batch_for(PLAN, 1)
    with failing(step, function, call, failure), pytest.raises(kind):
        step(twin)
    assert differing(before, everything(step)) == []
    assert step.state.gradients == {}
    after_failure = step(twin)
    found = everything(step)
    other = restarted(step, before)
    assert torch.equal(other(twin).loss, after_failure.loss)
    assert differing(everything(other), found) == []


def restarted(step: CompiledStep, before: dict[str, Any]) -> CompiledStep:
    """A fresh step at the values of `before`, which has never failed."""
    state = runtime.StepState.from_module(seeded(lambda: Language(Noisy(), Noisy())))
    for name, tensor in state.tensors().items():
        tensor.copy_(before[name])
    state.step, state.updates = before["step"], dict(before["updates"])
    torch.set_rng_state(before["random"])
    return CompiledStep.of(step.program, state, step.folder, step.log, PLAN)


@pytest.mark.parametrize("spoil", ["shape", "label", "nan", "evaluation"])
def test_a_refused_step_leaves_everything_as_it_was(step: CompiledStep, spoil: str) -> None:
    model, batch = seeded(lambda: Language(Noisy(), Noisy())), batch_for(PLAN, 2)
    before = everything(step)
    if spoil == "shape":
        with pytest.raises(BatchError):
            step({name: value[:, :, 1:] for name, value in batch.items()})
    elif spoil == "label":
        batch["labels"][1, 0, 3] = 99
        with pytest.raises(IndexError, match="label 99 is outside"):
            step(batch)
    elif spoil == "nan":
        with spoiled(step), pytest.raises(NonFiniteError, match=r"layers.1 is the first layer whose output holds nan"):
            step(batch)
    else:
        other = moec.load(step.folder, model)
        model.eval()
        with pytest.raises(ModelChangedError, match="the model is in evaluation mode"):
            other(batch)
        assert other.state.step == 0
    assert differing(before, everything(step)) == []


def test_the_layer_of_a_nan_is_looked_for_in_the_same_forward() -> None:
    """With the random numbers and buffers of the step that failed: dropout hides the value in other ones."""

    class Rare(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, hidden: Tensor) -> Tensor:
            self.calls.add_(1)
            kept = torch.rand(()) < 0.5
            return super().forward(hidden) + torch.where(kept & (self.calls == 3), float("nan"), 0.0)

    step = moec.compile(seeded(lambda: Language(Rare(), Rare())), PLAN)
    located = [seed for seed in range(20) if _fails_in_a_layer(step, seed)]
    assert 3 < len(located) < 20
    assert step.state.step == 20 - len(located)


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -1e-3, "x", True], ids=str)
def test_a_rate_that_no_update_can_use_changes_nothing(step: CompiledStep, lr: Any) -> None:
    before = everything(step)
    with pytest.raises(BatchError, match=rf"lr is {lr!r}(.|\n)*finite number >= 0"):
        step(batch_for(PLAN), lr=lr)
    assert not differing(before, everything(step))


def test_a_step_prints_as_one_line(step: CompiledStep) -> None:
    text = repr(step)
    assert "CompiledStep at step 1" in text
    assert len(text) < 300


def _fails_in_a_layer(step: CompiledStep, seed: int) -> bool:
    torch.manual_seed(seed)
    for buffer in step.state.buffers.values():
        buffer.zero_()
    try:
        step(batch_for(PLAN), lr=0.0)
    except NonFiniteError as error:
        return "is the first layer whose output holds nan" in error.where
    return False


def test_an_interrupt_during_the_update_waits_until_it_is_done(
    step: CompiledStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two groups, when some weights have their new values and some have not."""
    before, original, calls = everything(step), runtime.adamw, iter((1, 2))
    other = restarted(step, before)

    def interrupted(*args: Any, **options: Any) -> None:
        if next(calls) == 2:
            an_interrupt()
        original(*args, **options)

    monkeypatch.setattr(runtime, "adamw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(batch_for(PLAN, 1))
    monkeypatch.undo()
    assert step.state.step == 2
    found = everything(step)
    torch.set_rng_state(before["random"])
    other(batch_for(PLAN, 1))
    assert differing(everything(other), found) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_update_that_fails_half_way_names_what_it_changed(
    step: CompiledStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, original, calls = everything(step), runtime.adamw, iter((1, 2))

    def failing(*args: Any, **options: Any) -> None:
        if next(calls) == 2:
            raise MemoryError("no room")
        original(*args, **options)

    monkeypatch.setattr(runtime, "adamw", failing)
    with pytest.raises(UpdateError) as caught:
        step(batch_for(PLAN, 1))
    assert "step 2 failed after it had updated 8 of 12 weights" in caught.value.what
    assert "changed, with their moments: embed.weight, layers.0.gate.weight" in caught.value.where
    assert "MemoryError: no room" in caught.value.why
    changed = {name.partition(".")[2] for name in differing(before, everything(step)) if name.startswith("weights.")}
    assert len(changed) == 8
    assert {name for name in differing(before, everything(step)) if not name.startswith(("weights.", "exp_avg"))} == {
        "updates"
    }


def test_queries_draw_no_random_numbers_of_the_run(step: CompiledStep) -> None:
    before = everything(step)
    first = step.loss(batch_for(PLAN))["lm_loss"]
    assert torch.equal(step.loss(batch_for(PLAN))["lm_loss"], first)
    step.gradients(batch_for(PLAN))
    with failing(step, "layer_backward", 2, an_error), pytest.raises(RuntimeError, match="planted"):
        step.gradients(batch_for(PLAN))
    assert differing(before, everything(step)) == []
    assert step.state.gradients == {}


def test_routers_count_nothing_of_a_step_that_failed() -> None:
    model = small_k3(layers=1, full_attention_layers=(1,))
    step = moec.compile(model, dataclasses.replace(PLAN, accumulation=2))
    batch = batch_for(step.plan)
    step(batch)
    assert any(path.endswith("histogram") for path in step.written), step.written
    assert any("bias" in path for path in step.written), step.written
    twin = {name: value.clone() for name, value in step.state.buffers.items()}
    with failing(step, "backward", 2, an_error), pytest.raises(RuntimeError, match="planted"):
        step(batch)
    assert all(torch.equal(value, twin[path]) for path, value in step.state.buffers.items())


def test_what_routers_count_is_not_copied_and_what_the_caller_has_counted_is_kept() -> None:
    model = small_k3(layers=1, full_attention_layers=(1,))
    step = moec.compile(model, dataclasses.replace(PLAN, accumulation=1))
    batch = batch_for(step.plan)
    path = next(path for path in step.written if path.endswith("histogram"))
    counts = step.state.buffers[path]
    for _ in range(2):
        with CopiesOf(counts) as seen:
            step(batch)
        assert seen.copies == 0
        assert not counts.any()
    model(batch["input_ids"], batch["labels"])  # counts, in training mode
    before = counts.clone()
    assert before.any()
    for _ in range(2):
        with CopiesOf(counts) as seen, failing(step, "backward", 1, an_error), pytest.raises(RuntimeError):
            step(batch)
        assert seen.copies == 1
        assert torch.equal(counts, before)
    step(batch)
    with failing(step, "backward", 1, an_error), pytest.raises(RuntimeError):
        step(batch)
    assert not counts.any()


class CopiesOf(TorchDispatchMode):
    """Counts the clones of a tensor within the context."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.copies, self._tensor = 0, tensor

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        same = function is torch.ops.aten.clone.default and args[0].data_ptr() == self._tensor.data_ptr()
        self.copies += bool(same)
        return function(*args, **(kwargs or {}))


def test_nothing_outlives_the_error(step: CompiledStep) -> None:
    """What a failed step saved for backward lives as long as the traceback, and no longer."""
    held: list[weakref.ref[Tensor]] = []
    original = step.program.backward

    def watched(state: Any, saved: dict[str, list[Any]]) -> None:
        held.extend(weakref.ref(value) for values in saved.values() for value in values if isinstance(value, Tensor))
        raise RuntimeError("planted")

    step.program.backward = watched  # type: ignore[attr-defined]
    try:
        step(batch_for(PLAN))
    except RuntimeError:
        pass
    finally:
        step.program.backward = original  # type: ignore[attr-defined]
    gc.collect()
    assert len(held) > 5
    assert [ref for ref in held if ref() is not None] == []


def test_a_step_in_another_thread_handles_no_signals(step: CompiledStep) -> None:
    results: list[float] = []
    thread = Thread(target=lambda: results.append(float(step(batch_for(PLAN)).loss)))
    thread.start()
    thread.join()
    assert len(results) == 1


def test_an_op_that_raises_in_backward_is_like_any_other_error() -> None:
    """From inside of an op's kernel, not from Python around it."""
    model = seeded(lambda: Language(Opaque(), Opaque()))
    step = moec.compile(model, PLAN)
    step(batch_for(PLAN))
    before = everything(step)
    Opaque.broken = True
    try:
        with pytest.raises(RuntimeError, match="this backward is broken"):
            step(batch_for(PLAN, 1))
    finally:
        Opaque.broken = False
    assert differing(before, everything(step)) == []
    step(batch_for(PLAN, 1))


@torch.library.custom_op("moec_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("moec_tests::twice_backward", mutates_args=())
def twice_backward(grad: Tensor) -> Tensor:
    if Opaque.broken:
        raise RuntimeError("this backward is broken")
    return grad * 2


twice.register_fake(torch.empty_like)
twice_backward.register_fake(torch.empty_like)
twice.register_autograd(lambda context, grad: twice_backward(grad))


class Opaque(Layer):
    broken = False

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(twice(hidden))
