"""What the tests of passes share: units from modules, running them under autograd, golden texts.

MOEC_UPDATE_GOLDEN=1 pytest tests/passes    rewrites the golden files from what the passes yield now.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moec.compiler.grad_modes import inline_grad_modes
from moec.compiler.graph import InputValue, OutputValue, Signature, Unit, op_histogram
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.plan import Plan
from moec.passes import SEMANTIC_PASSES
from moec.passes.normalize import Normalize

GOLDEN = Path(__file__).parent / "golden"

ONE_RANK = tuple(step for step in SEMANTIC_PASSES if step.name != "shard_experts")
"""The semantic passes for a plan of one rank."""


def unit_of(module: nn.Module, *args: Any, name: str = "unit", dynamic_shapes: Any = None) -> Unit:
    """The unit of `module` traced on `args`, as a capture makes it: weights, buffers and inputs are placeholders."""
    exported = torch.export.export(module, args, strict=False, dynamic_shapes=dynamic_shapes)
    kinds = {"PARAMETER": "weight", "BUFFER": "buffer", "USER_INPUT": "input"}
    inputs = []
    parameters = dict(module.named_parameters(remove_duplicate=False))
    floats = {node.name for node in exported.graph.find_nodes(op="placeholder") if _is_floating(node.meta.get("val"))}
    for spec in exported.graph_signature.input_specs:
        kind = kinds[spec.kind.name]
        trained = kind == "weight" and parameters[str(spec.target)].requires_grad
        grad = trained or (kind == "input" and spec.arg.name in floats)
        inputs.append(InputValue(kind, str(spec.target or spec.arg.name), grad))
    count = len(exported.graph_module.graph.output_node().args[0])
    outputs = tuple(OutputValue("result", f"result{index}") for index in range(count))
    unit = Unit(name, exported.graph_module, Signature(tuple(inputs), outputs))
    inline_grad_modes(unit.module, [node for node, value in unit.placeholders() if value.requires_grad])
    return unit


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def run_unit(unit: Unit, module: nn.Module, args: Sequence[Any]) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Results of the unit's graph on the module's weights, and gradients of a quadratic function of the results."""
    state = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    given = iter(torch.utils._pytree.tree_leaves([list(args)]))
    leaves: dict[str, Tensor] = {}
    values = []
    for value in unit.signature.inputs:
        tensor = state[value.name].detach().clone() if value.kind != "input" else next(given)
        if isinstance(tensor, Tensor):
            tensor = tensor.detach().clone().requires_grad_(tensor.is_floating_point() and value.kind != "buffer")
            leaves[value.name] = tensor
        values.append(tensor)
    unit.module.recompile()
    results = [result for result in unit.module(*values) if isinstance(result, Tensor)]
    objective = sum(_distance(r) for r in results if r.is_floating_point() and r.requires_grad)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if not isinstance(objective, Tensor):
        return results, dict.fromkeys(wanted)
    grads = torch.autograd.grad(objective, list(wanted.values()), allow_unused=True)
    return [result.detach() for result in results], dict(zip(wanted, grads, strict=True))


def _distance(result: Tensor) -> Tensor:
    """Squared distance to fixed values, so that also a norm's scale gets a gradient."""
    fixed = torch.arange(result.numel(), dtype=torch.float64).cos().view(result.shape)
    return (result.double() - fixed).square().sum()


def apply(passes: Sequence[Pass], unit: Unit, *, documents: bool = True, plan: Plan | None = None) -> list[Report]:
    """Run passes over one unit as the pipeline does; returns their reports.

    documents: whether inputs [B, T] of whole numbers are document ids, as in a capture.
    """
    reports = []
    context = PassContext(plan=plan, documents={unit.name: _tables(unit) if documents else ()})
    for step in passes:
        reports.append(step.run(unit, context))
        unit.graph.eliminate_dead_code()
        unit.graph.lint()
        unit.module.recompile()
    return reports


