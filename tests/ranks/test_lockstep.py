"""N ranks in lock step against one rank: loss, every gradient, three optimizer steps; and that a wrong step is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch

import moec
from moec.models.k3.model import K3Model
from moec.placing import UnconnectedStep
from moec.rank_checks import REDUCED, joined_batches, joined_plan, verify_lockstep
from tests.moec.small_models import SMALL_K3
from tests.ranks.models import HUGGINGFACE, MESHES, PRESETS, model_of, needs_transformers, plan_of

QUICK = ((4, 2),)


def check(name: str, fsdp: int, ep: int, **mesh: object) -> None:
    report = verify_lockstep(model_of(name), plan_of(fsdp, ep, packing=name in PRESETS, **mesh))
    assert report.equal, str(report)
    losses = [loss for loss, _ in report.losses]
    assert len(losses) == 3
    assert losses[0] != losses[-1], "a step that does nothing would be equal too"


@pytest.mark.parametrize(("fsdp", "ep"), QUICK)
def test_ranks_equal_one_rank(fsdp: int, ep: int) -> None:
    check("k3-tiny", fsdp, ep)


@pytest.mark.slow
@pytest.mark.parametrize(("fsdp", "ep"), [mesh for mesh in MESHES if mesh not in QUICK])
def test_ranks_of_every_mesh_equal_one_rank(fsdp: int, ep: int) -> None:
    check("k3-tiny", fsdp, ep)


@pytest.mark.slow
@pytest.mark.parametrize(("fsdp", "ep"), MESHES)
def test_sparse_attention_on_ranks(fsdp: int, ep: int) -> None:
    check("k3-dsa-tiny", fsdp, ep)


@pytest.mark.parametrize(
    ("experts", "fsdp", "ep", "mesh"),
    [
        (5, 4, 2, {}),
        (8, 6, 3, {"capacity": 8.0}),
        pytest.param(8, 6, 3, {}, marks=pytest.mark.slow),
        pytest.param(6, 8, 4, {}, marks=pytest.mark.slow),
        pytest.param(5, 6, 2, {"gather": "keep"}, marks=pytest.mark.slow),
    ],
)
def test_experts_that_do_not_divide_are_sharded_further(
    experts: int, fsdp: int, ep: int, mesh: dict[str, object]
) -> None:
    """A part of fewer experts than the others is spread over as many ranks, so places between its experts are empty."""
    torch.manual_seed(0)
    model = K3Model(replace(SMALL_K3, experts=experts)).train()
    report = verify_lockstep(model, plan_of(fsdp, ep, packing=True, **mesh))
    assert report.equal, str(report)


def test_image_features_on_ranks() -> None:
    """Each rank has as many placeholders in its rows, and takes the features of its own."""
    torch.manual_seed(0)
    model = K3Model(replace(SMALL_K3, image_token=7)).train()
    plan = replace(plan_of(2, 2, length=16), batch=2, accumulation=2, image_tokens=3)
    report = verify_lockstep(model, plan, steps=2)
    assert report.equal, str(report)


@pytest.mark.slow
def test_half_precision_on_ranks() -> None:
    torch.manual_seed(0)
    model = K3Model(SMALL_K3).to(torch.bfloat16).train()
    report = verify_lockstep(model, replace(plan_of(4, 2, length=16), dtype="bfloat16"), steps=2)
    assert report.equal, str(report)


@pytest.mark.slow
def test_gradients_summed_in_half_precision() -> None:
    """They are those of one rank but for one rounding of each part, which shows."""
    torch.manual_seed(0)
    report = verify_lockstep(K3Model(SMALL_K3).train(), plan_of(4, 2, length=16, reduce_dtype="bfloat16"), steps=2)
    assert report.equal, str(report)
    errors = [one.error for one in report.comparisons if one.kind == "gradient"]
    assert 2.0**-12 < max(errors) < REDUCED


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize(("fsdp", "ep"), MESHES)
@pytest.mark.parametrize("name", HUGGINGFACE)
def test_hugging_face_models_on_ranks(name: str, fsdp: int, ep: int) -> None:
    check(name, fsdp, ep)


@pytest.mark.parametrize(
    "mesh",
    [
        {"prefetch": 0},
        pytest.param({"gather": "keep"}, marks=pytest.mark.slow),
        pytest.param({"prefetch": 5, "gather": "keep"}, marks=pytest.mark.slow),
    ],
    ids=lambda mesh: " ".join(f"{name}={value}" for name, value in mesh.items()),
)
def test_how_weights_are_gathered_changes_no_bit(mesh: dict[str, object]) -> None:
    usual, other = (_gradients(**changes) for changes in ({}, mesh))
    assert usual.keys() == other.keys()
    assert all(torch.equal(usual[name], other[name]) for name in usual)


def _gradients(**mesh: object) -> dict[str, torch.Tensor]:
    plan = plan_of(2, 2, packing=True, **mesh)
    model = model_of("k3-tiny")
    step = cast(UnconnectedStep, moec.compile(model, plan))
    return step.simulate_ranks(2).gradients(joined_batches(model, plan, 1, 0)[0])


def test_accumulated_microbatches_on_ranks_equal_one_rank() -> None:
    """Valid tokens differ between ranks and microbatches, and one rank has none in the second."""
    plan = moec.Plan(batch=1, length=24, packing=True, accumulation=2, mesh=plan_of(2, 2).mesh)
    model = model_of("k3-tiny")
    batch = joined_batches(model, plan, 1, 0)[0]
    batch["labels"][1, 1, :] = -100
    one = moec.compile(model_of("k3-tiny"), joined_plan(plan)).gradients(batch)
    many = cast(UnconnectedStep, moec.compile(model, plan)).simulate_ranks().gradients(batch)
    assert one.keys() == many.keys()
    for name, gradient in one.items():
        assert float((many[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"sum", 2, "scatter"', '"max", 2, "scatter"'),
        ('state.shard("layers.3.attention")', 'state.shard("layers.7.attention")'),
        ("d_add_3 = d_output_mix_3 + d_feed_forward_mix_3", "d_add_3 = d_output_mix_3 + 2 * d_feed_forward_mix_3"),
    ],
    ids=["another reduction", "another layer's weights", "a factor in backward"],
)
def test_a_wrong_program_is_seen(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import moec.driver as driver

    emit = driver.write_program

    def wrong(*args: object, **kwargs: object) -> object:
        program = emit(*args, **kwargs)  # type: ignore[arg-type]
        if "c10d." not in program.text:
            return program
        assert old in program.text
        return type(program)(program.text.replace(old, new), program.constants)

    monkeypatch.setattr(driver, "write_program", wrong)
    assert not verify_lockstep(model_of("k3-tiny"), plan_of(2, 1, packing=True), steps=1).equal
