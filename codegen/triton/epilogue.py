"""Activations as text: Triton source that the expert kernels apply to the tiles of a product.

An `Epilogue` is what a traced activation prints to. `functions` turns one into two Triton functions of float32 tiles,
which the kernels take as compile-time arguments: a new activation needs no new kernel.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import textwrap
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Epilogue:
    """An elementwise activation of one or two projections.

    inputs: names of the float32 tiles, in the order of the projections, e.g. ("gate", "up") or ("up",).
    forward: lines that assign `result`; in scope are the inputs and `tl`.
    backward: lines in whose scope also is `grad`, the gradient of the result; they assign `result` and `grad_NAME` for
        each input.
    """

    inputs: tuple[str, ...]
    forward: str
    backward: str


def source(epilogue: Epilogue) -> str:
    """The module text with the functions `forward(inputs)` and `backward(inputs, grad)`."""
    inputs = ", ".join(epilogue.inputs)
    grads = ", ".join(f"grad_{name}" for name in epilogue.inputs)
    return "\n\n\n".join(
        [
            "import triton\nimport triton.language as tl",
            _function(f"forward({inputs})", epilogue.forward, "result"),
            _function(f"backward({inputs}, grad)", epilogue.backward, f"result, {grads}"),
        ]
    )


@functools.cache
def functions(epilogue: Epilogue) -> tuple[Any, Any]:
    """The Triton functions of an epilogue; the same text gives the same functions."""
    text = source(epilogue)
    name = f"epilogue_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    file = f"<{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # Triton reads the source again
    scope: dict[str, Any] = {"__name__": name}
    exec(compile(text, file, "exec"), scope)
    return scope["forward"], scope["backward"]


def _function(signature: str, body: str, results: str) -> str:
    lines = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return f"@triton.jit\ndef {signature}:\n{lines}\n    return {results}\n"
