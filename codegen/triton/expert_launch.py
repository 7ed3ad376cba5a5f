"""The launches of the expert kernels: sort, rows, grouped products, gradients. Nothing waits for the device.

Sizes: N tokens, k choices, S = N*k slots, R rows, E experts, D width of a token, I hidden width, P projections of the
activation (2 gated, 1 not). Rows behind offsets[-1] (padding of an exchange) get zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moec.codegen.triton.epilogue import Epilogue, functions
from moec.codegen.triton.expert_gradients import clear_unused, expert_bias_gradient, expert_weight_gradient
from moec.codegen.triton.expert_products import expert_linear, expert_up
from moec.codegen.triton.expert_rows import (
    activate_rows,
    activation_gradient_rows,
    combine_gradient_rows,
    combine_rows,
    spread_rows,
)
from moec.codegen.triton.expert_sort import count_slots, place_slots, sum_blocks, sum_experts
from moec.codegen.triton.expert_tiles import list_tiles
from moec.compiler.dialect.experts import membership


@dataclass(frozen=True)
class Tile:
    """How a product is cut; it changes speed only.

    rows, columns, depth: of one tile; depth is along the inner dimension. group: row tiles that share their columns in
    time.
    """

    rows: int = 128
    columns: int = 256
    depth: int = 64
    group: int = 16
    stages: int = 4
    warps: int = 8


@dataclass(frozen=True)
class Launch:
    """Tiles for operands of 16 bits, chosen on an H200, and for wider ones; slots and columns of a row in a block.

    library: weight gradients in bfloat16 by torch's grouped product, which is faster than ours there.
    """

    narrow: Tile = Tile()
    wide: Tile = Tile(rows=64, columns=64, depth=32, stages=1, warps=4)
    slots: int = 128
    row: int = 4096
    library: bool = True

    def tile(self, dtype: torch.dtype) -> Tile:
        return self.narrow if dtype.itemsize == 2 else self.wide


LAUNCH = Launch()


def slots(indices: Tensor, experts: int, launch: Launch = LAUNCH) -> tuple[Tensor, Tensor, Tensor]:
    """Stable sort of the slots [N,k] by expert: order int64 [S], position int64 [S], offsets int32 [E].

    order[r] is the slot of row r and position its inverse. A slot whose index is outside [0, E) is behind every group.
    """
    indices = indices.contiguous()
    count, blocks = indices.numel(), triton.cdiv(indices.numel(), launch.slots)
    order, position, ranks = (torch.empty(count, dtype=torch.int64, device=indices.device) for _ in range(3))
    counts = torch.zeros(experts + 1, blocks, dtype=torch.int32, device=indices.device)
    totals, offsets = (torch.empty(size, dtype=torch.int32, device=indices.device) for size in (experts + 1, experts))
    if not count:
        return order, position, offsets.zero_()
    shape = count, experts, blocks
    count_slots[(blocks,)](indices, ranks, counts, *shape, BLOCK=launch.slots)
    sum_blocks[(experts + 1,)](counts, totals, blocks, BLOCK=min(1024, triton.next_power_of_2(blocks)))
    sum_experts[(1,)](totals, offsets, experts, BLOCK=min(1024, triton.next_power_of_2(experts)))
    place_slots[(blocks,)](indices, ranks, counts, offsets, order, position, *shape, BLOCK=launch.slots)
    return order, position, offsets


def inverse(order: Tensor) -> Tensor:
    """position, from order."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def spread(x: Tensor, position: Tensor, choices: int, weights: Tensor | None = None, launch: Launch = LAUNCH) -> Tensor:
    """rows[position[n*k+j]] = x[n], times weights[n,j] if there are any: x [N,D] -> [S,D]."""
    x, width = x.contiguous(), x.shape[1]
    rows = x.new_empty(position.numel(), width)
    if rows.numel():
        spread_rows[(x.shape[0],)](
            x, position, _or(weights, x), rows, width, CHOICES=choices, WEIGHTED=weights is not None,
            BLOCK=_block(width, launch),
        )  # fmt: skip
    return rows


