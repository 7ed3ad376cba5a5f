"""Weights from safetensors files into a model, under its own names or under those of published checkpoints.

1. PATH is one file, or a folder whose *.safetensors files are read together.
2. A K3 model takes its own module paths, or the published names (models/k3/checkpoint.py).
3. A Hugging Face model takes a folder with a config.json through `from_pretrained`, otherwise its own module paths.
Names that are missing or left over are errors, and so are other shapes; values are cast to the model's dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from moec.compiler.errors import CheckpointError
from moec.models.huggingface.adapter import is_huggingface
from moec.models.k3.checkpoint import from_huggingface
from moec.models.k3.model import K3Model

_OTHER_TOWERS = ("vision_tower.", "mm_projector.")
_NAMED = 3


def load_weights(model: nn.Module, path: Path) -> None:
    """Copy the tensors at `path` into `model`; raises CheckpointError when they do not fit it."""
    if is_huggingface(model) and (path / "config.json").is_file():
        _copy(model, _pretrained(model, path), path)
        return
    files = _files(path)
    tensors: Iterable[tuple[str, Tensor]] = _tensors(files)
    if isinstance(model, K3Model) and not _names(files[0]) & set(model.state_dict()):
        tensors = from_huggingface(tensors, model.config, ignore=_OTHER_TOWERS)
    _copy(model, tensors, path)


def _pretrained(model: Any, path: Path) -> Iterator[tuple[str, Tensor]]:
    """What transformers itself reads from a checkpoint: it knows how published experts become stacked ones."""
    yield from type(model).from_pretrained(path, dtype=model.dtype).state_dict().items()


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise CheckpointError(
            f"no weights at {path}", hint="give a safetensors file, or a folder that holds safetensors files"
        )
    return files


def _names(file: Path) -> set[str]:
    with _opened(file) as stream:
        return set(stream.keys())


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with _opened(file) as stream:
            for name in stream.keys():  # noqa: SIM118 (not a mapping)
                yield name, stream.get_tensor(name)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{file} is no safetensors file", why=str(error)) from error


@torch.no_grad()
def _copy(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    saved = set(model.state_dict())
    slots: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    slots |= dict(model.named_buffers(remove_duplicate=False))
    filled: set[int] = set()
    for name, tensor in tensors:
        if name not in saved:
            raise CheckpointError(
                f"unexpected tensor {name} in {path}", why=f"{type(model).__name__} has no weight of that name"
            )
        if tensor.shape != slots[name].shape:
            raise CheckpointError(
                f"{name} in {path} has shape {list(tensor.shape)}", why=f"the model's has {list(slots[name].shape)}"
            )
        slots[name].copy_(tensor)
        filled.add(id(slots[name]))  # a tied weight is filled under all of its names
    missing = sorted(name for name in saved if id(slots[name]) not in filled)
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise CheckpointError(f"{path} lacks {', '.join(missing[:_NAMED])}{more}", hint="it belongs to another model")
