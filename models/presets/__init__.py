"""Presets: model configurations as YAML files in this folder, one per model.

A file holds the fields of `K3Config`; `base: NAME` starts from another preset.
"""

from __future__ import annotations

import difflib
from importlib import resources
from typing import Any

import yaml

from moec.compiler.errors import PresetError
from moec.models.k3.config import K3Config


def preset_names() -> list[str]:
    """Names of all presets, sorted."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def preset(name: str) -> K3Config:
    """The configuration of a preset; PresetError with the nearest names for an unknown one."""
    return K3Config.from_dict(_read(name))


def _read(name: str, below: tuple[str, ...] = ()) -> dict[str, Any]:
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        raise PresetError(
            f"unknown preset {name}",
            where=f"base of preset {below[-1]}" if below else "",
            hint=f"did you mean {', '.join(near)}?" if near else f"presets: {', '.join(names)}",
        )
    if name in below:
        raise PresetError(f"preset {name} is its own base", where=" -> ".join((*below, name)))
    values = yaml.safe_load((resources.files(__name__) / f"{name}.yaml").read_text())
    base = values.pop("base", None)
    return values if base is None else _read(base, (*below, name)) | values
