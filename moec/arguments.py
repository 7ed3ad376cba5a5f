"""What is wrong with the arguments of a command, as far as it can be told without torch, whose import takes seconds.

TARGET is the name of a preset, `module:factory`, or the path of a Hugging Face config.json or of its folder.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import sys
from contextlib import ExitStack
from pathlib import Path

from moec.compiler.errors import CheckpointError, PresetError, UnsupportedModelError


def check_target(target: str) -> None:
    """Raise PresetError or UnsupportedModelError for a target that is none; a factory itself is found later."""
    if is_config(target):
        _check_config(Path(target))
    elif is_preset(target):
        _check_preset(target)
    else:
        _check_module(target)


def check_weights(path: Path | None) -> None:
    """Raise CheckpointError where weights are asked for and there is nothing."""
    if path is not None and not path.exists():
        raise CheckpointError(
            f"no weights at {path}", hint="give a safetensors file, or a folder that holds safetensors files"
        )


def is_config(target: str) -> bool:
    """Whether a target is a configuration of a Hugging Face model."""
    return target.endswith(".json") or (Path(target) / "config.json").is_file()


def is_preset(target: str) -> bool:
    """Whether a target is looked up by name."""
    return ":" not in target and not is_config(target)


def not_importable(target: str, why: str) -> UnsupportedModelError:
    """The error for a factory whose module is not found, or fails to load."""
    return UnsupportedModelError(
        f"cannot import {target.partition(':')[0]!r}",
        where=target,
        why=why,
        hint="give module:factory, the module importable from here, for example my_model:make",
    )


def _check_preset(target: str) -> None:
    from moec.models.presets import preset_names  # `moec run` works without the folder of models

    names = preset_names()
    if target in names:
        return
    if Path(target).suffix or "/" in target:
        raise PresetError(
            f"{target} is no target",
            why="there is no such config.json",
            hint="give a preset (moec presets), module:factory, or the path of a Hugging Face config.json",
        )
    near = difflib.get_close_matches(target, names, n=3, cutoff=0.4)
    raise PresetError(
        f"unknown preset {target}",
        hint=f"did you mean {', '.join(near)}?" if near else f"presets: {', '.join(names)}",
    )


def _check_config(path: Path) -> None:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UnsupportedModelError(f"no config at {path}", hint="give the path of a config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is not JSON", why=str(error), hint="give a config.json") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise UnsupportedModelError("the config has no model_type", where=str(path), hint="give a config.json")


def _check_module(target: str) -> None:
    """Only the first part of a dotted name: to look further would import it."""
    first = target.partition(":")[0].partition(".")[0]
    with ExitStack() as stack:
        if "" not in sys.path:
            sys.path.insert(0, "")
            stack.callback(sys.path.remove, "")
        found = first in sys.modules or (first and importlib.util.find_spec(first) is not None)
    if not found:
        raise not_importable(target, f"No module named {first!r}")
