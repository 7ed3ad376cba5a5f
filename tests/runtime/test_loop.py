"""The loop: exact resume, metrics that survive a kill, and stopping where numbers stop being numbers."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from moec.compiler.errors import CheckpointError, DataError, MoecError, NonFiniteError, PlanError
from moec.runtime import StepResult, train
from moec.runtime.loop import RESUMES
from moec.runtime.metrics import METRICS, JsonLines, read_metrics
from tests.runtime.toy import ToyStep, toy_data, toy_step, write_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "text")


def _quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def _bits(step: ToyStep) -> dict[str, Any]:
    """Everything that must be equal after a resume."""
    tensors = {name: tensor.clone() for name, tensor in step.state.tensors().items()}
    return tensors | {"step": step.state.step, "updates": dict(step.state.updates), "random": torch.get_rng_state()}


def _assert_same_bits(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]) if isinstance(value, Tensor) else value == right[name], name


def _untimed(out: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if name not in ("seconds", "tokens_per_second")}
        for record in read_metrics(out)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_resume_is_bit_equal(tmp_path: Path, corpus: Path, dtype: torch.dtype, tied: bool) -> None:
    whole, data = toy_step(tied, dtype), toy_data(corpus)
    train(whole, data, steps=9, out=tmp_path / "whole", checkpoint_every=2, console=_quiet())
    expected, position = _bits(whole), data.state_dict()

    first = toy_step(tied, dtype)
    train(first, toy_data(corpus), steps=4, out=tmp_path / "cut", checkpoint_every=2, console=_quiet())
    for disturbance in (random.random, lambda: torch.rand(3)):
        disturbance()
    second, data = toy_step(tied, dtype, seed=77), toy_data(corpus)
    summary = train(second, data, steps=9, out=tmp_path / "cut", resume=True, console=_quiet())

    _assert_same_bits(_bits(second), expected)
    assert data.state_dict() == position
    assert _untimed(tmp_path / "cut") == _untimed(tmp_path / "whole")
    assert (summary.first_step, summary.last_step, len(summary.losses)) == (4, 9, 5)
    assert summary.checkpoint.name == "step-00000009"


def test_a_resume_notes_what_changed(tmp_path: Path, corpus: Path) -> None:
    train(toy_step(), toy_data(corpus), steps=2, out=tmp_path, console=_quiet())
    assert not (tmp_path / RESUMES).exists()
    console = _quiet()
    train(toy_step(total_steps=50), toy_data(corpus), steps=3, out=tmp_path, resume=True, console=console)
    train(toy_step(total_steps=50), toy_data(corpus), steps=4, out=tmp_path, resume=True, console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("  steps was 100, now it is 50\n") == 1
    assert [json.loads(line) for line in (tmp_path / RESUMES).read_text().splitlines()] == [
        {"step": 2, "checkpoint": "step-00000002", "changed": {"steps": [100, 50]}},
        {"step": 3, "checkpoint": "step-00000003", "changed": {}},
    ]


def test_a_resume_without_its_random_state_would_be_noticed(tmp_path: Path, corpus: Path) -> None:
    """The toy's dropout makes the equality above depend on the random state."""
    whole = toy_step()
    train(whole, toy_data(corpus), steps=4, out=tmp_path / "a", console=_quiet())
    expected = _bits(whole)
    other, data = toy_step(), toy_data(corpus)
    for number in range(4):
        if number == 2:
            torch.manual_seed(5)
        other(next(data))
    assert not torch.equal(other.state.weights["mix.weight"], expected["weights.mix.weight"])


def test_training_learns_and_reports(tmp_path: Path, corpus: Path) -> None:
    seen: list[tuple[int, float]] = []
    console = _quiet()
    summary = train(
        toy_step(total_steps=40),
        toy_data(corpus, batch=4),
        steps=40,
        out=tmp_path / "out",
        on_step=lambda number, result: seen.append((number, float(result.loss))),
        console=console,
    )
    assert summary.losses[-1] < 0.9 * summary.losses[0]
    assert seen == list(enumerate(summary.losses, start=1))
    assert summary.tokens == 40 * 4 * 2 * 16
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.startswith("5 files, ")
    assert f"step 40/40  loss {summary.losses[-1]:.4f}" in text
    assert len([line for line in text.splitlines() if line.startswith("step ")]) == 21
    records = read_metrics(tmp_path / "out")
    assert [record["step"] for record in records] == list(range(1, 41))
    assert set(records[0]) == {"step", "loss", "gradient_norm", "tokens", "seconds", "tokens_per_second", "lr"}