def combine(rows: Tensor, position: Tensor, weights: Tensor | None, choices: int, launch: Launch = LAUNCH) -> Tensor:
    """y[n] = sum_j weights[n,j] rows[position[n*k+j]], in float32 in the order of the slots, rounded once."""
    rows, width = rows.contiguous(), rows.shape[1]
    y = rows.new_empty(position.numel() // choices, width)
    if y.numel():
        combine_rows[(y.shape[0],)](
            rows, position, position if weights is None else weights.contiguous(), y, width,
            CHOICES=choices, WEIGHTED=weights is not None, BLOCK=_block(width, launch),
        )  # fmt: skip
    return y


def combine_backward(
    grad_y: Tensor, rows: Tensor, order: Tensor, weights: Tensor, launch: Launch = LAUNCH, *, keep_rows: bool = True
) -> tuple[Tensor, Tensor]:
    """Gradients of the rows (empty without keep_rows) and of the weights of `combine`."""
    grad_y, rows, weights = grad_y.contiguous(), rows.contiguous(), weights.contiguous()
    grad_rows, grad_weights = rows.new_empty(rows.shape if keep_rows else 0), torch.empty_like(weights)
    if rows.numel():
        combine_gradient_rows[(rows.shape[0],)](
            grad_y, rows, order, weights, grad_rows, grad_weights, rows.shape[1], weights.shape[1], KEEP=keep_rows,
            BLOCK=_block(rows.shape[1], launch),
        )  # fmt: skip
    return grad_rows, grad_weights if rows.numel() else grad_weights.zero_()


def token_weight_gradient(
    x: Tensor, grad_rows: Tensor, order: Tensor, weights: Tensor, launch: Launch = LAUNCH
) -> Tensor:
    """Gradient of the weights [N,k] of `spread`: x[n] . grad_rows[r] for the row r of each slot."""
    return combine_backward(x, grad_rows, order, weights, launch, keep_rows=False)[1]


def linear(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None, *, transposed: bool, launch: Launch = LAUNCH
) -> Tensor:
    """y[r] = weight[e] x[r] + bias[e]: x [R,K], weight [E,O,K] (transposed: [E,K,O]) -> [R,O]."""
    x, weight, tile = x.contiguous(), weight.contiguous(), launch.tile(x.dtype)
    columns = weight.shape[2] if transposed else weight.shape[1]
    y = x.new_empty(x.shape[0], columns)
    if y.numel():
        # Two reads of half the columns: a fifth faster than one where columns are the outer dimension of a matrix.
        two = not transposed
        given = _Operands.of(x, weight, offsets, tile, tile.columns // 2 if two else tile.columns, transposed)
        expert_linear[given.grid(columns, tile.columns)](
            *given.x, *given.w, _or(bias, x), y, *given.lists, x.shape[1], columns,
            BIASED=bias is not None, TWO=two, **given.constants,
        )  # fmt: skip
    return y


def up(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    order: Tensor | None = None,
    weights: Tensor | None = None,
    transposed: bool,
    interleaved: bool,
    epilogue: Epilogue,
    keep_pre: bool = True,
    launch: Launch = LAUNCH,
) -> tuple[Tensor, Tensor]:
    """Up projection and activation of rows [R,D]: pre [R,P*I] (empty without keep_pre) and act [R,I], in x's dtype.

    weight: [E,P*I,D], or transposed [E,D,P*I]; its columns are gate then up, or alternate. order, weights [N,k]: router
    weights that belong before the down projection.
    """
    x, weight, tile = x.contiguous(), weight.contiguous(), launch.tile(x.dtype)
    rows, parts = x.shape[0], len(epilogue.inputs)
    hidden = (weight.shape[2] if transposed else weight.shape[1]) // parts
    act, pre = x.new_empty(rows, hidden), x.new_empty((rows, parts * hidden) if keep_pre else 0)
    if act.numel():
        halves = parts == 2 and not interleaved
        given = _Operands.of(x, weight, offsets, tile, tile.columns // 2 if halves else tile.columns, transposed)
        expert_up[given.grid(hidden, tile.columns // parts)](
            *given.x, *given.w, _or(bias, x), _or(order, x), _or(weights, x), pre if keep_pre else act, act,
            *given.lists, x.shape[1], hidden, FORWARD=functions(epilogue)[0], PARTS=parts, INTERLEAVED=interleaved,
            KEEP=keep_pre, BIASED=bias is not None, WEIGHTED=weights is not None, **given.constants,
        )  # fmt: skip
    return pre, act


def activate(
    pre: Tensor,
    *,
    order: Tensor | None = None,
    weights: Tensor | None = None,
    interleaved: bool,
    epilogue: Epilogue,
    launch: Launch = LAUNCH,
) -> Tensor:
    """act [R,I] of a saved pre-activation [R,P*I]."""
    pre, parts = pre.contiguous(), len(epilogue.inputs)
    act = pre.new_empty(pre.shape[0], pre.shape[1] // parts)
    if act.numel():
        activate_rows[(pre.shape[0],)](
            pre, _or(order, pre), _or(weights, pre), act, act.shape[1], FORWARD=functions(epilogue)[0], PARTS=parts,
            INTERLEAVED=interleaved, WEIGHTED=weights is not None, BLOCK=min(1024, _block(act.shape[1], launch)),
        )  # fmt: skip
    return act


def down_backward(
    grad_rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    pre: Tensor,
    *,
    order: Tensor | None = None,
    weights: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool,
    interleaved: bool,
    epilogue: Epilogue,
    keep_act: bool = True,
    launch: Launch = LAUNCH,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of pre [R,P*I], weighted act [R,I] for the matrix's gradient, gradient of the router weights [N,k].

    grad_rows [R,D]: each row's token's gradient, not weighted. weight: the down projection [E,D,I], or transposed
    [E,I,D]. weights [N,k] with order, whether they are applied before or after the down projection; without them no
    gradient of them (empty). keep_act False: no act (empty).
    """
    pre, rows, parts = pre.contiguous(), pre.shape[0], len(epilogue.inputs)
    weights = None if weights is None else weights.contiguous()
    hidden = pre.shape[1] // parts
    slope = linear(grad_rows, weight, offsets, transposed=not transposed, launch=launch)
    grad_pre, grad_weights = torch.empty_like(pre), pre.new_empty(0) if weights is None else torch.empty_like(weights)
    biased = down_bias is not None and weights is not None
    if slope.numel():
        activation_gradient_rows[(rows,)](
            slope, pre, _or(order, pre), _or(weights, pre), experts_of(offsets, rows) if biased else offsets,
            grad_rows.contiguous(), _or(down_bias, pre), grad_pre, slope, grad_weights, hidden, grad_rows.shape[1],
            BACKWARD=functions(epilogue)[1], PARTS=parts, INTERLEAVED=interleaved, WEIGHTED=weights is not None,
            BIASED=biased, KEEP=keep_act, BLOCK=min(1024, _block(hidden, launch)),
        )  # fmt: skip
    return grad_pre, slope if keep_act else pre.new_empty(0), grad_weights


def experts_of(offsets: Tensor, rows: int) -> Tensor:
    """The expert of each row, int32 [rows]; the last one for rows behind the last group."""
    return membership(offsets, rows).clamp_max_(offsets.numel() - 1)


def weight_gradient(
    grad: Tensor, x: Tensor, offsets: Tensor, *, transposed: bool, into: Tensor | None = None, launch: Launch = LAUNCH
) -> Tensor:
    """dW[e] = sum over rows of grad[r] x[r]^T: grad [R,O], x [R,K] -> [E,O,K] (transposed: [E,K,O]).

    In the dtype of x, zeros for an expert without rows; or added to `into`, float32, which is returned.
    """
    left, right = (x, grad) if transposed else (grad, x)
    left, right, tile = left.contiguous(), right.contiguous(), launch.tile(x.dtype)
    experts, height, width = offsets.numel(), left.shape[1], right.shape[1]
    if into is None and launch.library and _fits_library(left) and _fits_library(right):
        result = F.grouped_mm(left.t(), right, offs=offsets)
        clear_unused[(experts, 16)](result, offsets, height * width, BLOCK=4096)
        return result
    result = x.new_empty(experts, height, width) if into is None else into
    if not left.shape[0]:
        return result.zero_() if into is None else result
    if result.numel():
        tma = _fits_tma(left) and _fits_tma(right)
        expert_weight_gradient[(experts * triton.cdiv(height, tile.rows) * triton.cdiv(width, tile.columns),)](
            left, _described(left, tma, tile.depth, tile.rows), right,
            _described(right, tma, tile.depth, tile.columns), result, offsets, _lists(offsets, left.shape[0], tile)[1],
            height, width, TMA=tma, ADD=into is not None, **_shape(tile, left.dtype),
        )  # fmt: skip
    return result


def bias_gradient(
    grad: Tensor,
    offsets: Tensor,
    *,
    order: Tensor | None = None,
    weights: Tensor | None = None,
    launch: Launch = LAUNCH,
) -> Tensor:
    """Sums of each expert's rows [E,O], each row times its slot's weight if order and weights [N,k] are given."""
    grad, width = grad.contiguous(), grad.shape[1]
    result = grad.new_empty(offsets.numel(), width)
    if result.numel():
        block = min(128, _block(width, launch))
        expert_bias_gradient[(offsets.numel(), triton.cdiv(width, block))](
            grad, _or(order, grad), _or(weights, grad), result, offsets, width, WEIGHTED=weights is not None, ROWS=32,
            COLUMNS=block,
        )  # fmt: skip
    return result


@dataclass(frozen=True)
class _Operands:
    """What every grouped product is given: rows, matrices, lists of tiles, compile-time constants."""

    x: tuple[Any, Any, Any]
    w: tuple[Any, Any]
    lists: tuple[Any, ...]
    constants: dict[str, Any]
    row_tiles: int

    @classmethod
    def of(cls, x: Tensor, w: Tensor, offsets: Tensor, tile: Tile, wide: int, transposed: bool) -> _Operands:
        rows, experts = x.shape[0], offsets.numel()
        tma_x, tma_w = _fits_tma(x), _fits_tma(w)
        matrix = w if transposed else w.view(-1, w.shape[2])
        block = (1, tile.depth, wide) if transposed else (wide, tile.depth)
        return cls(
            (x, _described(x, tma_x, tile.rows, tile.depth), _described(x, tma_x, tile.rows // 2, tile.depth)),
            (w, _described(matrix, tma_w, *block)),
            (offsets, _lists(offsets, rows, tile)[0], experts, rows),
            _shape(tile, x.dtype) | {"TRANSPOSED": transposed, "TMA_X": tma_x, "TMA_W": tma_w},
            rows // tile.rows + experts + 1,
        )

    def grid(self, columns: int, wide: int) -> tuple[int]:
        return (self.row_tiles * triton.cdiv(columns, wide),)


def _shape(tile: Tile, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "GROUP": tile.group, "STAGES": tile.stages,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32", "num_warps": tile.warps,
    }  # fmt: skip


def _lists(offsets: Tensor, rows: int, tile: Tile) -> tuple[Tensor, Tensor]:
    """Row tiles of all experts, and the experts with most rows first."""
    experts = offsets.numel()
    tiles = torch.empty(rows // tile.rows + experts + 2, 2, dtype=torch.int32, device=offsets.device)
    ranking = torch.empty(experts, dtype=torch.int32, device=offsets.device)
    block = min(1024, triton.next_power_of_2(experts))
    list_tiles[(experts + 1,)](offsets, tiles, ranking, experts, rows, ROWS=tile.rows, BLOCK=block, num_warps=1)
    return tiles, ranking


def _or(given: Tensor | None, absent: Tensor) -> Tensor:
    """An optional operand; the kernel does not read what stands for an absent one."""
    return absent if given is None else given.contiguous()


def _fits_tma(x: Tensor) -> bool:
    """Whether a tensor descriptor can read it: two bytes an element, rows of a multiple of 16 bytes."""
    return x.element_size() == 2 and x.shape[-1] % 8 == 0 and x.data_ptr() % 16 == 0


def _fits_library(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16 and _fits_tma(x) and x.numel() > 0


def _described(x: Tensor, tma: bool, *block: int) -> Any:
    return TensorDescriptor.from_tensor(x, list(block)) if tma else x


def _block(width: int, launch: Launch) -> int:
    return min(launch.row, triton.next_power_of_2(width))
