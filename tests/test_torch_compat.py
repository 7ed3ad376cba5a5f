"""One probe per private torch symbol that moec uses: it is there, and does what moec needs of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from moec.compiler import _torch_compat as compat


def mode() -> Any:
    return compat.FakeTensorMode(shape_env=compat.ShapeEnv(), allow_non_fake_inputs=True)


def joint(module: nn.Module, *shapes: tuple[int, ...]) -> fx.GraphModule:
    with mode():
        args = tuple(torch.empty(shape, requires_grad=True) for shape in shapes)
    graph = fx.symbolic_trace(module)
    with ExitStack() as stack:
        return compat.aot_export_joint_with_descriptors(stack, graph, args).graph_module


class Square(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x * x,)


def descriptors() -> tuple[set[type], set[type]]:
    graph = joint(Square(), (3,)).graph
    inputs = {type(node.meta["desc"]) for node in graph.find_nodes(op="placeholder")}
    return inputs, {type(description) for description in graph.output_node().meta["desc"]}


def probe_inputs() -> bool:
    return descriptors()[0] == {compat.PlainAOTInput, compat.TangentAOTInput}


def probe_outputs() -> bool:
    return descriptors()[1] == {compat.PlainAOTOutput, compat.GradAOTOutput}


def probe_mutation() -> bool:
    description = compat.InputMutationAOTOutput(mutated_input=compat.PlainAOTInput(idx=0))
    return description.mutated_input.idx == 0


def probe_fake() -> bool:
    with mode() as fakes:
        value = torch.empty(2, 3)
    return isinstance(value, compat.FakeTensor) and value.fake_mode is fakes


def probe_spin() -> bool:
    if torch.cuda.is_available():
        compat.spin(torch.device("cuda"), 1e-6)
    return callable(torch.cuda._sleep)


def probe_unset_fake() -> bool:
    with mode(), compat.unset_fake_temporarily():
        return torch.ones(2).tolist() == [1.0, 1.0]


def probe_data_dependent() -> bool:
    with mode():
        value = torch.ones(2)
        try:
            torch.ops.aten.equal.default(value, value)
        except compat.DataDependentOutputException:
            return True
    return False


def probe_op() -> bool:
    op = torch.ops.aten.mul.Tensor
    return isinstance(op, compat.OpOverload) and op._schema.name == "aten::mul"


def probe_higher_order() -> bool:
    return isinstance(torch.ops.higher_order.wrap_with_set_grad_enabled, compat.HigherOrderOperator)


def probe_schema() -> bool:
    return [a.name for a in compat.parse_schema("moec::probe(Tensor x, int n=2) -> Tensor").arguments] == ["x", "n"]


def probe_dispatch_mode() -> bool:
    seen = []

    class Recorder(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Recorder():
        torch.ones(2).neg()
    return torch.ops.aten.neg.default in seen


def probe_pytree() -> bool:
    leaves, spec = compat.pytree.tree_flatten(((1, [2]), {"a": 3}))
    return leaves == [1, 2, 3] and compat.pytree.tree_unflatten(leaves, spec) == ((1, [2]), {"a": 3})


def probe_make_fx() -> bool:
    graph = compat.make_fx(lambda x: torch.nn.functional.linear(x, x), pre_dispatch=True)(torch.ones(2, 2))
    return any(node.target is torch.ops.aten.linear.default for node in graph.graph.nodes)


def probe_python_dispatcher() -> bool:
    with compat.enable_python_dispatcher():
        return torch.ones(2).sum().item() == 2


def probe_set_grad_enabled() -> bool:
    before = torch.is_grad_enabled()
    compat.set_grad_enabled_op(False)
    off = not torch.is_grad_enabled()
    compat.set_grad_enabled_op(before)
    return off


def probe_boxed() -> bool:
    graph = fx.symbolic_trace(Square())
    graph.graph.set_codegen(compat.BoxedCodeGen())
    graph.recompile()
    arguments = [torch.full((2,), 3.0)]
    (result,) = graph(arguments)
    return result.tolist() == [9.0, 9.0] and arguments == []


def probe_aot_autograd() -> bool:
    compiled = []

    def compiler(graph: fx.GraphModule, _: Any) -> Any:
        compiled.append(graph)
        graph.graph.set_codegen(compat.BoxedCodeGen())
        graph.recompile()

        def run(arguments: list[Any]) -> Any:
            return graph(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = compat.aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=compat.default_partition)
    torch._dynamo.reset()
    x = torch.full((2,), 3.0, requires_grad=True)
    torch.compile(lambda value: (value * value).sum(), backend=backend)(x).backward()
    return x.grad is not None and x.grad.tolist() == [6.0, 6.0] and len(compiled) == 2


def probe_autocast() -> bool:
    on, off = (torch.autocast("cpu", torch.bfloat16, enabled=enabled) for enabled in (True, False))
    return compat.autocast_is_enabled(on) and not compat.autocast_is_enabled(off)


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def probe_default_store() -> bool:
    with one_rank():
        compat.default_store().set("probe", "1")
        return compat.default_store().clone().get("probe") == b"1"


def probe_group_names() -> bool:
    def total() -> list[float]:
        result = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", "probe")
        return torch.ops._c10d_functional.wait_tensor(result).tolist()

    with one_rank():
        compat.register_process_group("probe", dist.new_group([0]))
        found = total()
        compat.unregister_process_group("probe")
        with pytest.raises(RuntimeError, match="probe"):
            total()
    return found == [1.0, 1.0]


def probe_group_timeout() -> bool:
    with one_rank():
        group = dist.new_group([0], timeout=timedelta(seconds=60))
        compat.set_process_group_timeout(timedelta(seconds=5), group)
        options = group._get_backend(torch.device("cpu")).options
        return options._timeout == timedelta(seconds=5)


def probe_has_kernel() -> bool:
    library = torch.library.Library("moec_probe", "DEF")
    library.define("hollow(Tensor x) -> Tensor")
    hollow = torch.ops.moec_probe.hollow.default
    found = [compat.has_kernel(op, "cpu") for op in (torch.ops.aten.mm.default, torch.ops.aten.reshape.default, hollow)]
    library._destroy()
    return found == [True, True, False]


PROBES: dict[str, Callable[[], bool]] = {
    "AOTInput": lambda: issubclass(compat.PlainAOTInput, compat.AOTInput),
    "AOTOutput": lambda: issubclass(compat.PlainAOTOutput, compat.AOTOutput),
    "BoxedCodeGen": probe_boxed,
    "DataDependentOutputException": probe_data_dependent,
    "FakeTensor": probe_fake,
    "FakeTensorMode": probe_fake,
    "GradAOTOutput": probe_outputs,
    "HigherOrderOperator": probe_higher_order,
    "InputMutationAOTOutput": probe_mutation,
    "OpOverload": probe_op,
    "PlainAOTInput": probe_inputs,
    "PlainAOTOutput": probe_outputs,
    "ShapeEnv": probe_fake,
    "TangentAOTInput": probe_inputs,
    "TorchDispatchMode": probe_dispatch_mode,
    "aot_autograd": probe_aot_autograd,
    "aot_export_joint_with_descriptors": probe_inputs,
    "autocast_is_enabled": probe_autocast,
    "default_partition": probe_aot_autograd,
    "default_store": probe_default_store,
    "enable_python_dispatcher": probe_python_dispatcher,
    "has_kernel": probe_has_kernel,
    "make_fx": probe_make_fx,
    "parse_schema": probe_schema,
    "pytree": probe_pytree,
    "register_process_group": probe_group_names,
    "set_grad_enabled_op": probe_set_grad_enabled,
    "set_process_group_timeout": probe_group_timeout,
    "spin": probe_spin,
    "unregister_process_group": probe_group_names,
    "unset_fake_temporarily": probe_unset_fake,
}


def test_every_symbol_has_a_probe() -> None:
    assert sorted(PROBES) == sorted(compat.__all__)


@pytest.mark.parametrize("name", PROBES)
def test_probe(name: str) -> None:
    assert hasattr(compat, name)
    assert PROBES[name]()
