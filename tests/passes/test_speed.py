"""Time of the passes grows with the graph, not faster."""

from __future__ import annotations

import time

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from moec.compiler.graph import Signature, Unit
from moec.compiler.pass_manager import Pass, PassContext
from moec.models.k3.config import K3Config
from moec.models.k3.kda import KDA
from moec.models.k3.mla import MLA
from moec.models.k3.moe import LatentMoE
from tests.passes.support import ONE_RANK

from .support import unit_of

CONFIG = K3Config(vocab_size=8, hidden_size=16, layers=1, heads=2, kv_rank=8, experts=4, expert_size=8, latent_size=8)


class Block(nn.Module):
    """A bit of everything that the passes look for, and long chains of what they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.kda, self.mla, self.moe = KDA(CONFIG), MLA(CONFIG), LatentMoE(CONFIG)
        self.moe.router.balancing = False

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x + self.kda(x, ids)
        x = x + self.mla(x, ids)
        x = x + self.moe(x)
        for _ in range(20):
            x = F.silu(x * 0.5 + x.sin()) * x
        return x


def _repeated(unit: Unit, times: int) -> Unit:
    """The unit's graph after itself, `times` times; values keep their metadata."""
    graph = fx.Graph()
    inputs = {node: graph.node_copy(node) for node in unit.graph.find_nodes(op="placeholder")}
    (x,) = [node for node in inputs if node.name == "x"]
    (last,) = unit.graph.output_node().args[0]  # type: ignore[misc]
    value = inputs[x]
    for _ in range(times):
        copies: dict[fx.Node, fx.Node] = inputs | {x: value}
        for node in unit.graph.nodes:
            if node.op == "call_function":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        value = copies[last]
    graph.output((value,))
    return Unit("repeated", fx.GraphModule(unit.module, graph), Signature(unit.signature.inputs, ()))


def _seconds(step: Pass, unit: Unit) -> float:
    started = time.process_time()
    step.run(unit, PassContext())
    return time.process_time() - started


NODES = 10_000


def test_ten_thousand_nodes() -> None:
    args = (torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.int64))
    once = unit_of(Block(), *args)
    size = len(once.graph.nodes)
    unit = _repeated(once, -(-NODES // size))
    assert len(unit.graph.nodes) >= NODES * 0.9
    took = {}
    for step in ONE_RANK:
        took[step.name] = _seconds(step, unit)
        unit.graph.eliminate_dead_code()
    # A pass takes well under a second on an idle core; quadratic time would be minutes.
    assert max(took.values()) < 5.0, took
