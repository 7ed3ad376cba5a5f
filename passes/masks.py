"""What an attention mask says, read from the operators that build it.

The mask of a query q and a key k is evaluated symbolically (`mask_rules.py`, `mask_values.py`) into facts:

    q - k >= c,  q - k <= c       from comparisons of positions, tril and triu
    ids[q] == ids[k]              from comparisons of table elements
    table[k] <= table[q]          position ids that are data

`understand` turns the facts into what `moec::attention` takes, or says why it cannot.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from moec.compiler.graph import tensor_meta
from moec.compiler.matching import Match, match
from moec.compiler.nodes import aten, describe
from moec.compiler.pattern import dim, op, var
from moec.passes.mask_rules import NotUnderstood, evaluate
from moec.passes.mask_values import Additive, Fact, Truth, negation, positive

__all__ = ["Mask", "NotUnderstood", "understand"]


@dataclass(frozen=True)
class Mask:
    """causal: keys after the query are hidden. window: with w > 0, keys q - w and before are. documents: ids [B, T]."""

    causal: bool
    window: int = 0
    documents: fx.Node | None = None


def understand(
    node: fx.Node | None, document_ids: Collection[fx.Node] = (), *, hides: bool = False, batch: int = -4
) -> Mask:
    """The meaning of a mask: truth values (True = visible, or hidden if `hides`), or numbers added to the scores.

    document_ids: tables that are known never to fall along a row. batch: the dimension that the batch runs along,
    counted from the right.
    Raises NotUnderstood unless it is provably a causal mask, with or without window and documents.
    """
    if node is None:
        return Mask(causal=False)
    value = evaluate(node, {})
    truth = value.visible if isinstance(value, Additive) else value
    if not isinstance(truth, Truth):
        raise NotUnderstood(f"{describe(node)} is not a mask")
    if hides and not isinstance(value, Additive):
        truth = negation(truth)
    truth = positive(truth)
    if truth.negated:
        raise NotUnderstood(f"{describe(node)} hides what it should show")
    return _mask(node, truth.facts, document_ids, batch)


def _mask(node: fx.Node, facts: frozenset[Fact], document_ids: Collection[fx.Node], batch: int) -> Mask:
    causal, window, documents, ordered = False, 0, None, None
    for fact in sorted(facts, key=lambda fact: (fact.kind, fact.bound)):
        if (fact.query, fact.key) != (-2, -1):
            raise NotUnderstood(f"{describe(node)} does not have queries and keys in its last two dimensions")
        if fact.kind == "at least" and fact.bound == 0:
            causal = True
        elif fact.kind == "at most" and fact.bound >= 0 and not window:
            window = int(fact.bound) + 1
        elif fact.kind == "same" and documents is None:
            documents = fact
        elif fact.kind == "ordered" and ordered is None:
            ordered = fact
        else:
            raise NotUnderstood(f"the mask {describe(node)} is not provably causal")
    if ordered is not None:
        # Position ids that rise by one within what `documents` calls one document order it as the index does.
        if documents is None or not _counts_restarts(documents.table, ordered.table):
            raise NotUnderstood("the mask compares position ids, which are data, so it is not provably causal")
        causal = True
    if not causal:
        raise NotUnderstood(f"the mask {describe(node)} is not provably causal")
    if documents is None or documents.table is None:
        return Mask(causal, window)
    tensor = tensor_meta(documents.table)
    if not never_falls(documents.table, document_ids):
        raise NotUnderstood(f"the documents {describe(documents.table)} are not provably consecutive")
    if documents.batch != batch and (tensor is None or tensor.shape[0] != 1):
        raise NotUnderstood(f"{describe(node)} does not have the batch in its first dimension")
    return Mask(causal, window, documents.table)


def never_falls(table: fx.Node, document_ids: Collection[fx.Node]) -> bool:
    """Whether ids cannot fall along the row: a batch's document ids by contract, a running count of flags rises."""
    if table in document_ids:
        return True
    found = match(op(aten("cumsum.default"), var("flags"), dim(-1)), table, exclusive=False)
    flags = tensor_meta(found["flags"]) if isinstance(found, Match) else None
    return flags is not None and flags.dtype == torch.bool


def _counts_restarts(ids: fx.Node | None, positions: fx.Node | None) -> bool:
    """Whether ids = cumsum(diff(positions) != 1): they stay the same exactly while positions rise by one."""
    if ids is None or positions is None:
        return False
    jump = op(aten("ne.Scalar"), op(aten("diff.default"), var("positions"), 1, -1, var("before")), 1)
    found = match(op(aten("cumsum.default"), jump, -1), ids, exclusive=False)
    return isinstance(found, Match) and found["positions"] is positions
