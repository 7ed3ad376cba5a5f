"""`moec.compile`: equal to eager training over several steps, a log that says everything, errors before it runs."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import moec
from moec import driver, fused_stage, placed_stages
from moec.codegen.program import ProgramText, write_program
from moec.compiler.errors import CaptureError, PassError, PlanError, UnsupportedModelError
from moec.compiler.graph import Unit
from moec.compiler.pass_manager import Pass, PassContext, Report
from moec.compiler.plan import OptimizerPlan, Plan
from moec.driver import build

from ..spine import (
    PLAN,
    VOCABULARY,
    WIDTH,
    Language,
    Layer,
    assert_equal_gradients,
    assert_like_eager,
    batch_for,
    distance,
    eager,
    recomputed,
    seeded,
)

RULES = Plan(batch=2, length=6, accumulation=2, optimizer=OptimizerPlan(lr=1e-2, clip_norm=0.5, schedule="constant"))


class Odd(Layer):
    """Layers with weights that never get a gradient, and one that is decayed apart."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Parameter(torch.ones(3, 3))

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.silent(hidden).sigmoid()
        return super().forward(hidden) * gate


def train_eagerly(model: nn.Module, plan: Plan, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """AdamW as torch has it, weight decay on matrices only; losses of the steps."""
    options = plan.optimizer
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)
    losses = []
    for batch in batches:
        loss, gradients = eager(model, batch)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
        optimizer.step()
        losses.append(loss)
    return losses


def assert_trains_like_eager(model: nn.Module, plan: Plan, steps: int = 3) -> None:
    reference = copy.deepcopy(model)
    batches = [batch_for(plan, seed) for seed in range(steps)]
    wanted = train_eagerly(reference, plan, batches)
    step = moec.compile(model, plan)
    losses = [step(batch).loss for batch in batches]
    for got, expected in zip(losses, wanted, strict=True):
        assert distance(got, expected) <= 1e-5
    expected_weights = dict(reference.named_parameters())
    for name, weight in model.named_parameters():
        assert distance(weight, expected_weights[name]) <= 1e-5, name


def test_three_steps_are_eagers() -> None:
    """Also for frozen weights, and for those without gradient, which no decay may move."""
    model = seeded(Language, Odd(), Odd(), Odd())
    model.layers[1].gate.requires_grad_(False)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    assert_trains_like_eager(model, RULES)
    still = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
    assert still == {"layers.1.gate.weight"} | {
        f"layers.{i}.{name}" for i in range(3) for name in ("silent.weight", "silent.bias", "idle")
    }


@pytest.mark.parametrize("mutant", ["doubled", "swapped", "late"])
def test_the_comparison_sees_a_wrong_step(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these once passed for right in some trainer: gradients x 2, two weights' exchanged, clipping left out."""
    write = driver.write_program

    def wrong(*args: Any) -> Any:
        program = write(*args)
        text = program.text
        changes = {
            "doubled": (
                'state.accumulate_layer("layers.1", grads)',
                'state.accumulate_layer("layers.1", {n: 2 * g for n, g in grads.items()})',
            ),
            "swapped": ('"gate.weight": d_gate_weight', '"gate.weight": d_up_weight'),
            "late": ("max_norm=0.5", "max_norm=None"),
        }
        old, new = changes[mutant]
        assert old in text
        return type(program)(text.replace(old, new), program.constants)

    monkeypatch.setattr(driver, "write_program", wrong)
    with pytest.raises(AssertionError):
        assert_trains_like_eager(seeded(Language, Layer(), Layer()), RULES)


def test_a_plan_of_another_type_is_refused() -> None:
    with pytest.raises(PlanError, match=r"the plan is a dict(.|\n)*Plan\.from_dict"):
        moec.compile(seeded(Language), {"batch": 2})  # type: ignore[arg-type]


def test_half_precision_weights_have_masters() -> None:
    model = seeded(Language, Layer(), Layer()).to(torch.bfloat16)
    plan = Plan(batch=2, length=6, optimizer=OptimizerPlan(lr=1e-6, schedule="constant"))
    step = moec.compile(model, plan)
    before = {path: master.clone() for path, master in step.state.masters.items()}
    step(batch_for(plan))
    moved = [path for path, master in step.state.masters.items() if not torch.equal(master, before[path])]
    assert len(moved) == len(before) > 0, "steps far below the precision of bfloat16 add up in the masters"
    assert all(step.state.weights[path].dtype == torch.bfloat16 for path in moved)


def test_weights_without_gradient_are_found() -> None:
    model = seeded(Language, Odd(), Odd(), tied=True)
    found = build(model, PLAN).unreached
    assert sorted(found) == sorted(
        f"layers.{i}.{n}" for i in range(2) for n in ("silent.weight", "silent.bias", "idle")
    )


def test_the_same_model_and_plan_give_the_same_text() -> None:
    texts = [build(seeded(Language, Layer(), Layer(2.0)), PLAN).program for _ in range(2)]
    assert texts[0] == texts[1]


def test_models_without_weights_compile_to_the_same_text() -> None:
    """On the meta device nothing is allocated, as for models that fit nowhere."""
    with torch.device("meta"):
        model = Language(Layer(), Layer()).train()
    assert build(model, PLAN).program == build(seeded(Language, Layer(), Layer()), PLAN).program


def test_every_stage_is_in_the_log_and_can_be_looked_at() -> None:
    step = assert_like_eager(seeded(Language, Layer(), Layer()), Plan(batch=2, length=6, check=True))
    stages = ["captured", "fused", "joint", "placed", "lowered"]
    assert [name for stage in step.log.stages if (name := stage.stage) in [*stages, "emitted"]] == [*stages, "emitted"]
    assert all(stage.seconds > 0 for stage in step.log.stages)
    for stage in stages:
        assert "layer" in str(step.graph(stage))
    changes = step.graph("captured").diff(step.graph("fused")).splitlines()
    assert [line for line in changes if line.startswith("+%") and "moec.gated_mlp_act" in line]
    assert {placement.decision for placement in step.log.placements["layer"]} == {"keep"}
    assert step.log.lowering["moec.gated_mlp_act.default"].startswith("reference")
    assert step.log.matches("recognize_mlp")


def test_a_pass_can_be_left_out() -> None:
    model = seeded(Language, Layer(), Layer())
    names = tuple(step.name for step in fused_stage.SEMANTIC_PASSES)
    step = assert_like_eager(model, Plan(batch=2, length=6, disable=names))
    assert "moec.gated_mlp_act" not in step.source
    assert step.log.records == []


def test_a_wrong_pass_is_caught_by_its_stages_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Pass):
        name = "wrong"

        def run(self, unit: Unit, context: PassContext) -> Report:
            for node in unit.graph.find_nodes(op="call_function", target=torch.ops.aten.silu.default):
                node.target = torch.nn.functional.silu
            return Report()

    monkeypatch.setattr(fused_stage, "SEMANTIC_PASSES", (Wrong(),))
    with pytest.raises(moec.MoecError, match="after pass wrong the recognized spec does not hold"):
        build(seeded(Language, Layer(), Layer()), Plan(batch=2, length=6, check=True))


