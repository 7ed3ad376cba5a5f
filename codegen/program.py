"""The step program: `step.py` as text, from the partitioned units.

The program is one Python module:

    <template>_forward(w, ...)      one per layer template: results, and the list of values that its backward needs
    <template>_backward(w, saved, ...)   gradients of the inputs, and a dict of weight gradients
    forward(state, batch)           the whole model, one call per layer
    backward(state, saved)          the reverse; adds weight gradients to the state as soon as they exist
    update(state, lr)               clipping, AdamW, balancing
    step(state, batches, lr)        one optimizer step over all microbatches

`w` maps names of weights and buffers relative to the layer ("mixer.q_proj.weight") to tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from moec.codegen.buffer_writes import BufferWrites, buffer_writes
from moec.codegen.cache_calls import CACHE_HANDLERS, copies_of, names_of_fetched, uses_cache
from moec.codegen.function import INDENT, FunctionWriter, fold, identifier
from moec.compiler.cache_schedule import END, CacheSchedule
from moec.compiler.collectives import WAIT
from moec.compiler.differentiate import is_getitem
from moec.compiler.graph import OutputValue, Signature
from moec.compiler.partition import Partitioned
from moec.compiler.template import Template
from moec.compiler.text import in_docstring, quoted

OBJECTIVE = "objective"
_REDUCE = torch.ops._c10d_functional.reduce_scatter_tensor.default


@dataclass(frozen=True)
class ProgramText:
    """The emitted module and the tensors it refers to as CONSTANTS."""

    text: str
    constants: dict[str, Tensor]


@dataclass(frozen=True)
class Section:
    """A layer template with its graphs."""

    template: Template
    parts: Partitioned


@dataclass(frozen=True)
class HostCopies:
    """Values that wait in host memory. schedule: when their copies start and end; pool_bytes: of host memory."""

    schedule: CacheSchedule
    pool_bytes: int


def write_program(
    header: str,
    device: torch.device,
    sections: Sequence[Section],
    outer: Partitioned,
    results: Sequence[OutputValue],
    tied: Mapping[str, str],
    update: str,
    cache: HostCopies | None = None,
) -> ProgramText:
    """The text of step.py.

    header: its docstring. results: what outer gives. tied: other path of a weight or buffer -> its owner.
    update: body of update(). cache: what goes to host memory, if anything does.
    """
    constants: dict[str, Tensor] = {}
    blocks: list[str] = []
    for section in sections:
        blocks += _template_functions(section, constants)
    by_name = {section.template.name: section for section in sections}
    forward, saved_names = _model_forward(by_name, outer, results, tied, constants, cache)
    blocks += [forward, _model_backward(by_name, outer, saved_names, constants, cache)]
    blocks.append(_function("def update(state, lr):", [f'"""{_UPDATE_DOC}"""', *update.splitlines()]))
    blocks.append(_STEP)
    blocks.insert(0, _preamble(header, device, "\n".join(blocks), cache))
    return ProgramText("\n\n\n".join(blocks) + "\n", constants)


def _preamble(header: str, device: torch.device, body: str, cache: HostCopies | None) -> str:
    index = f", {device.index}" if device.index is not None else ""
    kernels = any(f"moec.{op}_triton" in body for op in ("kda", "kda_with_state"))
    collectives = "c10d." in body
    return "\n".join(
        [
            f'"""{in_docstring(header)}\n"""',
            "",
            "import torch",
            "",
            *(["import moec.codegen.triton  # registers the kernels called below"] if kernels else []),
            "from moec import runtime",
            "",
            "aten = torch.ops.aten",
            "moec = torch.ops.moec",
            *(["c10d = torch.ops._c10d_functional"] if collectives else []),
            f'DEVICE = torch.device("{device.type}"{index})',
            "CONSTANTS = runtime.load_constants(__file__, DEVICE)",
            *(
                [f"HOST_POOL = {cache.pool_bytes}  # bytes of host memory for values that backward fetches"]
                if cache
                else []
            ),
        ]
    )


def _template_functions(section: Section, constants: dict[str, Tensor]) -> list[str]:
    template, parts = section.template, section.parts
    signature = parts.joint.unit.signature
    inputs = list(_locals(signature).values())
    forward_arguments = ["w", *(["cache"] if uses_cache(parts) else []), *inputs]
    saved_inputs = _inputs_of_backward(parts)
    forward = FunctionWriter(
        parts.forward,
        given=_input_texts(parts, parts.forward),
        owned=set(),
        taken={*forward_arguments, *_RESERVED},
        handlers=CACHE_HANDLERS,
        attributes=parts.joint.module,
        constants=constants,
    )
    outputs = list(parts.forward.output_node().args[0])  # type: ignore[arg-type]
    body = [f'"""{in_docstring(_template_doc(section))}"""', *forward.lines(outputs)]
    count = len(outputs) - len(parts.saved)
    values = [forward.text(node) for node in outputs]
    body += fold(f"saved = [{', '.join([*values[count:], *saved_inputs])}]")
    body.append(f"return {_one_or_tuple(values[:count])}, saved")
    blocks = [_function(f"def {template.name}_forward({', '.join(forward_arguments)}):", body)]
    if parts.joint.grads:
        saved_names = [forward.text(node) for node in outputs[count:]]
        blocks.append(_template_backward(section, saved_names, saved_inputs, constants))
    return blocks


def _template_backward(
    section: Section, saved_names: list[str], saved_inputs: list[str], constants: dict[str, Tensor]
) -> str:
    template, parts = section.template, section.parts
    signature = parts.joint.unit.signature
    tangents = {
        index: f"d_output_{index}" if len(parts.joint.tangents) > 1 else "d_output" for index in parts.joint.tangents
    }
    given = _input_texts(parts, parts.backward)
    unpack = [*saved_names, *saved_inputs]
    writer = FunctionWriter(
        parts.backward,
        given=given,
        owned={*tangents.values(), *unpack},
        taken={*tangents.values(), *unpack, *_RESERVED},
        handlers=CACHE_HANDLERS,
        attributes=parts.joint.module,
        constants=constants,
    )
    for node in parts.backward.find_nodes(op="placeholder"):
        kind, index = node.meta["role"]
        if kind == "saved":
            given[node] = saved_names[index]
        elif kind == "tangent":
            given[node] = tangents[index]
    body = [f'"""Gradients of {template.name}_forward."""']
    body += [*fold(f"[{', '.join(unpack)}] = saved"), "saved.clear()"] if unpack else []
    grads = dict(zip(parts.joint.grads, parts.backward.output_node().args[0], strict=True))  # type: ignore[arg-type]
    writer.wishes = {node: f"d_{_short(signature.inputs[index].name)}" for index, node in grads.items()}
    writer.wishes |= names_of_fetched(parts.backward, given)
    body += writer.lines(node for node in grads.values() if isinstance(node, fx.Node))
    of_inputs, of_buckets, of_weights = list[str](), list[str](), list[str]()
    for index, node in grads.items():
        value = signature.inputs[index]
        if value.kind == "weight":
            of_weights.append(f"{quoted(value.name)}: {writer.text(node)}")
        else:
            (of_inputs if value.kind == "input" else of_buckets).append(writer.text(node))
    found = [*of_inputs, *of_buckets]
    if _returns_weights(section):
        body += fold(f"grads = {{{', '.join(of_weights)}}}") if len(of_weights) < 3 else _dict_lines(of_weights)
        body.append(f"return {_one_or_tuple(found) if found else None}, grads")
    else:
        body.append(f"return {_one_or_tuple(found)}")
    cache = ["cache"] if uses_cache(parts) else []
    arguments = ["w", *cache, *_buckets(signature), "saved", *tangents.values()]
    return _function(f"def {template.name}_backward({', '.join(arguments)}):", body)


def _returns_weights(section: Section) -> bool:
    """Whether a layer's backward returns gradients by weight name, beside those of its inputs and buckets."""
    signature = section.parts.joint.unit.signature
    by_name = any(signature.inputs[index].kind == "weight" for index in section.parts.joint.grads)
    return by_name or not _buckets(signature)


