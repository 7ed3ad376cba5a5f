"""What masks say: provably causal ones in many spellings, and those whose meaning stays unknown."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moec.passes.masks import Mask, NotUnderstood, understand
from moec.passes.normalize import Normalize

from .support import Call, apply, unit_of

B, T = 2, 6
IDS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1]])
LOW = torch.finfo(torch.float32).min


def _meaning(function: Callable[..., Tensor], *args: Tensor, hides: bool = False, known: bool = True) -> Mask:
    """The meaning of the mask that the function makes; `known`: its inputs are document ids, as in a capture."""
    unit = unit_of(Call(lambda *xs: function(*xs).clone()), *args)
    apply([Normalize()], unit)
    (clone,) = unit.graph.output_node().args[0]  # type: ignore[misc]
    inputs = unit.graph.find_nodes(op="placeholder") if known else ()
    return understand(clone.args[0], inputs, hides=hides)


def _index() -> Tensor:
    return torch.arange(T)


CAUSAL: dict[str, Callable[[], Tensor]] = {
    "tril of ones": lambda: torch.ones(T, T, dtype=torch.bool).tril(),
    "not triu": lambda: ~torch.ones(T, T, dtype=torch.bool).triu(1),
    "positions": lambda: _index() <= _index()[:, None],
    "positions flipped": lambda: _index()[:, None] >= _index()[None, :],
    "distance": lambda: (_index()[:, None] - _index()) >= 0,
    "distance above": lambda: (_index()[:, None] - _index()) > -1,
    "additive triu": lambda: torch.full((T, T), float("-inf")).triu(1),
    "additive where": lambda: torch.where(_index() <= _index()[:, None], 0.0, LOW),
    "additive fill": lambda: torch.zeros(T, T).masked_fill(_index() > _index()[:, None], float("-inf")),
    "logical not": lambda: torch.logical_not(_index() > _index()[:, None]),
    "shifted": lambda: (_index() + 3) <= (_index() + 3)[:, None],
    "transposed": lambda: (_index()[:, None] <= _index()).transpose(0, 1),
}


@pytest.mark.parametrize("name", sorted(CAUSAL))
@pytest.mark.parametrize("shape", ["matrix", "expanded", "viewed"])
def test_causal(name: str, shape: str) -> None:
    def function() -> Tensor:
        mask = CAUSAL[name]()
        if shape == "viewed":
            return mask.reshape(1, 1, T, T)
        return mask[None, None].expand(B, 1, T, T) if shape == "expanded" else mask

    assert _meaning(function) == Mask(causal=True)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.booleans(), st.sampled_from(["minus", "distance"]))
def test_windows(window: int, strict: bool, spelling: str) -> None:
    def function() -> Tensor:
        q, k = _index()[:, None], _index()[None]
        if spelling == "minus":
            near = k > q - window if strict else k >= q - (window - 1)
        else:
            near = (q - k) < window if strict else (q - k) <= window - 1
        return (k <= q) & near

    assert _meaning(function) == Mask(causal=True, window=window)


def test_documents() -> None:
    def function(ids: Tensor) -> Tensor:
        same = ids.unsqueeze(2) == ids.unsqueeze(1)
        return (CAUSAL["tril of ones"]().unsqueeze(0) & same).unsqueeze(1)

    mask = _meaning(function, IDS)
    assert (mask.causal, mask.window) == (True, 0)
    assert mask.documents is not None
    assert mask.documents.op == "placeholder"


def test_documents_viewed_and_squeezed() -> None:
    def function(ids: Tensor) -> Tensor:
        same = ids.reshape(B, 1, T, 1) == ids.reshape(B, 1, 1, T)
        seen = CAUSAL["positions"]() & same.squeeze(1)
        return seen.reshape(B, 1, T, T)[:, 0].unsqueeze(1)

    mask = _meaning(function, IDS)
    assert mask.causal
    assert mask.documents is not None


def test_documents_hidden() -> None:
    def function(ids: Tensor) -> Tensor:
        other = ids[:, None, :, None] != ids[:, None, None, :]
        return (_index() > _index()[:, None]) | other

    mask = _meaning(function, IDS, hides=True)
    assert mask.causal
    assert mask.documents is not None


def _packed(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key elements of positions and of the document numbers that transformers derives from them."""
    documents = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    b, q, k = torch.arange(B)[:, None, None, None], _index()[None, None, :, None], _index()[None, None, None, :]
    ordered = positions[b, k] <= positions[b, q]
    return ordered, documents[b, q] == documents[b, k]


def test_packed_positions_as_transformers_writes_them() -> None:
    def function(positions: Tensor) -> Tensor:
        ordered, same = _packed(positions)
        return positions.new_ones((), dtype=torch.bool) & ordered & same

    mask = _meaning(function, torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1]]))
    assert mask.causal
    assert mask.documents is not None
    assert str(mask.documents.target) == "aten.cumsum.default"


@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (lambda: torch.ones(T, T, dtype=torch.bool).tril(1), (), "is not provably causal"),
        (lambda: torch.ones(T, T, dtype=torch.bool).tril(-1), (), "is not provably causal"),
        (lambda: _index() >= _index()[:, None], (), "is not provably causal"),
        (lambda: torch.ones(T, T, dtype=torch.bool).triu().transpose(0, 1).tril(-1), (), "unknown meaning"),
        (lambda: ~torch.ones(T, T, dtype=torch.bool).tril(), (), "is not provably causal"),
        (lambda: torch.where(_index() <= _index()[:, None], 0.0, -1e4), (), "unknown meaning"),
        (lambda: torch.where(_index() <= _index()[:, None], 1.0, LOW), (), "unknown meaning"),
        (lambda p: _packed(p)[0], (IDS,), "compares position ids, which are data"),
        (lambda p: _packed(p)[1], (IDS,), "is not provably causal"),
        (lambda m: m, (torch.ones(B, 1, T, T, dtype=torch.bool),), "(placeholder) has an unknown meaning"),
        (lambda m: m & CAUSAL["positions"](), (torch.ones(T, T, dtype=torch.bool),), "unknown meaning"),
        (lambda i: i[:, None, :, None] == i[:, None, None], (IDS,), "is not provably causal"),
        (lambda i: (i[:, :, None] == i[:, None]) & CAUSAL["positions"](), (IDS,), "the batch in its first dimension"),
        (lambda i: _same_and_causal(i * 2), (IDS,), "are not provably consecutive"),
    ],
)
def test_not_understood(function: Callable[..., Tensor], args: tuple[Tensor, ...], reason: str) -> None:
    with pytest.raises(NotUnderstood, match=re.escape(reason)):
        _meaning(function, *args)


def _same_and_causal(ids: Tensor) -> Tensor:
    return (ids[:, None, :, None] == ids[:, None, None]) & CAUSAL["positions"]()


@pytest.mark.parametrize("function", [_same_and_causal, lambda i: _same_and_causal(i.to(torch.int32))])
def test_any_table_of_whole_numbers_may_fall(function: Callable[..., Tensor]) -> None:
    """Only a batch's document ids are known never to; kernels stop at the first key of another document."""
    with pytest.raises(NotUnderstood, match="are not provably consecutive"):
        _meaning(function, IDS, known=False)


def test_without_a_mask_everything_is_visible() -> None:
    assert understand(None) == Mask(causal=False)
