"""The passes, in the order in which they run.

Depth mixes and gated norms contain what later passes look for on its own, sparse attention contains a softmax
attention: the larger form comes first.
"""

from __future__ import annotations

from moec.compiler.pass_manager import Pass
from moec.compiler.placement import PlacementPass
from moec.passes.chunk_loss import ChunkLoss
from moec.passes.fuse_attention_gate import FuseAttentionGate
from moec.passes.fuse_dsa import FuseDsa
from moec.passes.fuse_experts import FuseExperts
from moec.passes.fuse_kda import FuseKda
from moec.passes.normalize import Normalize
from moec.passes.place_cache import PlaceCache
from moec.passes.prefetch_gathers import PrefetchGathers
from moec.passes.recognize_attention import RecognizeAttention
from moec.passes.recognize_conv import RecognizeConv
from moec.passes.recognize_depth_mix import RecognizeDepthMix
from moec.passes.recognize_experts import RecognizeExperts
from moec.passes.recognize_mlp import RecognizeMlp
from moec.passes.recognize_norm import RecognizeNorm
from moec.passes.recognize_route import RecognizeRoute
from moec.passes.shard_experts import ShardExperts
from moec.passes.shard_parameters import ShardParameters

SEMANTIC_PASSES: tuple[Pass, ...] = (
    Normalize(),
    RecognizeDepthMix(),
    RecognizeNorm(),
    RecognizeMlp(),
    RecognizeConv(),
    FuseDsa(),
    RecognizeAttention(),
    RecognizeRoute(),
    RecognizeExperts(),
    ChunkLoss(),
    FuseAttentionGate(),
    FuseKda(),
    ShardExperts(),
    FuseExperts(),
)

SHARDING_PASSES: tuple[PlacementPass, ...] = (ShardParameters(), PrefetchGathers())
"""For plans of more than one rank, on the differentiated program."""

CACHING_PASSES: tuple[PlacementPass, ...] = (PlaceCache(),)
"""For plans whose cache policy is not to keep everything, behind the sharding."""