def _buckets(signature: Signature) -> list[str]:
    """Variables of the gathered buckets that a layer takes."""
    return [name for index, name in _locals(signature).items() if signature.inputs[index].kind == "bucket"]


def _model_forward(
    sections: Mapping[str, Section],
    outer: Partitioned,
    results: Sequence[OutputValue],
    tied: Mapping[str, str],
    constants: dict[str, Tensor],
    cache: HostCopies | None,
) -> tuple[str, list[str]]:
    schedule = cache.schedule if cache else CacheSchedule()
    signature = outer.joint.unit.signature
    outputs = list(outer.forward.output_node().args[0])  # type: ignore[arg-type]
    count, written = len(outer.joint.results), list(outer.joint.buffers)
    final = list(zip(written, outputs[count : count + len(written)], strict=True))
    writes = buffer_writes(outer.forward, {n: s.template for n, s in sections.items()}, tied, final)
    names = {signature.inputs[index].name: name for index, name in _locals(signature).items()}
    parked = {name: node for node, name in outer.copies().items() if node.graph is outer.forward}
    writer = FunctionWriter(
        outer.forward,
        given=_input_texts(outer, outer.forward),
        owned=set(),
        taken={*names.values(), *_RESERVED, *_functions(sections)},
        handlers={
            torch.ops.moec.region.default: _region_handler(sections, writes, schedule, parked),
            **CACHE_HANDLERS,
        },
        attributes=outer.joint.module,
        constants=constants,
        section=_layer_of,
        own_heading="the model itself",
    )
    saved_values = outputs[count + len(written) :]
    statements = writer.lines([*outputs[:count], *(value for _, value in writes.at_end), *saved_values])
    body = ['"""Results of one microbatch by name, and what backward() needs."""', 'w = state.scope("")']
    body += [f"{local} = batch[{quoted(name)}]" for name, local in names.items() if _is_used(outer, name)]
    body += [*(["cache = state.host_cache(HOST_POOL)"] if cache else []), "saved = {}", *statements]
    body += copies_of(schedule.release.get(END, ()), "release", lambda name: writer.text(parked[name]))
    body += [line for name, value in writes.at_end for line in fold(_write(name, writer.text(value)))]
    saved = [writer.text(node) for node in saved_values]
    body += fold(f'saved[""] = [{", ".join([*saved, *_inputs_of_backward(outer)])}]')
    pairs = []
    for value, node in zip(results, outputs[:count], strict=True):
        if value.kind == "overflow":
            body.append(f"state.note_overflow({quoted(value.name)}, {writer.text(node)}, capacity={value.capacity})")
        else:
            pairs.append(f"{quoted(value.name)}: {writer.text(node)}")
    body += fold(f"results = {{{', '.join(pairs)}}}")
    body.append("return results, saved")
    return _function("def forward(state, batch):", body), saved


