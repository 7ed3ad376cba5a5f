"""Load an emitted `step.py` as a module, and the constants beside it."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file
from torch import Tensor

import moec.compiler.dialect  # noqa: F401 (registers the ops that an emitted program calls)
from moec.compiler.errors import ArtifactError

PROGRAM = "step.py"
CONSTANTS = "constants.safetensors"

_numbers = itertools.count()


def load_program(folder: Path) -> ModuleType:
    """Import `folder/step.py` under a name of its own; raises ArtifactError when it is missing or does not run."""
    path = folder / PROGRAM
    if not path.is_file():
        raise ArtifactError(f"no {PROGRAM} in {folder}", hint="write one with `moec compile` or step.save(folder)")
    name = f"moec_step_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ArtifactError(
            f"{path} does not import", why=f"{type(error).__name__}: {error}", hint="undo the last edit of the file"
        ) from error
    missing = [function for function in ("forward", "backward", "update", "step") if not hasattr(module, function)]
    if missing:
        raise ArtifactError(f"{path} has no {', '.join(missing)}", hint="an edited program keeps these functions")
    return module


def load_constants(program_file: str, device: torch.device) -> dict[str, Tensor]:
    """The tensors that an emitted program refers to as CONSTANTS, on its device; empty when it has none."""
    path = Path(program_file).with_name(CONSTANTS)
    # Copies, since tensors of a file lie at any address, and alignment decides the order in which kernels sum.
    return (
        {name: value.clone() for name, value in load_file(path, device=str(device)).items()} if path.is_file() else {}
    )
