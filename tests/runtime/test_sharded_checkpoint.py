"""Checkpoints of several real ranks: bit-equal on any number of ranks, and whole whatever fails."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from moec.compiler.errors import CheckpointError
from moec.compiler.plan import MeshPlan
from moec.runtime import ShardedState, StepState, durable, latest_checkpoint, load_checkpoint, save_checkpoint
from moec.runtime.checkpoint import MANIFEST, read_manifest
from moec.runtime.groups import connect
from tests.runtime.processes import run_ranks, start_ranks
from tests.runtime.sharded_toy import joined_rows, model, state

pytestmark = pytest.mark.slow
GROUPS = ("weights", "masters", "exp_avg", "exp_avg_sq")
FINGERPRINT = {"weights": "toy"}
DATA = {"row": 12}
SAVED_ON = [(1, 1), (4, 2), (3, 3), (4, 4)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of the same marked values, saved on several meshes."""
    found = []
    for fsdp, ep in SAVED_ON:
        folder = tmp_path_factory.mktemp("saved")
        _on_mesh(fsdp, _save, folder, fsdp, ep)
        latest = latest_checkpoint(folder)
        assert latest is not None
        found.append(latest)
    return found


@pytest.mark.parametrize(("fsdp", "ep"), [(1, 1), (2, 1), (3, 1), (3, 3), (4, 2), (4, 4)])
def test_c32_a_checkpoint_loads_on_any_mesh(saved: list[Path], fsdp: int, ep: int) -> None:
    """C23, C31, C32: odd sizes, a tied weight, and experts in their places with their moments."""
    for ranks in zip(*_on_mesh(fsdp, _load_all, saved, fsdp, ep), strict=True):
        _assert_as_marked(ranks)


def test_c32_two_experts_that_change_places_are_seen(tmp_path: Path) -> None:
    """Rank 0 writes its two experts, or their moments, in the other order."""
    for group in ("weights", "exp_avg"):
        run_ranks(4, _save_swapped, tmp_path / group, 4, 2, group)
        latest = latest_checkpoint(tmp_path / group)
        assert latest is not None
        ranks = run_ranks(2, _load, latest, 2, 2)
        with pytest.raises(AssertionError, match=rf"{group}\.layers\.0\.experts"):
            _assert_as_marked(ranks)


def _save_swapped(rank: int, folder: Path, fsdp: int, ep: int, group: str) -> None:
    plain = ShardedState.tensors

    def swapped(state: ShardedState) -> dict[str, Tensor]:
        tensors = plain(state)
        if rank == 0:
            local = tensors[f"{group}.layers.0.experts"].to_local()  # type: ignore[attr-defined]
            local.copy_(local.flip(0))
        return tensors

    ShardedState.tensors = swapped  # type: ignore[method-assign]
    _save(rank, folder, fsdp, ep)


def _assert_as_marked(ranks: Sequence[dict[str, Any]]) -> None:
    expected = _marked()
    found = joined_rows([rank["rows"] for rank in ranks])
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    for rank in ranks:
        assert rank["step"] == 7
        assert rank["updates"] == {path: 3 + index for index, path in enumerate(rank["updates"])}
        assert rank["data"] == DATA
        assert torch.equal(rank["bias"], torch.arange(6.0))
        assert rank["masters_kept"], "masters were read again from rounded weights"
        assert rank["scalar"] == expected["weights.layers.0.scale"], "the caller's model has another value"


def test_every_rank_goes_on_with_its_own_random_numbers(saved: list[Path]) -> None:
    """Saved by the ranks of `saved[1]`, whose generators started from 100 + rank."""
    expected = []
    for rank in range(4):
        _start_generators(rank)
        expected.append(_drawn())
    drawn = [rank[0]["drawn"] for rank in run_ranks(4, _load_all, saved[1:2], 4, 1)]
    assert drawn == expected
    more = [rank[0]["drawn"] for rank in run_ranks(4, _load_all, saved[2:3], 4, 1)]
    assert more[:3] == expected[:3]
    assert more[3] not in expected


def test_the_parts_are_files_of_each_rank_and_hold_no_padding(saved: list[Path]) -> None:
    path = saved[-1]
    manifest = read_manifest(path)
    assert set(manifest["files"]) == {file.name for file in path.iterdir()} - {MANIFEST}
    assert {name[:4] for name in manifest["files"]} >= {"__0_", "__1_", "__2_", "__3_"}
    stored = dcp.FileSystemReader(path).read_metadata()
    sizes = {name: list(entry.size) for name, entry in stored.state_dict_metadata.items()}  # type: ignore[union-attr]
    whole = model(dtype=torch.bfloat16)
    for name, weight in whole.named_parameters():
        assert sizes[f"weights.{name}"] == list(weight.shape or (1,))
    assert "weights.head.weight" not in sizes
    rows = sum(chunk.sizes[0] for chunk in stored.state_dict_metadata["exp_avg.embed.weight"].chunks)  # type: ignore[union-attr]
    assert rows == 513


