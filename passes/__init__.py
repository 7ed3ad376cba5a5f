"""The passes, in the order in which they run."""

from __future__ import annotations

from moec.compiler.pass_manager import Pass

SEMANTIC_PASSES: tuple[Pass, ...] = ()
