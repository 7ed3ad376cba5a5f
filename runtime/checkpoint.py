"""Checkpoints of a run: `FOLDER/step-00000100/` by torch.distributed.checkpoint, and `FOLDER/LATEST` naming one.

Saving:
1. write tensors and then `moec.json` (everything else) into a partial folder, and flush both to disk;
2. rename it to its final name; 3. rewrite LATEST the same way; 4. remove checkpoints beyond the newest `keep`.
A kill at any point leaves the last good checkpoint, and LATEST names a whole one.

Several ranks write into one folder, which all of them must see: each its own rows, without padding, and the first rank
does the rest once all have written. Whole tensors are stored, so that any number of ranks can load them, or one.

Loading checks everything before it changes anything: size and checksum of each file, every name, shape and dtype, and
the fingerprint of model and plan. A name that is missing or left over is an error. Settings may differ; loading says
which do. What is wrong for one rank is an error on all.
"""

from __future__ import annotations

import json
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from moec.compiler.errors import CheckpointError
from moec.compiler.overlap import overlaps_itself, write_overlapping
from moec.runtime import durable, random_state
from moec.runtime.state import StepState
from moec.runtime.team import PeerError, Team

FORMAT = 3
LATEST = "LATEST"
MANIFEST = "moec.json"
_STEP = "step-"

Changes = dict[str, tuple[Any, Any]]
"""Field -> its value in the checkpoint, and its value now."""
_NAMED = 5


