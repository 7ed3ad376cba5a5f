"""Packing: pieces of documents side by side in one row, kept apart by document ids.

A row is filled to the last token. A document that does not fit goes on in the next row, and since a model carries no
state from row to row, what goes on there is a document of its own: its first token is not predicted either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moec.runtime.tokenizer import Tokens

IGNORED = -100


@dataclass(frozen=True)
class Row:
    """One packed row, three int64 arrays [T].

    labels: `tokens` unshifted, IGNORED for the first token of each document. document_ids: 0, 0, ..., 1, 1, ...
    """

    tokens: Tokens
    labels: Tokens
    document_ids: Tokens


def pack_row(pieces: Sequence[Tokens]) -> Row:
    """Join pieces of different documents to one row; every piece holds at least one token."""
    lengths = np.array([len(piece) for piece in pieces])
    tokens = np.concatenate(pieces)
    labels = tokens.copy()
    labels[np.cumsum(lengths) - lengths] = IGNORED
    return Row(tokens, labels, np.repeat(np.arange(len(pieces), dtype=np.int64), lengths))
