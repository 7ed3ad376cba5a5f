"""The launches of the expert kernels: sort, rows, grouped products, gradients. Nothing waits for the device.

Sizes: N tokens, k choices, S = N*k slots, R rows, E experts, D width of a token, I hidden width, P projections of the
activation (2 gated, 1 not). Rows behind offsets[-1] (padding of an exchange) get zeros.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moec.codegen.triton.epilogue import Epilogue, functions
from moec.codegen.triton.expert_gradients import clear_unused, expert_bias_gradient, expert_weight_gradient
from moec.codegen.triton.expert_products import expert_down_backward, expert_linear, expert_up
from moec.codegen.triton.expert_rows import (
    activate_rows,
    activation_gradient_rows,
    combine_rows,
    gather_rows,
    scatter_gradient,
    spread_rows,
    sum_parts,
)
from moec.codegen.triton.expert_sort import count_slots, place_slots, sum_blocks, sum_experts
from moec.codegen.triton.expert_tiles import list_tiles


@dataclass(frozen=True)
class Tile:
    """How a product is cut. They change speed only.

    rows, columns, depth: of one tile; depth is along the inner dimension. group: row tiles that share their columns in
    time. small: tiles of half the rows where that is enough. resident: programs per multiprocessor that take tiles in
    turn, 0 for a program per tile.
    """

    rows: int = 128
    columns: int = 256
    depth: int = 64
    group: int = 16
    stages: int = 3
    warps: int = 8
    small: bool = True
    resident: int = 0
    flatten: bool = False


@dataclass(frozen=True)
class Launch:
    """Tiles of each product, for 16 bit operands; wider ones take `wide`. block: of slots, row: of columns."""

    up: Tile = Tile()
    linear: Tile = Tile()
    down_backward: Tile = Tile(columns=128)
    weight_gradient: Tile = Tile(small=False)
    wide: Tile = Tile(rows=64, columns=64, depth=32, stages=1, warps=4)
    slots: int = 128
    row: int = 4096
    fused_gradient: bool = True
    library: bool = True

    def tile(self, name: str, dtype: torch.dtype) -> Tile:
        return getattr(self, name) if dtype.itemsize == 2 else self.wide  # type: ignore[no-any-return]


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


def gather(x: Tensor, order: Tensor, choices: int, launch: Launch = LAUNCH) -> Tensor:
    """rows[r] = x[order[r] // choices]: x [N,D] -> [R,D]."""
    x, width = x.contiguous(), x.shape[1]
    rows = x.new_empty(order.numel(), width)
    if rows.numel():
        gather_rows[(order.numel(),)](x, order, rows, width, choices, BLOCK=_block(width, launch))
    return rows


def spread(x: Tensor, position: Tensor, choices: int, launch: Launch = LAUNCH) -> Tensor:
    """The same rows as `gather`: rows[position[n*k+j]] = x[n]."""
    x, width = x.contiguous(), x.shape[1]
    rows = x.new_empty(position.numel(), width)
    if rows.numel():
        spread_rows[(x.shape[0],)](x, position, rows, width, CHOICES=choices, BLOCK=_block(width, launch))
    return rows


def combine(
    rows: Tensor, position: Tensor, weights: Tensor | None, choices: int, launch: Launch = LAUNCH
) -> Tensor:
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
    grad_y: Tensor, rows: Tensor, order: Tensor, weights: Tensor, launch: Launch = LAUNCH
) -> tuple[Tensor, Tensor]:
    """Gradients of the rows and of the weights of `combine`."""
    grad_y, rows, weights = grad_y.contiguous(), rows.contiguous(), weights.contiguous()
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    if rows.numel():
        scatter_gradient[(rows.shape[0],)](
            grad_y, rows, order, weights, grad_rows, grad_weights, rows.shape[1], weights.shape[1],
            BLOCK=_block(rows.shape[1], launch),
        )  # fmt: skip
    return grad_rows, grad_weights if rows.numel() else grad_weights.zero_()