def _model_backward(
    sections: Mapping[str, Section],
    outer: Partitioned,
    saved_names: list[str],
    constants: dict[str, Tensor],
    cache: HostCopies | None,
) -> str:
    schedule = cache.schedule if cache else CacheSchedule()
    signature, joint = outer.joint.unit.signature, outer.joint
    saved_inputs = _inputs_of_backward(outer)
    given = _input_texts(outer, outer.backward)
    own_copies = {node.name: text for node, text in zip(outer.saved, saved_names, strict=True)}
    writer = FunctionWriter(
        outer.backward,
        given=given,
        owned={*saved_names, *saved_inputs},
        taken={*saved_names, *saved_inputs, *_RESERVED, *_functions(sections)},
        handlers={
            torch.ops.moec.region_backward.default: _region_backward_handler(sections, schedule, own_copies),
            WAIT: _reduced_handler,
            **CACHE_HANDLERS,
        },
        attributes=joint.module,
        constants=constants,
        section=_layer_of,
        own_heading="the model itself",
    )
    seed_dtype = torch.float32
    for node in outer.backward.find_nodes(op="placeholder"):
        kind, index = node.meta["role"]
        if kind == "saved":
            given[node] = saved_names[index]
        elif kind == "tangent":
            given[node] = "seed"
            seed_dtype = node.meta["val"].dtype
    grads = dict(zip(joint.grads, outer.backward.output_node().args[0], strict=True))  # type: ignore[arg-type]
    own: dict[fx.Node, list[str]] = {}
    for index, node in grads.items():
        if isinstance(node, fx.Node) and not _is_layer_grad(node, sections) and not _is_reduced(node):
            own.setdefault(node, []).append(signature.inputs[index].name)
    writer.after = {node: _accumulations(wanted) for node, wanted in own.items() if node.op == "call_function"}
    writer.wishes = names_of_fetched(outer.backward, given)
    unpack = [*saved_names, *saved_inputs]
    body = ['"""Add the gradients of one microbatch to the state."""', 'w = state.scope("")']
    body += [*fold(f'[{", ".join(unpack)}] = saved.pop("")')] if unpack else []
    if cache:
        body.append("cache = state.host_cache(HOST_POOL)")
        body += copies_of(schedule.prefetch.get(END, ()), "prefetch", own_copies.__getitem__)
    body.append(f"seed = torch.ones((), dtype={seed_dtype}, device=DEVICE)")
    body += writer.lines(())
    for node, wanted in own.items():
        if node.op != "call_function":
            body += _accumulations(wanted)(writer.text(node)).splitlines()
    return _function("def backward(state, saved):", body)


