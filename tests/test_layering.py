"""Imports go down only, moec -> models | passes -> codegen -> runtime -> compiler, and always by the name moec."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BELOW = {
    "moec": {"moec", "models", "passes", "codegen", "runtime", "compiler"},
    "models": {"models", "compiler"},
    "passes": {"passes", "codegen", "runtime", "compiler"},
    "codegen": {"codegen", "runtime", "compiler"},
    "runtime": {"runtime", "compiler"},
    "compiler": {"compiler"},
}
FOLDERS = set(BELOW) - {"moec"}


def _imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a source imports; `package` is the dotted name of the package it lies in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, node.module or ""]).strip(".")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _layer(name: str) -> str | None:
    """The layer that a dotted import lies in; None outside moec."""
    first, *rest = name.split(".")
    if first != "moec":
        return None
    return rest[0] if rest and rest[0] in FOLDERS else "moec"


def _violations(source: str, path: str) -> list[str]:
    """What is wrong with the imports of a file at `path` ("runtime/state.py") below the root."""
    folder = path.split("/")[0]
    package = ".".join(path.split("/")[:-1]) if folder == "moec" else "moec." + ".".join(path.split("/")[:-1])
    found = []
    for line, name in _imports(source, package):
        layer = _layer(name)
        if name.split(".")[0] in FOLDERS:
            found.append(f"{path}:{line} imports {name} bare; write moec.{name}")
        elif folder in BELOW and layer is not None and layer not in BELOW[folder]:
            found.append(f"{path}:{line} ({folder}) imports {name} ({layer}), which lies above")
    return found


def _sources() -> list[Path]:
    folders = [*BELOW, "tests", "benchmarks", "tools"]
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_every_import_goes_down_and_none_is_bare() -> None:
    sources = _sources()
    assert len(sources) > 30
    violations = [text for path in sources for text in _violations(path.read_text(), path.relative_to(ROOT).as_posix())]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(
    ("path", "source", "text"),
    [
        (
            "runtime/x.py",
            "from moec.passes import fuse",
            "imports moec.passes.fuse (passes), which lies above",
        ),
        ("runtime/x.py", "def f():\n    import moec.models.k3", "runtime/x.py:2 (runtime) imports moec.models.k3"),
        ("models/x.py", "from moec import runtime", "(models) imports moec.runtime (runtime)"),
        ("compiler/dialect/x.py", "from ...runtime import state", "imports moec.runtime.state (runtime)"),
        ("passes/x.py", "from moec import compile", "(passes) imports moec.compile (moec)"),
        ("tests/x.py", "import compiler.dialect", "imports compiler.dialect bare"),
        ("moec/x.py", "from runtime.state import StepState", "imports runtime.state.StepState bare"),
    ],
)
def test_a_wrong_import_is_found(path: str, source: str, text: str) -> None:
    (violation,) = _violations(source, path)
    assert text in violation


def test_allowed_imports_are_left_alone() -> None:
    source = "import torch\nfrom moec.compiler import errors\nfrom .state import StepState\nfrom . import durable"
    assert _violations(source, "runtime/x.py") == []
    assert _violations("from moec.models import k3\nimport moec", "tests/x.py") == []


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("moec.compiler.errors", ["moec.runtime", "moec.passes", "moec.codegen", "moec.models"]),
        ("moec.runtime", ["moec.passes", "moec.codegen", "moec.models", "torch.distributed.checkpoint", "rich"]),
        ("moec.runtime.loop", ["moec.passes", "moec.codegen", "moec.models", "transformers", "tokenizers"]),
    ],
)
def test_importing_a_lower_layer_loads_no_upper_one(module: str, unwanted: list[str]) -> None:
    code = f"import sys, {module}; print(sorted(name for name in {unwanted!r} if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert found.stdout.strip() == "[]"


def _private_imports(source: str) -> list[int]:
    """Lines that import from a private module of torch."""
    return [line for line, name in _imports(source, "moec") if name.startswith("torch.") and "._" in name]


def test_private_torch_imports_lie_in_one_file() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in BELOW
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "_torch_compat.py"
        for line in _private_imports(path.read_text())
    ]
    assert found == []
    assert _private_imports("from torch._ops import OpOverload") == [1]
