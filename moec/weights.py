"""Weights between files and models or runs, under a model's own names or under those of published checkpoints.

1. PATH is one safetensors file, a folder of them, or a checkpoint of a run (`step-...`, or the folder of several).
2. Its names are the model's own module paths, or the published ones: of a K3 model those of models/k3/checkpoint.py, of
   a Hugging Face model those that `save_pretrained` writes.
Names that are missing or left over are errors, and so are other shapes; values are cast to the model's dtypes. Weights
are read a few rows at a time, so a rank that holds a part of the model reads that part alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from moec.compiler.errors import CheckpointError
from moec.compiler.pieces import Piece
from moec.models.huggingface.adapter import is_huggingface
from moec.models.k3 import published_pieces as k3_pieces
from moec.models.k3.model import K3Model
from moec.runtime.checkpoint import LATEST, MANIFEST, latest_checkpoint, read_manifest, read_weights
from moec.runtime.export import export_pieces
from moec.runtime.inventory import Inventory
from moec.runtime.state import StepState
from moec.runtime.tensor_file import Entry
from moec.runtime.weight_files import FileWeights, file_entries

_OTHER_TOWERS = (r"vision_tower\.", r"mm_projector\.")
_NAMED = 3


@torch.no_grad()
def load_weights(model: nn.Module, path: Path) -> None:
    """Copy the weights at `path` into `model`; raises CheckpointError when they do not fit it."""
    checkpoint = _checkpoint(path)
    if checkpoint is not None:
        _load_checkpoint(model, checkpoint)
        return
    source = file_weights(model, path)
    for name, tensor in _saved(model).items():
        value = source.buffer(name)
        assert value is not None
        tensor.copy_(value)


def file_weights(model: nn.Module, path: Path) -> FileWeights:
    """The safetensors at `path` as a source of the weights of `model`, which may be without data itself.

    Raises CheckpointError when they do not fit it.
    """
    entries = file_entries(path)
    saved = _saved(model)
    pieces, known = _own_pieces(model, saved, entries), set(model.state_dict())
    if not all(piece.name in entries for piece in pieces):
        published = published_pieces(model)
        if sum(piece.name in entries for piece in published) > sum(piece.name in entries for piece in pieces):
            pieces, known = published, {piece.name for piece in published}
    for name in sorted(entries.keys() - known):
        if not any(re.match(pattern, name) for pattern in _ignored(model)):
            raise CheckpointError(
                f"unexpected tensor {name} in {entries[name].file}",
                why=f"{type(model).__name__} has no weight of that name",
            )
    return FileWeights(entries, pieces, {name: tuple(tensor.shape) for name, tensor in saved.items()})


def save_published(state: StepState, model: nn.Module, folder: Path) -> Path:
    """Write a run's weights under the published names of its model, as files with an index; no rank holds all of them.

    On several ranks all call it together. Raises CheckpointError for a model without published names.
    """
    pieces = published_pieces(model)
    if not pieces:
        raise CheckpointError(
            f"{type(model).__name__} has no published names", hint="export under its own names: export_weights"
        )
    return export_pieces(state, folder, [piece for piece in pieces if piece.path not in state.aliases])


def published_pieces(model: nn.Module) -> list[Piece]:
    """How a model's weights are named and cut in published checkpoints; empty for one that has none."""
    if isinstance(model, K3Model):
        return k3_pieces(model.config)
    if is_huggingface(model):
        from moec.models.huggingface.pieces import published_pieces as huggingface_pieces

        return huggingface_pieces(model)
    return []


def _own_pieces(model: nn.Module, saved: Mapping[str, Tensor], entries: Mapping[str, Entry]) -> list[Piece]:
    """Every tensor whole; a tied one under any of its names."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return [
        Piece(next((other for other in names[id(tensor)] if other in entries), name), tuple(tensor.shape), name)
        for name, tensor in saved.items()
    ]


def _saved(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state_dict, tied ones once, under the name that owns them in a run."""
    inventory = Inventory.of(model)
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if name not in inventory.aliases}


def _ignored(model: nn.Module) -> Iterable[str]:
    """Patterns of published names that the model has no place for, by its own account."""
    if isinstance(model, K3Model):
        return _OTHER_TOWERS
    return getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()


def _checkpoint(path: Path) -> Path | None:
    """The checkpoint that a path means, None when it holds files of another kind."""
    if (path / MANIFEST).is_file():
        return path
    return latest_checkpoint(path) if (path / LATEST).is_file() else None


def _load_checkpoint(model: nn.Module, path: Path) -> None:
    aliases = read_manifest(path)["aliases"]
    buffers = dict(model.named_buffers(remove_duplicate=False))
    targets = {}
    for name, tensor in _saved(model).items():
        group = "buffers" if name in buffers else "weights"
        stored = aliases.get(name, name)
        scalar = group == "weights" and not tensor.dim()
        targets[f"{group}.{stored}"] = tensor.detach().view(1) if scalar else tensor.detach()
    read_weights(path, targets)