def test_another_model_is_refused_on_every_rank(saved: list[Path]) -> None:
    run_ranks(2, _refuse_other_tie, saved[1])


def _refuse_other_tie(rank: int, path: Path) -> None:
    connect(MeshPlan(fsdp=2), torch.device("cpu"))
    loose = state(model(tied=False, dtype=torch.bfloat16), MeshPlan(fsdp=2), rank)
    before = {name: value.clone() for name, value in loose.weights.items()}
    with pytest.raises(CheckpointError, match=r"missing: exp_avg\.head\.weight, exp_avg_sq\.head\.weight"):
        load_checkpoint(path, loose, fingerprint=FINGERPRINT)
    with pytest.raises(CheckpointError, match="weights was toy, now it is other"):
        load_checkpoint(path, _fresh(2, 1, rank), fingerprint={"weights": "other"})
    assert all(torch.equal(before[name], value) for name, value in loose.weights.items())


def test_what_one_rank_finds_is_an_error_on_all(tmp_path: Path) -> None:
    run_ranks(2, _disagree, tmp_path)


def _disagree(rank: int, folder: Path) -> None:
    part = _marked_state(2, 2, rank)
    good = _saved(folder, part)
    _fails(rank, "stand at different positions", "rank 0", lambda: _saved(folder, part, data={"row": rank}))
    elsewhere = folder if rank == 0 else folder / "elsewhere"
    _fails(rank, "do not write into one folder", "rank 0", lambda: _saved(elsewhere, part))
    if rank == 1:
        write = dcp.FileSystemWriter.write_data
        dcp.FileSystemWriter.write_data = _no_space  # type: ignore[method-assign, assignment]
    with pytest.raises(CheckpointError, match=r"step 7 could not be written\n.*\n  why: .*No space left"):
        _saved(folder, part)
    if rank == 1:
        dcp.FileSystemWriter.write_data = write  # type: ignore[method-assign]
    assert latest_checkpoint(folder) == good
    if rank == 0:
        file = good / "__1_0.distcp"
        file.write_bytes(file.read_bytes()[:-1])
    torch.distributed.barrier()
    fresh = _fresh(2, 2, rank)
    before = {name: value.clone() for name, value in fresh.weights.items()}
    with pytest.raises(CheckpointError, match=r"the checkpoint (is damaged|could not be loaded on every rank)"):
        load_checkpoint(good, fresh, fingerprint=FINGERPRINT)
    assert all(torch.equal(before[name], value) for name, value in fresh.weights.items())


def _fails(rank: int, own: str, others: str, action: Any) -> None:
    """Rank 0 raises its own error, the other says whose it was and why."""
    with pytest.raises(CheckpointError, match=own) as caught:
        action()
    assert rank == 0 or others in str(caught.value)
    torch.distributed.barrier()


