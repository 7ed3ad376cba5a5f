"""Graphs of a stage as text, and the time that a stage takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import fx

from moec.compiler.capture import Capture
from moec.compiler.log import PassLog, StageTime
from moec.compiler.partition import Partitioned
from moec.compiler.placement import JointProgram
from moec.compiler.printer import StageGraphs, graph_text


def unit_graphs(stage: str, captured: Capture) -> StageGraphs:
    return StageGraphs(
        stage,
        {
            unit.name: graph_text(unit.graph, {node: value.name for node, value in unit.placeholders()})
            for unit in captured.program.units.values()
        },
    )


def joint_graphs(stage: str, program: JointProgram) -> StageGraphs:
    return StageGraphs(stage, {name: graph_text(graph) for name, graph in program.graphs()})


def placed_graphs(stage: str, everything: list[tuple[str, Partitioned]]) -> StageGraphs:
    texts = {}
    for name, parts in everything:
        texts[f"{name}.forward"] = graph_text(parts.forward)
        texts[f"{name}.backward"] = graph_text(parts.backward)
    return StageGraphs(stage, texts)


@contextmanager
def timed(log: PassLog, stage: str) -> Iterator[Callable[..., None]]:
    """Log how long the block takes, and how many nodes the graphs have that it counts."""
    counted = [0]

    def count(graphs: Iterable[fx.Graph]) -> None:
        counted[0] = sum(len(graph.nodes) for graph in graphs)

    started = time.perf_counter()
    yield count
    log.stages.append(StageTime(stage, time.perf_counter() - started, counted[0]))
