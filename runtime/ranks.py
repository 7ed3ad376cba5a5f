"""Where a process stands in a mesh."""

from __future__ import annotations

from dataclasses import dataclass, field

from moec.compiler.collectives import group_of
from moec.compiler.plan import MeshPlan


@dataclass(frozen=True)
class Ranks:
    """One rank of a mesh; without arguments the only one."""

    mesh: MeshPlan = field(default_factory=MeshPlan)
    rank: int = 0

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.mesh.world

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes what is written once."""
        return self.rank == 0

    @property
    def ep_index(self) -> int:
        """Which share of the experts this rank holds."""
        return self.rank % self.mesh.ep

    @property
    def edp_index(self) -> int:
        """Which part of that share."""
        return self.rank // self.mesh.ep

    def members(self, role: str) -> tuple[int, ...]:
        """The ranks of this rank's group of a role, in the order of the group."""
        return group_of(self.mesh, role, self.rank)
