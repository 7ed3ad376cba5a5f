"""The artefact: a folder with the program, its plan, log, graphs, and the fingerprint that tells whether it still fits.

step.py               the program
plan.yaml             the plan it was compiled for
log.jsonl             the pass log
state_map.json        every weight and buffer: shape, dtype, trained or not, tied to what
fingerprint.json      versions, device, plan and weights; compared field by field on load
constants.safetensors tensors the program refers to; buffers.safetensors: buffers that the model computes itself
buckets.json          what lies sharded where, and collectives.json: in which order ranks meet; for several ranks
graphs/STAGE/UNIT.txt the graphs of every stage
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moec.compiler.errors import ArtifactError

PLAN, LOG, STATE_MAP, FINGERPRINT, GRAPHS = "plan.yaml", "log.jsonl", "state_map.json", "fingerprint.json", "graphs"
ARTIFACT = "artifact"
"""The artefact's folder inside the folder of a run."""
BUFFERS, WEIGHTS = "buffers.safetensors", "weights.safetensors"
BUCKETS, COLLECTIVES = "buckets.json", "collectives.json"


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """One of the JSON files; raises ArtifactError when it is missing or broken."""
    path = folder / name
    if not path.is_file():
        raise no_artifact(folder, name)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged", why=str(error), hint="compile it again") from error


def check_holds(folder: Path, *names: str) -> None:
    """Raise ArtifactError unless a folder holds these parts of an artefact."""
    for name in names:
        if not (folder / name).exists():
            raise no_artifact(folder, name)


def no_artifact(folder: Path, lacking: str) -> ArtifactError:
    """The error for a folder that lacks a part which every artefact has."""
    inner = folder / ARTIFACT
    return ArtifactError(
        f"{folder} has no {lacking}",
        why="it is no moec artefact, or an incomplete one",
        hint=f"the artefact of this run is {inner}" if (inner / FINGERPRINT).is_file() else "compile it again",
    )


def check_room(out: Path) -> None:
    """Raise ArtifactError unless `out` is an empty folder, an older artefact, or not there yet."""
    if out.is_file():
        raise ArtifactError(f"{out} is a file", hint="give a folder to write")
    if out.is_dir() and any(out.iterdir()) and not (out / FINGERPRINT).is_file():
        raise ArtifactError(f"{out} holds other files", why="it is no moec artefact", hint="give an empty folder")
