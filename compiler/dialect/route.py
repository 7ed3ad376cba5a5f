"""Routing of tokens to experts, and quantile balancing of the correction bias.

route, per token (all axes are independent):

1. score: s = sigmoid(logits) or softmax(logits) over all experts; with softmax_after_topk the logits themselves;
2. selection: the top_k of s + bias; with groups only within the top_groups best groups, a group counting the sum of its
   two best s + bias (its best s without bias);
3. weights: s of the selected experts, never with the bias; with softmax_after_topk their softmax; with renormalize
   divided by (their sum + renorm_eps); times scale.

Quantile balancing (Kimi K3 report, appendix D) replaces auxiliary losses. With alpha_i the (top_k+1)-th largest
s_ij + b_j of token i, the new bias of expert j is the quantile k/E over all tokens of alpha_i - s_ij, then centred.
`route_histogram` counts alpha_i - s_ij in uniform bins, which sum over microbatches and ranks; `balanced_bias` reads
the quantile from the summed counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moec.compiler.dialect._define import define_op, math_dtype


def route(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    top_k: int,
    score: str,
    softmax_after_topk: bool = False,
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    renorm_eps: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    """Choose top_k experts per token: logits [N,E] -> weights [N,top_k], indices int64 [N,top_k].

    logits: float32 by convention; lower precision is computed in float32. score: "sigmoid" or "softmax".
    bias: [E] correction, for the selection only, without gradient.
    weights have the dtype of logits and are in descending order of the selection score.
    Raises ValueError for an unknown score, or for counts that do not fit (top_k > E, E not divisible by groups, ...).
    """
    return torch.ops.moec.route(
        logits, bias, top_k, score, softmax_after_topk, renormalize, scale, groups, top_groups, renorm_eps
    )


def route_histogram(logits: Tensor, bias: Tensor, *, top_k: int, bins: int = 1000) -> Tensor:
    """Counts for quantile balancing: logits [N,E] (sigmoid scores), bias [E] -> int64 [E,bins].

    Bin edges are uniform over [min(bias) - 1, max(bias) + 1], which holds every alpha_i - s_ij. Each row sums to N.
    """
    return torch.ops.moec.route_histogram(logits, bias, top_k, bins)


def balanced_bias(bias: Tensor, histogram: Tensor, top_k: int) -> Tensor:
    """The next correction bias [E] from the counts [E,bins] that `route_histogram` took with this bias, mean 0.

    Within the bin that holds the quantile, mass counts as uniform. With no tokens counted the bias stays as it is.
    """
    experts, bins = histogram.shape
    dtype = math_dtype(bias.dtype)
    low, width = _range(bias.to(dtype), bins)
    below = histogram.cumsum(1)
    tokens = below[:, -1:]
    rank = tokens.to(torch.float64) * (top_k / experts)
    index = (below < rank.ceil()).sum(1, keepdim=True).clamp_max(bins - 1)
    count = histogram.gather(1, index)
    before = below.gather(1, index) - count
    part = ((rank - before) / count.clamp_min(1)).clamp(0, 1)
    quantile = low + (index + part).squeeze(1).to(dtype) * width
    return torch.where(tokens[0] > 0, quantile - quantile.mean(), bias.to(dtype)).to(bias.dtype)


# route


def _route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    score: str,
    softmax_after_topk: bool,
    renormalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
    renorm_eps: float,
) -> tuple[Tensor, Tensor]:
    check(logits, top_k, score, softmax_after_topk, groups, top_groups)
    values = logits.to(math_dtype(logits.dtype))
    scores = values if softmax_after_topk else _score(values, score)
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    if groups > 1:
        choice = _within_best_groups(choice, groups, top_groups, 1 if bias is None else 2)
    indices = choice.topk(top_k, dim=-1).indices
    weights = _weights(scores.gather(1, indices), softmax_after_topk, renormalize, renorm_eps)
    return (weights * scale).to(logits.dtype), indices


def _route_backward(
    grad_weights: Tensor,
    logits: Tensor,
    indices: Tensor,
    score: str,
    softmax_after_topk: bool,
    renormalize: bool,
    scale: float,
    renorm_eps: float,
) -> Tensor:
    values = logits.to(math_dtype(logits.dtype))
    scores = values if softmax_after_topk else _score(values, score)
    chosen = scores.gather(1, indices)
    grad = grad_weights.to(values.dtype) * scale
    if softmax_after_topk:
        chosen = chosen.softmax(-1)
    if renormalize:
        total = chosen.sum(-1, keepdim=True) + renorm_eps
        grad = (grad - (grad * chosen / total).sum(-1, keepdim=True)) / total
    grad_logits = torch.zeros_like(values, memory_format=torch.contiguous_format)
    if softmax_after_topk:
        grad_logits.scatter_(1, indices, chosen * (grad - (grad * chosen).sum(-1, keepdim=True)))
    elif score == "sigmoid":
        grad_logits.scatter_(1, indices, grad * chosen * (1 - chosen))
    else:
        grad_logits.scatter_(1, indices, grad * chosen).sub_(scores * (grad * chosen).sum(-1, keepdim=True))
    return grad_logits.to(logits.dtype)


def _route_fake(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    score: str,
    softmax_after_topk: bool,
    renormalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
    renorm_eps: float,
) -> tuple[Tensor, Tensor]:
    check(logits, top_k, score, softmax_after_topk, groups, top_groups)
    tokens = logits.shape[0]
    return logits.new_empty(tokens, top_k), logits.new_empty(tokens, top_k, dtype=torch.int64)


def _route_backward_fake(
    grad_weights: Tensor,
    logits: Tensor,
    indices: Tensor,
    score: str,
    softmax_after_topk: bool,
    renormalize: bool,
    scale: float,
    renorm_eps: float,
) -> Tensor:
    return logits.new_empty(logits.shape)


def check(logits: Tensor, top_k: int, score: str, softmax_after_topk: bool, groups: int, top_groups: int) -> None:
    experts = logits.shape[-1]
    if score not in ("sigmoid", "softmax"):
        raise ValueError(f"moec::route: score={score!r} is not 'sigmoid' or 'softmax'")
    if softmax_after_topk and score != "softmax":
        raise ValueError("moec::route: softmax_after_topk needs score='softmax'")
    if experts % groups or not 1 <= top_groups <= groups:
        raise ValueError(f"moec::route: {experts} experts, groups={groups} and top_groups={top_groups} do not fit")
    if not 1 <= top_k <= experts // groups * top_groups:
        raise ValueError(f"moec::route: top_k={top_k} of the {experts // groups * top_groups} experts to choose from")


def _score(logits: Tensor, score: str) -> Tensor:
    return logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)


def _within_best_groups(choice: Tensor, groups: int, top_groups: int, best: int) -> Tensor:
    """choice [N,E] with -inf outside the top_groups groups of largest sum of their `best` largest entries."""
    members = choice.unflatten(1, (groups, -1))
    ranking = members.topk(min(best, members.shape[2]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(ranking, dtype=torch.bool).scatter_(1, ranking.topk(top_groups, dim=-1).indices, True)
    return members.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)


def _weights(chosen: Tensor, softmax_after_topk: bool, renormalize: bool, renorm_eps: float) -> Tensor:
    weights = chosen.softmax(-1) if softmax_after_topk else chosen
    return weights / (weights.sum(-1, keepdim=True) + renorm_eps) if renormalize else weights


# route_histogram


def _histogram(logits: Tensor, bias: Tensor, top_k: int, bins: int) -> Tensor:
    experts = logits.shape[1]
    scores = logits.to(math_dtype(logits.dtype)).sigmoid()
    shift = bias.to(scores.dtype)
    low, width = _range(shift, bins)
    alpha = (scores + shift).topk(min(top_k + 1, experts), dim=-1).values[:, -1:]
    index = ((alpha - scores - low) / width).long().clamp_(0, bins - 1)
    counts = torch.zeros(experts, bins, dtype=torch.int64, device=logits.device)
    return counts.scatter_add_(1, index.t(), torch.ones_like(index).t())


def _histogram_fake(logits: Tensor, bias: Tensor, top_k: int, bins: int) -> Tensor:
    return logits.new_empty(logits.shape[1], bins, dtype=torch.int64)


def _range(bias: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Lower end and bin width of the interval that holds every alpha_i - s_ij."""
    low, high = bias.aminmax()
    return low - 1, (high - low + 2) / bins


define_op(
    "route",
    "(Tensor logits, Tensor? bias, int top_k, str score, bool softmax_after_topk, bool renormalize, float scale,"
    " int groups, int top_groups, float renorm_eps) -> (Tensor weights, Tensor indices)",
    _route,
    _route_fake,
    backward_schema="(Tensor grad_weights, Tensor logits, Tensor indices, str score, bool softmax_after_topk,"
    " bool renormalize, float scale, float renorm_eps) -> Tensor grad_logits",
    backward=_route_backward,
    backward_fake=_route_backward_fake,
    shapes={"logits": "N E", "bias": "E", "indices": "N top_k"},
    flops="N*(5*E + 3*top_k)",
    backward_flops="5*N*E",
    recompute=False,
    source="Kimi K3 report 2.3; DeepSeek-V3 arXiv 2412.19437; gpt-oss",
    summary="expert choice and weights per token",
)

define_op(
    "route_histogram",
    "(Tensor logits, Tensor bias, int top_k, int bins) -> Tensor histogram",
    _histogram,
    _histogram_fake,
    shapes={"logits": "N E", "bias": "E"},
    flops="8*N*E",
    recompute=False,
    source="Kimi K3 report, appendix D",
    summary="counts for quantile balancing",
)
