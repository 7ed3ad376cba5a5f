"""Every mistake a user can make has one class here; its text says what, where, why, and what to do next."""

from __future__ import annotations


class MoecError(Exception):
    """Base of all errors that moec raises on purpose.

    what: the finding in one sentence. where: module path, file and line, or plan field. why: the cause.
    hint: what to do next.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", hint: str = "") -> None:
        self.what, self.where, self.why, self.hint = what, where, why, hint
        lines = [what]
        lines += [f"  where: {where}"] if where else []
        lines += [f"  why:   {why}"] if why else []
        lines += [f"  do:    {hint}"] if hint else []
        super().__init__("\n".join(lines))


class PlanError(MoecError):
    """An unknown, contradictory or impossible field of a plan."""


class PresetError(MoecError):
    """An unknown preset, or one whose data file is wrong."""


class CaptureError(MoecError):
    """The model could not be traced into one graph."""


class LengthError(CaptureError):
    """A graph that does not take every length of a plan.

    shortest: the least length from which on it takes all, that of the plan's `length` if it takes no other.
    """

    def __init__(self, what: str, shortest: int, *, where: str = "", why: str = "", hint: str = "") -> None:
        self.shortest = shortest
        super().__init__(what, where=where, why=why, hint=hint)


class UnsupportedOpError(MoecError):
    """An op for which a table (cost, rewrite, emission) has no rule."""


class UnsupportedModelError(MoecError):
    """A model, or a way of running it (packing, a mask), that moec refuses by name."""


class PassError(MoecError):
    """A pass broke its contract or its stage's spec."""


class BatchError(MoecError):
    """A batch whose shape, dtype or values do not fit the compiled step."""


class NonFiniteError(MoecError):
    """NaN or infinity in the loss or in the gradients."""


class DeferredInitError(UnsupportedModelError):
    """A model whose weights cannot be made later, one at a time."""


class ModelChangedError(MoecError):
    """A model that is no longer what its step was compiled for."""


class UpdateError(MoecError):
    """An update that failed half-way; the text names the weights that it has changed."""


class ArtifactError(MoecError):
    """An emitted folder that is incomplete, edited beyond what its fingerprint allows, or stale."""


class CheckpointError(MoecError):
    """A checkpoint that is missing, incomplete, or belongs to another model or plan."""


class DataError(MoecError):
    """Training data that is missing, empty or not text."""


class RankError(MoecError):
    """Ranks that cannot work together: they differ, one of them stopped, or they are not as many as the mesh says."""


class AgreedError(RankError):
    """Something that ranks told each other, so that all of them raise at the same place."""


class CapacityError(MoecError):
    """More rows for an expert than the plan's capacity leaves room for."""


class CollectiveError(RankError):
    """Ranks that meet in different collectives, or in one whose arguments do not fit."""
