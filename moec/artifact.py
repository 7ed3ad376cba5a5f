"""Write an artefact, read its graphs, and tell whether it still fits: its fingerprint, field by field."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import moec
from moec.artifact_files import BUFFERS, FINGERPRINT, GRAPHS, LOG, PLAN, STATE_MAP, read_json
from moec.codegen.program import ProgramText
from moec.compiler.errors import ArtifactError
from moec.compiler.fake import is_fake
from moec.compiler.log import PassLog
from moec.compiler.plan import Plan
from moec.compiler.printer import StageGraphs
from moec.compiler.view import TrainingView
from moec.runtime.durable import write_file
from moec.runtime.program import CONSTANTS, PROGRAM

FORMAT = 2


@dataclass(frozen=True)
class StateMap:
    """Every weight and buffer of a program, without their values.

    weights, buffers: path -> {"shape", "dtype"}, for weights also "requires_grad", for buffers "persistent".
    aliases: other path of a tied tensor -> its owner. without_gradient: trainable by flag, but never reached.
    vocabulary, images: what the checks of a batch need (compiler/view.py). written: paths that the program's forward
    and balance write. evaluating: paths of modules that were in evaluation mode.
    """

    weights: dict[str, dict[str, Any]]
    buffers: dict[str, dict[str, Any]]
    aliases: dict[str, str]
    without_gradient: list[str]
    vocabulary: int | None
    images: list[int] | None
    written: list[str]
    evaluating: list[str]

    @classmethod
    def of(cls, model: nn.Module, without_gradient: list[str], view: TrainingView, written: list[str]) -> StateMap:
        """The map of a module as it is now."""
        images = None if view.images is None else list(view.images)
        evaluating = [path for path, child in model.named_modules() if not child.training]
        empty = cls({}, {}, {}, without_gradient, view.vocabulary, images, written, evaluating)
        return empty.with_tensors_of(model)

    def with_tensors_of(self, model: nn.Module) -> StateMap:
        """This map with the weights, buffers and ties of a model in place of its own, to compare the two."""
        saved = set(model.state_dict())
        first: dict[int, str] = {}
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        owners = {path: first.setdefault(id(tensor), path) for path, tensor in tensors}
        weights = {
            path: {**_describe(weight), "requires_grad": weight.requires_grad}
            for path, weight in model.named_parameters(remove_duplicate=False)
        }
        buffers = {
            path: {**_describe(buffer), "persistent": path in saved}
            for path, buffer in model.named_buffers(remove_duplicate=False)
        }
        aliases = {path: owner for path, owner in owners.items() if owner != path}
        return replace(self, weights=weights, buffers=buffers, aliases=aliases)

    def digest(self) -> str:
        """Changes when any path, shape, dtype, trained flag or tie does."""
        content = [self.weights, self.buffers, self.aliases]
        return digest(json.dumps(content, sort_keys=True))


def write_artifact(
    folder: Path,
    *,
    program: ProgramText,
    plan: Plan,
    log: PassLog,
    stages: Mapping[str, StageGraphs],
    state_map: StateMap,
    device: str,
    derived_buffers: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Write everything but weights into `folder`, and return the fingerprint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PROGRAM).write_text(program.text, encoding="utf-8")
    (folder / PLAN).write_text(plan.to_yaml(), encoding="utf-8")
    log.write(folder / LOG)
    (folder / STATE_MAP).write_text(json.dumps(asdict(state_map), indent=1) + "\n")
    fingerprint = {
        **_versions(),
        "device": device,
        "weights": state_map.digest(),
        "plan": plan.to_dict(),
        "program": digest(program.text),
    }
    _write_tensors(folder / CONSTANTS, program.constants)
    _write_tensors(folder / BUFFERS, derived_buffers)
    for name, graphs in stages.items():
        graphs.save(folder / GRAPHS / name)
    # Last, since nothing loads without it: an artefact that was cut off is not mistaken for a whole one.
    (folder / FINGERPRINT).write_text(json.dumps(fingerprint, indent=1) + "\n")
    return fingerprint


def write_plan(folder: Path, plan: Plan) -> None:
    """Make `plan` the one that an artefact says it is for."""
    fingerprint = read_json(folder, FINGERPRINT) | {"plan": plan.to_dict()}
    write_file(folder / PLAN, plan.to_yaml().encode())
    write_file(folder / FINGERPRINT, f"{json.dumps(fingerprint, indent=1)}\n".encode())


def read_stages(folder: Path) -> dict[str, StageGraphs]:
    """The graphs of every stage, in the order in which they were made."""
    root = folder / GRAPHS
    found = {path.name: StageGraphs.read(path.name, path) for path in root.iterdir()} if root.is_dir() else {}
    return {name: found[name] for name in STAGES if name in found}


def check_fingerprint(folder: Path, plan: Plan | None, model: nn.Module | None) -> None:
    """Compare the saved fingerprint with these versions and this machine and, where given, with a plan and a model.

    Learning rate and schedule of the plan are not compared: the program takes the rate as an input. Raises
    ArtifactError naming the first field that differs.
    """
    saved = read_json(folder, FINGERPRINT)
    here: dict[str, Any] = {**_versions(), "device": _device_here(saved.get("device"), model)}
    for name, value in here.items():
        _compare(folder, name, saved.get(name), value)
    if plan is not None:
        compiled = Plan.from_dict(saved["plan"])
        expected = plan.with_schedule_of(compiled).completed_by(compiled)
        _compare(folder, "plan", saved["plan"], expected.to_dict())
    if model is None:
        return
    saved_map = StateMap(**read_json(folder, STATE_MAP))
    state_map = saved_map.with_tensors_of(model)
    if saved["weights"] != state_map.digest():
        raise _stale(folder, *_first_difference(saved_map, state_map))
    modes = dict.fromkeys(saved_map.evaluating, "evaluation")
    for path, child in model.named_modules():
        then, now = modes.get(path, "training"), "training" if child.training else "evaluation"
        if then != now:
            raise _stale(folder, f"the mode of {path or 'the model'}", then, now)


def digest(text: str) -> str:
    """A short hash, for comparing."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def derived_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a model leaves out of its state_dict, where they have values (none on fake or meta tensors).

    Those of zeros, such as the counts of routers, are left out too: `moec.load` makes them.
    """
    saved = set(model.state_dict())
    return {
        path: buffer.detach().cpu().contiguous()
        for path, buffer in model.named_buffers()
        if path not in saved and not is_fake(buffer) and bool(buffer.any())
    }


def _compare(folder: Path, name: str, saved: Any, here: Any) -> None:
    if isinstance(saved, dict) and isinstance(here, dict):
        for key in sorted({*saved, *here}):
            _compare(folder, f"{name}.{key}", saved.get(key), here.get(key))
    elif saved != here:
        raise _stale(folder, name, saved, here)


def _stale(folder: Path, name: str, saved: Any, here: Any) -> ArtifactError:
    return ArtifactError(
        f"the artefact in {folder} is stale: {name} differs",
        where=name,
        why=f"compiled for {saved!r}, now {here!r}",
        hint="compile again, or use what it was compiled for",
    )


def _first_difference(saved: StateMap, here: StateMap) -> tuple[str, Any, Any]:
    for kind in ("weights", "buffers"):
        one, two = getattr(saved, kind), getattr(here, kind)
        for path in sorted({*one, *two}):
            if one.get(path) != two.get(path):
                return path, one.get(path, "absent"), two.get(path, "absent")
    for path in sorted({*saved.aliases, *here.aliases}):
        ties = [f"tied to {m.aliases[path]}" if path in m.aliases else "not tied" for m in (saved, here)]
        if ties[0] != ties[1]:
            return path, ties[0], ties[1]
    return "weights", "another order", "this order"


def _describe(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    path.unlink(missing_ok=True)
    if tensors:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def _versions() -> dict[str, Any]:
    return {"format": FORMAT, "moec": moec.__version__, "torch": _minor(torch.__version__)}


def _device_here(saved: Any, model: nn.Module | None) -> str:
    """Where a step would run: on the model's device, without a model on the saved one if this machine has it.

    A step for several ranks is saved without the number of a device: each rank has one of its own.
    """
    device = next((p.device for p in model.parameters() if not p.is_meta), None) if model is not None else None
    if device is not None:
        return str(device) if ":" in str(saved) else device.type
    if model is not None:
        return str(saved)
    try:
        torch.empty(0, device=saved)
    except (AssertionError, NotImplementedError, RuntimeError, TypeError):
        return "a machine without it"
    return str(saved)


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


STAGES = ("captured", "fused", "joint", "sharded", "placed", "lowered")
