"""FSDP: parameters, gradients and moments are sharded over the ranks; each layer's weights are gathered for its use.

1. The weights of a layer template become one bucket: a flat buffer that an all-gather yields. The template takes whole
   weights out of it where they are used (`moec::unshard`), and returns its gradients as one flat tensor
   (`moec::pack_gradients`).
2. The outer program gathers each layer's bucket before the layer's call, again before its backward (or keeps it, as
   the plan says), and reduce-scatters the flat gradient. Its own weights lie in the bucket "model"; a large one has a
   bucket of its own.
3. Expert weights that `shard_experts` divided over ranks have buckets of their own, gathered by the ranks that hold
   the same experts; where that is one rank, they are whole already and stay weights.

A weight that several places use (tied) belongs to the outer program, once. Frozen weights are gathered and never
reduced. Weights that nothing reads lie in the bucket ":unused", which is never gathered.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from moec.compiler.differentiate import Joint, is_getitem
from moec.compiler.graph import InputValue
from moec.compiler.layout import BucketInstance, BucketLayout, Role
from moec.compiler.pass_manager import Change, PassContext, Report
from moec.compiler.placement import JointProgram, PlacementPass
from moec.compiler.plan import MeshPlan
from moec.compiler.template import Template
from moec.passes.joint_edit import JointEditor, empty_like_of

LARGE = 1 << 20
"""Elements from which on a weight of the outer program has a bucket of its own."""
MODEL, UNUSED = ":model", ":unused"

c10d = torch.ops._c10d_functional
moec = torch.ops.moec


@dataclass(frozen=True)
class Kind:
    """One kind of bucket: the input of a layer that takes it, its collectives' groups, and the suffix of its name."""

    role: Role
    input: str
    gather: str
    scatter: str
    suffix: str

    def ranks(self, mesh: MeshPlan) -> int:
        """Ranks that share such a bucket."""
        return mesh.fsdp if self.role == "dense" else mesh.edp

    def takes(self, value: InputValue) -> bool:
        """Whether a weight belongs into such a bucket."""
        return bool(value.experts) == (self.role == "experts")


DENSE = Kind("dense", "bucket", "gather", "scatter", "")
EXPERTS = Kind("experts", "expert_bucket", "expert_gather", "expert_scatter", ":experts")
KINDS = (DENSE, EXPERTS)


class ShardParameters(PlacementPass):
    """Weights of every unit into buckets, and the collectives that gather and reduce them."""

    name: ClassVar[str] = "shard_parameters"
    provides: ClassVar[tuple[str, ...]] = ("shards",)
    changes_numerics: ClassVar[bool] = True  # gradients are summed over ranks, in another order
    touches_state: ClassVar[bool] = True

    def run(self, program: JointProgram, context: PassContext) -> Report:
        """Rewrite all joints; `program.buckets` says what lies where."""
        mesh, report = context.plan.mesh, Report()
        program.shared = _shared_by_all_calls(program)
        layouts = {
            name: _shard_layer(joint, _shared_names(program, name), mesh) for name, joint in program.joints.items()
        }
        before = {name: _positions(template) for name, template in program.templates.items()}
        for template in program.templates.values():
            template.take_buckets(program.joints[template.unit.name])
        _Outer(program, mesh, report).run(layouts, before)
        return report


def _shared_names(program: JointProgram, unit: str) -> set[str]:
    """Names of a unit's weights that, in any of its calls, other places of the program use as well."""
    return {
        name
        for template in program.templates.values()
        if template.unit.name == unit
        for path in template.paths
        for name in template.weight_names
        if f"{path}.{name}" in program.shared
    }


def _shared_by_all_calls(program: JointProgram) -> dict[str, str]:
    """`program.shared`, with each shared weight of one call shared in every call of its unit, whose text is one."""
    shared = dict(program.shared)
    for template in program.templates.values():
        for name in _shared_names(program, template.unit.name):
            for path in template.paths:
                shared.setdefault(f"{path}.{name}", f"{path}.{name}")
    return shared


def _positions(template: Template) -> list[str | int]:
    """What the results of a layer's backward are: positions of inputs, names of weights."""
    count = len(template.inputs)
    return [p if p < count else template.weight_names[p - count] for p in template.grad_positions]


