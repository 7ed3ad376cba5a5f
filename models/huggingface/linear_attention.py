"""Linear attention: the delta rule and the short convolution in front of it, as ops that know documents.

transformers falls back to plain PyTorch where no kernel package is installed: a loop over chunks and a solve over
rows, which unroll into a thousand nodes and freeze the length, and a convolution that runs across documents. Modeling
files call these functions as globals of known names; the functions below take their place and signature.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from moec.compiler import dialect
from moec.models.huggingface.documents import current_document_ids
from moec.models.huggingface.swaps import Notes, modeling_globals, replaced

# transformers writes this epsilon as a literal at each call.
_L2_EPS = 1e-6


@contextmanager
def exportable_linear_attention(model: nn.Module, notes: Notes) -> Iterator[None]:
    """The modeling files' delta rule and causal convolution are `chunk_delta_rule` and `causal_convolution`."""
    replacements = []
    for table in modeling_globals(model):
        for name in sorted(REPLACEMENTS.keys() & table.keys()):
            new = REPLACEMENTS[name]
            replacements.append((table, name, new))
            notes.add(f"linear attention: {new.__name__} instead of {table['__name__']}.{name}")
    with replaced(replacements):
        yield


@contextmanager
def token_by_token(model: nn.Module, notes: Notes) -> Iterator[None]:
    """The modeling files' delta rule over chunks is their own one over tokens.

    For reference runs: the plain form over chunks takes differences of cumulated decays, and under strong decay its
    float32 gradient of the decay is wrong by up to a few percent.
    """
    tables = list(modeling_globals(model))
    pairs = [(table, chunks, table[tokens]) for table in tables for chunks, tokens in _TOKEN_FORMS if chunks in table]
    with replaced(pairs):
        yield


def chunk_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """query, key [B, T, H, K], value [B, T, HV, V], g [B, T, HV(, K)], beta [B, T, HV] -> (o [B, T, HV, V], state).

    H divides HV. The state, float32 [B, HV, K, V], is None unless asked for.
    """
    dtype, scale = query.dtype, query.shape[-1] ** -0.5
    # As in the originals the norm sees, and the recurrence gets, float32.
    query, key = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        query, key = dialect.l2_norm(query, _L2_EPS), dialect.l2_norm(key, _L2_EPS)
    output, state = dialect.delta_rule(
        query,
        key,
        value,
        g.float(),
        beta,
        current_document_ids(),
        initial_state,
        scale=scale,
        chunk=chunk_size,
    )
    return output.to(dtype), state if output_final_state else None


def causal_convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """hidden_states [B, C, T], weight [C, W], bias [C] -> [B, C, T]; zeros stand before each document's first token."""
    fused = bias is None and activation in ("silu", "swish")
    output = dialect.short_conv(
        hidden_states.transpose(1, 2), weight, current_document_ids(), "silu" if fused else "none"
    )
    if not fused:
        output = output if bias is None else output + bias
        output = output if activation is None else ACT2FN[activation](output)
    return output.to(hidden_states.dtype).transpose(1, 2)


_TOKEN_FORMS = (
    ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
)
REPLACEMENTS = {
    "torch_chunk_gated_delta_rule": chunk_delta_rule,
    "chunk_kimi_delta_attention": chunk_delta_rule,
    "causal_conv1d_fn": causal_convolution,
}