def test_a_wrong_lowering_is_caught_by_its_stages_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: fx.Graph) -> dict[str, str]:
        for node in graph.find_nodes(op="call_function", target=torch.ops.moec.gated_mlp_act.default):
            node.target = torch.nn.functional.silu
        return {}

    monkeypatch.setattr(placed_stages, "lower", wrong)
    with pytest.raises(moec.MoecError, match="after lowering the lowered spec does not hold: every op can be written"):
        build(seeded(Language, Layer(), Layer()), PLAN)


def test_a_wrong_program_is_caught_by_its_stages_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> ProgramText:
        program = write_program(*args)
        return replace(program, text=program.text.replace("moec.gated_mlp_act(", "moec.gated_mlp_axt(", 1))

    monkeypatch.setattr(driver, "write_program", wrong)
    with pytest.raises(moec.MoecError, match="after emission the emitted spec does not hold: every op exists"):
        build(seeded(Language, Layer(), Layer()), PLAN)
    build(seeded(Language, Layer(), Layer()), Plan(batch=2, length=6))  # not without `check`


def test_a_pass_that_expected_something_and_found_nothing_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind(Pass):
        name = "blind"

        def run(self, unit: Unit, context: PassContext) -> Report:
            return Report()

        def expected(self, unit: Unit) -> str:
            return "" if unit.is_outer else "the layer has a norm"

    monkeypatch.setattr(fused_stage, "SEMANTIC_PASSES", (Blind(),))
    log = build(seeded(Language, Layer(), Layer()), PLAN).log
    assert log.warnings() == ["blind on layer: the layer has a norm"]
    assert "matched nothing blind on layer: the layer has a norm" in str(log)


def test_layers_left_out_of_templates_are_in_the_log() -> None:
    shared = Layer()
    log = build(seeded(Language, shared, Layer(), shared), PLAN).log
    assert [(miss.path, miss.reason) for miss in log.near_misses] == [
        ("layers.0", "it is called more than once in a forward pass")
    ]
    assert "not a template layers.0" in str(log)


