"""The load-balancing loss of a batch that is spread over ranks: each rank's part, whose sum is the loss of the batch.

    one rank       loss = E * sum_e f_e P_e            f_e: share of tokens sent to expert e, a count without gradient
    rank r of W    loss_r = E * sum_e f_e P_e,r / W    f_e: mean over ranks; P_e,r: mean probability on this rank

holds because the loss is linear in P, and each rank has the same number of tokens. The function is the model's own,
whatever it looks like. While it runs, values are followed: those that carry a gradient from the router logits, and
those that only depend on them (chosen experts, counts). Where a count meets a value that carries a gradient, its mean
over the ranks takes its place. A function that is not linear after the sum over tokens is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moec.compiler._torch_compat import pytree
from moec.compiler.dialect.rank_mean import rank_mean
from moec.compiler.errors import UnsupportedModelError


def loss_of_rank(function: Callable[[tuple[Tensor, ...]], Tensor], logits: tuple[Tensor, ...], ranks: int) -> Tensor:
    """This rank's part of function(logits of all ranks), for the logits [tokens, experts] of this rank by router.

    Raises UnsupportedModelError for a function whose parts would not add up.
    """
    follower = _Follower(logits, ranks)
    with follower:
        loss = function(logits)
    if not follower.means:
        raise _refusal("it multiplies no count of tokens with a probability")
    return loss / ranks


class _Follower(TorchFunctionMode):
    """See the module docstring. means: id of a count -> its mean over the ranks."""

    def __init__(self, logits: tuple[Tensor, ...], ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        self._alive: list[Tensor] = list(logits)
        self._flowing = {id(tensor) for tensor in logits}
        self._counted: set[int] = set()
        self.means: dict[int, Tensor] = {}
        tokens, experts = logits[0].shape[:-1].numel(), logits[0].shape[-1]
        self._token_sizes = {_expression(tokens) * number for number in range(1, len(logits) + 1)}
        if experts in self._token_sizes:
            raise _refusal(f"a rank has {tokens} tokens and {experts} experts, too few to tell one from the other")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        flowing = [tensor for tensor in _tensors((args, kwargs)) if id(tensor) in self._flowing]
        if flowing and name not in _CUTS:
            if not any(map(self._is_per_token, flowing)):
                self._check_linear(name, args, flowing)
            args, kwargs = pytree.tree_map(self._over_ranks, (args, kwargs))
        follows = flowing or any(id(tensor) in self._counted for tensor in _tensors((args, kwargs)))
        result = func(*args, **kwargs)
        for tensor in _tensors(result) if follows else ():
            known = self._flowing if flowing and name not in _CUTS and tensor.is_floating_point() else self._counted
            known.add(id(tensor))
            self._alive.append(tensor)
        return result

    def _over_ranks(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) not in self._counted or not value.is_floating_point():
            return value
        if self._is_per_token(value):
            return value
        if id(value) not in self.means:
            self.means[id(value)] = rank_mean(value, ranks=self._ranks)
        return self.means[id(value)]

    def _is_per_token(self, tensor: Tensor) -> bool:
        return any(_expression(size) in self._token_sizes for size in tensor.shape)

    def _check_linear(self, name: str, args: tuple[Any, ...], flowing: list[Tensor]) -> None:
        products = name in _PRODUCTS and len(flowing) > 1
        divided = name in _QUOTIENTS and id(args[-1]) in self._flowing
        if name not in _LINEAR or products or divided:
            raise _refusal(f"it is not linear in the mean probabilities ({name})")


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _refusal(why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "the load-balancing loss cannot be divided among ranks",
        where="config.output_router_logits",
        why=why,
        hint="set output_router_logits=False in the model's config, or train on one rank",
    )


# What passes no gradient on.
_CUTS = {"detach", "histc", "bincount", "one_hot", "argmax", "argsort"}
_PRODUCTS = {"mul", "rmul", "imul", "matmul", "rmatmul", "einsum", "dot"}
_QUOTIENTS = {"div", "truediv", "itruediv"}
_MOVES = {
    "get",
    "getitem",
    "to",
    "float",
    "unsqueeze",
    "squeeze",
    "reshape",
    "view",
    "flatten",
    "stack",
    "cat",
    "clone",
}
_LINEAR = _PRODUCTS | _QUOTIENTS | _MOVES | {"add", "radd", "iadd", "sub", "rsub", "isub", "neg", "sum", "mean"}
