"""The load-balancing loss on several ranks: its parts add up, for loss functions of different forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from moec.compiler.errors import UnsupportedModelError
from moec.compiler.plan import MeshPlan
from moec.models.huggingface.rank_balance import loss_of_rank
from moec.runtime.simulate import simulate

EXPERTS, TOP_K, TOKENS, LAYERS = 4, 2, 12, 3
Loss = Callable[[tuple[Tensor, ...]], Tensor]


def installed(logits: tuple[Tensor, ...]) -> Tensor:
    """The function of the transformers that is there."""
    return load_balancing_loss_func(logits, EXPERTS, TOP_K)  # type: ignore[return-value]


def by_one_hot(logits: tuple[Tensor, ...]) -> Tensor:
    """As earlier releases wrote it: means over a one-hot mask of all layers, with a row per choice."""
    scores = F.softmax(torch.cat(list(logits), dim=0), dim=-1)
    _, selected = torch.topk(scores, TOP_K, dim=-1)
    mask = F.one_hot(selected, EXPERTS)
    share = torch.mean(mask.float(), dim=0)
    return torch.sum(share * torch.mean(scores, dim=0).unsqueeze(0)) * EXPERTS


def with_z_loss(logits: tuple[Tensor, ...]) -> Tensor:
    """A count of the first choices, and a term per token that needs nothing of other ranks."""
    loss = torch.zeros(())
    for layer in logits:
        scores = layer.float().softmax(-1)
        count = torch.bincount(scores.argmax(-1), minlength=EXPERTS).to(scores.dtype) / len(layer)
        loss = loss + (count * scores.mean(0)).sum() / LAYERS + 0.1 * torch.logsumexp(layer, -1).square().mean()
    return loss


def logits_of(ranks: int) -> list[Tensor]:
    """One tensor per layer with the tokens of all ranks, most of which like the first experts."""
    generator = torch.Generator().manual_seed(0)
    lean = torch.arange(EXPERTS) * 0.5
    return [torch.randn(ranks * TOKENS, EXPERTS, generator=generator) - lean for _ in range(LAYERS)]


def parts(function: Loss, ranks: int) -> tuple[Tensor, list[Tensor], Tensor, list[Tensor]]:
    """Sum of the ranks' losses and gradients by layer, and both for the joined tokens."""
    whole = [layer.requires_grad_() for layer in logits_of(ranks)]
    joined = function(tuple(whole))
    wanted = torch.autograd.grad(joined, whole)

    def run(rank: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        own = [layer.detach().chunk(ranks)[rank].clone().requires_grad_() for layer in whole]
        loss = loss_of_rank(function, tuple(own), ranks)
        return loss.detach(), torch.autograd.grad(loss, own)

    found = simulate(MeshPlan(fsdp=ranks), run)
    total = torch.stack([loss for loss, _ in found]).sum()
    return total, [torch.cat(rows) for rows in zip(*(g for _, g in found), strict=True)], joined.detach(), list(wanted)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("function", [installed, by_one_hot, with_z_loss])
def test_parts_of_ranks_add_up(function: Loss, ranks: int) -> None:
    loss, grads, joined, wanted = parts(function, ranks)
    torch.testing.assert_close(loss, joined, rtol=1e-6, atol=0)
    for grad, reference in zip(grads, wanted, strict=True):
        assert float((grad - reference).norm() / reference.norm()) < 1e-6


def test_local_counts_would_be_seen() -> None:
    """With its own counts instead of everyone's, a rank's gradient is another one."""
    whole = logits_of(2)
    own = [layer.chunk(2)[0].clone().requires_grad_() for layer in whole]
    local = torch.autograd.grad(installed(tuple(own)) / 2, own)
    _, grads, _, _ = parts(installed, 2)
    for grad, other in zip(grads, local, strict=True):
        assert float((grad.chunk(2)[0] - other).norm() / other.norm()) > 1e-2


REFUSED: list[tuple[str, Any]] = [
    (r"not linear in the mean probabilities \(mul\)", lambda logits: _means(logits).mul(_means(logits)).sum()),
    (r"not linear in the mean probabilities \(square\)", lambda logits: _means(logits).square().sum()),
    (r"not linear in the mean probabilities", lambda logits: (1.0 / _means(logits)).sum()),
    (r"multiplies no count", lambda logits: _means(logits).sum()),
]


def _means(logits: tuple[Tensor, ...]) -> Tensor:
    return logits[0].softmax(-1).mean(0)


@pytest.mark.parametrize(("why", "function"), REFUSED)
def test_functions_whose_parts_do_not_add_up_are_refused(why: str, function: Loss) -> None:
    logits = tuple(logits_of(1))
    with pytest.raises(UnsupportedModelError, match=why):
        loss_of_rank(function, logits, 2)


def test_too_few_tokens_to_tell_from_experts() -> None:
    logits = tuple(layer[:EXPERTS] for layer in logits_of(1))
    with pytest.raises(UnsupportedModelError, match=r"a rank has 4 tokens and 4 experts"):
        loss_of_rank(installed, logits, 2)