def _no_space(*args: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


DEATHS = {
    "rank 1 before its tensors": (1, dcp.FileSystemWriter, "write_data", 2, "before"),
    "rank 1 after its tensors": (1, dcp.FileSystemWriter, "write_data", 2, "after"),
    "rank 0 before its tensors": (0, dcp.FileSystemWriter, "write_data", 2, "before"),
    "rank 0 before the metadata": (0, dcp.FileSystemWriter, "finish", 2, "before"),
    "rank 0 before the manifest": (0, durable, "publish", 4, "before"),
    "rank 0 before the folder": (0, durable, "publish", 5, "before"),
    "rank 0 after the folder": (0, durable, "publish", 5, "after"),
    "rank 0 after LATEST": (0, durable, "publish", 6, "after"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_killed_rank_leaves_the_last_checkpoint_whole(tmp_path: Path, death: str) -> None:
    folder = tmp_path / "checkpoints"
    (tmp_path / "ranks").mkdir()
    ranks = start_ranks(2, tmp_path / "ranks", _die, folder, death)
    for process in ranks:
        process.join(90)
    assert all(process.exitcode not in (0, None) for process in ranks), "a rank went on without the other"
    assert ranks[DEATHS[death][0]].exitcode == -signal.SIGKILL
    latest = latest_checkpoint(folder)
    assert latest is not None
    assert latest.name == ("step-00000008" if death == "rank 0 after LATEST" else "step-00000007")
    found = _load(0, latest, 1, 1)
    expected = _marked()
    assert found["step"] == int(latest.name[-1])
    rows = joined_rows([found["rows"]])
    assert all(torch.equal(rows[name], expected[name]) for name in expected)
    # The next save finds and removes what was left behind.
    _save(0, folder, 1, 1)
    assert not list(folder.glob(".partial*"))


def _die(rank: int, folder: Path, death: str) -> None:
    dying, owner, name, call, moment = DEATHS[death]
    if rank == dying:
        _die_at(owner, name, call, moment)
    part = _marked_state(2, 2, rank)
    for step in (7, 8):
        part.step = step
        _saved(folder, part)


def _die_at(owner: Any, name: str, call: int, moment: str) -> None:
    original, calls = getattr(owner, name), 0

    def dying(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < call:
            return original(*args, **options)
        if moment == "after":
            original(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    setattr(owner, name, dying)


def _on_mesh(fsdp: int, function: Any, *arguments: Any) -> list[Any]:
    """One rank needs no process group and no sharded state."""
    return [function(0, *arguments)] if fsdp == 1 else run_ranks(fsdp, function, *arguments)


def _fresh(fsdp: int, ep: int, rank: int, seed: int = 5) -> StepState:
    whole, mesh = model(seed, dtype=torch.bfloat16), MeshPlan(fsdp=fsdp, ep=ep)
    if fsdp == 1:
        return StepState.from_module(whole)
    connect(mesh, torch.device("cpu"))
    return state(whole, mesh, rank)


def _marked() -> dict[str, Tensor]:
    """Values that tell group, path, and place; expert e counts e (C32), masters are finer than their weights."""
    whole, generator = model(dtype=torch.bfloat16), torch.Generator().manual_seed(1)
    values = {}
    for path, weight in whole.named_parameters():
        for group in GROUPS if weight.requires_grad else ("weights",):
            value = torch.randn(weight.shape, generator=generator)
            if path.endswith("experts"):
                value = torch.arange(6.0).view(6, 1, 1) + 10 * GROUPS.index(group) + 0.1 * value
            if group == "masters" and weight.dtype == torch.float32:
                continue
            values[f"{group}.{path}"] = value.to(weight.dtype) if group == "weights" else value
            if group == "masters":
                values[f"weights.{path}"] = value.to(weight.dtype)
    return values


def _marked_state(fsdp: int, ep: int, rank: int) -> StepState:
    part = _fresh(fsdp, ep, rank, seed=6)
    for name, value in _marked().items():
        group, _, path = name.partition(".")
        getattr(part, group)[path].detach().copy_(_rows(part, path, value))
    part.note_weights()
    part.step = 7
    part.updates = {path: 3 + index for index, path in enumerate(part.updates)}
    part.buffers["layers.1.bias"].copy_(torch.arange(6.0))
    return part


def _rows(part: StepState, path: str, value: Tensor) -> Tensor:
    if not isinstance(part, ShardedState) or path not in part.shards:
        return value
    rows = part.shards[path].rows
    return (value if value.dim() else value.view(1))[rows.start : rows.stop]


def _saved(folder: Path, part: StepState, data: Any = DATA) -> Path:
    return save_checkpoint(folder, part, fingerprint=FINGERPRINT, data=data)


def _save(rank: int, folder: Path, fsdp: int, ep: int) -> None:
    part = _marked_state(fsdp, ep, rank)
    if isinstance(part, ShardedState):
        part.place_in(model(dtype=torch.bfloat16))
    _start_generators(rank)
    _saved(folder, part)


def _start_generators(rank: int) -> None:
    for start in (torch.manual_seed, random.seed, np.random.seed):
        start(100 + rank)


def _load_all(rank: int, paths: list[Path], fsdp: int, ep: int) -> list[dict[str, Any]]:
    return [_load(rank, path, fsdp, ep) for path in paths]


def _load(rank: int, path: Path, fsdp: int, ep: int) -> dict[str, Any]:
    part = _fresh(fsdp, ep, rank)
    whole: Any = model(dtype=torch.bfloat16)
    scalar = part.weights["layers.0.scale"]
    if isinstance(part, ShardedState):
        part.place_in(whole)
        scalar = whole.layers[0].scale.to_local()
    position: dict[str, Any] = {}
    load_checkpoint(path, part, fingerprint=FINGERPRINT, restore_data=position.update)
    drawn = _drawn()
    masters = {path: value.clone() for path, value in part.masters.items()}
    part.follow_weights()
    return {
        "rows": dict(_held(part)),
        "step": part.step,
        "updates": part.updates,
        "data": position,
        "bias": part.buffers["layers.1.bias"],
        "drawn": drawn,
        "scalar": scalar.detach(),
        "masters_kept": all(torch.equal(value, part.masters[path]) for path, value in masters.items()),
    }


def _held(part: StepState) -> Iterator[tuple[str, tuple[int, Tensor, tuple[int, ...]]]]:
    """name -> (first row, rows, whole shape) of everything that a rank holds."""
    for group in GROUPS:
        for path, value in getattr(part, group).items():
            if path in part.aliases:
                continue
            if isinstance(part, ShardedState) and path in part.shards:
                shard = part.shards[path]
                yield f"{group}.{path}", (shard.rows.start, value.detach().clone(), shard.shape)
            else:
                yield f"{group}.{path}", (0, value.detach().clone(), tuple(value.shape))


def _drawn() -> tuple[float, ...]:
    return float(torch.rand(())), random.random(), float(np.random.rand())