def save_checkpoint(
    folder: Path,
    state: StepState,
    *,
    fingerprint: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Save a run between two steps and return the new checkpoint's folder; all ranks call it together.

    fingerprint, settings: JSON values nested by field, which must be equal at load, and which may have changed.
    data: the position of the batches. keep: how many checkpoints stay, this one included. Raises CheckpointError when
    the disk refuses.
    """
    if keep < 1:
        raise CheckpointError(f"keep is {keep}", hint="keep at least one checkpoint")
    team = Team.of(state)
    final = folder / f"{_STEP}{state.step:08d}"
    partial = folder / f"{durable.PARTIAL}{final.name}"
    try:
        team.once(lambda: _start(folder))
        _write_tensors(partial, state, team)
        parts = team.gather(team.together(lambda: _part(partial, team, data)))
        team.once(lambda: _publish(partial, final, _manifest(partial, state, parts, fingerprint, settings or {}), keep))
    except (OSError, dcp.CheckpointException, PeerError) as error:
        if _interrupted(error):
            raise KeyboardInterrupt from error
        raise CheckpointError(
            f"the checkpoint of step {state.step} could not be written",
            where=str(folder),
            why=_cause(error),
            hint="free space or choose another folder; the checkpoint before it is whole",
        ) from error
    finally:
        if team.first:
            shutil.rmtree(partial, ignore_errors=True)
    return final


def load_checkpoint(
    path: Path,
    state: StepState,
    *,
    fingerprint: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    restore_data: Callable[[Mapping[str, Any]], None] | None = None,
) -> Changes:
    """Load a checkpoint's folder into `state` in place, then the data position, then the random generators.

    All ranks call it together. Their number and how they share experts may be other ones than when it was saved; a
    rank that was not there then starts its random generators from the step and its number.

    Returns the settings that changed. Where none did, the run goes on bit for bit as it would have without the stop.
    Raises CheckpointError, with `state` untouched, when the checkpoint is incomplete or belongs to another model or
    plan.
    """
    team = Team.of(state)
    try:
        tensors = state.tensors()
        manifest = team.together(lambda: _checked(path, state, tensors, fingerprint, team))
        team.together(lambda: _restore_data(path, manifest, restore_data))
        team.together(lambda: _load(path, tensors))
    except PeerError as error:
        raise CheckpointError(
            "the checkpoint could not be loaded on every rank", where=str(path), why=_cause(error)
        ) from error
    state.step = manifest["step"]
    state.updates.update(manifest["updates"])
    state.clear_gradients()
    state.note_weights()
    _restore_random(manifest, team)
    return _changes(manifest["settings"], settings or {})


def _load(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy what a checkpoint holds into the tensors given by name; of DTensors, into this rank's part."""
    overlapping = {name: torch.empty_like(t).contiguous() for name, t in tensors.items() if overlaps_itself(t)}
    with quietly():
        dcp.load({**tensors, **overlapping}, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    for name, values in overlapping.items():
        if not write_overlapping(tensors[name], values):
            raise CheckpointError(
                f"{name} of the checkpoint has different values where the model has one",
                where=str(path),
                why=f"elements of {name.partition('.')[2]} share memory in this model",
                hint="give the tensor memory of its own (.contiguous()) before compiling",
            )


def stored_tensors(path: Path) -> dict[str, tuple[list[int], torch.dtype]]:
    """Shape and dtype of everything in a checkpoint, by name."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: (list(entry.size), entry.properties.dtype)  # type: ignore[union-attr]
        for name, entry in metadata.items()
    }


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that LATEST names, or the newest one if that is gone; None when there is none."""
    pointer = folder / LATEST
    if pointer.is_file():
        named = folder / pointer.read_text().strip()
        if (named / MANIFEST).is_file():
            return named
    whole = _steps(folder)
    return whole[-1] if whole else None


@contextmanager
def quietly() -> Iterator[None]:
    """A context for dcp: torch warns about running without a process group even when told to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _interrupted(error: OSError | dcp.CheckpointException | PeerError) -> bool:
    """torch wraps whatever is raised while it writes, an interrupt by the user too."""
    failures = error.failures.values() if isinstance(error, dcp.CheckpointException) else ()
    return any(isinstance(failure, KeyboardInterrupt) for failure, _ in failures)


def _cause(error: OSError | dcp.CheckpointException | PeerError) -> str:
    if isinstance(error, dcp.CheckpointException):
        return "; ".join(sorted({str(failure) for failure, _ in error.failures.values()}))
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _start(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    durable.remove_partials(folder)


class _Writer(dcp.FileSystemWriter):
    """Says what the system refused; torch's archives hide a write that failed behind an offset that is not theirs."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            refusal: BaseException | None = error
            while refusal is not None and not isinstance(refusal, OSError):
                refusal = refusal.__cause__ or refusal.__context__
            if refusal is None:
                raise
            raise refusal from error


def _write_tensors(partial: Path, state: StepState, team: Team) -> None:
    with quietly():
        writer = _Writer(partial, sync_files=True)
        dcp.save(state.tensors(), storage_writer=writer, no_dist=team.world == 1)


def _part(partial: Path, team: Team, data: Mapping[str, Any] | None) -> dict[str, Any]:
    """What one rank knows of a checkpoint: the files it wrote, its random generators, its position in the data."""
    files = [*partial.glob(f"__{team.rank}_*"), *(partial.glob(".metadata") if team.first else ())]
    return {"files": {file.name: _seal(file) for file in files}, "random": random_state.capture(), "data": data}


def _publish(partial: Path, final: Path, manifest: bytes, keep: int) -> None:
    durable.write_file(partial / MANIFEST, manifest)
    durable.publish(partial, final)
    durable.write_file(final.parent / LATEST, f"{final.name}\n".encode())
    for old in _steps(final.parent)[:-keep]:
        if old != final:
            durable.remove_folder(old)


def _steps(folder: Path) -> list[Path]:
    """All whole checkpoints, oldest step first."""
    return sorted(
        (path.parent for path in folder.glob(f"{_STEP}*/{MANIFEST}")), key=lambda path: int(path.name[len(_STEP) :])
    )


def _manifest(
    partial: Path,
    state: StepState,
    parts: list[dict[str, Any]],
    fingerprint: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> bytes:
    files = {name: seal for part in parts for name, seal in part["files"].items()}
    _check_one_folder(partial, files)
    data = parts[0]["data"]
    for rank, part in enumerate(parts):
        if part["data"] != data:
            raise CheckpointError(
                f"ranks 0 and {rank} stand at different positions in the data",
                why=f"{data} and {part['data']}",
                hint="give every rank the same data in the same order; each takes its own rows of a batch",
            )
    content = {
        "format": FORMAT,
        "step": state.step,
        "torch": torch.__version__,
        "fingerprint": fingerprint,
        "settings": settings,
        "data": data,
        "updates": state.updates,
        "aliases": state.aliases,
        "files": dict(sorted(files.items())),
        "random": [part["random"] for part in parts],
    }
    return json.dumps(content).encode()


def _check_one_folder(partial: Path, files: Mapping[str, Any]) -> None:
    seen = {file.name for file in partial.iterdir()}
    if seen != files.keys():
        missing = sorted(files.keys() - seen) or sorted(seen - files.keys())
        raise CheckpointError(
            f"the ranks do not write into one folder: {', '.join(missing[:_NAMED])} is not where rank 0 looks",
            where=str(partial.parent),
            hint="give a folder on a disk that all ranks share",
        )


def _checked(
    path: Path, state: StepState, tensors: Mapping[str, Tensor], fingerprint: Mapping[str, Any], team: Team
) -> dict[str, Any]:
    """The manifest of a checkpoint that fits; each rank looks at its share of the files."""
    manifest = read_manifest(path)
    check_files(path, dict(sorted(manifest["files"].items())[team.rank :: team.world]))
    _check_tensors(path, tensors)
    _check_paths(path, "optimizer updates", manifest["updates"], state.updates)
    _check_fingerprint(path, manifest["fingerprint"], fingerprint)
    return manifest


def _restore_data(path: Path, manifest: Mapping[str, Any], restore: Callable[[Mapping[str, Any]], None] | None) -> None:
    if restore is None:
        return
    if manifest["data"] is None:
        raise CheckpointError("the checkpoint holds no data position", where=str(path))
    restore(manifest["data"])


def _restore_random(manifest: Mapping[str, Any], team: Team) -> None:
    states = manifest["random"]
    if team.rank < len(states):
        random_state.restore(states[team.rank])
    else:
        random_state.separate(team.rank, manifest["step"])


def read_manifest(path: Path) -> dict[str, Any]:
    """Everything but tensors of the checkpoint in a folder; raises CheckpointError when there is none."""
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(
            f"no checkpoint in {path}",
            why=f"there is no {MANIFEST}",
            hint="give a folder named step-..., as listed beside LATEST",
        )
    try:
        manifest: dict[str, Any] = json.loads(file.read_bytes())
    except ValueError as error:
        raise _damaged(path, f"{MANIFEST} is no JSON: {error}") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint has format {manifest.get('format')}, this version reads {FORMAT}",
            where=str(path),
            hint="load it with the version of moec that wrote it",
        )
    return manifest


def check_files(path: Path, files: Mapping[str, tuple[int, int]]) -> None:
    """Compare files with what the manifest says of them; raises CheckpointError for damage."""
    for name, (size, checksum) in files.items():
        if not (path / name).is_file():
            raise _damaged(path, f"{name} is missing")
        found = _seal(path / name)
        if found[0] != size:
            raise _damaged(path, f"{name} has {found[0]} bytes instead of {size}")
        if found[1] != checksum:
            raise _damaged(path, f"{name} has another checksum than when it was written")


def _seal(file: Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size = checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return size, checksum


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint is damaged", where=str(path), why=why, hint="load an older one from the same folder"
    )


def _check_fingerprint(path: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    differing = _changes(saved, here)
    if differing:
        name, *more = differing
        then, now = differing[name]
        others = f" (and {len(more)} more: {', '.join(more[: _NAMED - 1])})" if more else ""
        raise CheckpointError(
            f"the checkpoint belongs to another model or plan: {name} was {then}, now it is {now}{others}",
            where=str(path),
            hint="compile with the model and plan of the checkpoint, or start a new run in another folder",
        )


def _changes(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Changes:
    then, now = _flatten(saved), _flatten(json.loads(json.dumps(here)))
    return {
        name: (then.get(name, "absent"), now.get(name, "absent"))
        for name in sorted(then.keys() | now.keys())
        if then.get(name, ...) != now.get(name, ...)
    }


def _flatten(fields: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(fields, Mapping):
        return {prefix: fields}
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= _flatten(value, f"{prefix}.{name}" if prefix else name)
    return flat


def _check_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    stored = stored_tensors(path)
    _check_paths(path, "tensors", stored, tensors)
    for name, tensor in tensors.items():
        shape, dtype = stored[name]
        if shape != list(tensor.shape) or dtype != tensor.dtype:
            raise CheckpointError(
                f"the checkpoint belongs to another model: {name} is {dtype} {shape} there, "
                f"here it is {tensor.dtype} {list(tensor.shape)}",
                where=str(path),
            )


def _check_paths(path: Path, what: str, saved: Iterable[str], here: Iterable[str]) -> None:
    missing, unexpected = sorted(set(here) - set(saved)), sorted(set(saved) - set(here))
    if missing or unexpected:
        raise CheckpointError(
            f"the checkpoint's {what} do not fit the model",
            where=str(path),
            why="; ".join(
                f"{kind}: {', '.join(names[:_NAMED])}"
                + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
                for kind, names in (("missing", missing), ("unexpected", unexpected))
                if names
            ),
            hint="load it into the model it was saved from",
        )
