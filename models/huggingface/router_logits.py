"""The load-balancing loss of models that define one, without hooks reaching across layers.

transformers records router logits by hooks on the routers while the base model runs. A layer that is compiled on its
own cannot have such a side effect, so here

1. a hook on each router puts its logits into the list that is open;
2. a layer with routers inside opens a list of its own and returns it beside its result;
3. a hook on that layer takes the list off again and hands it to the outer list. With no outer list open the layer is
   being traced alone, and the logits stay in its result.

The loss itself is the model's own `load_balancing_loss_func`; what becomes of it on several ranks is in
`rank_balance.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.utils.output_capturing import OutputRecorder

from moec.compiler.errors import UnsupportedModelError
from moec.compiler.regions import find_regions
from moec.models.huggingface.rank_balance import loss_of_rank
from moec.models.huggingface.swaps import Notes, replaced


class BalanceLoss:
    """The auxiliary loss of one model; `enabled` is False for models that have none or whose config leaves it off."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._open: list[Tensor] | None = None
        self._function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
        self.enabled = self._function is not None and bool(getattr(model.config, "output_router_logits", False))
        if self.enabled:
            self.coefficient = float(self._required("router_aux_loss_coef"))
            self._arguments = (int(self._required("num_experts")), int(self._required("num_experts_per_tok")))

    @contextmanager
    def hooks(self, model: nn.Module, notes: Notes) -> Iterator[None]:
        """The swap: routers and layers hand their logits out as values."""
        if not self.enabled:
            yield
            return
        routers = _routers(model)
        layers = {
            path: layer
            for path, layer in find_regions(model).items()
            if any(router is inner for router, _ in routers for inner in layer.modules())
        }
        notes.add(f"aux loss: the logits of {len(routers)} routers are results of their layers")
        handles = [router.register_forward_hook(self._record(index)) for router, index in routers]
        handles += [layer.register_forward_hook(self._take_off) for layer in layers.values()]
        forwards = [(vars(layer), "forward", self._with_logits(layer.forward)) for layer in layers.values()]
        try:
            with replaced(forwards):
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def collecting(self) -> Iterator[list[Tensor]]:
        """A list that receives the logits [tokens, experts] of every router that runs within the context."""
        outer, self._open = self._open, []
        try:
            yield self._open
        finally:
            self._open = outer

    def __call__(self, logits: list[Tensor], ranks: int = 1) -> Tensor:
        """The model's loss (scalar, not yet times the coefficient) for the logits of all its routers.

        On several ranks this one's part of it: the parts add up to the loss of the tokens of all ranks.
        """
        return self._loss(tuple(logits)) if ranks == 1 else loss_of_rank(self._loss, tuple(logits), ranks)

    def _loss(self, logits: tuple[Tensor, ...]) -> Tensor:
        assert self._function is not None
        return self._function(logits, *self._arguments, None)  # type: ignore[no-any-return]

    def _required(self, name: str) -> Any:
        if not hasattr(self._model, name):
            raise UnsupportedModelError(
                f"the load-balancing loss of {type(self._model).__name__} is not the one that moec knows",
                where="config.output_router_logits",
                why=f"the model has no attribute {name}",
                hint="set output_router_logits=False in the model's config",
            )
        return getattr(self._model, name)

    def _record(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._open is not None:
                self._open.append(output[index] if isinstance(output, tuple) else output)

        return hook

    def _with_logits(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.collecting() as logits:
                output = forward(*args, **kwargs)
            return output, logits

        return run

    def _take_off(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._open is None:
            return output
        result, logits = output
        self._open.extend(logits)
        return result


def _routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Each router with the place of the logits in its output, as the model itself declares for recording."""
    found = []
    for base in model.modules():
        specs = (getattr(base, "_can_record_outputs", None) or {}).get("router_logits", [])
        for spec in specs if isinstance(specs, list) else [specs]:
            kind, index = (spec.target_class, spec.index) if isinstance(spec, OutputRecorder) else (spec, 1)
            for path, module in base.named_modules():
                layer_name = getattr(spec, "layer_name", None)
                named = layer_name is None or f".{layer_name.strip('.')}." in f".{path}."
                if kind is not None and isinstance(module, kind) and named:
                    found.append((module, index))
    return list(dict.fromkeys(found))
