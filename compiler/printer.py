"""Graphs as text: one line per node with its op, its value's dtype and shape, and the module it comes from."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from moec.compiler._torch_compat import OpOverload
from moec.compiler.graph import module_path
from moec.compiler.text import printable

_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
}


def graph_text(graph: fx.Graph, names: Mapping[fx.Node, str] | None = None) -> str:
    """The graph, line by line; `names` gives placeholders their names."""
    labels = {node: printable(name) for node, name in (names or {}).items()}
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_argument(node.args[0], labels)}")
            continue
        left = f"%{labels.get(node, node.name)}: {value_text(node.meta.get('val'))}"
        if node.op == "placeholder":
            lines.append(f"{left} = input")
            continue
        arguments = [_argument(value, labels) for value in node.args]
        arguments += [f"{name}={_argument(value, labels)}" for name, value in node.kwargs.items()]
        path = printable(module_path(node))
        line = f"{left} = {op_text(node.target)}({', '.join(arguments)})"
        lines.append(f"{line}  # {path}" if path else line)
    return "\n".join(lines)


def op_text(target: Any) -> str:
    """'aten.mul.Tensor', 'moec.kda', or the name of a plain function."""
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def value_text(value: Any) -> str:
    """'bf16[2, 512, 64]', 'int', or a tuple of those."""
    if isinstance(value, Tensor):
        sizes = ", ".join(str(size) for size in value.shape)
        return f"{_SHORT.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]"
    if isinstance(value, list | tuple):
        return f"({', '.join(value_text(item) for item in value)})"
    if value is None:
        return "?"
    return "int" if isinstance(value, int | torch.SymInt) else type(value).__name__


def _argument(value: Any, labels: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return f"%{labels.get(value, value.name)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_argument(item, labels) for item in value)}]"
    return printable(str(value))


@dataclass(frozen=True)
class StageGraphs:
    """The graphs of one stage by unit name; prints, saves and diffs."""

    stage: str
    units: Mapping[str, str]

    def __str__(self) -> str:
        return "\n\n".join(f"# {self.stage}: {name}\n{text}" for name, text in self.units.items())

    def save(self, folder: str | Path) -> list[Path]:
        """Write one file per unit into `folder` and return their paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, text in self.units.items():
            paths.append(folder / f"{name}.txt")
            paths[-1].write_text(text + "\n", encoding="utf-8")
        return paths

    @classmethod
    def read(cls, stage: str, folder: Path) -> StageGraphs:
        """What `save` wrote."""
        return cls(
            stage, {path.stem: path.read_text(encoding="utf-8").rstrip("\n") for path in sorted(folder.glob("*.txt"))}
        )

    def diff(self, other: StageGraphs) -> str:
        """Unified diff from this stage to another, unit by unit; '' when equal."""
        parts = []
        for name in sorted({*self.units, *other.units}):
            lines = difflib.unified_diff(
                self.units.get(name, "").splitlines(),
                other.units.get(name, "").splitlines(),
                f"{self.stage}/{name}",
                f"{other.stage}/{name}",
                lineterm="",
            )
            parts += list(lines)
        return "\n".join(parts)
