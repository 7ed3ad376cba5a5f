"""What happens inside the chunks of the delta rule, for all chunks at once.

Between two tokens of a chunk lies a decay: the product of exp(g) over the tokens after the first, up to the second.
A pair of tokens first meets as members of two neighbouring blocks of 1, 2, 4, ... rows, and its decay is the product of
one factor for the row (from the border of the blocks) and one for the column (up to that border). So every level of
the doubling is a batch of small matmuls over decayed rows, no exponent is ever positive, nothing is divided, and a
decay of exactly zero, the start of a document, cuts all ties across it.

N is the number of chunks of all rows and heads, C their length, D is K, or 1 for decays per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How [B, T, heads, ...] is cut into chunks [N, C, ...], N = B * heads * chunks of a row."""

    batch: int
    length: int
    heads: int
    chunks: int
    size: int

    @staticmethod
    def of(batch: int, length: int, heads: int, chunk: int) -> Layout:
        """Chunks of `chunk` rows, or of the next power of two for a shorter length."""
        size = min(chunk, 1 << max(length - 1, 0).bit_length())
        return Layout(batch, length, heads, -(-length // size), size)

    @property
    def count(self) -> int:
        return self.batch * self.heads * self.chunks

    def cut(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, heads, ...] -> a new [N, C, ...]; rows beyond the length are zero."""
        shape = (self.batch, self.heads, self.chunks * self.size, *value.shape[3:])
        out = value.new_empty(shape, dtype=dtype)
        out[:, :, : self.length] = value.transpose(1, 2)
        out[:, :, self.length :] = 0
        return out.view(self.count, self.size, *value.shape[3:])

    def rows(self, value: Tensor) -> Tensor:
        """[N, C, ...] -> view [B, heads, T, ...] without the padding."""
        return value.view(self.batch, self.heads, self.chunks * self.size, *value.shape[2:])[:, :, : self.length]

    def join(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, C, ...] -> a new contiguous [B, T, heads, ...]."""
        out = value.new_empty((self.batch, self.length, self.heads, *value.shape[2:]), dtype=dtype)
        return out.copy_(self.rows(value).transpose(1, 2))

    def serial(self, value: Tensor) -> Tensor:
        """[N, ...] -> view [B * heads, chunks, ...]."""
        return value.view(self.batch * self.heads, self.chunks, *value.shape[1:])


class Decays(NamedTuple):
    """Decay products of the chunks. Level l joins blocks of h = 2^l rows into blocks of 2h."""

    rows: list[Tensor]  # per level [N, C / 2h, h, D]: from the start of a second half to each of its rows, inclusive
    columns: list[Tensor]  # per level [N, C / 2h, h, D]: from after each row of a first half to the end of that half
    start: Tensor  # [N, C, D]: from the start of the chunk to each row, inclusive
    end: Tensor  # [N, C, D]: from after each row to the end of the chunk


def decay_products(decay: Tensor) -> Decays:
    """decay [N, C, D], the factor of each row, is consumed."""
    start, end, rows, columns = decay, torch.ones_like(decay), [], []
    for size in _sizes(decay):
        (first_start, second_start), (first_end, _) = halves(start, size), halves(end, size)
        rows.append(second_start.clone(memory_format=torch.contiguous_format))
        columns.append(first_end.clone(memory_format=torch.contiguous_format))
        first_end *= rows[-1][:, :, -1:]
        second_start *= first_start[:, :, -1:]
    return Decays(rows, columns, start, end)


def halves(value: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """[N, C, ...] -> views of the first and second halves of all blocks of 2 * size rows, [N, C / 2size, size, ...]."""
    blocks = value.view(value.shape[0], value.shape[1] // (2 * size), 2, size, *value.shape[2:])
    return blocks[:, :, 0], blocks[:, :, 1]


class Pairs(NamedTuple):
    """Sums over the pairs of rows of a chunk."""

    keys: Tensor  # [N, C, C]: k_r . decay(r, i) k_i for i < r, else 0
    queries: Tensor  # [N, C, C]: q_r . decay(r, i) k_i for i <= r, else 0
    inverse: Tensor  # [N, C, C]: (I + beta * keys)^-1, unit lower triangular


def pair_sums(k: Tensor, q: Tensor, beta: Tensor, decays: Decays) -> Pairs:
    """The pair sums of k, q [N, C, K] and the inverse they define with beta [N, C, 1].

    The inverse grows with the blocks: inverses A and D of two neighbours with corner b give [[A, 0], [-D b A, D]].
    """
    count, rows = k.shape[:2]
    keys, queries = k.new_zeros(count, rows, rows), torch.diag_embed((q * k).sum(-1))
    inverse = k.new_ones(count * rows, 1, 1)
    for level, size in enumerate(_sizes(k)):
        left, right = _decayed(k, q, decays, level, size)
        blocks = rows // (2 * size)
        corners = torch.bmm(left.flatten(0, 1).flatten(1, 2), right.flatten(0, 1).mT)
        corners = corners.view(count, blocks, 2, size, size)
        _corners(keys, size).copy_(corners[:, :, 0])
        _corners(queries, size).copy_(corners[:, :, 1])

        first, second = inverse.view(count * blocks, 2, size, size).unbind(1)
        corner = (corners[:, :, 0] * halves(beta, size)[1]).flatten(0, 1)
        inverse = k.new_zeros(first.shape[0], 2 * size, 2 * size)
        inverse[:, :size, :size] = first
        inverse[:, size:, size:] = second
        inverse[:, size:, :size] = (second @ corner @ first).neg_()
    return Pairs(keys, queries, inverse.view(count, rows, rows))


class PairGradients(NamedTuple):
    """Running gradients; `start` and `end` are those of the logarithms of the products of the same name."""

    k: Tensor  # [N, C, K]
    q: Tensor  # [N, C, K]
    start: Tensor  # [N, C, D]
    end: Tensor  # [N, C, D]


def pair_sums_backward(
    grad_keys: Tensor, grad_queries: Tensor, k: Tensor, q: Tensor, decays: Decays, into: PairGradients
) -> Tensor:
    """Add to `into.k` and `into.q`, and return the gradient of log decay [N, C, D], in the storage of `into.start`.

    grad_keys, grad_queries [N, C, C]; entries above the diagonals are not read. The logarithms of the products are
    sums, so their doubling runs backwards level by level: what a wider product received goes to the narrower ones.
    """
    diagonal = grad_queries.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    into.q.addcmul_(k, diagonal)
    into.k.addcmul_(q, diagonal)
    for level, size in reversed(list(enumerate(_sizes(k)))):
        left, right = _decayed(k, q, decays, level, size)
        grad = torch.stack((_corners(grad_keys, size), _corners(grad_queries, size)), 2)
        grad = grad.flatten(0, 1).flatten(1, 2)
        grad_left = torch.bmm(grad, right.flatten(0, 1)).view(left.shape)
        grad_right = torch.bmm(grad.mT, left.flatten(0, 1).flatten(1, 2)).view(right.shape)

        (first_start, second_start), (first_end, _) = halves(into.start, size), halves(into.end, size)
        first_start[:, :, -1] += second_start.sum(2)
        second_start[:, :, -1] += first_end.sum(2)
        for part in (0, 1):
            add_product(second_start, left[:, :, part], grad_left[:, :, part])
        add_product(first_end, right, grad_right)

        (first_k, second_k), (_, second_q) = halves(into.k, size), halves(into.q, size)
        second_k.addcmul_(grad_left[:, :, 0], decays.rows[level])
        second_q.addcmul_(grad_left[:, :, 1], decays.rows[level])
        first_k.addcmul_(grad_right, decays.columns[level])
    return into.start


def add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into += left * right, summed over the channels if `into` has one for all of them."""
    if into.shape[-1] == left.shape[-1]:
        into.addcmul_(left, right)
    else:
        into += (left * right).sum(-1, keepdim=True)


def _sizes(value: Tensor) -> Iterator[int]:
    """1, 2, 4, ... half the chunk, for value [N, C, ...]."""
    size = 1
    while size < value.shape[1]:
        yield size
        size *= 2


def _decayed(k: Tensor, q: Tensor, decays: Decays, level: int, size: int) -> tuple[Tensor, Tensor]:
    """Rows of second halves [N, C / 2size, 2 (k, q), size, K] and columns of first halves [N, C / 2size, size, K]."""
    first_k, second_k = halves(k, size)
    left = k.new_empty(k.shape[0], first_k.shape[1], 2, size, k.shape[2])
    torch.mul(second_k, decays.rows[level], out=left[:, :, 0])
    torch.mul(halves(q, size)[1], decays.rows[level], out=left[:, :, 1])
    return left, first_k * decays.columns[level]


def _corners(pairs: Tensor, size: int) -> Tensor:
    """[N, C, C] -> view [N, C / 2size, size, size]: rows of second halves, columns of the first halves before them."""
    count, rows = pairs.shape[:2]
    row, column = pairs.stride()[1:]
    return pairs.as_strided(
        (count, rows // (2 * size), size, size),
        (pairs.stride(0), 2 * size * (row + column), row, column),
        pairs.storage_offset() + size * row,
    )
