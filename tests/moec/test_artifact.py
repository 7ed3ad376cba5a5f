"""Artefacts: loaded they train on without the model, edited they run as edited, damaged they are refused by name."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import moec
from moec.artifact import _device_here
from moec.compiler.errors import ArtifactError
from moec.compiler.plan import MeshPlan, Plan
from moec.preflight import device_of_program

from ..spine import PLAN, WIDTH, Language, Layer, batch_for, distance, seeded


class Buffered(Layer):
    """With a buffer that is saved, one that the model computes itself, and constants too large to write out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("table", torch.arange(1.0, WIDTH + 1), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen.add_(hidden.detach().mean((0, 1)))
        constant = torch.tensor([[0.1 * i + j for i in range(WIDTH)] for j in range(6)])
        return super().forward(hidden * self.table) * constant


def make() -> Any:
    return seeded(Language, Buffered(), Buffered(), tied=True)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a saved step, with weights; tests work on copies of it."""
    return moec.compile(make(), PLAN).save(tmp_path_factory.mktemp("artifact") / "step", weights=True)


@pytest.fixture
def folder(artifact: Path, tmp_path: Path) -> Path:
    target = tmp_path / "step"
    target.mkdir()
    for path in artifact.rglob("*"):
        other = target / path.relative_to(artifact)
        other.mkdir() if path.is_dir() else other.write_bytes(path.read_bytes())
    return target


def losses(step: moec.CompiledStep, seeds: range = range(3)) -> list[Tensor]:
    return [step(batch_for(PLAN, seed)).loss for seed in seeds]


def test_a_loaded_step_trains_on_as_the_compiled_one(folder: Path) -> None:
    """Bit for bit: loss, weights and buffers."""
    model = make()
    wanted = losses(moec.compile(model, PLAN))
    step = moec.load(folder)
    assert all(torch.equal(got, expected) for got, expected in zip(losses(step), wanted, strict=True))
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for path, value in {**step.state.weights, **step.state.buffers}.items():
        assert torch.equal(value, state[path]), path
    assert step.state.weights["head.weight"] is step.state.weights["embed.weight"]


def test_a_loaded_step_can_train_a_model_in_place(folder: Path) -> None:
    model = make()
    step = moec.load(folder, model)
    before = model.embed.weight.clone()
    losses(step)
    assert not torch.equal(model.embed.weight, before)
    assert step.state.weights["embed.weight"] is model.embed.weight


def test_another_process_needs_neither_model_nor_trace(folder: Path) -> None:
    """The program imports moec.runtime only; the front door, the passes and the models stay out."""
    program = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from moec.loading import load\n"
        f"step = load({str(folder)!r})\n"
        "ids = torch.arange(12).reshape(2, 6)\n"
        "print(float(step(ids, ids).loss))\n"
        "own = ('moec.passes', 'moec.models', 'moec.driver', 'tests')\n"
        "print([name for name in sys.modules if name.startswith(own)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/", check=True)
    loss, modules = done.stdout.splitlines()
    ids = torch.arange(12).reshape(2, 6)
    assert float(loss) == float(moec.compile(make(), PLAN)(ids, ids).loss)
    assert modules == "[]"


def test_log_plan_and_graphs_come_back(folder: Path) -> None:
    compiled, loaded = moec.compile(make(), PLAN), moec.load(folder)
    assert loaded.plan == PLAN
    assert loaded.log.records
    assert [record.name for record in loaded.log.records] == [record.name for record in compiled.log.records]
    for stage in ("captured", "fused", "joint", "placed", "lowered"):
        assert loaded.graph(stage) == compiled.graph(stage)
    assert loaded.source == compiled.source
    with pytest.raises(ArtifactError, match="no stage 'fuse'") as caught:
        loaded.graph("fuse")
    assert "fused" in caught.value.hint


def test_an_edited_program_runs_as_edited(folder: Path) -> None:
    """A residual twice as large; then back."""
    plain = losses(moec.load(folder), range(1))
    path = folder / "step.py"
    text = path.read_text()
    call = 'layer_forward(state.scope("layers.1"), layer_0)'
    edited = text.replace(call, call.replace("layer_0)", "layer_0 * 2)"))
    assert edited != text
    path.write_text(edited)
    assert distance(losses(moec.load(folder), range(1))[0], plain[0]) > 1e-3
    path.write_text(text)
    assert torch.equal(losses(moec.load(folder), range(1))[0], plain[0])


def test_an_edit_that_breaks_the_program_is_said(folder: Path) -> None:
    path = folder / "step.py"
    text = path.read_text()
    path.write_text(text + "\nthis is no Python\n")
    with pytest.raises(ArtifactError, match=r"step.py does not import") as caught:
        moec.load(folder)
    assert "SyntaxError" in caught.value.why
    path.write_text(text.replace("def update(", "def refresh("))
    with pytest.raises(ArtifactError, match=r"step.py has no update"):
        moec.load(folder)
    path.unlink()
    with pytest.raises(ArtifactError, match=r"no step.py"):
        moec.load(folder)


def test_a_gradient_of_the_wrong_shape_after_an_edit_names_the_weight(folder: Path) -> None:
    path = folder / "step.py"
    text = path.read_text()
    edited = text.replace('"gate.weight": d_gate_weight', '"gate.weight": d_gate_weight[:3]')
    assert edited != text
    path.write_text(edited)
    with pytest.raises(ArtifactError, match=r"the gradient of layers.1.gate.weight has shape \[3, 8\]"):
        losses(moec.load(folder))


def refused(folder: Path, *args: Any, **kwargs: Any) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        moec.load(folder, *args, **kwargs)
    return caught.value


def test_an_artefact_without_weights_says_so(tmp_path: Path) -> None:
    folder = moec.compile(make(), PLAN).save(tmp_path / "step")
    assert "no weights at" in refused(folder).what
    assert "save(folder, weights=True)" in refused(folder).hint


def test_weights_may_come_from_elsewhere_and_are_checked(folder: Path, tmp_path: Path) -> None:
    values = load_file(folder / "weights.safetensors")
    other = tmp_path / "other.safetensors"
    save_file({name: value * 0 for name, value in values.items()}, other)
    step = moec.load(folder, weights=other)
    assert not step.state.weights["embed.weight"].any()
    save_file({name: value for name, value in values.items() if name != "embed.weight"}, other)
    assert "has no value for embed.weight" in refused(folder, weights=other).what
    save_file({**values, "embed.weight": torch.zeros(3)}, other)
    error = refused(folder, weights=other)
    assert "embed.weight in" in error.what
    assert "the program needs float32 [16, 8]" in error.why


@pytest.mark.parametrize("name", ["fingerprint.json", "state_map.json"])
def test_missing_and_damaged_files_are_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    assert f"{name} is damaged" in refused(folder).what
    (folder / name).unlink()
    assert f"has no {name}" in refused(folder).what


def test_saving_again_forgets_older_weights(tmp_path: Path) -> None:
    step = moec.compile(make(), PLAN)
    step.save(tmp_path / "step", weights=True)
    step.save(tmp_path / "step")
    assert "no weights at" in refused(tmp_path / "step").what


def test_saved_weights_are_those_of_now(tmp_path: Path) -> None:
    model = make()
    step = moec.compile(model, PLAN)
    losses(step)
    loaded = moec.load(step.save(tmp_path / "step", weights=True))
    for path, weight in model.named_parameters():
        assert torch.equal(loaded.state.weights[path], weight)
    before = copy.deepcopy(loaded.state.weights["embed.weight"])
    losses(step)
    assert torch.equal(loaded.state.weights["embed.weight"], before), "a copy, not the model's memory"


def test_loaded_tensors_lie_at_aligned_addresses(folder: Path) -> None:
    """Where they do not, kernels sum in another order, and a run differs in its last bits after some steps."""
    step = moec.load(folder)
    tensors = [*step.state.weights.values(), *step.state.buffers.values(), *step.program.CONSTANTS.values()]
    assert {tensor.data_ptr() % 64 for tensor in tensors} == {0}


class _On:
    """A model, as far as its device goes."""

    def __init__(self, device: str) -> None:
        self._parameter = SimpleNamespace(is_meta=False, device=torch.device(device))

    def named_parameters(self) -> list[tuple[str, Any]]:
        return [("weight", self._parameter)]

    def parameters(self) -> list[Any]:
        return [self._parameter]


def test_a_program_for_several_ranks_names_no_device_number() -> None:
    """Ranks on the GPUs of one machine run the same text."""
    on_one: Any = _On("cuda:1")
    assert device_of_program(on_one, Plan()) == torch.device("cuda:1")
    assert device_of_program(on_one, Plan(mesh=MeshPlan(fsdp=2))) == torch.device("cuda")
    for saved, model, here in (
        ("cuda:0", "cuda:1", "cuda:1"),
        ("cuda", "cuda:1", "cuda"),
        ("cuda", "cpu", "cpu"),
        ("cpu", "cuda:1", "cuda"),
    ):
        on: Any = _On(model)
        assert _device_here(saved, on) == here
