"""When values that wait in host memory are copied: statements between the calls of layers.

A copy to host memory starts where the value is made. Its device memory is free for others at the `release` of its
holder, which waits for the copy. A copy back starts at the holder's `prefetch`, and is waited for where it is read. The
values of a layer have the layer's path as their holder; a value outside of layers is its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

END = ""
"""In the place of a layer: the end of forward, or the beginning of backward."""
_OUTSIDE = ":"


def outside(name: str) -> str:
    """The holder that a value outside of layers is, by the name of its node."""
    return f"{_OUTSIDE}{name}"


def outside_name(holder: str) -> str:
    """The name of the value that a holder is; '' for a layer."""
    return holder.removeprefix(_OUTSIDE) if holder.startswith(_OUTSIDE) else ""


@dataclass(frozen=True)
class CacheSchedule:
    """Holders whose copies a step waits for, or starts.

    release: behind the forward of this layer -> the holders whose values then are in host memory alone. prefetch:
    before the backward of this layer -> the holders whose values start on their way back. Both may have `END`.
    """

    release: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prefetch: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
