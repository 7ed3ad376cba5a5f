"""`moec.load(folder)`: run an emitted step again, without the model's source and without tracing."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

import moec.codegen.triton  # noqa: F401  registers the kernels
from moec.artifact import StateMap, check_fingerprint
from moec.artifact_files import BUFFERS, LOG, PLAN, STATE_MAP, WEIGHTS, read_json
from moec.compiler.errors import ArtifactError
from moec.compiler.log import PassLog
from moec.compiler.plan import Plan
from moec.placing import step_over
from moec.runtime.program import load_program
from moec.runtime.state import StepState
from moec.step import CompiledStep


def load(
    folder: str | Path,
    model: nn.Module | None = None,
    *,
    weights: str | Path | None = None,
    plan: Plan | None = None,
) -> CompiledStep:
    """The step of an artefact.

    model: train this module's parameters in place. weights: what to start from (as for `moec.compile`; without a model
    a safetensors file under the artefact's names); by default the model's values, or the file that
    `step.save(folder, weights=True)` wrote. plan: what the caller expects; it is compared, but for learning
    rate and schedule, which the step takes from it.

    Raises ArtifactError naming the field when the artefact was compiled for another plan, model or device or by another
    version of moec or torch, and when there are no weights to run on.
    """
    folder = Path(folder)
    check_fingerprint(folder, plan, model)
    saved = StateMap(**read_json(folder, STATE_MAP))
    program = load_program(folder)
    log, then = PassLog.read(folder / LOG), Plan.from_yaml(folder / PLAN)
    chosen = then if plan is None else plan.completed_by(then)
    if model is not None:
        start = None if weights is None else Path(weights)
        return step_over(model, program, folder, log, chosen, saved.without_gradient, start)
    state = _state_from_files(folder, saved, program.DEVICE, weights)
    return CompiledStep.of(program, state, folder, log, chosen)


def _state_from_files(folder: Path, saved: StateMap, device: torch.device, weights: str | Path | None) -> StepState:
    path = Path(weights) if weights is not None else folder / WEIGHTS
    if not path.is_file():
        raise ArtifactError(
            f"no weights at {path}",
            why="the artefact was saved without them" if weights is None else "",
            hint="give weights=FILE.safetensors (--weights) or a model, or save with step.save(folder, weights=True)",
        )
    values = _read(path, device)
    values |= _read(folder / BUFFERS, device) if (folder / BUFFERS).is_file() else {}
    for name, description in saved.buffers.items():
        if not description["persistent"] and saved.aliases.get(name, name) not in values:
            dtype = getattr(torch, description["dtype"])
            values[name] = torch.zeros(description["shape"], dtype=dtype, device=device)
    tensors = {}
    for name, description in {**saved.weights, **saved.buffers}.items():
        owner = saved.aliases.get(name, name)
        if owner not in values:
            raise ArtifactError(f"{path} has no value for {owner}", hint="it belongs to another model")
        value = values[owner]
        found = [list(value.shape), str(value.dtype).removeprefix("torch.")]
        if found != [description["shape"], description["dtype"]]:
            raise ArtifactError(
                f"{owner} in {path} is {found[1]} {found[0]}",
                why=f"the program needs {description['dtype']} {description['shape']}",
            )
        tensors[name] = value
    trainable = tuple(
        name
        for name, description in saved.weights.items()
        if description["requires_grad"] and name not in saved.aliases and name not in saved.without_gradient
    )
    return StepState(
        weights={name: tensors[name] for name in saved.weights},
        buffers={name: tensors[name] for name in saved.buffers},
        trainable=trainable,
        without_gradient=tuple(saved.without_gradient),
        aliases=saved.aliases,
        derived_buffers=frozenset(n for n, d in saved.buffers.items() if not d["persistent"]),
    )


def _read(path: Path, device: torch.device) -> dict[str, Tensor]:
    # Tensors of a file lie at any address, and kernels sum in another order where memory is not aligned: a copy has
    # the bits of a run that never went through a file.
    with safe_open(path, framework="pt", device=str(device)) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
