"""From a program to a step over a model: on one rank, on one of several, or on none of them yet.

With a mesh of several ranks the step of this process holds its shards, if torch.distributed runs with as many ranks:
the model's parameters become DTensors over them. In a process that is alone the step only shows how it was made, and
`simulate_ranks()` runs all ranks in lock step.

Weights come from the model, or from files in place of its own. A model that was built in `deferred_init` has none yet:
they are made here, on several ranks one after the other, of which each keeps its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from moec.compiler.deferred import make_buffers, recording_of
from moec.compiler.errors import PlanError, RankError
from moec.compiler.layout import BucketInstance
from moec.compiler.log import PassLog
from moec.compiler.plan import Plan
from moec.rank_files import read_buckets, read_collectives
from moec.runtime.handshake import shake_hands
from moec.runtime.ranks import Ranks
from moec.runtime.sharded_state import ShardedState
from moec.runtime.state import StepState
from moec.runtime.team import Team
from moec.runtime.weight_source import ModuleWeights, WeightSource, fill_module
from moec.simulated import SimulatedRanks
from moec.step import CompiledStep

EMITTED = "emitted"


def step_over(
    model: nn.Module,
    program: ModuleType,
    folder: Path,
    log: PassLog,
    plan: Plan,
    without_gradient: Sequence[str],
    weights: Path | None = None,
) -> CompiledStep:
    """The step of an artefact over a model's own parameters; on several ranks, all of them call it together.

    weights: where to take their values from (moec/weights.py). Raises CheckpointError, on every rank, when they do not
    fit the model or one cannot read them.
    """
    make_buffers(model)
    if plan.mesh.world == 1:
        _make_weights(model, weights)
        state = StepState.from_module(model, without_gradient=without_gradient)
        return CompiledStep.of(program, state, folder, log, plan)
    program.COLLECTIVES = [(c.kind, c.role, c.dtype, c.numel) for c in read_collectives(folder)]  # type: ignore[attr-defined]
    if not torch.distributed.is_initialized():
        if weights is not None:
            _make_weights(model, weights)
        return UnconnectedStep.of(program, StepState({}, {}, ()), folder, log, plan).over(model, without_gradient)
    from moec.runtime.groups import connect  # loads torch.distributed, which one rank does not need

    ranks = connect(plan.mesh, program.DEVICE)
    buckets = read_buckets(folder)
    if weights is None:
        shake_hands(
            {"initial weights": ModuleWeights(model).signature()},
            ranks.world,
            program.DEVICE,
            hint="build the model from the same seed on every rank, or give weights=FILE",
        )

    def fill() -> ShardedState:
        source = None if weights is None else _source(model, weights, ranks)
        return shards_of(model, buckets, ranks, without_gradient, source)

    if weights is None:
        sharded = Team(ranks.rank, ranks.world, program.DEVICE).together(fill)
    else:
        from moec.weights import on_every_rank

        sharded = on_every_rank(fill, weights, ranks, program.DEVICE)
    sharded.place_in(model)
    return CompiledStep.of(program, sharded, folder, log, plan)


def shards_of(
    model: nn.Module,
    buckets: Mapping[str, BucketInstance],
    ranks: Ranks,
    without_gradient: Sequence[str],
    source: WeightSource | None = None,
) -> ShardedState:
    """What one rank holds of a model, whose parameters stay as they are."""
    return ShardedState.from_module(
        model, without_gradient, buckets=buckets, mesh=ranks.mesh, rank=ranks.rank, source=source
    )


def _source(model: nn.Module, weights: Path, ranks: Ranks) -> WeightSource:
    from moec.weights import weights_at  # needs the models, which an artefact runs without

    return weights_at(model, weights, ranks)


def _make_weights(model: nn.Module, weights: Path | None) -> None:
    """Give a model in this process whole weights, where it is to have others or has none yet."""
    if weights is not None:
        fill_module(model, _source(model, weights, Ranks()))
    elif recording_of(model) is not None:
        fill_module(model, ModuleWeights(model))


class UnconnectedStep(CompiledStep):
    """A step for several ranks in a process that is alone: it can be read, saved and simulated."""

    model: nn.Module
    without_gradient: Sequence[str]

    def over(self, model: nn.Module, without_gradient: Sequence[str]) -> UnconnectedStep:
        """This step, with the model whose weights the ranks start from."""
        self.model, self.without_gradient = model, without_gradient
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises RankError."""
        raise self._alone()

    def loss(self, batch: Mapping[str, Tensor]) -> NoReturn:
        """Raises RankError."""
        raise self._alone()

    def gradients(self, batch: Mapping[str, Tensor]) -> NoReturn:
        """Raises RankError."""
        raise self._alone()

    def simulate_ranks(self, ranks: int | None = None, *, stage: str = EMITTED) -> SimulatedRanks:
        """All ranks of the plan's mesh in this process; they start from the model's weights, which stay as they are.

        ranks: the number expected, only compared. stage: whose graphs they run, "captured" to "lowered" or "emitted",
        the program's text. Raises PlanError when the plan's mesh has another number of ranks, ArtifactError for a stage
        that there is not.
        """
        mesh = self.plan.mesh
        if ranks is not None and ranks != mesh.world:
            raise PlanError(
                f"{ranks} ranks were asked for, the step was compiled for {mesh.world}",
                where="plan.mesh.fsdp",
                hint=f"compile with mesh.fsdp={ranks}",
            )
        if stage != EMITTED:
            from moec.stage_ranks import simulate_stage  # compiles again, with all passes

            return simulate_stage(self, stage)
        buckets = read_buckets(self.folder)
        steps = []
        for rank in range(mesh.world):
            state = shards_of(self.model, buckets, Ranks(mesh, rank), self.without_gradient)
            state.separate_buffers()
            steps.append(CompiledStep.of(self.program, state, self.folder, self.log, self.plan))
        return SimulatedRanks(self.plan, steps, self)

    def _saved_state(self) -> StepState:
        return StepState.from_module(self.model, self.without_gradient)

    def _alone(self) -> RankError:
        world = self.plan.mesh.world
        return RankError(
            f"the plan's mesh has {world} ranks, and this process is alone",
            where="plan.mesh",
            hint=f"start it with `torchrun --nproc-per-node {world} ...`, or use step.simulate_ranks()",
        )