def _functions(sections: Mapping[str, Section]) -> set[str]:
    """What the model's forward and backward call by name."""
    return {f"{template}_{direction}" for template in sections for direction in ("forward", "backward")}


def _accumulations(paths: Sequence[str]) -> Callable[[str], str]:
    """The statements that add a gradient to the sums of one or several weights, from its text."""
    return lambda value: "\n".join(f"state.accumulate({quoted(path)}, {value})" for path in paths)


def _write(path: str, value: str) -> str:
    return f"w[{quoted(path)}].copy_({value})"


def _is_reduced(node: fx.Node) -> bool:
    """Whether a node waits for the reduction of a bucket's gradients."""
    source = node.args[0] if node.target is WAIT else None
    return isinstance(source, fx.Node) and source.target is _REDUCE


def _reduced_handler(writer: FunctionWriter, node: fx.Node) -> str | None:
    """Reduced gradients go to the state as soon as they are there; any other wait has its ordinary form."""
    call = f"c10d.wait_tensor({writer.text(node.args[0])})"
    if _is_reduced(node):
        return f"state.accumulate_shard({quoted(node.meta['bucket'])}, {call})"
    return f"{writer.name(node)} = {call}"


def _region_handler(
    sections: Mapping[str, Section], writes: BufferWrites, schedule: CacheSchedule, parked: Mapping[str, fx.Node]
) -> Any:
    def write(writer: FunctionWriter, node: fx.Node) -> str:
        template, path, inputs, _ = node.args
        section = sections[str(template)]
        known = section.template
        count = known.result_count - len(known.mutated)
        users = {int(user.args[1]): user for user in node.users if is_getitem(user)}  # type: ignore[arg-type]
        names = []
        for index in range(known.result_count):
            user = users.get(index)
            if user is None:
                names.append(writer.drop(node))
                continue
            wish = region_name(str(path)) if index < count else identifier(known.mutated[index - count])
            names.append(writer.name(user, wish, within=node))
            writer.given[user] = names[-1]
        arguments = [*_weight_texts(writer, node, section), *(writer.text(value) for value in inputs)]  # type: ignore[union-attr]
        target = f"{_one_or_tuple(names)}, saved[{quoted(str(path))}]"
        call = f"{target} = {template}_forward({', '.join(arguments)})"
        before = [_write(name, writer.text(value)) for name, value in writes.before[node]]
        released = copies_of(schedule.release.get(str(path), ()), "release", lambda name: writer.text(parked[name]))
        after = [*(_write(name, writer.text(value)) for name, value in writes.after[node]), *released]
        return "\n".join([*before, call, *after])

    return write