def _shard_layer(joint: Joint, shared: set[str], mesh: MeshPlan) -> dict[Kind, BucketLayout]:
    editor = JointEditor(joint)
    layouts = {}
    for kind in KINDS:
        members = [(n, v) for n, v in editor.weights() if kind.takes(v) and v.name not in shared]
        if not members:
            continue
        layout = layouts[kind] = _layout(editor, kind, members, mesh)
        if layout.ranks == 1:
            continue
        bucket = editor.add_input(
            InputValue("bucket", kind.input, requires_grad=layout.gradient_numel > 0),
            empty_like_of(members[0][0], (layout.gathered_nbytes,), torch.uint8),
        )
        _unshard(editor, layout, members, [bucket, bucket])
        packed = _pack(editor, layout, members, mesh)
        if packed is not None:
            editor.set_gradient(bucket, packed)
        for node, _ in members:
            editor.remove_input(node)
    editor.finish()
    return layouts


def _layout(
    editor: JointEditor, kind: Kind, members: Sequence[tuple[fx.Node, InputValue]], mesh: MeshPlan
) -> BucketLayout:
    entries = []
    for node, value in members:
        fake: Tensor = node.meta["val"]
        dtype = str(fake.dtype).removeprefix("torch.")
        entries.append((value.name, tuple(fake.shape), dtype, editor.gradient(node) is not None))
    return BucketLayout.of(kind.role, kind.ranks(mesh), entries)


def _unshard(
    editor: JointEditor,
    layout: BucketLayout,
    members: Sequence[tuple[fx.Node, InputValue]],
    sources: Sequence[fx.Node | None],
) -> None:
    """Let the users of each weight read it out of the gathered bucket: sources of forward and of backward."""
    for node, value in members:
        editor.separate_views(node)
        weight = layout.weight(value.name)
        for backward, source in enumerate(sources):
            users = editor.users(node, backward=bool(backward))
            if not users:
                continue
            first = editor.first(users)
            with editor.graph.inserting_before(first):
                whole = editor.call(
                    moec.unshard.default,
                    (source, layout.ranks, weight.offset, list(weight.shape), weight.torch_dtype),
                    node.meta["val"],
                    path=(first.meta.get("custom") or {}).get("path", ""),
                    backward=bool(backward),
                    wish=_short(value.name),
                )
            for user in users:
                user.replace_input_with(node, whole)


def _pack(
    editor: JointEditor, layout: BucketLayout, members: Sequence[tuple[fx.Node, InputValue]], mesh: MeshPlan
) -> fx.Node | None:
    """The flat gradient of a bucket, right after its last part exists; None for a frozen one."""
    if not layout.gradient_numel:
        return None
    found = ((value.name, editor.gradient(node)) for node, value in members)
    by_name = {name: gradient for name, gradient in found if gradient is not None}
    gradients = [by_name[weight.name] for weight in layout.with_gradient]
    dtype = getattr(torch, mesh.reduce_dtype)
    if any(node.meta["val"].dtype == torch.float64 for node, _ in members):
        dtype = torch.float64
    for weight, node in zip(layout.with_gradient, gradients, strict=True):
        node.meta.setdefault("wish", f"d_{_short(weight.name)}")
    last = editor.last(gradients)
    value = empty_like_of(members[0][0], (layout.ranks * layout.gradient_numel,), dtype)
    offsets = [weight.gradient_offset for weight in layout.with_gradient]
    with editor.graph.inserting_after(last):
        return editor.call(
            moec.pack_gradients.default,
            (gradients, offsets, layout.gradient_numel, layout.ranks, dtype),
            value,
            path="",
            backward=True,
            wish="d_bucket",
        )


def bucket_name(bucket: str) -> str:
    """'layers.3.attention' -> 'attention_3', 'layers.3.feed_forward:experts' -> 'feed_forward_experts_3'."""
    path, _, experts = bucket.removeprefix(":").partition(":")
    parts = path.split(".")
    numbers = [part for part in parts if part.isdigit()]
    words = [part for part in parts if not part.isdigit()]
    kept = words[-1:] if numbers else words[-2:]
    if parts[-1].isdigit():
        kept = [word.removesuffix("s") for word in kept]
    return "_".join([*kept, *([experts] if experts else []), *numbers])


def _short(name: str) -> str:
    return "_".join(name.split(".")[-2:])


