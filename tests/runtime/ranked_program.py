"""A step program for several ranks, as text, small enough to be checked by hand: one table, one layer, one loss.

objective = inverse_tokens * sum over valid tokens of (table[token] . scale . table[label]) ** 2 / 2
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moec.compiler.layout import BucketInstance, BucketLayout
from moec.compiler.plan import MeshPlan, OptimizerPlan, Plan
from moec.runtime.program import load_program
from moec.runtime.sharded_state import ShardedState
from moec.runtime.state import StepState
from moec.runtime.step import TrainStep

VOCABULARY, WIDTH = 7, 3

PROGRAM = '''"""A step for tests."""

import torch

from moec import runtime

moec = torch.ops.moec
c10d = torch.ops._c10d_functional
DEVICE = torch.device("cpu")
COLLECTIVES = [("all_gather", "gather", "uint8", 64), ("reduce_scatter", "scatter", "float32", 12)]


def table_of(state):
    if RANKS == 1:
        return state.scope("")["table"]
    gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(state.shard("model"), RANKS, "gather"))
    return moec.unshard(gathered, RANKS, 0, [VOCABULARY, WIDTH], torch.float32)


def layer_forward(w, table, ids):
    return table[ids] * w["scale"], [ids]


def forward(state, batch):
    table, ids, labels = table_of(state), batch["input_ids"][:, :-1], batch["labels"][:, 1:]
    hidden, saved = layer_forward(state.scope("layer"), table, ids)
    valid = labels != -100
    targets = table[labels.clamp(min=0)]
    scores = (hidden * targets).sum(-1) * valid
    state.scope("")["layer.counts"].add_(torch.bincount(ids.flatten(), minlength=VOCABULARY))
    loss = scores.square().sum() / 2 * batch["inverse_tokens"]
    results = {"lm_loss": loss, "objective": loss, "seen": valid.sum()}
    return results, [table, ids, labels, scores, batch["inverse_tokens"]]


def backward(state, saved):
    table, ids, labels, scores, inverse = saved
    scale = state.scope("layer")["scale"]
    outer = (scores * inverse)[..., None] * scale
    gradient = torch.zeros_like(table)
    gradient.index_add_(0, ids.flatten(), (outer * table[labels.clamp(min=0)]).flatten(0, 1))
    gradient.index_add_(0, labels.clamp(min=0).flatten(), (outer * table[ids]).flatten(0, 1))
    if RANKS == 1:
        state.accumulate("table", gradient)
        return
    numel = state.buckets["model"].layout.gradient_numel
    packed = moec.pack_gradients([gradient], [0], numel, RANKS, torch.float32)
    state.accumulate_shard("model", c10d.wait_tensor(
        c10d.reduce_scatter_tensor(packed, "sum", RANKS, "scatter")))


def update(state, lr):
    norm = runtime.clip_gradients(state, max_norm=0.5)
    runtime.adamw(state, ["table"], lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    return norm


def step(state, batches, lr):
    totals = {}
    for batch in batches:
        results, saved = forward(state, batch)
        backward(state, saved)
        for name, value in results.items():
            totals[name] = totals[name] + value if name in totals else value
    return totals, update(state, lr)
'''.replace("VOCABULARY", str(VOCABULARY)).replace("WIDTH", str(WIDTH))


class Table(nn.Module):
    """The weights of the program."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator))
        self.layer = nn.Module()
        self.layer.register_buffer("scale", torch.tensor([0.5, 1.0, 2.0]))
        self.layer.register_buffer("counts", torch.zeros(VOCABULARY, dtype=torch.int64))


def step_of(folder: Path, plan: Plan, rank: int = 0, text: str = PROGRAM) -> TrainStep:
    """The step of one rank; ranks of the same text may share the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "step.py").write_text(text.replace("RANKS", str(plan.mesh.world)))
    module, mesh = Table(), plan.mesh
    state: StepState
    if mesh.world == 1:
        state = StepState.from_module(module)
    else:
        entries = [("table", (VOCABULARY, WIDTH), "float32", True)]
        buckets = {"model": BucketInstance(BucketLayout.of("dense", mesh.world, entries), "")}
        state = ShardedState.from_module(module, buckets=buckets, mesh=mesh, rank=rank)
    artifact: dict[str, Any] = {"weights": "w", "moec": "0", "torch": "0", "device": "cpu", "program": "p"}
    return TrainStep(load_program(folder), state, plan, artifact, vocabulary=VOCABULARY)


def plan_of(world: int, batch: int = 2) -> Plan:
    """A plan of `world` ranks with two microbatches of `batch` rows each, and a constant learning rate."""
    optimizer = OptimizerPlan(lr=0.01, schedule="constant")
    return Plan(batch=batch, length=6, accumulation=2, mesh=MeshPlan(fsdp=world), optimizer=optimizer)


def batch_of(rows: int, seed: int, ignored: float = 0.3) -> dict[str, Tensor]:
    """[2, rows, 6] ids, with labels of which a share is ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (2, rows, 6), generator=generator)
    left_out = torch.rand(ids.shape, generator=generator) < ignored
    return {"input_ids": ids, "labels": ids.masked_fill(left_out, -100)}


def rows_of(batch: dict[str, Tensor], rank: int, rows: int) -> dict[str, Tensor]:
    """The rows of one rank, of a batch for one rank that holds all."""
    return {name: value[:, rank * rows : (rank + 1) * rows] for name, value in batch.items()}
