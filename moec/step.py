"""What `moec.compile` and `moec.load` return: a training step that can show how it was made."""

from __future__ import annotations

import difflib
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from moec.artifact import digest, read_stages, write_plan
from moec.artifact_files import FINGERPRINT, STATE_MAP, WEIGHTS, no_artifact, read_json
from moec.compiler.errors import ArtifactError
from moec.compiler.log import PassLog
from moec.compiler.memory import MemoryPlan
from moec.compiler.plan import Plan
from moec.compiler.printer import StageGraphs
from moec.runtime.export import export_weights
from moec.runtime.program import PROGRAM
from moec.runtime.state import StepState
from moec.runtime.step import TrainStep
from moec.runtime.team import Team


class CompiledStep(TrainStep):
    """A `TrainStep` with its log, the graphs of every stage, and its source text.

    folder: where the artefact lies (a temporary one until `save`).
    """

    folder: Path
    log: PassLog

    @classmethod
    def of(cls, program: ModuleType, state: StepState, folder: Path, log: PassLog, plan: Plan) -> Self:
        """The step for a loaded program and a state. plan: the artefact's, but for the schedule."""
        fingerprint = read_json(folder, FINGERPRINT)
        state_map = read_json(folder, STATE_MAP)
        images = tuple(state_map["images"]) if state_map["images"] else None
        artifact = fingerprint | {"program": digest((folder / PROGRAM).read_text(encoding="utf-8"))}
        step = cls(program, state, plan, artifact, state_map["vocabulary"], images, tuple(state_map["written"]))
        step.folder, step.log = folder, log
        return step

    def __repr__(self) -> str:
        size = f"{len(self.state.weights)} weights, {describe(self.artifact)}"
        return f"<{type(self).__name__} at step {self.state.step}: {size}, in {self.folder}>"

    @property
    def source(self) -> str:
        """The text of step.py as it runs."""
        return (self.folder / PROGRAM).read_text(encoding="utf-8")

    @property
    def memory(self) -> MemoryPlan:
        """What one rank is predicted to hold; ArtifactError for an artefact that does not say."""
        if self.log.memory is None:
            raise ArtifactError(f"{self.folder} says nothing about memory", hint="compile it again with this version")
        return self.log.memory

    def graph(self, stage: str) -> StageGraphs:
        """The graphs of a stage: `captured`, `fused`, `joint`, `placed` or `lowered`; prints, saves and diffs."""
        return pick_stage(self.folder, stage)

    def save(self, folder: str | Path, *, weights: bool = False) -> Path:
        """Write the artefact to `folder`, which `moec.load` reads; with `weights` the values too.

        On several ranks all call it together, with a folder that they share.
        """
        folder = Path(folder)
        Team.of(self.state).once(lambda: self._copy_to(folder))
        if weights:
            export_weights(self._saved_state(), folder / WEIGHTS, derived=True)
        return folder

    def _saved_state(self) -> StepState:
        return self.state

    def _copy_to(self, folder: Path) -> None:
        shutil.copytree(self.folder, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / WEIGHTS).unlink(missing_ok=True)
        write_plan(folder, self.plan)


def pick_stage(folder: Path, stage: str) -> StageGraphs:
    """One stage's graphs of an artefact; an unknown name raises ArtifactError with the known ones."""
    stages = read_stages(folder)
    if not stages:
        raise no_artifact(folder, "graphs")
    if stage not in stages:
        near = difflib.get_close_matches(stage, stages, n=1)
        raise ArtifactError(
            f"no stage {stage!r}",
            where=str(folder),
            hint=f"did you mean {near[0]}?" if near else f"stages: {', '.join(stages)}",
        )
    return stages[stage]


def describe(fingerprint: dict[str, Any]) -> str:
    """One line on what an artefact was compiled for."""
    plan = fingerprint["plan"]
    shape = f"{plan['accumulation']} x [{plan['batch']}, {plan['length']}]"
    return f"{shape} tokens on {fingerprint['device']}, torch {fingerprint['torch']}"
