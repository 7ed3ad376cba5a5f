"""The training view of a Hugging Face causal language model.

1. Document ids become ambient and position ids; the model's own forward runs with labels, without a cache.
2. The model's loss function is asked for a sum instead of a mean, and the sum is scaled by `inverse_tokens`, so that
   a batch without valid tokens gives 0.
3. The load-balancing loss, where the model's config switches it on, is the model's own function of the router logits,
   times its coefficient and one over the number of microbatches; on several ranks with the load over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from moec.compiler.ambient import ambient_scope
from moec.compiler.errors import UnsupportedModelError
from moec.compiler.plan import Plan
from moec.models.huggingface import documents, plain
from moec.models.huggingface.attention import exportable_attention
from moec.models.huggingface.experts import exportable_experts, loops_in_double
from moec.models.huggingface.linear_attention import exportable_linear_attention, token_by_token
from moec.models.huggingface.lora import causal_model, plain_adapters
from moec.models.huggingface.router_logits import BalanceLoss
from moec.models.huggingface.swaps import Notes, Swap, replaced


class HuggingFaceView(nn.Module):
    """See `moec.compiler.view`; `model` is the user's model, `notes` says what `prepare` swaps in it.

    What runs is the transformers model in it, where peft has wrapped that one.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self.model = model
        self.notes = Notes()
        self._balance = BalanceLoss(self._causal)
        self._accumulation, self._ranks = plan.accumulation, plan.mesh.world
        self._prepared = False
        self._swaps: tuple[Swap, ...] = (
            exportable_experts,
            exportable_attention,
            exportable_linear_attention,
            plain.without_no_grad,
            plain.with_symbolic_min,
            plain.without_checkpointing,
            plain.with_fixed_rope(plan),
            plain_adapters,
            _summed_loss,
            self._balance.hooks,
        )
        with self.prepare():
            pass

    @contextmanager
    def prepare(self) -> Iterator[None]:
        """All swaps are in place within the context; entering it again inside changes nothing."""
        if self._prepared:
            yield
            return
        with ExitStack() as stack:
            for swap in self._swaps:
                stack.enter_context(swap(self._causal, self.notes))
            self._prepared = True
            try:
                yield
            finally:
                self._prepared = False

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        inverse_tokens: Tensor,
        document_ids: Tensor | None = None,
        image_features: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Objective and losses as `moec.compiler.view` says; "aux_loss" is the model's, over the accumulation steps."""
        if image_features is not None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} got image features",
                where="image_features",
                why="the adapter of Hugging Face models takes text only",
                hint="leave image_features out",
            )
        with (
            self.prepare(),
            ambient_scope(**{documents.NAME: document_ids}),
            self._balance.collecting() as logits,
        ):
            output = self._causal(
                input_ids=input_ids,
                labels=labels,
                position_ids=None if document_ids is None else documents.position_ids(document_ids),
                use_cache=False,
                **self._options(),
            )
        return self._losses(output.loss * inverse_tokens, logits, self._ranks)

    @torch.compiler.disable
    def reference(
        self, input_ids: Tensor, labels: Tensor, inverse_tokens: Tensor, document_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The same losses from the model's own implementations: what a compiled step has to equal.

        Documents run one by one, so that nothing can leak between them whatever the model does with packed rows, and
        delta rules run token by token, their accurate form.
        """
        total = torch.zeros((), device=input_ids.device)
        with (
            token_by_token(self._causal, Notes()),
            loops_in_double(self._causal, Notes()),
            self._balance.hooks(self._causal, Notes()),
            self._balance.collecting() as logits,
        ):
            for ids, targets in _documents(input_ids, labels, document_ids):
                one = torch.ones((), device=ids.device)
                output = self._causal(
                    input_ids=ids, labels=targets, use_cache=False, num_items_in_batch=one, **self._options()
                )
                total = total + output.loss
        return self._losses(total * inverse_tokens, logits)

    @property
    def _causal(self) -> nn.Module:
        return causal_model(self.model)

    def _losses(self, lm_loss: Tensor, logits: list[Tensor], ranks: int = 1) -> dict[str, Tensor]:
        if not self._balance.enabled:
            return {"objective": lm_loss, "lm_loss": lm_loss.detach().clone()}
        aux_loss = self._balance(logits, ranks) / self._accumulation
        return {
            "objective": lm_loss + self._balance.coefficient * aux_loss,
            "lm_loss": lm_loss.detach().clone(),
            "aux_loss": aux_loss.detach().clone(),
        }

    def _options(self) -> dict[str, Any]:
        # The view adds the load-balancing loss itself: transformers' recording hooks reach across layers.
        return {"output_router_logits": False} if self._balance.enabled else {}


@contextmanager
def _summed_loss(model: nn.Module, notes: Notes) -> Iterator[None]:
    """The model's loss is a sum over valid tokens, whatever the model passes on to its loss function."""

    def summed(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
        options["num_items_in_batch"] = 1
        return ForCausalLMLoss(logits, labels, vocab_size, **options)

    with replaced([(vars(model), "_loss_function", summed)]):
        yield


def _documents(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    if document_ids is None:
        yield input_ids, labels
        return
    for row in range(input_ids.shape[0]):
        _, lengths = torch.unique_consecutive(document_ids[row], return_counts=True)
        sizes = lengths.tolist()
        for ids, targets in zip(input_ids[row].split(sizes), labels[row].split(sizes), strict=True):
            yield ids[None], targets[None]
