"""The parts of a plan: optimizer, mesh, loss and cache, each with its fields and their rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moec.compiler.byte_sizes import parse_bytes
from moec.compiler.errors import PlanError
from moec.compiler.plan_fields import convert_fields, require


@dataclass(frozen=True)
class OptimizerPlan:
    """AdamW and its schedule.

    lr: peak learning rate. clip_norm: bound of the global gradient norm, 0 for none. schedule: how lr moves after
    `warmup_steps` of linear rise; "cosine" ends at lr * min_lr_ratio at step `total_steps`, which `moec train` sets
    from its number of steps; while it is 0 the rate stays at its peak.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 0
    total_steps: int = 0
    min_lr_ratio: float = 0.1

    def __post_init__(self) -> None:
        convert_fields(self, "optimizer.")
        require(self.lr >= 0, "optimizer.lr", f"is {self.lr}", "a learning rate is at least 0")
        for beta in self.betas:
            require(0 <= beta < 1, "optimizer.betas", f"holds {beta}", "each beta lies in [0, 1)")
        require(self.eps > 0, "optimizer.eps", f"is {self.eps}", "eps is above 0")
        require(self.weight_decay >= 0, "optimizer.weight_decay", f"is {self.weight_decay}", "it is at least 0")
        require(self.clip_norm >= 0, "optimizer.clip_norm", f"is {self.clip_norm}", "it is at least 0; 0 turns it off")
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", f"is {self.warmup_steps}", "it is at least 0")
        require(
            self.total_steps == 0 or self.total_steps > self.warmup_steps,
            "optimizer.total_steps",
            f"is {self.total_steps}",
            f"it is 0, or above the {self.warmup_steps} steps of warm-up",
        )
        require(0 <= self.min_lr_ratio <= 1, "optimizer.min_lr_ratio", f"is {self.min_lr_ratio}", "it is 0 to 1")


@dataclass(frozen=True)
class MeshPlan:
    """How many ranks work on a step, and how they share it.

    fsdp: all ranks; each holds its part of every parameter, gradient and moment. ep: ranks that share the experts
    among them; it divides fsdp, and each expert lies on fsdp / ep ranks in parts.
    gather: "again" gathers a layer's weights anew for backward, "keep" holds them from forward on.
    prefetch: how many buckets are gathered ahead of the layer that runs; 0 gathers each one when it is needed.
    reduce_dtype: dtype in which gradients are summed over ranks.
    capacity: rows that an expert takes from each rank, as a multiple of an even share; 0 takes what comes.
    overflow: with a capacity, "refuse" stops the step when rows are too many, "drop" leaves them out and counts them.
    """

    fsdp: int = 1
    ep: int = 1
    gather: Literal["again", "keep"] = "again"
    prefetch: int = 1
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    capacity: float = 0.0
    overflow: Literal["refuse", "drop"] = "refuse"

    def __post_init__(self) -> None:
        convert_fields(self, "mesh.")
        require(self.fsdp >= 1, "mesh.fsdp", f"is {self.fsdp}", "there is at least one rank")
        require(self.ep >= 1, "mesh.ep", f"is {self.ep}", "there is at least one rank")
        require(
            self.fsdp % self.ep == 0,
            "mesh.ep",
            f"is {self.ep}, mesh.fsdp is {self.fsdp}",
            "ep must divide fsdp, the number of all ranks",
            f"start {self.ep} ranks or a multiple (mesh.fsdp; --ranks of moec train and verify sets it)",
        )
        require(self.prefetch >= 0, "mesh.prefetch", f"is {self.prefetch}", "it is at least 0")
        require(self.capacity >= 0, "mesh.capacity", f"is {self.capacity}", "it is at least 0; 0 takes all rows")
        require(
            self.capacity == 0 or self.ep > 1,
            "mesh.capacity",
            f"is {self.capacity}, mesh.ep is {self.ep}",
            "only ranks that exchange rows have a capacity",
        )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.fsdp

    @property
    def edp(self) -> int:
        """Ranks that hold parts of the same experts."""
        return self.fsdp // self.ep


@dataclass(frozen=True)
class LossPlan:
    """How many logits exist at a time in the output head, forward and backward.

    memory: their bytes, such as "1.25GiB"; None: 1.25 GiB, or what the returned gradient of the head's weight takes if
    that is more, since it is made where the last chunk is gone. rows, columns: rows of hidden states and classes of the
    vocabulary per chunk; what is None follows from the memory: all classes as long as 512 rows of them fit, fewer
    classes then.
    """

    memory: str | None = None
    rows: int | None = None
    columns: int | None = None

    def __post_init__(self) -> None:
        convert_fields(self, "loss.")
        try:
            size = self.memory_bytes
        except ValueError as error:
            raise PlanError(
                f"plan field loss.memory is {self.memory!r}", where="plan.loss.memory", why=str(error)
            ) from None
        require(size is None or size >= 1, "loss.memory", f"is {self.memory}", "it is at least 1B")
        for name in ("rows", "columns"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"loss.{name}", f"is {value}", "it is at least 1")

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_bytes(self.memory)


@dataclass(frozen=True)
class CacheRule:
    """How values of layers reach the backward.

    decision: keep in device memory, offload to host memory, or recompute. path: pattern of module paths, as `fnmatch`
    reads it ("layers.*.experts", "*"); it covers everything inside of what it matches. op: pattern of the names of the
    ops whose results are meant ("moec.grouped_linear"); "input" are the inputs of a layer.
    """

    decision: Literal["keep", "offload", "recompute"]
    path: str = "*"
    op: str = "*"

    def __post_init__(self) -> None:
        convert_fields(self, "cache.policy.")


@dataclass(frozen=True)
class CachePlan:
    """How forward values reach the backward, and how much memory there is for it.

    hbm: device memory of one rank for everything, such as "60GiB" or a number of bytes; a step that is predicted to
    need more is refused. None sets no limit. host: the same for values that wait in host memory.
    policy: "keep" keeps all, "recompute" recomputes all in layers that may be, "auto" lets a solver choose within the
    limits; or a list of rules, of which the last one that covers a value counts, and others are kept.
    times: a file of measured times of ops (moec.measure_ops), which "auto" then reckons with.
    """

    hbm: int | str | None = None
    host: int | str | None = None
    policy: Literal["keep", "recompute", "auto"] | tuple[CacheRule, ...] = "keep"
    times: str | None = None

    def __post_init__(self) -> None:
        convert_fields(self, "cache.")
        for name in ("hbm", "host"):
            _bytes_of(getattr(self, name), f"cache.{name}")
        free = self.policy == "auto" and self.hbm is None
        require(not free, "cache.hbm", "is not set, cache.policy is auto", "the solver needs to know the limit")

    @property
    def hbm_bytes(self) -> int | None:
        return _bytes_of(self.hbm, "cache.hbm")

    @property
    def host_bytes(self) -> int | None:
        return _bytes_of(self.host, "cache.host")

    @property
    def rules(self) -> tuple[CacheRule, ...]:
        """The policy as rules, for policies that are."""
        named = {"recompute": (CacheRule("recompute"),), "keep": (), "auto": ()}
        return named[self.policy] if isinstance(self.policy, str) else self.policy


def _bytes_of(size: int | str | None, name: str) -> int | None:
    if size is None or isinstance(size, int):
        require(size is None or size >= 0, name, f"is {size}", "it is at least 0")
        return size
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise PlanError(f"plan field {name} is {size!r}", where=f"plan.{name}", why=str(error)) from None
