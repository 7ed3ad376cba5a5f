"""The random generators a run draws from, as JSON values: Python, numpy, torch on the CPU and on the current GPU.

On several ranks each draws from streams of its own, or dropout would leave out the same elements of every rank's rows.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture() -> dict[str, Any]:
    """States of all generators; "cuda" is there only if this process has used a GPU."""
    name, keys, *rest = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], *rest],
        "torch": _to_text(torch.get_rng_state()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = _to_text(torch.cuda.get_rng_state())
    return states


def restore(states: dict[str, Any]) -> None:
    """Put all generators where `capture` found them."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_from_text(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_text(states["cuda"]))


def separate(rank: int, step: int = 0) -> None:
    """Give all generators streams that belong to (seed of torch so far, rank, completed steps) alone."""
    text = f"{torch.initial_seed()}:{rank}:{step}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _to_text(state: Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_text(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
