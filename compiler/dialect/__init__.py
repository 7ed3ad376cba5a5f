"""The dialect: the ops that layers are made of, as typed functions, and the table that describes them."""

from moec.compiler.dialect.activation import gated_mlp_act, sigmoid_gate
from moec.compiler.dialect.attention import attention
from moec.compiler.dialect.cache import fetch, offload
from moec.compiler.dialect.conv import short_conv
from moec.compiler.dialect.delta_rule import delta_rule
from moec.compiler.dialect.depth_mix import depth_mix
from moec.compiler.dialect.exchange import (
    exchange,
    exchange_back,
    exchange_counts,
    exchange_padded,
    exchange_padded_back,
    local_offsets,
    overflow,
)
from moec.compiler.dialect.expert_down import expert_down
from moec.compiler.dialect.expert_pipeline import expert_slots
from moec.compiler.dialect.expert_up import expert_up
from moec.compiler.dialect.experts import grouped_linear, permute, unpermute
from moec.compiler.dialect.kda import kda
from moec.compiler.dialect.kda_state import kda_with_state
from moec.compiler.dialect.log_probs import token_log_probs
from moec.compiler.dialect.loss import linear_cross_entropy, linear_cross_entropy_sum
from moec.compiler.dialect.loss_shards import combine, logit_statistics, loss_of_statistics
from moec.compiler.dialect.norm import gated_norm, l2_norm, rms_norm
from moec.compiler.dialect.rank_mean import rank_mean
from moec.compiler.dialect.registry import DEFINITIONS, Definition, define, lookup
from moec.compiler.dialect.route import balanced_bias, route, route_histogram
from moec.compiler.dialect.shards import pack_gradients, unshard
from moec.compiler.dialect.sparse_attention import index_topk, indexer_loss, sparse_attention

__all__ = [
    "DEFINITIONS",
    "Definition",
    "attention",
    "balanced_bias",
    "combine",
    "define",
    "delta_rule",
    "depth_mix",
    "exchange",
    "exchange_back",
    "exchange_counts",
    "exchange_padded",
    "exchange_padded_back",
    "expert_down",
    "expert_slots",
    "expert_up",
    "fetch",
    "gated_mlp_act",
    "gated_norm",
    "grouped_linear",
    "index_topk",
    "indexer_loss",
    "kda",
    "kda_with_state",
    "l2_norm",
    "linear_cross_entropy",
    "linear_cross_entropy_sum",
    "local_offsets",
    "logit_statistics",
    "lookup",
    "loss_of_statistics",
    "offload",
    "overflow",
    "pack_gradients",
    "permute",
    "rank_mean",
    "rms_norm",
    "route",
    "route_histogram",
    "short_conv",
    "sigmoid_gate",
    "sparse_attention",
    "token_log_probs",
    "unpermute",
    "unshard",
]
