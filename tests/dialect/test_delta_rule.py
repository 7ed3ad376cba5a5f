from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from moec.compiler import dialect
from moec.compiler.dialect import DEFINITIONS
from tests.dialect.contract import (
    assert_as_accurate,
    backward_args,
    check_gradients,
    check_op,
    documents,
    leaves_of,
    rand,
    relative_rms,
)

GATES = ("mild", "none", "lower-bound", "extreme", "mixed")


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    document_ids: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The rule token by token, for autograd; the state has at least float32."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    groups = v.shape[2] // q.shape[2]
    q, k = (value.to(dtype).repeat_interleave(groups, 2) for value in (q, k))
    decay = (g if g.dim() == 4 else g.unsqueeze(-1)).to(dtype).exp()
    if document_ids is not None:
        starts = functional.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0))
        decay = decay.masked_fill(starts[:, :, None, None], 0)
    state = v.new_zeros(*v.shape[:1], v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
    if initial_state is not None:
        state = initial_state.to(dtype)
    out = []
    for t in range(q.shape[1]):
        state = state * decay[:, t].unsqueeze(-1)
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t].to(dtype), k[:, t], error)
        out.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1).to(v.dtype), state


def inputs(
    length: int, *, batch: int = 2, heads: int = 2, groups: int = 2, per_head_gate: bool = False, gate: str = "mild",
    initial: bool = True, width: int = 5, values: int = 3,
) -> list[Tensor | None]:  # fmt: skip
    """q, k, v, g, beta, initial state in float64."""
    shape = (batch, length, heads * groups) if per_head_gate else (batch, length, heads * groups, width)
    uniform = torch.sigmoid(rand(*shape, seed=3)).detach()
    g = {
        "mild": -uniform,
        "none": -1e-7 * uniform,
        "lower-bound": torch.full_like(uniform, -5.0),
        "extreme": -50 - 100 * uniform,
        "mixed": torch.where(uniform > 0.5, -50 * uniform, -1e-3 * uniform),
    }[gate]
    return [
        functional.normalize(rand(batch, length, heads, width, seed=1), dim=-1).detach().requires_grad_(),
        functional.normalize(rand(batch, length, heads, width, seed=2), dim=-1).detach().requires_grad_(),
        rand(batch, length, heads * groups, values),
        g.requires_grad_(),
        torch.sigmoid(rand(batch, length, heads * groups, seed=4)).detach().requires_grad_(),
        rand(batch, heads * groups, width, values, seed=5) if initial else None,
    ]


def with_gradients(out: Sequence[Tensor], given: Sequence[Tensor | None]) -> list[Tensor]:
    """The outputs and the gradients of a fixed random linear function of them."""
    grads = [rand(*value.shape, seed=9).to(value.dtype).detach() for value in out]
    return [*out, *torch.autograd.grad(list(out), leaves_of(given), grads)]


def delta(given: Sequence[Tensor | None], ids: Tensor | None = None, chunk: int = 64) -> list[Tensor]:
    q, k, v, g, beta, state = given
    return with_gradients(dialect.delta_rule(q, k, v, g, beta, ids, state, 0.4, chunk), given)


def token_by_token(given: Sequence[Tensor | None], ids: Tensor | None = None) -> list[Tensor]:
    q, k, v, g, beta, state = given
    return with_gradients(recurrence(q, k, v, g, beta, ids, state, 0.4), given)


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], bound: float = 1e-12) -> None:
    for index, (value, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(value, other, atol=bound, rtol=bound, msg=lambda text, i=index: f"value {i}: {text}")


@pytest.mark.parametrize("per_head_gate", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_op(per_head_gate: bool, packed: bool) -> None:
    q, k, v, g, beta, state = inputs(5, heads=1, per_head_gate=per_head_gate, width=2, values=3)
    ids = documents([1, 3, 1], [5]) if packed else None
    check_op("delta_rule", (q, k, v, g, beta, ids, None if packed else state, 0.4, 4))


def test_only_the_final_state_is_used() -> None:
    q, k, v, g, beta, state = inputs(3, heads=1, width=2, values=3)
    check_gradients(lambda *args: dialect.delta_rule(*args)[1], (q, k, v, g, beta, None, state, 0.4, 2))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 130])
