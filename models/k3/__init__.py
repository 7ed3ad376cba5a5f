"""The Kimi K3 family as readable PyTorch: KDA, gated MLA, gated DSA, Stable LatentMoE, attention residuals."""

from moec.models.k3.checkpoint import published_pieces, to_huggingface
from moec.models.k3.config import K3Config
from moec.models.k3.counts import Counts, count_parameters
from moec.models.k3.model import K3Model, K3Output

__all__ = ["Counts", "K3Config", "K3Model", "K3Output", "count_parameters", "published_pieces", "to_huggingface"]
