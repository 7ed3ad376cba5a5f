"""Weights out of a run as one plain safetensors file, named by module path as the model's own state_dict is."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from moec.runtime import durable
from moec.runtime.state import StepState


def export_weights(state: StepState, path: Path) -> Path:
    """Write weights and saved buffers to a safetensors file, atomically; returns its path.

    Tied weights are stored once, under the first path; the file's metadata maps each other path to it. Buffers that
    the model leaves out of its state_dict are left out here too.
    """
    tensors = {name: weight for name, weight in state.weights.items() if name not in state.aliases}
    tensors |= {
        name: buffer
        for name, buffer in state.buffers.items()
        if name not in state.aliases and name not in state.derived_buffers
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    partial = path.with_name(durable.PARTIAL + path.name)
    save_file(whole, partial, metadata={"format": "pt", **state.aliases})
    durable.flush(partial)
    durable.publish(partial, path)
    return path