def _weight_texts(writer: FunctionWriter, node: fx.Node, section: Section) -> list[str]:
    """The first arguments of a layer: its weights and buffers by name, then its buckets."""
    names: tuple[str, ...] = node.meta.get("weight_names", ())
    values: Sequence[Any] = node.args[3]  # type: ignore[assignment]
    texts = [writer.text(value) for value in values[: len(names)]]
    buckets = len(_buckets(section.parts.joint.unit.signature))
    shared = [f"{quoted(name)}: {text}" for name, text in zip(names, texts, strict=True)][buckets:]
    scope = f"state.scope({quoted(str(node.args[1]))})"
    cache = ["cache"] if uses_cache(section.parts) else []
    return [f"{{**{scope}, {', '.join(shared)}}}" if shared else scope, *cache, *texts[:buckets]]


def _region_backward_handler(
    sections: Mapping[str, Section], schedule: CacheSchedule, own_copies: Mapping[str, str]
) -> Any:
    def write(writer: FunctionWriter, node: fx.Node) -> str:
        template, path, *_, tangents = node.args
        section = sections[str(template)]
        known, signature = section.template, section.parts.joint.unit.signature
        kinds = {value.name: value.kind for value in signature.inputs}
        users = {int(user.args[1]): user for user in node.users if is_getitem(user)}  # type: ignore[arg-type]
        names, extra = [], []
        for index, position in enumerate(known.grad_positions):
            user = users.get(index)
            weight = known.weight_names[position - len(known.inputs)] if position >= len(known.inputs) else ""
            if not weight or kinds[weight] == "bucket":
                wish = f"d_{'bucket_' if weight else ''}{region_name(str(path))}"
                names.append(writer.drop(node) if user is None else writer.name(user, wish, within=node))
            elif user is not None and not _only_output(user):
                local = writer.name(user, f"d_{identifier(weight)}", within=node)
                extra.append(f"{local} = grads.pop({quoted(weight)})")
            if user is not None:
                writer.given[user] = writer.names.get(user, "")
        arguments = [*_weight_texts(writer, node, section), f"saved.pop({quoted(str(path))})"]
        arguments += [writer.text(value) for value in tangents]  # type: ignore[union-attr]
        call = f"{template}_backward({', '.join(arguments)})"
        before = copies_of(schedule.prefetch.get(str(path), ()), "prefetch", own_copies.__getitem__)
        target = _one_or_tuple(names or [writer.drop(node)])
        if not _returns_weights(section):
            return "\n".join([*before, f"{target} = {call}"])
        added = f"state.accumulate_layer({quoted(str(path))}, grads)"
        return "\n".join([*before, f"{target}, grads = {call}", *extra, added, "del grads"])

    return write


def _layer_of(path: str) -> str:
    """'layers.3' for anything inside that layer, the module itself elsewhere."""
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return path if number is None else ".".join(parts[: number + 1])


def _short(path: str) -> str:
    """'q_proj_weight' of 'mixer.q_proj.weight'."""
    return identifier("_".join(path.split(".")[-2:]))


def region_name(path: str) -> str:
    """'layers.3.attention' -> 'attention_3', 'model.layers.3' -> 'layer_3'."""
    parts = path.split(".")
    numbers = [part for part in parts if part.isdigit()]
    words = [part for part in parts if not part.isdigit()]
    last = words[-1] if words else "layer"
    if parts[-1].isdigit():
        last = last.removesuffix("s")
    return identifier("_".join([last, *numbers]))