def linear(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None, *, transposed: bool, launch: Launch = LAUNCH
) -> Tensor:
    """y[r] = weight[e] x[r] + bias[e]: x [R,K], weight [E,O,K] (transposed: [E,K,O]) -> [R,O]."""
    x, weight, tile = x.contiguous(), weight.contiguous(), launch.tile("linear", x.dtype)
    columns = weight.shape[2] if transposed else weight.shape[1]
    y = x.new_empty(x.shape[0], columns)
    if not y.numel():
        return y
    given = _Operands.of(x, weight, offsets, tile, tile.columns, transposed, gathered=False)
    expert_linear[given.grid(columns, tile.columns)](
        *given.x, *given.w, x if bias is None else bias.contiguous(), y, *given.lists, x.shape[1], columns,
        BIASED=bias is not None, **given.constants,
    )  # fmt: skip
    return y


def up(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    order: Tensor | None = None,
    choices: int = 1,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    transposed: bool,
    interleaved: bool,
    epilogue: Epilogue,
    keep_pre: bool,
    launch: Launch = LAUNCH,
) -> tuple[Tensor, Tensor]:
    """Up projection and activation: pre [R,P*I] (empty without keep_pre) and act [R,I], in the dtype of x.

    x: [N,D], rows taken by order, or [R,D] without. weight: [E,P*I,D], or transposed [E,D,P*I]; its columns are gate
    then up, or alternate. weights [N,k]: router weights that belong before the down projection.
    """
    x, weight, tile = x.contiguous(), weight.contiguous(), launch.tile("up", x.dtype)
    parts = len(epilogue.inputs)
    hidden = (weight.shape[2] if transposed else weight.shape[1]) // parts
    rows = x.shape[0] if order is None else order.numel()
    act, pre = x.new_empty(rows, hidden), x.new_empty((rows, parts * hidden) if keep_pre else 0)
    if not act.numel():
        return pre, act
    halves = parts == 2 and not interleaved
    wide = tile.columns // 2 if halves else tile.columns
    given = _Operands.of(x, weight, offsets, tile, wide, transposed, gathered=order is not None, rows=rows)
    expert_up[given.grid(hidden, tile.columns // parts)](
        *given.x, x if order is None else order, *given.w, x if bias is None else bias.contiguous(),
        x if weights is None else weights.contiguous(), pre if keep_pre else act, act, *given.lists, x.shape[1], hidden,
        choices, FORWARD=functions(epilogue)[0], PARTS=parts, INTERLEAVED=interleaved, KEEP=keep_pre,
        BIASED=bias is not None, WEIGHTED=weights is not None, GATHERED=order is not None, **given.constants,
    )  # fmt: skip
    return pre, act


def activate(
    pre: Tensor,
    order: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    interleaved: bool,
    epilogue: Epilogue,
    launch: Launch = LAUNCH,
) -> Tensor:
    """act [R,I] of a saved pre-activation [R,P*I]."""
    parts = len(epilogue.inputs)
    act = pre.new_empty(pre.shape[0], pre.shape[1] // parts)
    if act.numel():
        activate_rows[(pre.shape[0],)](
            pre.contiguous(), pre if order is None else order, pre if weights is None else weights.contiguous(), act,
            act.shape[1], FORWARD=functions(epilogue)[0], PARTS=parts, INTERLEAVED=interleaved,
            WEIGHTED=weights is not None, BLOCK=min(1024, _block(act.shape[1], launch)),
        )  # fmt: skip
    return act


def down_backward(
    grad_y: Tensor,
    weight: Tensor,
    offsets: Tensor,
    pre: Tensor,
    weights: Tensor | None,
    order: Tensor | None,
    choices: int,
    *,
    transposed: bool,
    interleaved: bool,
    epilogue: Epilogue,
    down_bias: Tensor | None = None,
    keep_act: bool = True,
    launch: Launch = LAUNCH,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of pre [R,P*I], weighted act [R,I], gradient of the router weights [N,k] (empty without weights).

    grad_y: [N,D], rows taken by order, or [R,D] without. weight: the down projection [E,D,I], or transposed [E,I,D].
    """
    grad_y, weight, pre = grad_y.contiguous(), weight.contiguous(), pre.contiguous()
    tile, parts = launch.tile("down_backward", pre.dtype), len(epilogue.inputs)
    rows, hidden = pre.shape[0], pre.shape[1] // parts
    grad_pre, act = torch.empty_like(pre), pre.new_empty(rows, hidden)
    part_count = triton.cdiv(hidden, tile.columns)
    sums = torch.empty((rows, part_count) if weights is not None else 0, dtype=torch.float32, device=pre.device)
    if not act.numel():
        return grad_pre, act, pre.new_empty(0) if weights is None else torch.zeros_like(weights)
    if not launch.fused_gradient:
        source = grad_y if order is None else gather(grad_y, order, choices, launch)
        slope = linear(source, weight, offsets, transposed=not transposed, launch=launch)
        grad_weights = pre.new_empty(0) if weights is None else torch.empty_like(weights)
        biased = down_bias is not None and weights is not None
        activation_gradient_rows[(rows,)](
            slope, pre, slope if order is None else order, slope if weights is None else weights.contiguous(),
            experts_of(offsets, rows) if biased else slope, grad_y, grad_y if down_bias is None else down_bias.contiguous(),
            grad_pre, slope, grad_weights, hidden, grad_y.shape[1], choices, BACKWARD=functions(epilogue)[1], PARTS=parts,
            INTERLEAVED=interleaved, WEIGHTED=weights is not None, BIASED=biased, KEEP=keep_act,
            BLOCK=min(1024, _block(hidden, launch)),
        )  # fmt: skip
        return grad_pre, slope if keep_act else pre.new_empty(0), grad_weights
    given = _Operands.of(
        grad_y, weight, offsets, tile, tile.columns, not transposed, gathered=order is not None, rows=rows
    )
    router = grad_y if weights is None else weights.contiguous()
    expert_down_backward[given.grid(hidden, tile.columns)](
        *given.x, grad_y if order is None else order, *given.w, router, pre, grad_pre, act, sums, *given.lists,
        grad_y.shape[1], hidden, choices, BACKWARD=functions(epilogue)[1], PARTS=parts, INTERLEAVED=interleaved,
        WEIGHTED=weights is not None, GATHERED=order is not None, **given.constants,
    )  # fmt: skip
    if weights is None or order is None:
        return grad_pre, act, pre.new_empty(0)
    grad_weights = torch.empty_like(router)
    biased = down_bias is not None
    sum_parts[(rows,)](
        sums, inverse(order), grad_y, down_bias.contiguous() if down_bias is not None else grad_y,
        experts_of(offsets, rows) if biased else order, grad_weights, rows, part_count, grad_y.shape[1], choices,
        BIASED=biased, PARTS=triton.next_power_of_2(part_count), BLOCK=_block(grad_y.shape[1], launch),
    )  # fmt: skip
    return grad_pre, act, grad_weights


def experts_of(offsets: Tensor, rows: int) -> Tensor:
    """The expert of each row, int32 [rows]; the last one for rows behind the last group."""
    places = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, places, right=True, out_int32=True).clamp_max_(offsets.numel() - 1)


def weight_gradient(
    grad: Tensor, x: Tensor, offsets: Tensor, *, transposed: bool, into: Tensor | None = None, launch: Launch = LAUNCH
) -> Tensor:
    """dW[e] = sum over rows of grad[r] x[r]^T: grad [R,O], x [R,K] -> [E,O,K] (transposed: [E,K,O]).

    In the dtype of x, zeros for an expert without rows; or added to `into`, float32, which is returned.
    """
    left, right = (x, grad) if transposed else (grad, x)
    left, right, tile = left.contiguous(), right.contiguous(), launch.tile("weight_gradient", x.dtype)
    experts, height, width = offsets.numel(), left.shape[1], right.shape[1]
    result = x.new_empty(experts, height, width) if into is None else into
    if not left.shape[0] or not result.numel():
        return result.zero_() if into is None else result
    if launch.library and into is None and _fits_library(left) and _fits_library(right):
        result = F.grouped_mm(left.t(), right, offs=offsets)
        clear_unused[(experts, 16)](result, offsets, height * width, BLOCK=4096)
        return result
    ranking = _lists(offsets, left.shape[0], tile)[1]
    tma = _fits_tma(left) and _fits_tma(right)
    tiles = experts * triton.cdiv(height, tile.rows) * triton.cdiv(width, tile.columns)
    expert_weight_gradient[(_programs(tiles, tile, left),)](
        left, _described(left, tma, tile.depth, tile.rows), right, _described(right, tma, tile.depth, tile.columns),
        result, offsets, ranking, experts, height, width, TMA=tma, ADD=into is not None,
        **_shape(tile, left.dtype),
    )  # fmt: skip
    return result


def bias_gradient(
    grad: Tensor, offsets: Tensor, order: Tensor | None = None, weights: Tensor | None = None, launch: Launch = LAUNCH
) -> Tensor:
    """Sums of each expert's rows [E,O], each row times its slot's weight if weights [N,k] are given."""
    grad, width = grad.contiguous(), grad.shape[1]
    result = grad.new_empty(offsets.numel(), width)
    if result.numel():
        block = min(128, _block(width, launch))
        expert_bias_gradient[(offsets.numel(), triton.cdiv(width, block))](
            grad, grad if order is None else order, grad if weights is None else weights.contiguous(), result, offsets,
            width, WEIGHTED=weights is not None, ROWS=32, COLUMNS=block,
        )  # fmt: skip
    return result


@dataclass(frozen=True)
class _Operands:
    """What every grouped product is given: rows, matrices, lists of tiles, compile-time constants."""

    x: tuple[Any, Any, Any]
    w: tuple[Any, Any]
    lists: tuple[Any, ...]
    constants: dict[str, Any]
    tile: Tile
    row_tiles: int

    @classmethod
    def of(
        cls, x: Tensor, w: Tensor, offsets: Tensor, tile: Tile, wide: int, transposed: bool, *, gathered: bool,
        rows: int | None = None,
    ) -> _Operands:  # fmt: skip
        rows = x.shape[0] if rows is None else rows
        tma_x, tma_w = not gathered and _fits_tma(x), _fits_tma(w)
        matrix = w if transposed else w.view(-1, w.shape[2])
        block = (1, tile.depth, wide) if transposed else (wide, tile.depth)
        constants = _shape(tile, x.dtype) | {
            "TRANSPOSED": transposed, "TMA_X": tma_x, "TMA_W": tma_w, "SMALL": tile.small, "FLATTEN": tile.flatten,
        }  # fmt: skip
        return cls(
            (x, _described(x, tma_x, tile.rows, tile.depth), _described(x, tma_x, tile.rows // 2, tile.depth)),
            (w, _described(matrix, tma_w, *block)),
            (offsets, _lists(offsets, rows, tile)[0], offsets.numel(), rows),
            constants,
            tile,
            rows // tile.rows + offsets.numel() + 1,
        )

    def grid(self, columns: int, wide: int) -> tuple[int]:
        return (_programs(self.row_tiles * triton.cdiv(columns, wide), self.tile, self.x[0]),)


def _shape(tile: Tile, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "GROUP": tile.group, "STAGES": tile.stages,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32", "num_warps": tile.warps,
    }  # fmt: skip


def _lists(offsets: Tensor, rows: int, tile: Tile) -> tuple[Tensor, Tensor]:
    experts = offsets.numel()
    tiles = torch.empty(rows // tile.rows + experts + 2, 2, dtype=torch.int32, device=offsets.device)
    ranking = torch.empty(experts, dtype=torch.int32, device=offsets.device)
    block = min(1024, triton.next_power_of_2(experts))
    list_tiles[(experts + 1,)](offsets, tiles, ranking, experts, rows, ROWS=tile.rows, BLOCK=block, num_warps=1)
    return tiles, ranking


def _fits_tma(x: Tensor) -> bool:
    """Whether a tensor descriptor can read it: Hopper, two bytes an element, rows of a multiple of 16 bytes."""
    aligned = x.shape[-1] * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return aligned and x.element_size() == 2 and _has_tma(x.device)


def _fits_library(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0


@functools.cache
def _has_tma(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def _described(x: Tensor, tma: bool, *block: int) -> Any:
    return TensorDescriptor.from_tensor(x, list(block)) if tma else x


def _programs(tiles: int, tile: Tile, x: Tensor) -> int:
    if not tile.resident or x.device.type != "cuda":
        return tiles
    return min(tiles, tile.resident * _multiprocessors(x.device))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _block(width: int, launch: Launch) -> int:
    return min(launch.row, triton.next_power_of_2(width))


