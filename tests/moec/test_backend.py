"""`torch.compile(backend="moec")`: results and gradients of eager, few compilations, and a log of what happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moec.backend import BackendLog, last_log

from ..spine import WIDTH, Language, Layer, assert_equal_gradients, distance, seeded, small_k3
from .dynamo import Experts, Losses, assert_same, batch_of, compiled, loss_and_gradients

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_a_model_is_fused_and_has_eagers_gradients() -> None:
    model = seeded(Language, Experts(), Layer())
    function, log = compiled(model, check=True)
    assert_same(function, model, *batch_of())
    assert log.compiled == ["0/0"]
    assert [match.path for _, match in log.passes.matches("recognize_mlp")] == ["layers.1"]
    assert log.passes.lowering["moec.gated_mlp_act_backward.default"].startswith("reference")
    assert last_log() is log


def test_a_wrong_pass_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails when the graph is not the model's any more."""
    from moec import fused_stage
    from moec.compiler.pass_manager import Pass, Report

    class Wrong(Pass):
        name = "wrong"

        def run(self, unit: Any, context: Any) -> Report:
            for node in unit.graph.find_nodes(op="call_function", target=torch.ops.aten.silu.default):
                node.target = torch.ops.aten.relu.default
            return Report()

    monkeypatch.setattr(fused_stage, "SEMANTIC_PASSES", (Wrong(),))
    model = seeded(Language, Layer())
    with pytest.raises(AssertionError):
        assert_same(compiled(model)[0], model, *batch_of())


@pytest.mark.parametrize("kind", ["tied", "frozen", "running", "double"])
def test_odd_models_are_eagers_too(kind: str) -> None:
    class Running(Layer):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, hidden: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.mean((0, 1)))
            return super().forward(hidden - self.mean)

    model = seeded(Language, Running() if kind == "running" else Layer(), tied=kind == "tied")
    if kind == "frozen":
        model.embed.requires_grad_(False)
        model.layers[0].gate.requires_grad_(False)
    model = model.double() if kind == "double" else model
    function, _ = compiled(model)
    assert_same(function, model, *batch_of(), bound=1e-11 if kind == "double" else 1e-5)
    assert_same(function, model, *batch_of(seed=1), bound=1e-11 if kind == "double" else 1e-5)


def test_a_new_length_compiles_once_more_and_then_never() -> None:
    model = seeded(Language, Experts(), Layer())
    function, log = compiled(model)
    for length in (6, 9, 7, 12, 5):
        assert_same(function, model, *batch_of(length))
    assert len(log.compiled) == 2


def test_evaluation_and_no_grad_run_without_a_backward() -> None:
    class Logits(Language):
        def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
            return self.head(self.hidden(input_ids))

    model = seeded(Logits, Layer())
    function, _ = compiled(model)
    ids, _ = batch_of()
    with torch.no_grad():
        found = function(ids)
    assert not found.requires_grad
    assert distance(found, model(ids)) <= 1e-6
    model.eval()
    assert distance(function(ids), model(ids)) <= 1e-6
    with torch.inference_mode():
        assert distance(function(ids), model(ids)) <= 1e-6


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_gradients_written_in_python_are_kept() -> None:
    class Custom(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(Doubled.apply(hidden))

    model = seeded(Language, Custom())
    function, log = compiled(model)
    assert_same(function, model, *batch_of())
    assert "autograd_function_apply" in log.passes.notes[0]
    assert log.passes.matches("recognize_mlp"), "the rest of the graph is fused all the same"


def test_autocast_is_left_alone_and_says_so() -> None:
    model = seeded(Language, Layer())

    def mixed(input_ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(input_ids, labels)

    log = BackendLog()
    function = torch.compile(mixed, backend="moec", fullgraph=True, options={"log": log})
    found, got = loss_and_gradients(function, model, *batch_of())
    wanted, gradients = loss_and_gradients(mixed, model, *batch_of())
    assert torch.equal(found, wanted)
    assert_equal_gradients(got, gradients, 1e-2)
    assert "autocast" in log.passes.notes[0]
    assert log.passes.records == []


def test_passes_can_be_left_out() -> None:
    model = seeded(Language, Layer())
    function, log = compiled(model, disable=["recognize_mlp"])
    assert_same(function, model, *batch_of())
    assert "recognize_mlp" not in {record.name for record in log.passes.records}
    assert not log.passes.lowering.get("moec.gated_mlp_act.default")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"accumulation": 2}, "the moec backend has no option accumulation"),
        ({"disable": ["recognise"]}, "recognise, which is no pass"),
        ({"loss": {"rows": 0}}, "plan field loss.rows is 0"),
        ({"log": 3}, "option log is a int"),
    ],
)
def test_wrong_options_are_errors(options: dict[str, Any], says: str) -> None:
    model = seeded(Language, Layer())
    with pytest.raises(Exception, match=says):
        compiled(model, **options)[0](*batch_of())


def test_two_logs_of_one_model_both_tell_of_it() -> None:
    model = seeded(Language, Layer())
    for _ in range(2):
        function, log = compiled(model)
        function(*batch_of())
        assert len(log.compiled) == 1


def test_without_a_log_of_their_own_models_share_the_process_log() -> None:
    before = len(torch.compile(nn.Linear(2, 2), backend="moec")(torch.randn(1, 2)))
    shared = last_log()
    compiled_before = len(shared.compiled)
    torch.compile(nn.Linear(3, 3), backend="moec")(torch.randn(1, 3))
    assert last_log() is shared
    assert len(shared.compiled) == compiled_before + 1
    assert before == 1


def assert_model(model: nn.Module, lengths: tuple[int, ...], bound: float) -> BackendLog:
    """Forward and backward at each length, at most two compilations; then without gradients."""
    wrapped = Losses(model)
    function, log = compiled(wrapped)
    for length in lengths:
        assert_same(function, wrapped, *batch_of(length), bound=bound)
    assert len(log.compiled) <= 2
    model.eval()
    with torch.no_grad():
        assert distance(function(*batch_of(lengths[0])), wrapped(*batch_of(lengths[0]))) <= 1e-5
    return log


def remember(model: nn.Module) -> None:
    """Slow decay in every recurrence.

    As initialised, qwen3_next forgets within a token. The gradients of its decay are then differences of numbers that
    are nearly equal, and the order of sums alone moves them by 1e-4.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.02, 0.5).log())


def test_a_k3_model_is_fused_and_eagers() -> None:
    model = Losses(small_k3().double())
    function, log = compiled(model)
    assert_same(function, model, *batch_of(9), bound=1e-9)
    for name in ("recognize_depth_mix", "fuse_kda", "recognize_route", "recognize_norm"):
        assert log.passes.matches(name), name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("full_attention", ["mla", "dsa", "gqa"])
def test_k3_models_of_any_length(full_attention: str) -> None:
    assert_model(small_k3(full_attention=full_attention).double(), (9, 13, 11, 16), bound=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "kimi_linear", "glm_moe_dsa"])
def test_hugging_face_models_of_any_length(kind: str) -> None:
    """Their plain forward, without anything swapped in."""
    from moec.models.huggingface.adapter import from_config
    from moec.models.huggingface.tiny import tiny_config

    torch.manual_seed(0)
    model = from_config(tiny_config(kind), dtype=torch.float32)
    remember(model)
    assert_model(model, (16, 24, 20), bound=1e-5)
