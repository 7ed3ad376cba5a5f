"""The Kimi K3 family: embedding, layers, final norm, head and loss.

The forward only connects: sublayers do the work, and the residual stream says what each of them reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moec.models.k3.config import K3Config
from moec.models.k3.images import place_images
from moec.models.k3.layer import Layer, SparseAttention
from moec.models.k3.loss import IGNORED, next_token_labels, summed_cross_entropy, valid_tokens
from moec.models.k3.norms import RMSNorm
from moec.models.k3.residual import DepthMix, ResidualStream
from moec.models.k3.router import Router


@dataclass
class K3Output:
    """What a forward returns.

    logits [B, T, V]. loss: what to call backward on, None without labels. lm_loss: its cross-entropy part.
    indexer_loss: its other part, the indexers' divergence, None for a model without sparse attention. All losses are
    float32 scalars, averaged over valid tokens (and sparse attention layers).
    """

    logits: Tensor
    loss: Tensor | None = None
    lm_loss: Tensor | None = None
    indexer_loss: Tensor | None = None


class K3Model(nn.Module):
    """A language model of the family; `config` says which."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.layers))
        self.output_mix = DepthMix(config.hidden_size, config.norm_eps) if config.residual_block else None
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialise()

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        image_features: Tensor | None = None,
        inverse_tokens: Tensor | None = None,
    ) -> K3Output:
        """Logits, and the losses when labels are given.

        input_ids, labels: int64 [B, T]; labels unshifted, -100 ignored. document_ids: int64 [B, T], non-decreasing
        along T. image_features: [n, D] for the n placeholder tokens. inverse_tokens: scalar, one over the
        number of valid tokens to average over; by default those of this batch.
        """
        targets = None if labels is None else next_token_labels(labels)
        valid = torch.ones_like(input_ids, dtype=torch.bool) if targets is None else targets != IGNORED
        hidden = self.embed(input_ids)
        if image_features is not None:
            hidden = place_images(hidden, image_features, input_ids, self.config.image_token)
        hidden, divergences = self._run_layers(hidden, document_ids, valid)
        logits = self.lm_head(self.norm(hidden))
        if labels is None or targets is None:
            return K3Output(logits)
        summed = summed_cross_entropy(logits, targets)
        if inverse_tokens is None:
            inverse_tokens = valid_tokens(labels).clamp(min=1).to(summed.dtype).reciprocal()
        lm_loss = summed * inverse_tokens
        if not divergences:
            return K3Output(logits, lm_loss, lm_loss)
        indexer_loss = torch.stack(divergences).sum() * inverse_tokens / len(divergences)
        return K3Output(logits, lm_loss + indexer_loss, lm_loss, indexer_loss)

    def routers(self) -> dict[str, Router]:
        """Module path -> router, for each layer with experts."""
        return {path: module for path, module in self.named_modules() if isinstance(module, Router)}

    def set_balancing(self, on: bool) -> None:
        """Turn quantile balancing on or off; off keeps the correction biases as they are (fine-tuning)."""
        for router in self.routers().values():
            router.balancing = on and self.config.balancing

    def update_balance(self) -> None:
        """Rebalance all routers that count; call it after each optimizer step of plain eager training."""
        for router in self.routers().values():
            if router.balancing:
                router.update_balance()

    def _run_layers(
        self, embeddings: Tensor, document_ids: Tensor | None, valid: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """The final hidden state [B, T, D], and each sparse layer's summed divergence."""
        stream, divergences = ResidualStream(embeddings), []
        block = self.config.residual_block
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            hidden = stream.read(layer.attention_mix)
            if block and index % block == 0:
                stream.end_block()
            if isinstance(layer.attention, SparseAttention):
                output, divergence = layer.attention(hidden, document_ids, valid)
                divergences.append(divergence)
            else:
                output = layer.attention(hidden, document_ids)
            stream.write(output)
            stream.write(layer.feed_forward(stream.read(layer.feed_forward_mix)))
        return stream.read(self.output_mix), divergences

    def _initialise(self) -> None:
        """Normal matrices; what is not a matrix has been initialised where it is made."""
        for parameter_name, parameter in self.named_parameters():
            if parameter.dim() >= 2 and not parameter_name.endswith("_conv.weight"):
                nn.init.normal_(parameter, std=self.config.init_std)
