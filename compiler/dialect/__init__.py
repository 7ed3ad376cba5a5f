"""The dialect: the ops that layers are made of, as typed functions, and the table that describes them."""

from moec.compiler.dialect.activation import gated_mlp_act, sigmoid_gate
from moec.compiler.dialect.conv import short_conv
from moec.compiler.dialect.delta_rule import delta_rule
from moec.compiler.dialect.depth_mix import depth_mix
from moec.compiler.dialect.norm import gated_norm, l2_norm, rms_norm
from moec.compiler.dialect.registry import DEFINITIONS, Definition, define, lookup

__all__ = [
    "DEFINITIONS",
    "Definition",
    "define",
    "delta_rule",
    "depth_mix",
    "gated_mlp_act",
    "gated_norm",
    "l2_norm",
    "lookup",
    "rms_norm",
    "short_conv",
    "sigmoid_gate",
]
