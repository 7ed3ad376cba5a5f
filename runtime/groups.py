"""Process groups for the roles of a mesh, on gloo (CPU) and NCCL (CUDA).

    torch.distributed.init_process_group(...)
    ranks = connect(plan.mesh, device)

1. Every rank tells the others which mesh, device and versions it has; a difference is an error on all of them.
2. Every rank builds its own group of each role (`compiler/collectives.py`), and sums a number over it: NCCL connects
   the ranks of a group in its first collective, which should not be in the middle of a step. A group per role means a
   queue per role: a gather that is launched ahead does not wait behind a reduce-scatter.
3. Each group is registered in torch's table of groups under the role's name, which is how a program names it:
   `torch.ops._c10d_functional.all_gather_into_tensor(x, 8, "gather")`.

gloo runs every collective that programs use, with uneven and empty splits, on each dtype but int16 and float8; layouts
move such weights as bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist

from moec.compiler._torch_compat import (
    default_store,
    register_process_group,
    set_process_group_timeout,
    unregister_process_group,
)
from moec.compiler.collectives import ROLES, group_of
from moec.compiler.errors import AgreedError, RankError
from moec.compiler.plan import MeshPlan
from moec.runtime.bulletin import Bulletin
from moec.runtime.differences import first_difference, versions
from moec.runtime.ranks import Ranks
from moec.runtime.watch import Watch

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class _Connected:
    """What this process is connected by.

    world: torch's default group at the time. count, watches: calls of `connect` and of `watch_of`. mesh: whose groups
    are registered. built: every group so far, by role, ranks and backend; torch names a group by its ranks, so
    building one again would find what is left of the first.
    """

    world: dist.ProcessGroup | None = None
    count = watches = 0
    built: ClassVar[dict[tuple[str, tuple[int, ...], str], dist.ProcessGroup]] = {}
    mesh: MeshPlan | None = None


def connect(
    mesh: MeshPlan, device: torch.device, *, build_seconds: float = 60.0, collective_seconds: float = 600.0
) -> Ranks:
    """Build the groups of a mesh; all ranks call it together, and may call it again with another mesh.

    build_seconds: how long a rank waits for the others here. collective_seconds: how long a collective may take
    later. A mesh of one rank needs no torch.distributed.

    Raises RankError, on every rank, when the world has another size than the mesh, when ranks have other meshes,
    devices or versions, when one does not arrive in time, and when a group cannot be built.
    """
    disconnect()
    if mesh.world == 1 and not dist.is_initialized():
        return Ranks(mesh)
    if not dist.is_initialized():
        raise RankError(
            f"the plan's mesh has {mesh.world} ranks, and this process is alone",
            where="plan.mesh",
            hint=f"start it with `torchrun --nproc-per-node {mesh.world} -m moec ...` or `moec train --ranks N ...`",
        )
    rank, world = dist.get_rank(), dist.get_world_size()
    bulletin = Bulletin(default_store(), rank, world)
    topic = f"moec/connect/{_Connected.count}"
    _Connected.count += 1
    fields = [f"{name}: {value}" for name, value in asdict(mesh).items()]
    here = json.dumps({"versions": versions(), "mesh": fields, "device": [device.type]})
    found = first_difference([json.loads(text) for text in bulletin.exchange(f"{topic}/hello", here, build_seconds)])
    if found:
        raise AgreedError(
            f"ranks cannot be connected: {found}", hint="start every rank with the same plan and versions"
        )
    if world != mesh.world:
        raise AgreedError(
            f"the plan's mesh has {mesh.world} ranks, {world} were started",
            where="plan.mesh.fsdp",
            hint=f"start {mesh.world} ranks, or set mesh.fsdp={world} and an ep that divides it",
        )
    groups: dict[str, dist.ProcessGroup] = {}
    problem = _build(groups, mesh, rank, device, build_seconds)
    # The others notice a rank that failed when their own attempt has timed out.
    problems = bulletin.exchange(f"{topic}/built", problem, build_seconds + 10)
    failed = [(other, text) for other, text in enumerate(problems) if text]
    if failed:
        raise AgreedError(
            f"{len(failed)} of {mesh.world} ranks could not build their groups",
            why="; ".join(f"rank {other}: {text}" for other, text in failed[:4]),
            hint="check that the ranks reach each other over the network and that each has a device of its own, and "
            "start them again",
        )
    for group in groups.values():
        set_process_group_timeout(timedelta(seconds=collective_seconds), group)
    _register(mesh, groups)
    return Ranks(mesh, rank)


def disconnect() -> None:
    """Take the roles of the last `connect` away; does nothing without one."""
    if dist.is_initialized() and dist.group.WORLD is _Connected.world:
        for role in ROLES if _Connected.mesh is not None else ():
            unregister_process_group(cast(Any, role))
    else:
        _Connected.built.clear()
        _Connected.world = dist.group.WORLD if dist.is_initialized() else None
    _Connected.mesh = None


def use(mesh: MeshPlan) -> None:
    """Let the roles mean the groups of this mesh again, after another one was connected: steps may take turns.

    Does nothing where these groups were never built, as for simulated ranks. Every rank calls it for itself.
    """
    now = _Connected.mesh
    if now is None or (now.world, now.ep) == (mesh.world, mesh.ep) or dist.get_world_size() != mesh.world:
        return
    wanted = {role: group_of(mesh, role, dist.get_rank()) for role in ROLES}
    groups = {role: group for (role, members, _), group in _Connected.built.items() if members == wanted[role]}
    if len(groups) == len(ROLES):
        disconnect()
        _register(mesh, groups)


def _register(mesh: MeshPlan, groups: Mapping[str, dist.ProcessGroup]) -> None:
    for role, group in groups.items():
        register_process_group(cast(Any, role), group)
    _Connected.mesh = mesh


def watch_of(ranks: Ranks, seconds: float, way_back: Callable[[], str]) -> Watch | None:
    """A watch of the connected ranks, to be given to `watched`; all ranks ask for it together. None without any."""
    if _Connected.mesh is None:
        return None
    _Connected.watches += 1
    topic = f"moec/watch/{_Connected.watches}"
    return Watch(default_store(), topic, ranks.rank, ranks.world, seconds, way_back=way_back)


def _build(
    groups: dict[str, dist.ProcessGroup], mesh: MeshPlan, rank: int, device: torch.device, seconds: float
) -> str:
    """Build this rank's group of every role into `groups`; returns what went wrong, '' when nothing did."""
    backend = _BACKENDS[device.type]
    for role in ROLES:
        key = role, group_of(mesh, role, rank), backend
        try:
            if key not in _Connected.built:
                group = dist.new_group(
                    list(key[1]),
                    timeout=timedelta(seconds=seconds),
                    backend=backend,
                    use_local_synchronization=True,
                    group_desc=f"moec {role}",
                )
                _meet(group, len(key[1]), device)
                _Connected.built[key] = group
        except (RuntimeError, ValueError) as error:
            return f"{role}: {_cause(error)}"
        groups[role] = _Connected.built[key]
    return ""


def _meet(group: dist.ProcessGroup, size: int, device: torch.device) -> None:
    """The first collective of a group; RuntimeError when it does not reach all its ranks."""
    counted = torch.ones(1, device=device)
    dist.all_reduce(counted, group=group)
    if int(counted) != size:
        raise RuntimeError(f"a sum of ones over {size} ranks is {int(counted)}")


def _cause(error: Exception) -> str:
    """The line that says what went wrong: NCCL gives its own last, behind where in torch it was noticed."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if "nccl" in lines[0].lower() else lines[0]