class _Outer:
    """The outer program's part: collectives around layer calls, and its own weights."""

    def __init__(self, program: JointProgram, mesh: MeshPlan, report: Report) -> None:
        self._program, self._mesh, self._report = program, mesh, report
        self._editor = JointEditor(program.outer)
        self._editor.name_by_owner(program.tied)
        self._shards: dict[str, fx.Node] = {}
        self._gathered: dict[str, fx.Node] = {}
        self._reduced: set[str] = set()

    def run(self, layouts: dict[str, dict[Kind, BucketLayout]], before: dict[str, list[str | int]]) -> None:
        editor, templates = self._editor, self._program.templates
        for node in list(editor.graph.nodes):
            backward = node.target is moec.region_backward.default
            if not backward and node.target is not moec.region.default:
                continue
            template, path = templates[str(node.args[0])], str(node.args[1])
            known = layouts[template.unit.name]
            buckets = [self._bucket(node, path, kind, layout, backward) for kind, layout in known.items()]
            self._pass_weights(node, template, path, [bucket for bucket in buckets if bucket is not None])
            if backward:
                self._take_gradients(node, template, path, known, before[template.name])
        self._drop_unused_gradients()
        own = self._without_layers()
        for name, kind, members in self._own_buckets(own):
            self._own_bucket(name, kind, members)
        editor.finish()

    def _bucket(self, node: fx.Node, path: str, kind: Kind, layout: BucketLayout, backward: bool) -> fx.Node | None:
        name = f"{path}{kind.suffix}"
        if name not in self._program.buckets:
            self._program.buckets[name] = BucketInstance(layout, path)
            self._say(path, name, layout)
        if layout.ranks == 1:
            return None
        if backward and self._mesh.gather == "keep" and name in self._gathered:
            return self._gathered[name]
        gathered = self._gather(node, name, kind, layout, path, backward)
        self._gathered.setdefault(name, gathered)
        return gathered

    def _gather(
        self, before: fx.Node, name: str, kind: Kind, layout: BucketLayout, path: str, backward: bool
    ) -> fx.Node:
        """The whole bucket, gathered and waited for right before a node."""
        editor = self._editor
        shard = self._shard(name, layout)
        whole = empty_like_of(shard, (layout.gathered_nbytes,), torch.uint8)
        with editor.graph.inserting_before(before):
            arguments = (shard, layout.ranks, kind.gather)
            started = self._named("gather", name, c10d.all_gather_into_tensor.default, arguments, whole, path, backward)
            return self._named("bucket", name, c10d.wait_tensor.default, (started,), whole, path, backward)

    def _shard(self, name: str, layout: BucketLayout) -> fx.Node:
        if name not in self._shards:
            like = self._program.outer.inputs[0]
            value = InputValue("shard", name, requires_grad=layout.gradient_numel > 0)
            self._shards[name] = self._editor.add_input(value, empty_like_of(like, (layout.nbytes,), torch.uint8))
        return self._shards[name]

    def _pass_weights(self, node: fx.Node, template: Template, path: str, buckets: list[fx.Node]) -> None:
        owners = {value.name: weight for weight, value in self._editor.weights()}
        names = {name: self._program.shared.get(f"{path}.{name}") for name in template.weight_names}
        owner_of = {name: self._program.tied.get(owner or "", owner) for name, owner in names.items()}
        shared = {name: owners[owner] for name, owner in owner_of.items() if owner is not None}
        template_name, where, inputs, changing, *rest = node.args
        node.args = (template_name, where, inputs, [*buckets, *shared.values(), *changing], *rest)  # type: ignore[misc]
        node.meta["weight_names"] = (*(bucket.name for bucket in buckets), *shared)

    def _take_gradients(
        self,
        node: fx.Node,
        template: Template,
        path: str,
        layouts: dict[Kind, BucketLayout],
        before: list[str | int],
    ) -> None:
        """Read the results of a layer's backward in their new order, and reduce its flat gradients."""
        editor, after = self._editor, _positions(template)
        kinds = {kind.input: kind for kind in layouts}
        values = dict(zip(before, node.meta["val"], strict=True))
        for reader in [user for user in node.users if is_getitem(user)]:
            key = before[int(reader.args[1])]  # type: ignore[arg-type]
            if key in after:
                reader.args = (node, after.index(key))
            else:
                editor.discard(reader)
        values |= {key: self._flat_gradient(template, key) for key in after if key in kinds}
        node.meta["val"] = [values[key] for key in after]
        for position, key in enumerate(after):
            if key in kinds:
                kind = kinds[str(key)]
                with editor.graph.inserting_after(node):
                    name = f"{path}{kind.suffix}"
                    flat = self._named("d_bucket", name, operator.getitem, (node, position), values[key], path, True)
                self._reduce(flat, name, kind, layouts[kind], path)

    def _flat_gradient(self, template: Template, bucket: str | int) -> Tensor:
        joint = self._program.joints[template.unit.name]
        names = [value.name for value in joint.unit.signature.inputs]
        value: Tensor = joint.grads[names.index(str(bucket))].meta["val"]
        return empty_like_of(self._program.outer.inputs[0], value.shape, value.dtype)

    def _reduce(self, gradient: fx.Node, name: str, kind: Kind, layout: BucketLayout, path: str) -> None:
        editor = self._editor
        self._reduced.add(name)
        part = empty_like_of(gradient, (layout.gradient_numel,), gradient.meta["val"].dtype)
        with editor.graph.inserting_after(gradient):
            arguments = (gradient, "sum", layout.ranks, kind.scatter)
            started = self._named("reduce", name, c10d.reduce_scatter_tensor.default, arguments, part, path, True)
        with editor.graph.inserting_after(started):
            reduced = self._named("d_shard", name, c10d.wait_tensor.default, (started,), part, path, True)
        editor.set_gradient(self._shard(name, layout), reduced)

    def _drop_unused_gradients(self) -> None:
        """A layer that is called but never differentiated reduces nothing, although its template could."""
        for name, bucket in self._program.buckets.items():
            if name not in self._reduced and bucket.layout.ranks > 1 and bucket.layout.gradient_numel:
                self._program.buckets[name] = replace(bucket, layout=bucket.layout.without_gradients())

    def _without_layers(self) -> list[tuple[fx.Node, InputValue]]:
        """Weights that the outer program reads itself; those that come to layers in buckets are no inputs any more."""
        in_layers = {p: bucket.layout for bucket in self._program.buckets.values() for p, _ in bucket.paths()}
        own = []
        for node, value in self._editor.weights():
            if value.name not in in_layers:
                own.append((node, value))
            elif in_layers[value.name].ranks > 1:
                self._editor.remove_input(node)
        return own

    def _own_bucket(self, name: str, kind: Kind, members: list[tuple[fx.Node, InputValue]]) -> None:
        layout = _layout(self._editor, kind, members, self._mesh)
        self._program.buckets[name] = BucketInstance(layout, "")
        self._say("", name, layout)
        if layout.ranks == 1:
            return
        sources = [self._own_source(name, kind, layout, members, backward) for backward in (False, True)]
        _unshard(self._editor, layout, members, sources)
        packed = _pack(self._editor, layout, members, self._mesh)
        if packed is not None:
            self._reduce(packed, name, kind, layout, "")
        for node, _ in members:
            self._editor.remove_input(node)

    def _own_source(
        self,
        name: str,
        kind: Kind,
        layout: BucketLayout,
        members: Sequence[tuple[fx.Node, InputValue]],
        backward: bool,
    ) -> fx.Node | None:
        """Where the outer program reads a bucket of its own, on one side: before its first use there."""
        for node, _ in members:
            self._editor.separate_views(node)
        users = [user for node, _ in members for user in self._editor.users(node, backward=backward)]
        if not users:
            return None
        if backward and self._mesh.gather == "keep" and name in self._gathered:
            return self._gathered[name]
        gathered = self._gather(self._editor.first(users), name, kind, layout, "", backward)
        self._gathered.setdefault(name, gathered)
        return gathered

    def _own_buckets(
        self, own: list[tuple[fx.Node, InputValue]]
    ) -> Iterator[tuple[str, Kind, list[tuple[fx.Node, InputValue]]]]:
        """(name, kind, weights) of the buckets of weights that the outer program reads itself."""
        small: list[tuple[fx.Node, InputValue]] = []
        unused: list[tuple[fx.Node, InputValue]] = []
        for node, value in own:
            if value.experts:
                yield f"{value.name}{EXPERTS.suffix}", EXPERTS, [(node, value)]
            elif not node.users and self._editor.gradient(node) is None:
                unused.append((node, value))
            elif node.meta["val"].numel() >= LARGE:
                yield value.name, DENSE, [(node, value)]
            else:
                small.append((node, value))
        if small:
            yield MODEL, DENSE, small
        if unused:
            yield UNUSED, DENSE, unused

    def _named(
        self, what: str, bucket: str, target: Any, args: tuple[Any, ...], value: Tensor, path: str, backward: bool
    ) -> fx.Node:
        """A node of the collective that serves a bucket, named after both."""
        wish = f"{what}_{bucket_name(bucket)}"
        node = self._editor.call(target, args, value, path=path, backward=backward, wish=wish)
        node.meta["bucket"] = bucket
        return node

    def _say(self, path: str, name: str, layout: BucketLayout) -> None:
        frozen = len(layout.weights) - len(layout.with_gradient)
        what = f"{len(layout.weights)} weights, {layout.nbytes / 2**20:.3g} MiB on each of {layout.ranks} ranks"
        what += f", {frozen} without gradient" if frozen else ""
        self._report.matches.append(Change(path, f"bucket {name}: {what}"))