def _is_layer_grad(node: fx.Node, sections: Mapping[str, Section]) -> bool:
    """Whether a gradient is added to the state together with its whole layer."""
    if not is_getitem(node) or not isinstance(node.args[0], fx.Node):
        return False
    return node.args[0].target is torch.ops.moec.region_backward.default and _only_output(node)


def _only_output(node: fx.Node) -> bool:
    return (
        all(user.op == "output" for user in node.users)
        and sum(
            value is node
            for user in node.users
            for value in user.args[0]  # type: ignore[union-attr]
        )
        <= 1
    )


def _input_texts(parts: Partitioned, graph: fx.Graph) -> dict[fx.Node, str]:
    signature = parts.joint.unit.signature
    names = _locals(signature)
    texts = {}
    for node in graph.find_nodes(op="placeholder"):
        kind, index = node.meta["role"]
        if kind == "input":
            value = signature.inputs[index]
            name = quoted(value.name)
            by_name = f"state.shard({name})" if value.kind == "shard" else f"w[{name}]"
            texts[node] = names.get(index) or by_name
    return texts


def _locals(signature: Signature) -> dict[int, str]:
    """Index of each input and bucket (not weight or buffer) -> a variable of its own."""
    names: dict[int, str] = {}
    for index, value in enumerate(signature.inputs):
        if value.kind in ("input", "bucket"):
            name = identifier(value.name)
            name = f"input_{name}" if name.startswith("d_output") else name
            while name in _RESERVED or name in names.values():
                name = f"{name}_"
            names[index] = name
    return names


def _inputs_of_backward(parts: Partitioned) -> list[str]:
    """Names of the inputs (not weights) that the backward reads; they are saved by reference."""
    signature = parts.joint.unit.signature
    names = {index: name for index, name in _locals(signature).items() if signature.inputs[index].kind == "input"}
    roles = [node.meta["role"] for node in parts.backward.find_nodes(op="placeholder")]
    return [names[index] for kind, index in roles if kind == "input" and index in names]


def _is_used(parts: Partitioned, name: str) -> bool:
    signature = parts.joint.unit.signature
    for graph in (parts.forward, parts.backward):
        for node in graph.find_nodes(op="placeholder"):
            kind, index = node.meta["role"]
            if kind == "input" and signature.inputs[index].name == name and node.users:
                return True
    return False


def _template_doc(section: Section) -> str:
    paths = section.template.paths
    shown = ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
    kept = sum(p.decision == "keep" for p in section.parts.placements)
    out = sum(p.decision == "offload" for p in section.parts.placements)
    again = sum(p.decision == "recompute" for p in section.parts.placements)
    size = sum(p.bytes for p in section.parts.placements if p.decision == "keep") / 2**20
    moved = f"{out} in host memory, " if out else ""
    lines = [f"{shown}.", ""]
    lines.append(f"For backward: {kept} values kept ({size:.3g} MiB a layer), {moved}{again} computed again.")
    return "\n".join(line and (line if i == 0 else INDENT + line) for i, line in enumerate([*lines, ""])) + INDENT


def _one_or_tuple(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


def _dict_lines(pairs: Sequence[str]) -> list[str]:
    return ["grads = {", *(f"{INDENT}{pair}," for pair in pairs), "}"]


def _function(head: str, body: Sequence[str]) -> str:
    return "\n".join([head, *(f"{INDENT}{line}" if line else line for line in body)])


_RESERVED = {
    "state",
    "batch",
    "cache",
    "saved",
    "results",
    "grads",
    "torch",
    "runtime",
    "aten",
    "moec",
    "w",
    "seed",
    "lr",
}

_UPDATE_DOC = "One update of the weights from the accumulated gradients; returns the gradient norm before clipping."

_STEP = '''def step(state, batches, lr):
    """One optimizer step over all microbatches: sums of the results by name, and the gradient norm."""
    totals = {}
    for batch in batches:
        results, saved = forward(state, batch)
        backward(state, saved)
        for name, value in results.items():
            totals[name] = totals[name] + value if name in totals else value
    return totals, update(state, lr)'''