@pytest.mark.parametrize("per_head_gate", [False, True])
def test_recurrence(length: int, per_head_gate: bool) -> None:
    given = inputs(length, per_head_gate=per_head_gate)
    assert_same(delta(given), token_by_token(given))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_any_gate_and_chunk(gate: str, chunk: int) -> None:
    given = inputs(70, gate=gate, groups=1)
    assert_same(delta(given, chunk=chunk), token_by_token(given))


@pytest.mark.parametrize("gate", GATES)
def test_float32_is_accurate_for_any_gate(gate: str) -> None:
    """Decays of hundreds of nats per chunk neither overflow nor cost digits."""
    exact = inputs(130, gate=gate, width=16, values=16)
    given = [value.detach().float().requires_grad_() for value in exact]
    for found, truth in zip(delta(given), token_by_token(exact), strict=True):
        assert bool(found.isfinite().all())
        assert relative_rms(found, truth) < 3e-6 or float(truth.abs().max()) < 1e-18


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(0, 2), length=st.integers(1, 40), heads=st.integers(1, 2), groups=st.integers(1, 3),
    width=st.integers(1, 4), values=st.integers(1, 4), per_head_gate=st.booleans(), gate=st.sampled_from(GATES),
    initial=st.booleans(), chunk=st.sampled_from([1, 2, 8, 16]), split=st.integers(0, 7),
)  # fmt: skip
def test_any_shape(
    batch: int, length: int, heads: int, groups: int, width: int, values: int, per_head_gate: bool, gate: str,
    initial: bool, chunk: int, split: int,
) -> None:  # fmt: skip
    given = inputs(
        length, batch=batch, heads=heads, groups=groups, width=width, values=values, per_head_gate=per_head_gate,
        gate=gate, initial=initial,
    )  # fmt: skip
    ids = (torch.arange(length) // split).expand(batch, length) if split else None
    assert_same(delta(given, ids, chunk), token_by_token(given, ids), 1e-11)


@pytest.mark.parametrize("lengths", [[7, 1, 9], [16, 16], [1] * 20, [15, 2, 33, 1, 14], [3, 130], [64, 64, 1]])
@pytest.mark.parametrize("chunk", [16, 64])
def test_documents_are_separate_runs(lengths: list[int], chunk: int) -> None:
    given = inputs(sum(lengths), groups=1)
    found = delta(given, documents(lengths, lengths), chunk)

    outs: list[Tensor] = []
    state = given[5]
    parts = zip(*(value.split(lengths, 1) for value in given[:5] if value is not None), strict=True)
    for q, k, v, g, beta in parts:
        out, final = dialect.delta_rule(q, k, v, g, beta, None, state, 0.4, chunk)
        outs.append(out)
        state = None
    assert_same(found, with_gradients((torch.cat(outs, 1), final), given))


def test_nothing_crosses_a_document_start() -> None:
    """Bit for bit: neither values of any size nor gradients reach another document."""
    ids = documents([5, 6, 9])
    plain, loud = inputs(20, batch=1), inputs(20, batch=1)
    with torch.no_grad():
        loud[2][:, 5:11] *= 1e20
        loud[5] *= 1e20
    for case in (plain, loud):
        q, k, v, g, beta, state = case
        out, final = dialect.delta_rule(q, k, v, g, beta, ids, state, 0.4, 16)
        grads = torch.autograd.grad(out[:, 11:].sum() + final.sum(), leaves_of(case))
        assert all(not bool(grad[:, :11].any()) for grad in grads[:5])
        assert not bool(grads[5].any())
    last = [dialect.delta_rule(*case[:5], ids, case[5], 0.4, 16)[0][:, 11:] for case in (plain, loud)]
    torch.testing.assert_close(*last, rtol=0, atol=0)


@pytest.mark.parametrize("cut", [1, 15, 16, 21])
def test_state_hands_over_between_calls(cut: int) -> None:
    given = inputs(37)
    q, k, v, g, beta, state = given
    ids = documents([4, 30, 3], [37])
    first, middle = dialect.delta_rule(
        q[:, :cut], k[:, :cut], v[:, :cut], g[:, :cut], beta[:, :cut], ids[:, :cut], state, 0.4, 16
    )
    second, final = dialect.delta_rule(
        q[:, cut:], k[:, cut:], v[:, cut:], g[:, cut:], beta[:, cut:], ids[:, cut:], middle, 0.4, 16
    )
    assert_same(with_gradients((torch.cat((first, second), 1), final), given), delta(given, ids, 16))


def test_equal_keys_without_decay_stay_accurate() -> None:
    """The hardest triangular system: every key the same, every write full."""
    q, k, v, g, beta, _ = inputs(64, gate="none", initial=False, groups=1)
    with torch.no_grad():
        k.copy_(k[:, :1].expand_as(k))
        beta.fill_(1.0)
    truth = recurrence(q, k, v, g, beta, None, None, 0.4)
    found = dialect.delta_rule(*(value.float() for value in (q, k, v, g, beta)), None, None, 0.4)
    for value, exact in zip(found, truth, strict=True):
        assert relative_rms(value, exact) < 1e-5


def test_low_precision() -> None:
    q, k, v, g, beta, state = (value.detach() for value in inputs(100, width=16, values=16))
    low = [value.to(torch.bfloat16).requires_grad_() for value in (q, k, v)]
    wide = [value.float().requires_grad_() for value in (g, beta, state)]
    args = (*low, *wide[:2], None, wide[2], 0.25)
    out, final = dialect.delta_rule(*args)
    assert (out.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    assert_as_accurate(dialect.delta_rule, recurrence, args)


def test_results_are_fresh() -> None:
    args = [value.detach() for value in inputs(16, groups=1)]
    q, k, v, g, beta, state = args
    results = dialect.delta_rule(q, k, v, g, beta, None, state, 1.0, 16)
    gradients = DEFINITIONS["delta_rule"].backward(*backward_args("delta_rule", (*args[:5], None, state, 1.0, 16)))
    owners = {value.untyped_storage().data_ptr() for value in args}
    fresh = [value.untyped_storage().data_ptr() for value in (*results, *gradients)]
    assert owners.isdisjoint(fresh)
    assert len(set(fresh)) == len(fresh)


def test_no_tokens_keep_the_state() -> None:
    q, k, v, g, beta, state = inputs(0)
    out, final = dialect.delta_rule(q, k, v, g, beta, None, state, 0.4)
    assert out.shape == v.shape
    torch.testing.assert_close(final, state)


def test_exported_with_dynamic_length() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ids: Tensor) -> Tensor:
            return dialect.delta_rule(q, k, v, g, beta, ids, None, 0.4)[0]

    def args(length: int) -> tuple[Tensor, ...]:
        values = [value.detach() for value in inputs(length, batch=1)[:5] if value is not None]
        return (*values, documents([5, length - 5]))

    length = torch.export.Dim("length", min=2, max=512)
    exported = torch.export.export(Module(), args(20), dynamic_shapes=[{1: length}] * 6)
    (node,) = [node for node in exported.graph.nodes if node.target is DEFINITIONS["delta_rule"].op]
    given = [getattr(arg, "meta", {}).get("val", arg) for arg in node.args]
    assert len(DEFINITIONS["delta_rule"].flops_of(given, node.kwargs).free_symbols) == 1
    torch.testing.assert_close(exported.module()(*args(70)), Module()(*args(70)))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q", (2, 4, 10)), ("k", (2, 4, 2, 4)), ("v", (2, 4, 3, 3)), ("v", (2, 5, 4, 3)), ("g", (2, 4, 2)),
        ("g", (2, 4, 4, 4)), ("beta", (2, 4, 2)), ("document_ids", (4,)), ("initial_state", (2, 4, 3, 5)),
    ],
)  # fmt: skip
def test_mistakes_name_op_and_argument(name: str, shape: tuple[int, ...]) -> None:
    q, k, v, g, beta, state = inputs(4)
    arguments = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "document_ids": None, "initial_state": state}
    with pytest.raises(ValueError, match=f"moec::delta_rule: {name} has shape"):
        dialect.delta_rule(**{**arguments, name: rand(*shape)}, scale=1.0)


def test_chunk_is_a_power_of_two() -> None:
    q, k, v, g, beta, state = inputs(4)
    with pytest.raises(ValueError, match="moec::delta_rule: chunk is 48"):
        dialect.delta_rule(q, k, v, g, beta, None, state, 1.0, 48)
