"""Plans: defaults, YAML round trip, overrides, and an error naming the field for everything else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from moec.compiler.errors import PlanError
from moec.compiler.plan import CachePlan, CacheRule, LossPlan, MeshPlan, OptimizerPlan, Plan

FULL = Plan(
    batch=3,
    length=64,
    accumulation=4,
    dtype="bfloat16",
    packing=True,
    image_tokens=5,
    dynamic="length",
    min_length=16,
    cache=CachePlan(hbm="60GiB", host=1000, policy=(CacheRule("offload", "layers.*.mlp", "moec.*"),)),
    loss=LossPlan(memory="64MiB", rows=128, columns=1000),
    optimizer=OptimizerPlan(lr=1e-3, betas=(0.8, 0.99), schedule="constant", warmup_steps=7, total_steps=90),
    mesh=MeshPlan(fsdp=4, ep=2, gather="keep", prefetch=2, reduce_dtype="bfloat16", capacity=1.5, overflow="drop"),
    disable=("recognize_norm",),
    enable=("fuse_experts",),
    check=True,
)

plans = st.builds(
    Plan,
    batch=st.integers(1, 9),
    length=st.integers(3, 999),
    accumulation=st.integers(1, 9),
    dtype=st.sampled_from([None, "float32", "bfloat16"]),
    packing=st.booleans(),
    dynamic=st.sampled_from([None, "length"]),
    cache=st.builds(
        CachePlan,
        hbm=st.sampled_from([1 << 30, "1.5GiB"]),
        policy=st.sampled_from(["keep", "recompute", "auto"])
        | st.lists(st.builds(CacheRule, st.sampled_from(["keep", "offload"]), st.text("abc.*[]")), max_size=3).map(
            tuple
        ),
    ),
    optimizer=st.builds(OptimizerPlan, lr=st.floats(0, 1), eps=st.floats(1e-12, 1)),
)


def test_every_field_of_the_full_plan_differs_from_its_default() -> None:
    """So that the round trips below would miss none."""
    default, full = Plan(), FULL
    assert [f.name for f in dataclasses.fields(Plan) if getattr(default, f.name) == getattr(full, f.name)] == []


@pytest.mark.parametrize("plan", [Plan(), FULL])
def test_yaml_round_trip(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(plan.to_yaml())
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert Plan.from_yaml(file) == plan


@given(plans)
def test_any_plan_is_the_same_as_its_yaml(plan: Plan) -> None:
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert Plan.from_dict(plan.to_dict()) == plan


def test_empty_yaml_is_the_default_plan() -> None:
    assert Plan.from_yaml("") == Plan()


def test_scientific_notation_is_a_number() -> None:
    """YAML 1.1 reads 1e-3 as text."""
    assert Plan.from_yaml("optimizer: {lr: 1e-3}").optimizer.lr == 1e-3
    assert Plan().override(["optimizer.lr=1e-3", "batch=2"]) == Plan(batch=2, optimizer=OptimizerPlan(lr=1e-3))


def test_override_reaches_nested_fields_and_lists() -> None:
    plan = FULL.override(
        [
            "cache.policy=[{decision: keep, path: layers.0}]",
            "dynamic=null",
            "optimizer.betas=[0.5, 0.6]",
            "packing=false",
        ]
    )
    wanted = dataclasses.replace(
        FULL,
        cache=dataclasses.replace(FULL.cache, policy=(CacheRule("keep", "layers.0"),)),
        dynamic=None,
        packing=False,
        optimizer=dataclasses.replace(FULL.optimizer, betas=(0.5, 0.6)),
    )
    assert plan == wanted


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        ("lenght: 5", "plan.lenght", "did you mean length"),
        ("zq: 5", "plan.zq", "known fields: batch, length"),
        ("optimizer: {rate: 1}", "plan.optimizer.rate", "unknown plan field optimizer.rate"),
        ("optimizer: 3", "plan.optimizer", "a mapping of fields"),
        ("batch: 0", "plan.batch", "at least 1"),
        ("{batch: 2, length: 8, image_tokens: 17}", "plan.image_tokens", "0 to batch x length, 16"),
        ("batch: true", "plan.batch", "a whole number"),
        ("batch: 1.5", "plan.batch", "a whole number"),
        ("length: many", "plan.length", "a whole number"),
        ("dtype: int8", "plan.dtype", "one of float32, bfloat16"),
        ("packing: 1", "plan.packing", "true or false"),
        ("disable: layers", "plan.disable", "a list"),
        ("disable: [1]", "plan.disable", "text"),
        ("dynamic: batch", "plan.dynamic", "one of length"),
        ("{dynamic: length, length: 8, min_length: 8}", "plan.min_length", "2 <= min_length < length"),
        ("{dynamic: length, length: 2}", "plan.min_length", "2 <= min_length < length"),
        ("{dynamic: length, length: 8, min_length: 1}", "plan.min_length", "2 <= min_length < length"),
        ("loss: {memory: 1.25}", "plan.loss.memory", "text"),
        ("loss: {memory: 1.25GB}", "plan.loss.memory", "'1.25GB' is not a size in bytes such as 1.25GiB"),
        ("loss: {memory: 0.5B}", "plan.loss.memory", "at least 1B"),
        ("loss: {rows: 0}", "plan.loss.rows", "at least 1"),
        ("loss: {columns: -1}", "plan.loss.columns", "at least 1"),
        ("loss_chunk: 128", "plan.loss_chunk", "did you mean loss"),
        ("optimizer: {lr: -1}", "plan.optimizer.lr", "at least 0"),
        ("optimizer: {betas: [0.9]}", "plan.optimizer.betas", "a list of 2"),
        ("optimizer: {betas: [0.9, 1]}", "plan.optimizer.betas", "[0, 1)"),
        ("optimizer: {eps: 0}", "plan.optimizer.eps", "above 0"),
        ("optimizer: {min_lr_ratio: 2}", "plan.optimizer.min_lr_ratio", "0 to 1"),
        ("optimizer: {schedule: linear}", "plan.optimizer.schedule", "one of cosine, constant"),
        ("optimizer: {clip_norm: -1}", "plan.optimizer.clip_norm", "0 turns it off"),
        ("optimizer: {warmup_steps: -1}", "plan.optimizer.warmup_steps", "at least 0"),
        ("optimizer: {weight_decay: -1}", "plan.optimizer.weight_decay", "at least 0"),
    ],
)
def test_wrong_fields_are_errors_naming_the_field(text: str, field: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(text)
    assert caught.value.where == field
    assert says in str(caught.value)


def test_a_plan_made_in_python_is_checked_too() -> None:
    assert Plan(disable=["*"], optimizer=OptimizerPlan(lr=1)) == Plan(disable=("*",), optimizer=OptimizerPlan(lr=1.0))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="plan field batch is '2'") as caught:
        Plan(batch="2")  # type: ignore[arg-type]
    assert caught.value.where == "plan.batch"
    with pytest.raises(PlanError, match=r"plan field optimizer.betas is 0.9"):
        OptimizerPlan(betas=0.9)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="one of float32"):
        Plan(dtype="int8")  # type: ignore[arg-type]


def test_wrong_sources_are_errors(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no plan file at"):
        Plan.from_yaml(tmp_path / "missing.yaml")
    with pytest.raises(PlanError, match="not YAML"):
        Plan.from_yaml("{batch: ")
    with pytest.raises(PlanError, match="not a list"):
        Plan.from_yaml("[1, 2]")
    with pytest.raises(PlanError, match="is not field=value"):
        Plan().override(["batch"])
    with pytest.raises(PlanError, match="'batch' has no fields of its own"):
        Plan().override(["batch.size=2"])


def test_a_plan_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().batch = 2  # type: ignore[misc]