def test_results_that_no_loss_depends_on_are_in_the_log() -> None:
    class Branching(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.aux = nn.Linear(WIDTH, 3)

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(hidden), self.aux(hidden)

    class Model(Language):
        def hidden(self, input_ids: Tensor) -> Tensor:
            hidden = self.embed(input_ids)
            for index, layer in enumerate(self.layers):
                hidden, aux = layer(hidden)
                hidden = hidden + aux.sum(-1, keepdim=True) if index == 2 else hidden
            return hidden

    found = build(seeded(Model, Branching(), Branching(), Branching()), PLAN)
    assert found.log.notes == ["no loss depends on result1 of layers.0, layers.1: no gradient flows from there"]
    assert list(found.captured.templates) == ["layer", "layer_without_result1"]
    assert sorted(found.unreached) == sorted(
        f"layers.{index}.aux.{name}" for index in (0, 1) for name in ("weight", "bias")
    )


@pytest.mark.parametrize("rule", ["layers.*", "layers.1", "*"])
def test_recompute_rules_change_what_is_kept_and_not_the_numbers(rule: str) -> None:
    step = assert_like_eager(
        seeded(Language, Layer(), Layer(), Layer()), Plan(batch=2, length=6, cache=recomputed(rule))
    )
    again = {unit for unit, rows in step.log.placements.items() if any(row.decision == "recompute" for row in rows)}
    kept = {unit for unit, rows in step.log.placements.items() if any(row.decision == "keep" for row in rows)}
    assert again == {"layers.*": {"layer"}, "layers.1": {"layer_recomputed"}, "*": {"layer", "model"}}[rule]
    assert ("layer" in kept) == (rule == "layers.1")


def refused(error: type[moec.MoecError], model: nn.Module, **plan: Any) -> moec.MoecError:
    with pytest.raises(error) as caught:
        moec.compile(model, Plan(**{"batch": 2, "length": 6, **plan}))
    return caught.value


def test_a_model_in_evaluation_mode_is_refused() -> None:
    error = refused(UnsupportedModelError, Language(Layer()).eval())
    assert "evaluation mode" in error.what
    assert "model.train()" in error.hint


def test_a_plan_for_another_dtype_is_refused() -> None:
    error = refused(PlanError, seeded(Language, Layer(), Layer()), dtype="bfloat16")
    assert error.where == "plan.dtype"
    assert "the model's parameters are float32" in error.what
    assert "model.to(torch.bfloat16)" in error.hint


def test_packing_a_model_that_takes_no_documents_is_refused() -> None:
    error = refused(UnsupportedModelError, seeded(Language, Layer(), Layer()), packing=True)
    assert "cannot keep them apart" in error.what
    assert "Language.forward takes no document_ids" in error.where


def test_an_unknown_pass_is_refused_with_the_known_ones() -> None:
    error = refused(PlanError, seeded(Language, Layer(), Layer()), disable=("recognise_norm",))
    assert "recognise_norm, which is no pass" in error.what
    assert "recognize_norm" in error.hint


def test_a_recompute_rule_without_a_layer_is_refused_with_the_nearest() -> None:
    error = refused(PlanError, seeded(Language, Layer(), Layer()), cache=recomputed("layer.0"))
    assert error.what == "the rule to recompute 'layer.0' covers no value"
    assert "layers.0" in error.hint


def test_a_model_without_input_ids_is_refused() -> None:
    error = refused(UnsupportedModelError, nn.Linear(2, 2))
    assert "Linear.forward takes no input_ids and no labels" in error.what


def test_a_model_without_a_loss_is_refused() -> None:
    class Logits(Language):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            return {"logits": self.head(self.hidden(input_ids))}

    error = refused(UnsupportedModelError, seeded(Logits, Layer(), Layer()))
    assert "returned dict without a loss" in error.what


def test_a_length_that_does_not_fit_the_graph_of_the_others_is_refused() -> None:
    """The model shifts by one token: of a length of 2 a single one is left, and sizes of 1 are special to torch."""
    error = refused(CaptureError, seeded(Language, Layer(), Layer()), batch=1, dynamic="length", min_length=2)
    assert "it takes lengths from 3 to" in error.what
    assert error.why == "the model was traced with length >= 3"
    assert error.hint.startswith("set min_length: 3")


def test_sparse_gradients_are_refused_by_name() -> None:
    class Sparse(Language):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__(*layers)
            self.embed = nn.Embedding(VOCABULARY, WIDTH, sparse=True)

    error = refused(PassError, seeded(Sparse, Layer(), Layer()))
    assert (error.what, error.where) == ("the gradient of embed.weight is sparse", "embed.weight")
    assert "sparse=False" in error.hint


def test_what_cannot_be_differentiated_names_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no derivative\nmore")

    monkeypatch.setattr("moec.compiler.differentiate.aot_export_joint_with_descriptors", fail)
    error = refused(PassError, seeded(Language, Layer(), Layer()))
    assert (error.what, error.where) == ("unit layer cannot be differentiated", "layers.0")
    assert error.why == "RuntimeError: no derivative"


def test_an_op_that_no_program_can_call_is_refused_with_its_place() -> None:
    model = seeded(Language, Layer(), Layer())
    compiled = build(model, PLAN)
    section = compiled.sections[0]
    for node in section.parts.forward.nodes:
        if "gated_mlp_act" in str(node.target):
            node.target = torch.nn.functional.silu
    with pytest.raises(moec.MoecError, match="moec cannot write the call of"):
        driver._emit(compiled)


def test_gradients_and_loss_change_nothing() -> None:
    model = seeded(Language, Layer(), Layer())
    step = moec.compile(model, PLAN)
    before = copy.deepcopy(model.state_dict())
    first = step.gradients(batch_for(PLAN))
    step.loss(batch_for(PLAN))
    assert_equal_gradients(step.gradients(batch_for(PLAN)), first, 0.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (step.state.step, step.state.gradients) == (0, {})
