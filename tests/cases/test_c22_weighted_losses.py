"""C22: losses with a weight per token, a factor, or two uses: a fused head gives eager's gradients, or is not used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import moec

from ..spine import PLAN, VOCABULARY, Language, Layer, assert_equal_gradients, batch_for, distance, eager, seeded

LossOf = Callable[[Tensor, Tensor], Tensor]


class WithLoss(Language):
    """Hands flat logits [N, V] and targets [N] to `loss_of`."""

    loss_of: LossOf

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(input_ids))[:, :-1].flatten(0, 1)
        return self.loss_of(logits, labels[:, 1:].flatten())


def weighted(logits: Tensor, targets: Tensor) -> Tensor:
    weights = (targets % 3).float() * 0.5
    losses = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    return (losses * weights).sum() / (targets != -100).sum()


def tripled(logits: Tensor, targets: Tensor) -> Tensor:
    return 3 * F.cross_entropy(logits, targets, ignore_index=-100)


def used_twice(logits: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(logits, targets, ignore_index=-100)
    return loss + 0.1 * loss.square()


def used_per_token_and_in_total(logits: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    return losses.mean() + (losses * losses.detach()).mean()


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=-100, label_smoothing=0.1)


def with_class_weights(logits: Tensor, targets: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 2.0, VOCABULARY)
    return F.cross_entropy(logits, targets, weights, ignore_index=-100)


def with_a_penalty_on_logits(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=-100) + 1e-2 * logits.logsumexp(-1).square().mean()


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / 7


def focal(logits: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    return (losses * (1 - (-losses).exp())).sum()


def with_logits_read_elsewhere(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=-100) + 1e-2 * logits.square().mean()


SUMMED = [weighted, tripled, used_twice, summed, smoothed, with_class_weights, with_a_penalty_on_logits]
PER_TOKEN = [used_per_token_and_in_total, focal]
WHOLE = [with_logits_read_elsewhere]


def make(loss_of: LossOf) -> WithLoss:
    model = seeded(WithLoss, Layer())
    model.loss_of = loss_of
    return model


@pytest.mark.parametrize("loss_of", [*SUMMED, *PER_TOKEN, *WHOLE])
def test_c22_loss_and_gradients_are_eagers(loss_of: LossOf) -> None:
    model, batch = make(loss_of), batch_for(PLAN)
    loss, gradients = eager(model, batch)
    step = moec.compile(model, PLAN)
    assert distance(step.loss(batch)["lm_loss"], loss) <= 1e-6
    assert_equal_gradients(step.gradients(batch), gradients)
    assert ("moec.linear_cross_entropy_sum(" in step.source) == (loss_of in SUMMED)
    assert ("moec.linear_cross_entropy(" in step.source) == (loss_of in PER_TOKEN)


@pytest.mark.parametrize("loss_of", WHOLE)
def test_c22_a_loss_that_is_not_fused_says_why(loss_of: LossOf) -> None:
    log = moec.compile(make(loss_of), PLAN).log
    misses = [miss for r in log.records if r.name == "chunk_loss" for miss in r.near_misses]
    assert misses, "a near miss with its reason"
    assert misses[0].reason


@pytest.mark.parametrize(("loss_of", "op"), [(weighted, "linear_cross_entropy_sum"), (focal, "linear_cross_entropy")])
def test_c22_a_head_that_forgets_the_weight_of_its_tokens_is_seen(
    loss_of: LossOf, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a fused head does that computes its gradients in the forward pass, as if for a mean."""
    model, batch = make(loss_of), batch_for(PLAN)
    _, gradients = eager(model, batch)
    step = moec.compile(model, PLAN)

    class Forgetful:
        """`moec` as the program sees it, with one weight for every token."""

        def __getattr__(self, name: str) -> object:
            original = getattr(torch.ops.moec, name)
            if name == "linear_cross_entropy_sum":
                return lambda hidden, weight, labels, tokens, **rest: original(
                    hidden, weight, labels, torch.ones_like(tokens), **rest
                )
            if name == "linear_cross_entropy_backward":
                return lambda grad, **rest: original(torch.full_like(grad, 1 / grad.numel()).contiguous(), **rest)
            return original

    assert f"moec.{op}(" in step.source
    monkeypatch.setattr(step.program, "moec", Forgetful())
    with pytest.raises(AssertionError):
        assert_equal_gradients(step.gradients(batch), gradients)
