"""C08: an artefact that fits plan, model, versions or device no more is refused, and the field that differs is named.

That a fitting one runs in another process without a trace is in tests/moec/test_artifact.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import moec
from moec.compiler.errors import ArtifactError
from moec.compiler.plan import MeshPlan, Plan

from ..spine import WIDTH, Language, Layer, recomputed, seeded

PLAN = Plan(batch=2, length=6)


def make() -> Any:
    return seeded(Language, Layer(), Layer(), tied=True)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moec.compile(make(), PLAN).save(tmp_path_factory.mktemp("artifact") / "step", weights=True)


@pytest.fixture
def folder(artifact: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(artifact, tmp_path / "step"))


def refused(folder: Path, *args: Any, **kwargs: Any) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        moec.load(folder, *args, **kwargs)
    return caught.value


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (Plan(batch=2, length=7), "plan.length"),
        (Plan(batch=2, length=6, cache=recomputed("*")), "plan.cache.policy"),
        (Plan(batch=2, length=6, optimizer=moec.OptimizerPlan(clip_norm=2.0)), "plan.optimizer.clip_norm"),
        (Plan(batch=2, length=6, mesh=MeshPlan(fsdp=2)), "plan.mesh.fsdp"),
    ],
)
def test_c08_another_plan_is_a_stale_artefact(folder: Path, plan: Plan, field: str) -> None:
    assert_plan_is_refused(folder, plan, field)


def assert_plan_is_refused(folder: Path, plan: Plan, field: str) -> None:
    error = refused(folder, plan=plan)
    assert error.where == field
    assert f"is stale: {field} differs" in error.what
    moec.load(folder, plan=PLAN)


def test_c08_learning_rate_and_schedule_are_taken_from_the_callers_plan(folder: Path, tmp_path: Path) -> None:
    """They are inputs of the program, which stays the same."""
    schedule = moec.OptimizerPlan(lr=0.5, schedule="constant", warmup_steps=2)
    step = moec.load(folder, plan=Plan(batch=2, length=6, optimizer=schedule))
    assert step.learning_rate() == 0.25
    again = moec.load(step.save(tmp_path / "again", weights=True))
    assert again.plan.optimizer == schedule
    assert again.source == step.source


@pytest.mark.parametrize(
    ("field", "value"),
    [("torch", "1.13"), ("format", 0), ("moec", "0.0.1"), ("device", "cuda:77"), ("device", "nothing")],
)
def test_c08_other_versions_and_devices_are_stale_artefacts(folder: Path, field: str, value: Any) -> None:
    assert_fingerprint_is_refused(folder, field, value)


def assert_fingerprint_is_refused(folder: Path, field: str, value: Any) -> None:
    edit_json(folder / "fingerprint.json", lambda values: values.update({field: value}))
    error = refused(folder)
    assert (error.where, f"compiled for {value!r}" in error.why) == (field, True)
    error = refused(folder, make())
    assert (error.where, f"compiled for {value!r}" in error.why) == (field, True)


def test_c08_a_fingerprint_without_a_version_is_stale(folder: Path) -> None:
    edit_json(folder / "fingerprint.json", lambda values: values.pop("moec"))
    assert refused(folder).where == "moec"


def other_width(model: Any) -> None:
    model.layers[0].up = nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda model: model.to(torch.bfloat16), "embed.weight"),
        (lambda model: model.layers[1].gate.requires_grad_(False), "layers.1.gate.weight"),
        (other_width, "layers.0.up.bias"),
        (lambda model: model.layers.append(Layer()), "layers.2.down.weight"),
        (lambda model: model.layers[0].register_buffer("more", torch.zeros(1)), "layers.0.more"),
    ],
)
def test_c08_another_model_is_a_stale_artefact(folder: Path, change: Callable[[Any], Any], where: str) -> None:
    """Another dtype, trained set, shape or configuration: the first weight that differs is named."""
    assert_model_is_refused(folder, change, where)


def assert_model_is_refused(folder: Path, change: Callable[[Any], Any], where: str) -> None:
    model = make()
    change(model)
    assert refused(folder, model).where == where
    moec.load(folder, make())


def test_c08_untied_weights_are_a_stale_artefact(folder: Path) -> None:
    model = make()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    error = refused(folder, model)
    assert (error.where, error.why) == ("head.weight", "compiled for 'tied to embed.weight', now 'not tied'")


def test_c08_a_fitting_artefact_is_taken(folder: Path) -> None:
    moec.load(folder, plan=PLAN)
    moec.load(folder, make(), plan=PLAN)


def test_c08_a_stale_hit_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache whose key leaves out the plan, the versions, or the model."""
    weights = json.loads((folder / "fingerprint.json").read_text())["weights"]
    two_ranks, up = Plan(batch=2, length=6, mesh=MeshPlan(fsdp=2)), "layers.0.up.bias"
    lax: list[tuple[str, Callable[..., Any], Callable[[], None]]] = [
        ("_compare", lambda *given: None, lambda: assert_plan_is_refused(folder, two_ranks, "plan.mesh.fsdp")),
        (
            "StateMap.digest",
            lambda _: weights,
            lambda: assert_model_is_refused(folder, other_width, up),
        ),
        ("_versions", dict, lambda: assert_fingerprint_is_refused(folder, "torch", "1.13")),
    ]
    for name, wrong, check in lax:
        with monkeypatch.context() as planted:
            planted.setattr(f"moec.artifact.{name}", wrong)
            with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
                check()
