"""The emitted program as text: golden files, one for each construct.

MOEC_UPDATE_GOLDEN=1 pytest tests/codegen    rewrites them from what is emitted now.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moec.codegen.function import WIDTH
from moec.compiler.plan import OptimizerPlan, Plan
from moec.driver import build

from ..spine import PLAN, Language, Layer, recomputed, seeded
from ..spine import WIDTH as HIDDEN

GOLDEN = Path(__file__).parent / "golden"


class Counting(nn.Module):
    """A layer with a buffer that it writes, a result nobody differentiates, and an input it returns."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.add_(1)
        return torch.tanh(self.proj(hidden)) * mask, hidden


class CountingLanguage(Language):
    def hidden(self, input_ids: Tensor) -> Tensor:
        hidden, mask = self.embed(input_ids), (input_ids > 2).unsqueeze(-1)
        for layer in self.layers:
            output, residual = layer(hidden, mask)
            hidden = output + residual
        return hidden


def two_templates() -> str:
    """Layers of one class with different constants, one of them computed again in backward."""
    plan = Plan(batch=2, length=6, cache=recomputed("layers.1"), optimizer=OptimizerPlan(clip_norm=0.0))
    return text_of(seeded(Language, Layer(), Layer(2.0), Layer()), plan)


def buffers_and_several_results() -> str:
    return text_of(seeded(CountingLanguage, Counting(), Counting()), PLAN)


def dynamic_length() -> str:
    plan = Plan(batch=2, length=12, dynamic="length", min_length=3, accumulation=2)
    return text_of(seeded(Language, Layer(), Layer(), tied=True), plan)


PROGRAMS: list[Callable[[], str]] = [two_templates, buffers_and_several_results, dynamic_length]


def text_of(model: nn.Module, plan: Plan) -> str:
    program = build(model, plan).program
    assert program is not None
    return program.text.replace(f"torch {torch.__version__.split('+')[0]}", "torch VERSION")


@pytest.fixture(scope="module", params=PROGRAMS, ids=lambda make: make.__name__)
def program(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Name and text of each program."""
    return request.param.__name__, request.param()


def test_the_text_is_the_golden_one(program: tuple[str, str]) -> None:
    name, text = program
    path = GOLDEN / f"{name}.py.txt"
    if os.environ.get("MOEC_UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.exists(), f"{path.name} is missing: run with MOEC_UPDATE_GOLDEN=1"
    assert text == path.read_text(), f"the program differs from golden/{path.name}; MOEC_UPDATE_GOLDEN=1 accepts it"


def test_it_imports_torch_and_the_runtime_and_nothing_else(program: tuple[str, str]) -> None:
    imports = [node for node in ast.walk(ast.parse(program[1])) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imports] == ["import torch", "from moec import runtime"]


def test_it_has_the_functions_that_a_step_calls(program: tuple[str, str]) -> None:
    functions = {node.name: node for node in ast.parse(program[1]).body if isinstance(node, ast.FunctionDef)}
    assert {"forward", "backward", "update", "step"} <= functions.keys()
    assert all(ast.get_docstring(function) for function in functions.values())


def test_lines_fit_and_hold_no_trailing_blanks(program: tuple[str, str]) -> None:
    for line in program[1].splitlines():
        assert len(line) <= WIDTH + 2, line
        assert line == line.rstrip()


def test_every_variable_goes_when_it_is_used_up(program: tuple[str, str]) -> None:
    """What a function makes, it deletes, returns or saves: Python would keep it to the end otherwise."""
    for function in ast.parse(program[1]).body:
        if not isinstance(function, ast.FunctionDef) or function.name in ("update", "step"):
            continue
        made = _names(function, ast.Store) - {"w", "saved", "grads", "results", "seed"}
        kept = {name for statement in function.body if _keeps(statement) for name in _names(statement, ast.Load)}
        inputs = {"input_ids", "labels", "inverse_tokens"}
        assert made - _names(function, ast.Del) - inputs - kept == set(), function.name


def _keeps(statement: ast.stmt) -> bool:
    """Whether a statement hands values on: a return, what is saved or reported, a new value of a buffer."""
    text = ast.unparse(statement)
    return text.startswith(("return ", "saved = ", "saved[''] = ", "results = ", "grads = ")) or ".copy_(" in text


def _names(tree: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def test_layers_of_one_template_share_one_function() -> None:
    few, many = (text_of(seeded(Language, *[Layer() for _ in range(count)]), PLAN) for count in (2, 12))
    assert many.count("def ") == few.count("def ")
    per_layer = (len(many.splitlines()) - len(few.splitlines())) / 10
    assert per_layer <= 10, "a layer costs its calls in forward and backward, not its body"
