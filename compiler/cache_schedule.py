"""When values that wait in host memory are copied: statements between the calls of layers.

A copy to host memory starts where the value is made. Its device memory is free for others at the `release` of its
layer, which waits for the copy. A copy back starts at the layer's `prefetch`, and is waited for where it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

END = ""
"""In the place of a layer: the end of forward, or the beginning of backward."""


@dataclass(frozen=True)
class CacheSchedule:
    """Paths of layers whose copies a step waits for, or starts.

    release: behind the forward of this layer -> the layers whose values then are in host memory alone. prefetch:
    before the backward of this layer -> the layers whose values start on their way back. Both may have `END`.
    """

    release: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prefetch: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
