"""Weights between files and models or runs, under a model's own names or under those of published checkpoints.

1. PATH is one safetensors file, a folder of them, or a checkpoint of a run (`step-...`, or the folder of several).
2. Its names are the model's own module paths, or the published ones: of a K3 model those of models/k3/checkpoint.py, of
   a Hugging Face model those that `save_pretrained` writes.
Names that are missing or left over are errors, and so are other shapes; values are cast to the model's dtypes. Weights
are read a few rows at a time, so a rank that holds a part of the model reads that part alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from moec.compiler.errors import CheckpointError
from moec.compiler.pieces import Piece
from moec.models.huggingface.adapter import is_huggingface
from moec.models.k3.checkpoint import published_pieces as k3_pieces
from moec.models.k3.model import K3Model
from moec.runtime.checkpoint import LATEST, MANIFEST, latest_checkpoint
from moec.runtime.checkpoint_weights import CheckpointWeights
from moec.runtime.export import export_pieces
from moec.runtime.inventory import Inventory
from moec.runtime.ranks import Ranks
from moec.runtime.state import StepState
from moec.runtime.team import PeerError, Team
from moec.runtime.tensor_file import Entry
from moec.runtime.weight_files import FileWeights, file_entries
from moec.runtime.weight_source import fill_module
from moec.weight_marks import Marks, check_same_files, checkpoint_marks, file_marks

_OTHER_TOWERS = (r"vision_tower\.", r"mm_projector\.")
_NAMED = 3

T = TypeVar("T")


def load_weights(model: nn.Module, path: Path) -> None:
    """Give `model`, which may be without data, the weights at `path`; CheckpointError when they do not fit it."""
    fill_module(model, weights_at(model, path))


def weights_at(model: nn.Module, path: Path, ranks: Ranks | None = None) -> FileWeights | CheckpointWeights:
    """What lies at `path` as a source of the weights of `model`, which may be without data itself.

    ranks: that read together, each of which looks for damage in its share of a checkpoint's files. Raises
    CheckpointError when it does not fit the model.
    """
    checkpoint = _checkpoint(path)
    return file_weights(model, path) if checkpoint is None else _checkpoint_weights(model, checkpoint, ranks or Ranks())


def check_weights(model: nn.Module, path: Path, ranks: Ranks) -> None:
    """Raise CheckpointError, on every rank, when what lies at `path` does not fit the model or one cannot read it."""
    on_every_rank(lambda: weights_at(model, path, ranks), path, ranks, next(model.parameters()).device)


def on_every_rank(action: Callable[[], T], path: Path, ranks: Ranks, device: torch.device) -> T:
    """What reading the weights at `path` gives, where all ranks find the same files there.

    An error of one rank is a CheckpointError on all that says which.
    """
    team = Team(ranks.rank, ranks.world, device)
    try:
        if ranks.world > 1:
            check_same_files(path, lambda: _marks(path), team)
        return team.together(action)
    except PeerError as error:
        raise CheckpointError(
            "the weights could not be read on every rank",
            where=str(path),
            why=error.what,
            hint="give files that every rank can read",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"the weights at {path} cannot be read", where=error.filename or "", why=error.strerror or str(error)
        ) from error


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
    source = FileWeights(entries, pieces, {name: tuple(tensor.shape) for name, tensor in saved.items()})
    _check_dtypes(entries, (piece for piece in pieces if piece.path in saved), saved)
    return source


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


def _marks(path: Path) -> Marks:
    checkpoint = _checkpoint(path)
    return file_marks(path) if checkpoint is None else checkpoint_marks(checkpoint)


def _checkpoint_weights(model: nn.Module, path: Path, ranks: Ranks) -> CheckpointWeights:
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    shapes = {name: tuple(tensor.shape) for name, tensor in _saved(model).items()}
    return CheckpointWeights(
        path,
        {name: shape for name, shape in shapes.items() if name not in buffers},
        {name: shape for name, shape in shapes.items() if name in buffers},
        rank=ranks.rank,
        world=ranks.world,
    )


def _check_dtypes(entries: Mapping[str, Entry], pieces: Iterable[Piece], saved: Mapping[str, Tensor]) -> None:
    """Floating-point numbers become others of 16 bits or more; nothing else changes its kind."""
    for piece in pieces:
        stored, wanted = entries[piece.name].dtype, saved[piece.path].dtype
        if stored != wanted and not (_is_plain(stored) and _is_plain(wanted)):
            raise CheckpointError(
                f"{piece.name} in {entries[piece.name].file} is {stored}",
                why=f"the model's {piece.path} is {wanted}"
                + (", and a quantised weight is no value without its scales" if stored.is_floating_point else ""),
                hint="convert the file first",
            )


def _is_plain(dtype: torch.dtype) -> bool:
    return dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
