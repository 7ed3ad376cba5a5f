"""One emitted function: straight-line Python for an FX graph.

1. Every value gets a name from the module it comes from (`q_proj`, `d_q_proj` for its gradient).
2. Views and casts with a single use are written inside the expression that uses them.
3. A variable is deleted right after its last use, so that memory is what the partition says, not what Python keeps.
4. A comment marks each change of module.
"""

from __future__ import annotations

import builtins
import keyword
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from moec.codegen.operators import call_text
from moec.compiler._torch_compat import OpOverload
from moec.compiler.collectives import WAIT
from moec.compiler.graph import module_path
from moec.compiler.text import printable, quoted, without_strings

aten = torch.ops.aten

WIDTH = 118
INDENT = "    "

# A node handler may take over the writing of a node: it returns statement text, or None for the ordinary form.
Handler = Callable[["FunctionWriter", fx.Node], str | None]


@dataclass
class FunctionWriter:
    """Writes the nodes of one graph as statements.

    given: placeholder or other node -> expression that stands for it. owned: names that the function may delete.
    taken: names that are already in use. handlers: target -> handler. attributes: holds the tensors of get_attr nodes.
    after: node -> the statements to write once its value exists, from the value's text. wishes: node -> name to try
    first.
    section: module path -> heading under which its statements stand; own_heading: the one of the graph's own code.
    """

    graph: fx.Graph
    given: dict[fx.Node, str]
    owned: set[str]
    taken: set[str]
    handlers: dict[Any, Handler] = field(default_factory=dict)
    keep: set[fx.Node] = field(default_factory=set)
    attributes: torch.nn.Module | None = None
    constants: dict[str, Tensor] = field(default_factory=dict)
    after: dict[fx.Node, Callable[[str], str]] = field(default_factory=dict)
    wishes: dict[fx.Node, str] = field(default_factory=dict)
    section: Callable[[str], str] = field(default=lambda path: path)
    own_heading: str = "the layer itself"
    names: dict[fx.Node, str] = field(default_factory=dict)
    _defined: dict[fx.Node, list[str]] = field(default_factory=dict)
    _unpacked: set[fx.Node] = field(default_factory=set)

    def lines(self, returns: Iterable[fx.Node]) -> list[str]:
        """The body's statements, without the return; values in `returns` are never deleted."""
        self.keep = set(returns)
        self._inline = {node for node in self.graph.nodes if self._is_inlined(node)}
        statements = [(node, text) for node in self.graph.nodes if (text := self._statement(node))]
        last = self._last_uses([node for node, _ in statements])
        lines: list[str] = []
        path = None
        for node, text in statements:
            here = self.section(module_path(node))
            if here != path:
                lines.append(f"# {printable(here) or self.own_heading}")
                path = here
            for statement in text.splitlines():
                lines += fold(statement)
            for made in (node, *self._made_by(node)):
                if made in self.after:
                    lines += [line for text in self.after[made](self.text(made)).splitlines() for line in fold(text)]
            dead = sorted(last.get(node, ()))
            lines += _deletions(dead)
        return lines

    def text(self, value: Any) -> str:
        """The expression for a node or a constant argument."""
        if isinstance(value, fx.Node):
            if value in self.given:
                return self.given[value]
            if value in self._inline:
                return call_text(value, self.text)
            return self.names[value]
        return literal(value, self.text)

    def name(self, node: fx.Node, wish: str | None = None, *, within: fx.Node | None = None) -> str:
        """A new variable for a node's value, made by the statement of `within` (the node's own by default)."""
        base = identifier(self.wishes.get(node) or wish or _wish(node))
        name, number = base, 2
        while name in self.taken:
            name, number = f"{base}_{number}", number + 1
        self.taken.add(name)
        self.owned.add(name)
        self.names[node] = name
        self._defined.setdefault(within or node, []).append(name)
        return name

    def drop(self, within: fx.Node) -> str:
        """The variable for a result that nothing uses; it is deleted after the statement of `within`."""
        self._defined.setdefault(within, []).append("_")
        return "_"

    def _statement(self, node: fx.Node) -> str | None:
        if node.op in ("placeholder", "output") or node in self._inline | self._unpacked or node in self.given:
            return None
        if node.op == "get_attr":
            self.given[node] = self._constant(node)
            return None
        handler = self.handlers.get(node.target)
        if handler is not None:
            return handler(self, node)
        text = call_text(node, self.text)
        if isinstance(node.meta.get("val"), list | tuple) and node.users and all(map(_is_getitem, node.users)):
            return f"{self._unpack(node, node.meta['val'], node)} = {text}"
        return f"{self.name(node)} = {text}"

    def _unpack(self, node: fx.Node, value: Any, statement: fx.Node) -> str:
        """The target that takes a tuple apart, nested where a part is a list."""
        users = {int(user.args[1]): user for user in node.users}  # type: ignore[arg-type]
        self._unpacked |= set(users.values())
        targets = []
        for index, part in enumerate(value):
            user = users.get(index)
            if user is None or not user.users:
                targets.append(self.drop(statement))
            elif isinstance(part, list | tuple) and all(map(_is_getitem, user.users)):
                targets.append(f"[{self._unpack(user, part, statement)}]")
            else:
                targets.append(self.name(user, _result_name(node, index), within=statement))
        return ", ".join(targets) + ("," if len(targets) == 1 else "")

    def _made_by(self, statement: fx.Node) -> list[fx.Node]:
        """Values that a statement takes apart from a tuple."""
        parts = [user for user in statement.users if user in self._unpacked]
        return [*parts, *(inner for part in parts for inner in self._made_by(part))]

    def _constant(self, node: fx.Node) -> str:
        value = getattr(self.attributes, str(node.target))
        if 0 < value.numel() <= 16:
            return f"torch.tensor({literal(value.tolist())}, dtype={value.dtype}, device=DEVICE)"
        name = base = identifier(str(node.target))
        number = 2
        while name in self.constants and self.constants[name] is not value:
            name, number = f"{base}_{number}", number + 1
        self.constants[name] = value
        return f"CONSTANTS[{quoted(name)}]"

    def _is_inlined(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node in self.after or len(node.users) != 1:
            return False
        user = next(iter(node.users))
        # A collective is waited for in the call of the layer that reads it, and nowhere earlier.
        if node.target is WAIT:
            return user.target in self.handlers and user is _next_statement(node)
        if node.target not in _INLINE or user.target in self.handlers:
            return False
        if user.op == "output" and not isinstance(node.meta.get("val"), Tensor):
            return False  # a size that backward needs: what it takes has names
        return sum(source is node for source in _flat_nodes(user)) == 1

    def _last_uses(self, statements: list[fx.Node]) -> dict[fx.Node, set[str]]:
        holder: dict[str, fx.Node] = {}
        result: dict[fx.Node, set[str]] = {}
        order = set(statements)
        for node in self.graph.nodes:
            if node not in order:
                continue
            for name in self._defined.get(node, ()):
                holder.setdefault(name, node)
            for source in self._sources(node):
                name = self.names.get(source) or self.given.get(source, "")
                if name in self.owned:
                    holder[name] = node
            if "_" in self._defined.get(node, ()):
                result.setdefault(node, set()).add("_")
        holder.pop("_", None)
        kept = {self.names.get(node) or self.given.get(node, "") for node in self._kept_sources()}
        for name, node in holder.items():
            if name not in kept:
                result.setdefault(node, set()).add(name)
        return result

    def _kept_sources(self) -> set[fx.Node]:
        return {leaf for node in self.keep for leaf in (self._sources(node) if node in self._inline else [node])}

    def _sources(self, node: fx.Node) -> Iterable[fx.Node]:
        """Nodes whose variables a statement reads, looking through inlined ones."""
        for source in node.all_input_nodes:
            if source in self._inline:
                yield from self._sources(source)
            else:
                yield source


def literal(value: Any, text: Callable[[Any], str] = repr) -> str:
    """Python text of a constant argument."""
    if isinstance(value, fx.Node):
        return text(value)
    if isinstance(value, list | tuple):
        inner = ", ".join(literal(item, text) for item in value)
        return f"[{inner}]"
    if isinstance(value, torch.device):
        return "DEVICE"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    if value != value:
        return 'float("nan")'
    return quoted(value) if isinstance(value, str) else repr(value)


def fold(text: str) -> list[str]:
    """Break a long statement after commas inside its outermost brackets."""
    if len(text) <= WIDTH - len(INDENT):
        return [text]
    target, equals, value = _assignment(text)
    if equals and len(target) > WIDTH // 2 and ", " in target:
        bracketed = target if _last_call(target) == 0 else f"({target})"
        head, *names, tail = _wrapped(bracketed, 0)
        last, *rest = fold(f"_ = {value}")
        return [head, *names, f"{tail}{last[1:]}", *rest]
    opening = _last_call(text)
    if opening < 0 or opening + 2 == len(text):
        return [text]
    return _wrapped(text, opening)


def _deletions(names: list[str]) -> list[str]:
    lines: list[str] = []
    for name in names:
        if lines and len(lines[-1]) + len(name) + 2 <= WIDTH - len(INDENT):
            lines[-1] += f", {name}"
        else:
            lines.append(f"del {name}")
    return lines


def _wrapped(text: str, opening: int) -> list[str]:
    """The text with what lies between the bracket at `opening` and its last character on lines of their own."""
    head, inner, tail = text[: opening + 1], text[opening + 1 : -1], text[-1]
    lines, current = [head], INDENT
    for part in _split_commas(inner):
        if len(current) + len(part) + 2 > WIDTH - len(INDENT) and current.strip():
            lines.append(current.rstrip())
            current = INDENT
        current += f"{part}, "
    return [*lines, current.rstrip(), tail]


def identifier(text: str) -> str:
    """A valid lower-case Python identifier made from a path or op name."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_").lower() or "value"
    return (
        f"{name}_" if keyword.iskeyword(name) or hasattr(builtins, name) else f"v_{name}" if name[0].isdigit() else name
    )


def _wish(node: fx.Node) -> str:
    """A value that leaves its module is named after the module, any other after its op; a pass may name it itself.

    Some ops yield what only their schema can name.
    """
    if "wish" in node.meta:
        return str(node.meta["wish"])
    path = module_path(node)
    last = path.rpartition(".")[2]
    leaves = any(module_path(user) != path for user in node.users)
    named = (leaves or node.target in _NAMED_BY_MODULE) and _op_name(node) not in _NAMED_BY_RESULT
    name = last if last and not last.isdigit() and named else _op_name(node)
    name = _result_name(node, 0) or name if name in _NAMED_BY_RESULT else name
    backward = node.meta.get("partitioner_tag") == "is_backward"
    return f"d_{name}" if backward and not name.startswith("d_") else name


def _result_name(node: fx.Node, index: int) -> str | None:
    """The schema's name of one result: `d_x` for a backward op's `grad_x`."""
    if not isinstance(node.target, OpOverload):
        return None
    name = node.target._schema.returns[index].name if index < len(node.target._schema.returns) else None
    return name and (f"d_{name.removeprefix('grad_')}" if name.startswith("grad_") else name)


def _next_statement(node: fx.Node) -> fx.Node:
    """The node after this one, but for inputs."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following


def _is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _op_name(node: fx.Node) -> str:
    if node.op == "call_function" and isinstance(node.target, OpOverload):
        return node.target._schema.name.split("::")[1].strip("_")
    if "getitem" in str(node.target) and isinstance(node.args[0], fx.Node):
        return f"{_op_name(node.args[0])}_{node.args[1]}"
    return node.name


def _last_call(text: str) -> int:
    """Index of the bracket that the text's last character closes, or -1."""
    text = without_strings(text)
    if text[-1] not in ")]":
        return -1
    depth = 0
    for index in range(len(text) - 1, -1, -1):
        depth += text[index] in ")]}"
        depth -= text[index] in "([{"
        if depth == 0:
            return index
    return -1


def _assignment(text: str) -> tuple[str, str, str]:
    """Target, sign and value of an assignment; as `partition`, all of the text as target where it is none."""
    place = without_strings(text).find(" = ")
    return (text, "", "") if place < 0 else (text[:place], " = ", text[place + 3 :])


def _split_commas(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, char in enumerate(without_strings(text)):
        depth += char in "([{"
        depth -= char in ")]}"
        if char == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


def _flat_nodes(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda source: found.append(source))
    return found


_INLINE = {
    aten.reshape.default,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.slice.Tensor,
    aten.select.int,
    aten.sym_size.int,
}

# The one op that a module such as Linear is for.
_NAMED_BY_MODULE = {aten.mm.default, aten.addmm.default, aten.bmm.default}

# Ops of which a module has several, one after the other: their schemas name what they yield.
_NAMED_BY_RESULT = {
    "exchange_counts",
    "local_offsets",
    "overflow",
    "exchange",
    "exchange_back",
    "exchange_padded",
    "exchange_padded_back",
}
