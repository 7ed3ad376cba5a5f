"""Names of any characters: the program is Python, reads well, and everything calls a tensor by the name it has."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import moec
from moec.artifact_files import STATE_MAP
from moec.compiler.plan import Plan
from moec.overview import pass_report
from moec.runtime import load_checkpoint, save_checkpoint

from ..spine import WIDTH, Language, batch_for, distance, eager, recomputed, seeded

PLAN = Plan(batch=2, length=6, check=True)

ORDINARY = ("a-b", "1", "1a", "x y", "größe", "名", "²", "e\u0301", "😀")
OF_PYTHON = ("class", "lambda", "None", "print", "del", "_", "__init__x", "{x}", "{}", "%s", "a#b")
OF_PROGRAMS = ("w", "saved", "hidden", "step", "torch", "moec", "state", "d_hidden", "d_output", "runtime", "aten")
OF_PROGRAMS += ("grads", "seed", "lr", "batch", "results", "totals", "input_ids", "CONSTANTS", "layer_forward")
HOSTILE = ('"', "'", '"""', "'''", "\\", "t\\b", "n\nl", "\r", "\t", "\0", "\u2028", "\x85", "a,b", "a, b", "a[0", "a(")
HOSTILE += ("x = y", '"], w["', "[red]", "# x", "\u202ereversed")


class Named(nn.Module):
    """A parameter, a linear layer and a written buffer under every one of some names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.scales, self.linears, self.counts = nn.ParameterDict(), nn.ModuleDict(), nn.Module()
        for name in names:
            self.scales.register_parameter(name, nn.Parameter(torch.ones(WIDTH)))
            self.linears.add_module(name, nn.Linear(WIDTH, WIDTH))
            self.counts.register_buffer(name, torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        for name in self.names:
            scaled = hidden * (1 + 0.1 * self.scales._parameters[name])  # type: ignore[operator]
            hidden = scaled + torch.tanh(self.linears._modules[name](hidden)) * 0.1  # type: ignore[misc]
            self.counts._buffers[name].add_(1)  # type: ignore[union-attr]
        return hidden


class Region(Named):
    """The same as a layer of its own."""

    moec_region: ClassVar[bool] = True


class Everywhere(Language):
    """Names in layers that share a template, of layers themselves, and in the model itself."""

    def __init__(self, *names: str) -> None:
        super().__init__(Region(*names), Region(*names))
        self.blocks = nn.ModuleDict()
        for name in names:
            self.blocks.add_module(name, Region("plain"))
        self.own = Named(*names)

    def hidden(self, input_ids: Tensor) -> Tensor:
        hidden = self.own(super().hidden(input_ids))
        for block in self.blocks.values():
            hidden = block(hidden)
        return hidden


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(HOSTILE, id="hostile"),
        pytest.param(ORDINARY + OF_PYTHON, id="python", marks=pytest.mark.slow),
        pytest.param(OF_PROGRAMS, id="program", marks=pytest.mark.slow),
    ],
)
def test_a_model_with_such_names_is_compiled_right(names: tuple[str, ...], tmp_path: Path) -> None:
    model = seeded(Everywhere, *names)
    step, batch = moec.compile(model, PLAN), batch_for(PLAN)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss, gradients = eager(model, batch)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    assert distance(step.loss(batch)["lm_loss"], loss) <= 1e-6
    found = step.gradients(batch)
    assert found.keys() == gradients.keys()
    assert all(distance(found[name], wanted) <= 1e-5 for name, wanted in gradients.items())  # type: ignore[arg-type]
    step(batch)
    assert all(buffer == 1 for name, buffer in model.named_buffers()), "every buffer was written once"
    _keeps_its_names(step, model, tmp_path)


def _keeps_its_names(step: moec.CompiledStep, model: nn.Module, folder: Path) -> None:
    batch = batch_for(PLAN, 1)
    path = step.save(folder / "artefact", weights=True)
    state_map = json.loads((path / STATE_MAP).read_text())
    assert set(state_map["weights"]) == {name for name, _ in model.named_parameters()}
    assert set(state_map["buffers"]) == set(state_map["written"]) == {name for name, _ in model.named_buffers()}
    with safe_open(path / "weights.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(model.state_dict())
    loss = step.loss(batch)["lm_loss"]
    assert torch.equal(moec.load(path).loss(batch)["lm_loss"], loss)
    assert torch.equal(moec.load(path, model).loss(batch)["lm_loss"], loss)
    checkpoint = save_checkpoint(folder / "run", step.state, fingerprint={})
    step(batch)
    load_checkpoint(checkpoint, step.state, fingerprint={})
    assert torch.equal(step.loss(batch)["lm_loss"], loss)


def test_the_program_stays_readable() -> None:
    step = moec.compile(seeded(Everywhere, "a-b", "größe", 'say "hi"\n'), PLAN)
    source = step.source
    assert 'w["linears.größe.weight"]' in source
    assert 'w["linears.say \\"hi\\"\\n.weight"]' in source
    assert '    # linears.say "hi"\\n\n' in source
    assert 'saved["blocks.a-b"] = ' in source
    longest = max(source.splitlines(), key=len)
    assert len(longest) <= 120, longest
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    assert {"a_b", "gr_e", "say_hi"} <= names
    assert all(name.isascii() for name in names)


def test_a_value_never_hides_a_function_of_the_program() -> None:
    model = seeded(Everywhere, "region_forward", "layer_forward", "layer_backward", "step")
    step = moec.compile(model, PLAN)
    tree = ast.parse(step.source)
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        called = {n.func.id for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        assert not called & functions & stored
    step(batch_for(PLAN))


def test_log_graphs_and_inspection_show_the_name(tmp_path: Path) -> None:
    class Normed(Everywhere):
        def __init__(self, *names: str) -> None:
            super().__init__(*names)
            for name in names:
                self.own.linears._modules[name] = nn.Sequential(nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, WIDTH))

    name = 'a "b" [red]\n名'
    step = moec.compile(seeded(Normed, name), PLAN)
    (record,) = [r for r in step.log.records if r.name == "recognize_norm" and r.unit == "model"]
    assert f"own.linears.{name}.0" in {match.path for match in record.matches}
    shown = "\n".join(map(str, pass_report(step.folder, "recognize_norm")))
    assert 'own.linears.a "b" \\[red]' in shown
    graph = str(step.graph("captured"))
    assert 'own.linears.a "b" [red]\\n名.0.weight' in graph
    assert all(line.startswith(("%", "return", "#")) or not line for line in graph.splitlines())


def test_recompute_rules_reach_such_layers() -> None:
    plan = dataclasses.replace(PLAN, cache=recomputed('blocks.a "b"'))
    step = moec.compile(seeded(Everywhere, 'a "b"', "c"), plan)
    again = {unit for unit, rows in step.log.placements.items() if any(row.decision == "recompute" for row in rows)}
    assert len(again) == 1


@pytest.mark.slow
def test_text_files_do_not_depend_on_the_locale(tmp_path: Path) -> None:
    """Compiled, saved and loaded in a process whose files are ASCII by default."""
    script = (
        "import sys, moec\n"
        "from tests.moec.test_names import PLAN, Everywhere, batch_for, seeded\n"
        "step = moec.compile(seeded(Everywhere, 'gr\\u00f6\\u00dfe'), PLAN)\n"
        "loaded = moec.load(step.save(sys.argv[1], weights=True))\n"
        "assert loaded.source == step.source\n"
        "print(float(loaded.loss(batch_for(PLAN))['lm_loss']))\n"
    )
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "ascii")],
        env=os.environ | environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    step = moec.compile(seeded(Everywhere, "größe"), PLAN)
    assert float(done.stdout) == pytest.approx(float(step.loss(batch_for(PLAN))["lm_loss"]), rel=1e-6)
    assert (tmp_path / "ascii" / "step.py").read_text(encoding="utf-8") == step.source
