"""Shards as DTensors: how checkpoints and the caller's model see what the ranks hold between them.

A dense weight is `Shard(0)` over all ranks. Experts are `(Shard(0), Shard(0))` over a mesh with the exchange ranks
first, so that both are plain chunks of dimension 0 and a checkpoint loads on any other mesh. Needs a process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from moec.compiler.errors import ArtifactError, ModelChangedError
from moec.compiler.layout import Role
from moec.compiler.plan import MeshPlan


class Placements:
    """The device meshes of a run; making them is a collective, so all ranks make them at the same moment."""

    def __init__(self, mesh: MeshPlan, device_type: str) -> None:
        if not dist.is_initialized() or dist.get_world_size() != mesh.world:
            raise ArtifactError(
                f"shards of {mesh.world} ranks cannot become DTensors",
                why=f"there are {dist.get_world_size()} ranks"
                if dist.is_initialized()
                else "there is no process group",
                hint="start one process for each rank; simulated ranks have neither checkpoints nor DTensors",
            )
        ranks = torch.arange(mesh.world)
        self._dense = DeviceMesh(device_type, ranks, mesh_dim_names=("fsdp",))
        self._experts = DeviceMesh(device_type, ranks.view(mesh.edp, mesh.ep).t(), mesh_dim_names=("ep", "edp"))

    def sharded(self, role: Role, local: Tensor, shape: Sequence[int]) -> DTensor:
        """The DTensor of a whole shape whose part on this rank is `local`, sharing its memory."""
        mesh = self._dense if role == "dense" else self._experts
        stride = torch.empty(tuple(shape), device="meta").stride()
        placements = [Shard(0)] * mesh.ndim
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    def replicated(self, value: Tensor) -> DTensor:
        """A DTensor that every rank holds whole."""
        return DTensor.from_local(value, self._dense, [Replicate()], run_check=False)


@dataclass
class PlacedParameter:
    """A DTensor that took the place of a parameter of the caller's model."""

    path: str
    module: nn.Module
    name: str
    parameter: nn.Parameter
    _memory: int = field(init=False)

    def __post_init__(self) -> None:
        self.module._parameters[self.name] = self.parameter
        self._memory = self._local().data_ptr()

    @property
    def version(self) -> int:
        """Grows with every write through the parameter: DTensor's own methods count apart from those on its part."""
        return self.parameter._version + self._local()._version

    def check(self) -> None:
        """Raise ModelChangedError when the module has another parameter by now, or the same with other memory."""
        held = self.module._parameters.get(self.name)
        if held is not self.parameter or self._local().data_ptr() != self._memory:
            raise ModelChangedError(
                f"parameter {self.path} was moved or assigned anew since the step was compiled",
                why="the step works on the shards that the parameter had then",
                hint="write values in place (copy_, load_state_dict), or compile the model again",
            )

    def _local(self) -> Tensor:
        return self.parameter.to_local() if isinstance(self.parameter, DTensor) else self.parameter


@dataclass
class ScalarReplica:
    """A scalar weight, which one rank holds, as the caller's model sees it on every rank. shard: [1], or [0]."""

    parameter: DTensor
    shard: Tensor
    _seen: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._seen = self.parameter.to_local().detach().clone()

    @torch.no_grad()
    def give(self) -> None:
        """Hand on what the caller wrote since `take`."""
        value = self.parameter.to_local()
        if not torch.equal(value, self._seen):
            self.shard.copy_(value.expand_as(self.shard))

    @torch.no_grad()
    def take(self, whole: Tensor) -> None:
        """Become the value [1] that the holder has."""
        self.parameter.to_local().copy_(whole.reshape(()))
        self._seen.copy_(whole.reshape(()))
