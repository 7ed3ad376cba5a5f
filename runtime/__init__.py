"""What runs a compiled step: state, optimizer, balance, schedule, data, checkpoints and the training loop.

An emitted `step.py` imports this package and calls the functions below by name. Names load on first use (PEP 562), so
that a step which only needs the optimizer does not import `torch.distributed`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moec.runtime.balance import BalanceBuffers, update_balance
    from moec.runtime.capacity import refuse_overflow
    from moec.runtime.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
    from moec.runtime.data import PackedText
    from moec.runtime.export import export_weights
    from moec.runtime.loop import TrainSummary, train
    from moec.runtime.optimizer import adamw, clip_gradients, parameter_groups
    from moec.runtime.program import load_constants, load_program
    from moec.runtime.protocol import Batches, OptimizerStep, StepResult
    from moec.runtime.schedule import Schedule
    from moec.runtime.sharded_state import ShardedState
    from moec.runtime.sources import Sources, find_text
    from moec.runtime.state import StepState
    from moec.runtime.step import TrainStep
    from moec.runtime.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
    from moec.runtime.written_buffers import join_buffers

_HOME = {
    "BalanceBuffers": "balance",
    "Batches": "protocol",
    "ByteTokenizer": "tokenizer",
    "OptimizerStep": "protocol",
    "FileTokenizer": "tokenizer",
    "PackedText": "data",
    "Schedule": "schedule",
    "ShardedState": "sharded_state",
    "Sources": "sources",
    "StepResult": "protocol",
    "StepState": "state",
    "Tokenizer": "tokenizer",
    "TrainStep": "step",
    "TrainSummary": "loop",
    "adamw": "optimizer",
    "clip_gradients": "optimizer",
    "export_weights": "export",
    "find_text": "sources",
    "join_buffers": "written_buffers",
    "latest_checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
    "load_constants": "program",
    "load_program": "program",
    "parameter_groups": "optimizer",
    "refuse_overflow": "capacity",
    "save_checkpoint": "checkpoint",
    "train": "loop",
    "update_balance": "balance",
}

__all__ = [
    "BalanceBuffers",
    "Batches",
    "ByteTokenizer",
    "FileTokenizer",
    "OptimizerStep",
    "PackedText",
    "Schedule",
    "ShardedState",
    "Sources",
    "StepResult",
    "StepState",
    "Tokenizer",
    "TrainStep",
    "TrainSummary",
    "adamw",
    "clip_gradients",
    "export_weights",
    "find_text",
    "join_buffers",
    "latest_checkpoint",
    "load_checkpoint",
    "load_constants",
    "load_program",
    "parameter_groups",
    "refuse_overflow",
    "save_checkpoint",
    "train",
    "update_balance",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