def _tables(unit: Unit) -> list[str]:
    values = [(value, node.meta.get("val")) for node, value in unit.placeholders() if value.kind == "input"]
    return [v.name for v, t in values if isinstance(t, Tensor) and t.dim() == 2 and not t.is_floating_point()]


def check(
    step: Pass,
    module: nn.Module,
    *args: Any,
    before: Sequence[Pass] = (),
    bound: float = 1e-6,
    exact: bool = False,
    plan: Plan | None = None,
) -> tuple[Unit, Report]:
    """Run normalize, `before` and then `step` on the unit of `module`, and compare results and gradients.

    bound: on |a - b| / |b| per tensor, but 1e-5 at least for gradients. exact: bitwise instead. Returns the rewritten
    unit and the report of `step`.
    """
    unit = unit_of(module, *args)
    wanted = run_unit(unit, module, args)
    *_, report = apply([*([] if isinstance(step, Normalize) else [Normalize()]), *before, step], unit, plan=plan)
    compare(run_unit(unit, module, args), wanted, bound=bound, exact=exact)
    return unit, report


def compare(
    found: tuple[list[Tensor], dict[str, Tensor | None]],
    wanted: tuple[list[Tensor], dict[str, Tensor | None]],
    bound: float = 1e-6,
    exact: bool = False,
) -> None:
    """Assert that two results of `run_unit` are equal within `bound`, or bitwise."""
    pairs = [(f"result{i}", a, b) for i, (a, b) in enumerate(zip(found[0], wanted[0], strict=True))]
    pairs += [(f"gradient of {name}", found[1][name], grad) for name, grad in wanted[1].items()]  # type: ignore[list-item]
    assert found[1].keys() == wanted[1].keys()
    for name, a, b in pairs:
        assert (a is None) == (b is None), f"{name}: {a is None} {b is None}"
        if a is None or b is None:
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        if exact or not a.is_floating_point():
            assert torch.equal(a, b), name
        else:
            error = float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
            assert error <= (bound if name.startswith("result") else max(bound, 1e-5)), f"{name}: {error:.2e}"


def counts(unit: Unit) -> dict[str, int]:
    """How often each dialect op is called in the unit, by its bare name."""
    return {k.split(".")[1]: n for k, n in op_histogram(unit.graph).items() if k.startswith("moec.")}


def what(report: Report) -> list[str]:
    """The texts of the report's matches."""
    return [match.what for match in report.matches]


def reasons(report: Report) -> list[str]:
    """'what: reason' of the report's near misses."""
    return [f"{miss.what}: {miss.reason}" for miss in report.near_misses]


def graph_text(unit: Unit) -> str:
    """The unit's graph, one op a line, with shapes and dtypes."""
    lines = []
    for node in unit.graph.nodes:
        value = node.meta.get("val")
        shape = f"{str(value.dtype)[6:]}{list(value.shape)}" if isinstance(value, Tensor) else ""
        call = f"{node.op} " if node.op != "call_function" else ""
        target = "" if node.op in ("placeholder", "output") else getattr(node.target, "__name__", str(node.target))
        if hasattr(node.target, "_schema"):
            target = str(node.target)
        args = ", ".join([*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
        lines.append(f"{node.name} = {call}{target}({args})  {shape}".rstrip())
    return "\n".join(lines) + "\n"


def assert_golden(name: str, text: str) -> None:
    """Compare with tests/passes/golden/NAME.txt."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("MOEC_UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.exists(), f"{path.name} is missing: run with MOEC_UPDATE_GOLDEN=1"
    assert text == path.read_text(), f"the graph differs from golden/{path.name}; MOEC_UPDATE_GOLDEN=1 accepts it"


class Call(nn.Module):
    """A function as a module, with parameters given by name."""

    def __init__(self, function: Callable[..., Any], **parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *args: Any) -> Any:
        return self.function(*args, **dict(self._parameters))
