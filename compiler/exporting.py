"""One module through torch.export, and the error that says why it cannot be traced: where in the model, and what to do.

With a symbolic length, what the trace assumed of it may not hold for every length of the plan. Then the module is
exported once more without a claim about lengths, to find the shortest one that it takes: `LengthRefused`.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from moec.compiler._torch_compat import pytree
from moec.compiler.autocast import AUTOCAST_HINT, AutocastInModel
from moec.compiler.errors import CaptureError
from moec.compiler.lengths import has_symbols, length_range
from moec.compiler.overlap import overlaps_itself
from moec.compiler.plan import Plan
from moec.compiler.python_gradients import PythonGradient
from moec.compiler.regions import weight_slots
from moec.compiler.symbolic import TrustTopK


class LengthRefused(Exception):
    """A layer, or the model around them, that does not take every length of a plan.

    shortest: the least length from which on it takes all; that of the plan's `length` if it takes no other.
    """

    def __init__(self, what: str, shortest: int, reason: str) -> None:
        super().__init__(f"{what} {reason}")
        self.what, self.shortest, self.reason = what, shortest, reason


def export(
    module: nn.Module, args: tuple[Tensor, ...], shapes: Any, plan: Plan, root: nn.Module, path: str = ""
) -> ExportedProgram:
    """Trace a module on fakes; of torch.export's two ways the second is tried where the first fails.

    shapes: its dynamic shapes, None where all are fixed. root: the model; path: of the layer, "" for all of it.
    Raises LengthRefused, and CaptureError for everything else.
    """
    what = f"layer {path}" if path else "the model"
    failures = []
    for strict in (False, True):
        try:
            with TrustTopK(), _quiet():
                return torch.export.export(module, args, dynamic_shapes=shapes, strict=strict)
        except Exception as error:  # torch raises many kinds here; each becomes one CaptureError
            failures.append(error)
    refused = None
    if shapes is not None and "Constraints violated" in str(failures[0]):
        refused = _length_refused(what, module, args, shapes, plan)
    raise refused or capture_error(what, failures[0], root) from failures[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the pages that torch logs about a guard that fails; the error that follows says it."""
    logger = logging.getLogger("torch._guards")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _length_refused(
    what: str, module: nn.Module, args: tuple[Tensor, ...], shapes: Any, plan: Plan
) -> LengthRefused | None:
    """Which lengths a module takes, None if they are not the reason why it cannot be exported."""
    free = pytree.tree_map(lambda size: Dim.AUTO if isinstance(size, Dim) else size, shapes)
    try:
        with TrustTopK():
            graph = torch.export.export(module, args, dynamic_shapes=free, strict=False).graph
    except Exception:  # the first error says what is wrong
        return None
    if not has_symbols(graph):
        return LengthRefused(what, plan.length, f"length == {plan.length}")
    shortest, reason = length_range(graph, plan.shortest, plan.length)
    return LengthRefused(what, shortest, reason) if shortest > plan.shortest else None


def capture_error(what: str, error: Exception, root: nn.Module) -> CaptureError:
    """What went wrong while `what` of the model `root` was traced."""
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in text if line.startswith("- Not all values")), text[0] if text else "")
    data_dependent = any(word in str(error) for word in ("data-dependent", "data dependent", "GuardOnDataDependent"))
    if isinstance(error, PythonGradient):
        hint = (
            "make it an op (torch.library.custom_op with register_autograd), or write it in plain operations; "
            'torch.compile(backend="moec") takes it as it is'
        )
    elif isinstance(error, AutocastInModel):
        hint = AUTOCAST_HINT
    elif data_dependent:
        hint = (
            "its control flow or a size depends on the data: replace the loop or `.tolist()` by an op with fixed "
            "shapes (for experts: stacked weights and moec's grouped ops)"
        )
    elif "more than one element of the written-to tensor" in str(error):
        paths = [path for path, tensor in weight_slots(root) if overlaps_itself(tensor)]
        reason = f"it writes a tensor whose elements share memory, as those of {', '.join(paths)} do"
        hint = "give the buffer memory of its own: register tensor.contiguous()"
    elif "Constraints violated" in str(error):
        hint = "not every length of the plan fits one graph: raise plan.min_length, or leave plan.dynamic out"
    else:
        hint = "run the model once in eager mode with the plan's batch and length to see whether it is the model's own"
    return CaptureError(
        f"{what} cannot be traced into one graph",
        where=_user_frame(error, root),
        why=f"{type(error).__name__}: {reason}",
        hint=hint,
    )


def _user_frame(error: BaseException, root: nn.Module) -> str:
    """'layers.0.mlp, moe.py:12 in forward': the last frame of the model's code, and the module that runs it."""
    paths = {id(child): path for path, child in root.named_modules()}
    own = [f for f in traceback.walk_tb(error.__traceback__) if not f[0].f_code.co_filename.startswith(_NOT_THE_MODEL)]
    running = [paths[id(f.f_locals["self"])] for f, _ in own if id(f.f_locals.get("self")) in paths]
    text = f"{own[-1][0].f_code.co_filename}:{own[-1][1]} in {own[-1][0].f_code.co_name}" if own else ""
    return ", ".join(filter(None, [running[-1] if running else "", text]))


_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