def test_a_terminal_gets_a_bar(tmp_path: Path, corpus: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    summary = train(toy_step(), toy_data(corpus), steps=3, out=tmp_path / "out", console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3/3" in text
    assert "left" in text
    assert f"loss {summary.losses[-1]:.4f}" in text
    assert "tokens/s" in text


class Failing:
    """A step that from step `bad` on gives a loss, or a gradient, that is not finite."""

    def __init__(self, inner: ToyStep, bad: int, where: str) -> None:
        self._inner, self._bad, self._where = inner, bad, where
        self.state, self.fingerprint, self.settings = inner.state, inner.fingerprint, inner.settings

    def __call__(self, batch: Mapping[str, Tensor], /) -> StepResult:
        failing = self.state.step + 1 >= self._bad
        if failing and self._where == "gradient":
            self._inner.model.scale.fill_(float("nan"))
        result = self._inner(batch)
        return StepResult(torch.tensor(float("nan")), result.gradient_norm, result.tokens) if failing else result


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_last_good_checkpoint(
    tmp_path: Path, corpus: Path, where: str
) -> None:
    step = Failing(toy_step(), 4, where)
    with pytest.raises(NonFiniteError, match="step 4: the ") as caught:
        train(step, toy_data(corpus), steps=9, out=tmp_path, checkpoint_every=2, console=_quiet())
    assert f"the last good checkpoint is {tmp_path / 'checkpoints' / 'step-00000002'}" in caught.value.hint
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    if where == "gradient":
        assert "gradients of embed.weight" in caught.value.where
        assert all(torch.isfinite(weight).all() for weight in step.state.weights.values())


def test_without_any_checkpoint_the_error_says_so(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(NonFiniteError, match="there is no checkpoint yet"):
        train(Failing(toy_step(), 1, "loss"), toy_data(corpus), steps=2, out=tmp_path, console=_quiet())


def test_a_run_is_never_overwritten(tmp_path: Path, corpus: Path) -> None:
    train(toy_step(), toy_data(corpus), steps=1, out=tmp_path / "out", console=_quiet())
    with pytest.raises(CheckpointError, match=r"out already holds a run\n  do:    resume it"):
        train(toy_step(), toy_data(corpus), steps=2, out=tmp_path / "out", console=_quiet())


def test_resume_needs_a_run_but_not_yet_a_checkpoint(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no run in .*out to resume"):
        train(toy_step(), toy_data(corpus), steps=2, out=tmp_path / "out", resume=True, console=_quiet())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / METRICS).write_text('{"step": 1, "loss": 9.0}\n')
    console = _quiet()
    train(toy_step(), toy_data(corpus), steps=2, out=tmp_path / "out", resume=True, console=console)
    assert "yet, starting from the beginning" in console.file.getvalue()  # type: ignore[attr-defined]
    assert [record["step"] for record in read_metrics(tmp_path / "out")] == [1, 2]
    assert read_metrics(tmp_path / "out")[0]["loss"] != 9.0


def test_a_finished_run_resumes_to_nothing(tmp_path: Path, corpus: Path) -> None:
    train(toy_step(), toy_data(corpus), steps=3, out=tmp_path, console=_quiet())
    summary = train(toy_step(), toy_data(corpus), steps=3, out=tmp_path, resume=True, console=_quiet())
    assert (summary.first_step, summary.last_step, summary.losses) == (3, 3, ())
    assert len(read_metrics(tmp_path)) == 3


def test_other_data_or_another_plan_do_not_resume(tmp_path: Path, corpus: Path) -> None:
    train(toy_step(), toy_data(corpus), steps=1, out=tmp_path / "out", console=_quiet())
    with pytest.raises(DataError, match="seed was 3, now it is 4"):
        train(toy_step(), toy_data(corpus, seed=4), steps=2, out=tmp_path / "out", resume=True, console=_quiet())
    other = toy_step(plan={"length": 32})
    with pytest.raises(CheckpointError, match=r"plan\.length was 16, now it is 32"):
        train(other, toy_data(corpus), steps=2, out=tmp_path / "out", resume=True, console=_quiet())


def test_no_steps_is_an_error(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(PlanError, match="steps is 0"):
        train(toy_step(), toy_data(corpus), steps=0, out=tmp_path, console=_quiet())


def test_metrics_are_on_disk_after_every_line(tmp_path: Path) -> None:
    log = JsonLines(tmp_path, 0)
    log.write(1, {"loss": 2.5, "norm": float("inf")})
    assert (tmp_path / METRICS).read_text() == '{"step": 1, "loss": 2.5, "norm": null}\n'
    log.close()


@pytest.mark.parametrize("torn", ["", '{"step": 4, "lo', '{"step": 4, "loss": 1.0}'])
def test_metrics_are_cut_behind_the_resumed_step(tmp_path: Path, torn: str) -> None:
    lines = "".join(json.dumps({"step": number, "loss": number / 2}) + "\n" for number in (1, 2, 3))
    (tmp_path / METRICS).write_text(lines + torn)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    log = JsonLines(tmp_path, 2)
    log.write(3, {"loss": 7.0})
    log.close()
    assert [(record["step"], record["loss"]) for record in read_metrics(tmp_path)] == [(1, 0.5), (2, 1.0), (3, 7.0)]
    assert read_metrics(tmp_path / "nowhere") == []


def test_tensorboard_gets_every_step_once(tmp_path: Path, corpus: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(toy_step(), toy_data(corpus), steps=2, out=tmp_path, tensorboard=True, console=_quiet())
    train(toy_step(), toy_data(corpus), steps=4, out=tmp_path, tensorboard=True, resume=True, console=_quiet())
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(record["step"], pytest.approx(record["loss"])) for record in read_metrics(tmp_path)]


def test_without_tensorboard_the_error_says_what_to_install(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MoecError, match=r"pip install 'moec\[tensorboard\]'"):
        train(toy_step(), toy_data(corpus), steps=1, out=tmp_path, tensorboard=True, console=_quiet())
