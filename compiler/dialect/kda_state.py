"""`moec::kda` between two states: a sequence in pieces, one after the other or on several ranks.

A later piece starts from the final state of the one before it, and gives back the gradient of that state. Over ranks
nothing has to wait: the final state is S' = X S + Y for an entering state S [K, V]. Y is what a call without S ends
with, X [K, K] what one with v = 0, as wide as k, and no convolution makes of S = 1. So ranks exchange X and Y once, and
each finds the state that enters its piece (Kimi K3 report, eq. 17).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moec.compiler.dialect._define import define_op, math_dtype, only_asked_for
from moec.compiler.dialect.kda import ARGUMENTS, BACKWARD_FLOPS, FLOPS, GRADIENTS, SHAPES, backward, check, forward


def kda_with_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    conv_q: Tensor | None,
    conv_k: Tensor | None,
    conv_v: Tensor | None,
    output_gate: Tensor | None,
    norm_weight: Tensor | None,
    document_ids: Tensor | None,
    heads: int,
    value_heads: int,
    gate_kind: str,
    lower_bound: float,
    l2_eps: float,
    norm_eps: float,
    output_activation: str,
    scale: float,
    chunk: int = 64,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`kda` that starts from a state and returns (y [B, T, HV * V], final state [B, HV, K, V]).

    States belong to rows of the batch, not to documents: initial_state [B, HV, K, V], None for zero, enters the first
    document of each row, every other document starts from zero, and the final state is the one after a row's last
    token. So the pieces of a row of packed documents chain as those of one document do; for a state per document, give
    each a row. Final state in float32 (float64 for float64), not rounded in between.

    A convolution starts each row from zeros: it knows nothing of a piece before. Where a document goes on from one
    piece to the next, convolve outside with `short_conv` over its last W - 1 rows too, and give None here.
    """
    check(
        "kda_with_state", q, k, v, gate, beta, A_log, dt_bias, conv_q, conv_k, conv_v, output_gate, norm_weight,
        document_ids, heads, value_heads, gate_kind, output_activation, chunk,
    )  # fmt: skip
    expected = _state_shape(q, v, heads, value_heads)
    if initial_state is not None and tuple(initial_state.shape) != expected:
        raise ValueError(
            f"moec::kda_with_state: initial_state has shape {tuple(initial_state.shape)}, expected {list(expected)}"
        )
    return torch.ops.moec.kda_with_state(
        q, k, v, gate, beta, A_log, dt_bias, conv_q, conv_k, conv_v, output_gate, norm_weight, document_ids, heads,
        value_heads, gate_kind, lower_bound, l2_eps, norm_eps, output_activation, scale, chunk, initial_state,
    )  # fmt: skip


def _state_shape(q: Tensor, v: Tensor, heads: int, value_heads: int) -> tuple[int, int, int, int]:
    return q.shape[0], value_heads, q.shape[2] // heads, v.shape[2] // value_heads


def state_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Empty results, for the arguments of the op."""
    q, v = arguments[0], arguments[2]
    state = _state_shape(q, v, *arguments[13:15])
    return v.new_empty(v.shape), v.new_empty(state, dtype=math_dtype(v.dtype))


def state_backward_fake(grad_y: Tensor, grad_final_state: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    """Empty gradients of the first twelve arguments and of the initial state, those that `needed` asks for."""
    v, *_, initial_state, needed = arguments[2:]
    given = (*arguments[:12], initial_state)
    return only_asked_for(needed, [v.new_empty(0) if x is None else x.new_empty(x.shape) for x in given])


_ARGUMENTS = f"{ARGUMENTS}, Tensor? initial_state=None"
define_op(
    "kda_with_state",
    f"({_ARGUMENTS}) -> (Tensor y, Tensor final_state)",
    forward,
    state_fake,
    backward_schema=f"(Tensor grad_y, Tensor? grad_final_state, {_ARGUMENTS}, bool[]? needed=None) -> "
    f"({GRADIENTS}, Tensor grad_initial_state)",
    backward=backward,
    backward_fake=state_backward_fake,
    shapes=SHAPES | {"initial_state": "B HV K V"},
    flops=FLOPS,
    backward_flops=BACKWARD_FLOPS,
    source="Kimi Linear, arXiv:2510.26692; Kimi K3 technical report, 2.1",
    summary="`kda` from a given state to the one behind the last token",
)
