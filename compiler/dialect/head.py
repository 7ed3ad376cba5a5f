"""The output head in chunks: what every op over a vocabulary shares.

    x = hidden weight^T + bias,    z = logit_scale x,    with a soft cap: z = softcap tanh(logit_scale x / softcap)

A chunk is `rows` rows of hidden times `columns` classes, and no more logits than that exist at a time.

1. Statistics per row, carried from one chunk of classes to the next: the maximum m of z, the sum of exp(z - m), the z
   of the label, and the sum of w_c z_c over all classes (for label smoothing). lse = m + log(sum), but a
   difference lse - z is taken as (m - z) + log(sum): lse itself has the rounding of a number as large as m.
2. Gradients: z again, and for coefficients per row
       dz_c = exponential exp(z_c - reference) - target [c = label] - uniform w_c
   dx = dz dz/dx, dhidden = dx weight, dweight = sum over chunks of dx^T hidden in float32, dbias = sum of dx.
3. A chunk that holds all classes makes its gradients from the same logits as its statistics: three products instead of
   four. The coefficients have to be known by then.

`Kernels` is how a device does the work inside a chunk; the loops over chunks are the same everywhere. Offsets into
logits are never computed here, so nothing overflows at 2^31 elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moec.compiler.dialect._define import asked_for, math_dtype, only_asked_for


@dataclass(frozen=True)
class Head:
    """An output head, the labels of its rows, and how a label becomes a loss.

    hidden [N,D], weight [V,D], labels int64 [N], bias [V], class_weights [V] (1 where None). ignore_index: the label of
    rows without a loss. rows, columns: the most logits that exist at a time. shard: whether `weight` holds only the
    classes from first_class on, so that labels outside of them are no mistake.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None = None
    class_weights: Tensor | None = None
    ignore_index: int = -100
    logit_scale: float = 1.0
    softcap: float = 0.0
    label_smoothing: float = 0.0
    rows: int = 4096
    columns: int = 1 << 20
    first_class: int = 0
    shard: bool = False

    @property
    def classes(self) -> int:
        return self.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of statistics, losses and sums of gradients."""
        return math_dtype(self.hidden.dtype)


class Statistics(NamedTuple):
    """Per row [N]: maximum of z, sum of exp(z - maximum), z of the label (0 without), sum of w_c z_c (if smoothed)."""

    maximum: Tensor
    total: Tensor
    target: Tensor
    weighted: Tensor

    def of(self, rows: slice) -> Statistics:
        return Statistics(*(value[rows] for value in self))

    @property
    def lse(self) -> Tensor:
        return self.maximum + self.total.log()


class Coefficients(NamedTuple):
    """Per row [N]: what the gradient of z is made of, see the module's docstring. reference: the row's maximum."""

    reference: Tensor
    exponential: Tensor
    target: Tensor
    uniform: Tensor

    def of(self, rows: slice) -> Coefficients:
        return Coefficients(*(value[rows] for value in self))


class Gradients(NamedTuple):
    """Of hidden, weight and bias, in the dtype of the sums; empty where they were not asked for."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor


class Kernels(Protocol):
    """The work inside one chunk, on the logits of head.hidden[rows] and head.weight[columns]."""

    def unit(self, head: Head, *coefficients: Tensor | None) -> Tensor | None:
        """A number to divide out of the coefficients for a while, where dx could leave the range of its dtype."""

    def prepared(self, head: Head) -> Head:
        """The head with its weight as the products of many chunks want it."""

    def blocks(self, head: Head) -> Iterator[slice]:
        """Ranges of rows, of at most head.rows each."""

    def product(self, head: Head, rows: slice, columns: slice) -> Tensor:
        """hidden weight^T of a chunk, [R, C], in memory of its own."""

    def add_statistics(self, head: Head, product: Tensor, rows: slice, columns: slice, carried: Statistics) -> None:
        """Update the statistics of these rows ([R] each) in place."""

    def differentiate(
        self, head: Head, product: Tensor, rows: slice, columns: slice, coefficients: Coefficients
    ) -> Tensor:
        """dx [R, C] of these rows, ready to be multiplied; may take the memory of `product`."""

    def losses_and_gradient(
        self, head: Head, product: Tensor, rows: slice, token_weights: Tensor, z_weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, lse [R] and dx [R, V] of token_weights losses + z_weights lse^2, from logits of all classes."""

    def add_product(self, total: Tensor, left: Tensor, right: Tensor, fresh: bool) -> None:
        """total += left right (or = where `fresh`), summed in the dtype of total."""


def fresh_statistics(head: Head) -> Statistics:
    """Of no classes yet. The least number stands for the maximum: with -inf, rows of -inf alone would give NaN."""
    count, dtype = head.hidden.shape[0], head.dtype
    least = head.hidden.new_full((count,), torch.finfo(dtype).min, dtype=dtype)
    return Statistics(least, *(head.hidden.new_zeros(count, dtype=dtype) for _ in range(3)))


def statistics(head: Head, kernels: Kernels) -> Statistics:
    """Of all rows over all classes of the head."""
    check(head)
    head, found = kernels.prepared(head), fresh_statistics(head)
    for rows in kernels.blocks(head):
        for columns in column_blocks(head):
            kernels.add_statistics(head, kernels.product(head, rows, columns), rows, columns, found.of(rows))
    return found


def gradients(
    head: Head, coefficients: Coefficients, kernels: Kernels, hidden: bool = True, weight: bool = True
) -> Gradients:
    """From coefficients that are known for every row; `hidden`, `weight` (and bias) say which are wanted."""
    head, found = kernels.prepared(head), _empty_gradients(head, hidden, weight)
    unit = kernels.unit(head, *coefficients[1:])
    if unit is not None:
        coefficients = Coefficients(coefficients.reference, *(value / unit for value in coefficients[1:]))
    for rows in kernels.blocks(head):
        for columns in column_blocks(head):
            _add_chunk(found, head, kernels, rows, columns, coefficients.of(rows))
    return found if unit is None else Gradients(*(value.mul_(unit) for value in found))


def gradients_asked_for(
    head: Head, coefficients: Coefficients, kernels: Kernels, needed: Sequence[bool] | None
) -> tuple[Tensor, ...]:
    """Gradients of hidden, weight and bias in their dtypes; `needed` (`_define.py`) says which are made."""
    of_hidden, of_weight, of_bias = asked_for(needed, 3)
    found = gradients(head, coefficients, kernels, of_hidden, of_weight or (of_bias and head.bias is not None))
    bias = head.hidden if head.bias is None else head.bias
    dtypes = (head.hidden.dtype, head.weight.dtype, bias.dtype)
    return only_asked_for(needed, [grad.to(dtype) for grad, dtype in zip(found, dtypes, strict=True)])


def head_gradients_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool] | None
) -> tuple[Tensor, ...]:
    """Empty gradients as `gradients_asked_for` returns them."""
    grad_bias = hidden.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return only_asked_for(needed, [hidden.new_empty(hidden.shape), weight.new_empty(weight.shape), grad_bias])


def weighted_sum(
    head: Head, token_weights: Tensor, z_weights: Tensor | None, kernels: Kernels, hidden: bool, weight: bool
) -> tuple[Tensor, Tensor, Gradients]:
    """Sum of token_weights losses + z_weights lse^2, the losses, and the gradients of that sum.

    One chunk after the other is finished, so that its logits serve both; where a chunk does not hold all classes they
    are made twice.
    """
    check(head)
    head, count, dtype = kernels.prepared(head), head.hidden.shape[0], head.dtype
    losses, lse = (head.hidden.new_zeros(count, dtype=dtype) for _ in range(2))
    found, unit = _empty_gradients(head, hidden, weight), kernels.unit(head, token_weights, z_weights)
    if unit is not None:
        token_weights, z_weights = token_weights / unit, None if z_weights is None else z_weights / unit
    whole = head.columns >= head.classes
    for rows in kernels.blocks(head):
        tokens, z = token_weights[rows], None if z_weights is None else z_weights[rows]
        if whole and (hidden or weight):
            losses[rows], lse[rows] = _add_whole_chunk(found, head, kernels, rows, tokens, z)
            continue
        part_of_head = only_rows(head, rows)
        carried = fresh_statistics(part_of_head)
        for columns in column_blocks(head):
            kernels.add_statistics(head, kernels.product(head, rows, columns), rows, columns, carried)
        losses[rows], lse[rows] = losses_of(part_of_head, carried), carried.lse
        if not hidden and not weight:
            continue
        coefficients = coefficients_of(part_of_head, carried, tokens, None if z is None else 2 * z * lse[rows])
        for columns in column_blocks(head):
            _add_chunk(found, head, kernels, rows, columns, coefficients)
    taking_part = token_weights.ne(0)
    total = (losses * token_weights).masked_fill(~taking_part, 0).sum()
    if z_weights is not None:
        total = total + (lse.square() * z_weights).masked_fill(z_weights.eq(0), 0).sum()
    if unit is not None:
        total, found = total * unit, Gradients(*(value.mul_(unit) for value in found))
    return total, losses, found


def column_blocks(head: Head) -> Iterator[slice]:
    """Ranges of classes, of equal size up to one."""
    return even_blocks(head.classes, head.columns)


def even_blocks(count: int, most: int) -> Iterator[slice]:
    """The fewest ranges of at most `most`; multiples of 128 where that takes no more ranges."""
    if count == 0:
        return
    pieces = -(-count // most)
    step = -(-count // pieces)
    rounded = -(-step // 128) * 128
    step = rounded if rounded <= most else step
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def only_rows(head: Head, rows: slice) -> Head:
    """The head over some of its rows."""
    return replace(head, hidden=head.hidden[rows], labels=head.labels[rows])


def losses_of(head: Head, found: Statistics) -> Tensor:
    """Losses [N] from the statistics of all classes: 0 for an ignored row, NaN for a label that is no class.

    (1 - e) w_y (lse - z_y) + e / V sum_c w_c (lse - z_c), with e the label smoothing and w the class weights.
    """
    label, ignored, wrong = targets(head)
    lse, smoothing = found.lse, head.label_smoothing
    losses = (found.maximum - found.target + found.total.log()) * (1 - smoothing)
    if head.class_weights is not None:
        losses = losses * head.class_weights.to(head.dtype)[label]
    if smoothing:
        losses = losses + (smoothing / head.classes) * (weight_of_all_classes(head) * lse - found.weighted)
    return losses.masked_fill_(ignored, 0).masked_fill_(wrong, float("nan"))


def coefficients_of(head: Head, found: Statistics, grad_losses: Tensor, grad_lse: Tensor | None) -> Coefficients:
    """Of the gradient of z for given gradients [N] of losses and lse; rows without a class get none from their loss."""
    label, ignored, wrong = targets(head)
    smoothing = head.label_smoothing
    grad = grad_losses.to(head.dtype).masked_fill(ignored | wrong, 0)
    target = grad * (1 - smoothing)
    if head.class_weights is not None:
        target = target * head.class_weights.to(head.dtype)[label]
    uniform = grad * (smoothing / head.classes) if smoothing else torch.zeros_like(grad)
    exponential = target + uniform * weight_of_all_classes(head) if smoothing else target
    if grad_lse is not None:
        exponential = exponential + grad_lse.to(head.dtype).masked_fill(wrong, 0)
    return Coefficients(found.maximum, exponential / found.total, target, uniform)


def targets(head: Head) -> tuple[Tensor, Tensor, Tensor]:
    """Labels that are safe to gather with, which of them are ignored, and which are no class."""
    ignored = head.labels == head.ignore_index
    wrong = ~ignored & ((head.labels < 0) | (head.labels >= head.classes))
    return head.labels.clamp(0, max(head.classes - 1, 0)), ignored, wrong


def weight_of_all_classes(head: Head) -> Tensor | float:
    return float(head.classes) if head.class_weights is None else head.class_weights.to(head.dtype).sum()


def check(head: Head) -> None:
    """Raise ValueError for chunks below 1, and, on a CPU, IndexError for a label that is no class.

    On CUDA reading the labels would stall the device: there the row's loss is NaN, and it adds nothing to gradients.
    """
    if head.rows < 1 or head.columns < 1:
        raise ValueError(f"a chunk of {head.rows} rows and {head.columns} classes, expected at least 1 of each")
    if head.labels.device.type != "cpu" or head.shard:
        return
    wrong = head.labels[targets(head)[2]]
    if wrong.numel():
        raise IndexError(
            f"label {int(wrong[0])} is outside [0, V={head.classes}) and is not ignore_index={head.ignore_index};"
            f" {wrong.numel()} such labels"
        )


def _empty_gradients(head: Head, hidden: bool, weight: bool) -> Gradients:
    """Memory for the sums; zeros where no chunk will write."""

    def memory(like: Tensor | None, wanted: bool) -> Tensor:
        shape = like.shape if like is not None and wanted else (0,)
        make = torch.empty if head.hidden.shape[0] and head.classes else torch.zeros
        return make(shape, dtype=head.dtype, device=head.hidden.device)

    return Gradients(memory(head.hidden, hidden), memory(head.weight, weight), memory(head.bias, weight))


def _add_chunk(
    found: Gradients, head: Head, kernels: Kernels, rows: slice, columns: slice, coefficients: Coefficients
) -> None:
    """Functions of their own for the work of a chunk: its logits are gone before the next one is made."""
    product = kernels.product(head, rows, columns)
    part = kernels.differentiate(head, product, rows, columns, coefficients)
    del product
    _add_gradients(found, head, kernels, part, rows, columns)


def _add_whole_chunk(
    found: Gradients, head: Head, kernels: Kernels, rows: slice, tokens: Tensor, z: Tensor | None
) -> tuple[Tensor, Tensor]:
    product = kernels.product(head, rows, slice(0, head.classes))
    losses, lse, part = kernels.losses_and_gradient(head, product, rows, tokens, z)
    del product
    _add_gradients(found, head, kernels, part, rows, slice(0, head.classes))
    return losses, lse


def _add_gradients(found: Gradients, head: Head, kernels: Kernels, part: Tensor, rows: slice, columns: slice) -> None:
    if found.hidden.numel():
        kernels.add_product(found.hidden[rows], part, head.weight[columns], fresh=columns.start == 0)
    if found.weight.numel():
        kernels.add_product(found.weight[columns], part.t(), head.hidden[rows], fresh=rows.start == 0)
    if found.bias.numel():
        sums = part.sum(0, dtype=found.bias.dtype)
        found.bias[columns] = sums if rows.start == 0 else found.bias[columns] + sums


class Reference:
    """Plain PyTorch on any device, in float32 (float64 for float64): exact, and in place as far as it goes."""

    # Logits per block of rows that fit a CPU's cache (2 MiB of fp32), and the fewest rows that keep matmuls efficient.
    cached_logits = 1 << 19
    min_rows = 128

    def unit(self, head: Head, *coefficients: Tensor | None) -> Tensor | None:
        return None

    def prepared(self, head: Head) -> Head:
        """Where a product needs a cast, all of the weight is cast once, if a chunk takes all of it anyway."""
        if _multiplies_into_float32(head.hidden) or head.columns < head.classes:
            return head
        return replace(head, weight=head.weight.to(head.dtype))

    def blocks(self, head: Head) -> Iterator[slice]:
        """At most half of head.rows, because logits exist twice for a moment."""
        most = max(1, head.rows // 2)
        if head.hidden.device.type == "cpu":
            columns = max(1, min(head.columns, head.classes))
            most = min(most, max(self.min_rows, self.cached_logits // columns))
        return even_blocks(head.hidden.shape[0], most)

    def product(self, head: Head, rows: slice, columns: slice) -> Tensor:
        hidden, weight = head.hidden[rows], head.weight[columns]
        if _multiplies_into_float32(hidden):
            return torch.mm(hidden, weight.t(), out_dtype=head.dtype)
        return torch.mm(hidden.to(head.dtype), weight.to(head.dtype).t())

    def add_statistics(self, head: Head, product: Tensor, rows: slice, columns: slice, carried: Statistics) -> None:
        self._add(head, self._logits(head, product, columns), rows, columns, carried)

    def differentiate(
        self, head: Head, product: Tensor, rows: slice, columns: slice, coefficients: Coefficients
    ) -> Tensor:
        return self._gradient(head, self._logits(head, product, columns), rows, columns, coefficients)

    def losses_and_gradient(
        self, head: Head, product: Tensor, rows: slice, token_weights: Tensor, z_weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        part, columns = only_rows(head, rows), slice(0, head.classes)
        logits, carried = self._logits(head, product, columns), fresh_statistics(part)
        self._add(head, logits, rows, columns, carried)
        lse = carried.lse
        coefficients = coefficients_of(part, carried, token_weights, None if z_weights is None else 2 * z_weights * lse)
        return losses_of(part, carried), lse, self._gradient(head, logits, rows, columns, coefficients)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor, fresh: bool) -> None:
        if not _multiplies_into_float32(right):
            left, right = left.to(total.dtype), right.to(total.dtype)
            torch.mm(left, right, out=total) if fresh else total.addmm_(left, right)
        elif fresh:
            torch.mm(left.to(right.dtype), right, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, left.to(right.dtype), right, out_dtype=total.dtype, out=total)

    def _logits(self, head: Head, product: Tensor, columns: slice) -> Tensor:
        if head.bias is not None:
            product += head.bias[columns].to(head.dtype)
        if head.softcap > 0:
            return product.mul_(head.logit_scale / head.softcap).tanh_().mul_(head.softcap)
        return product if head.logit_scale == 1 else product.mul_(head.logit_scale)

    def _add(self, head: Head, logits: Tensor, rows: slice, columns: slice, carried: Statistics) -> None:
        maximum = torch.maximum(carried.maximum, logits.amax(1))
        sums = (logits - maximum.unsqueeze(1)).exp_().sum(1)
        carried.total.mul_((carried.maximum - maximum).exp_()).add_(sums)
        carried.maximum.copy_(maximum)
        place, inside = self._place(head, rows, columns)
        carried.target.add_(logits.gather(1, place).squeeze(1).masked_fill_(~inside, 0))
        if head.label_smoothing:
            weights = head.class_weights
            carried.weighted.add_(logits.sum(1) if weights is None else logits @ weights[columns].to(head.dtype))

    def _gradient(self, head: Head, logits: Tensor, rows: slice, columns: slice, coefficients: Coefficients) -> Tensor:
        slope = None if head.softcap <= 0 else (logits / head.softcap).square_().neg_().add_(1)
        reference, exponential, target, uniform = coefficients
        grad = logits.sub_(reference.unsqueeze(1)).exp_().mul_(exponential.unsqueeze(1))
        place, inside = self._place(head, rows, columns)
        grad.scatter_add_(1, place, -target.masked_fill(~inside, 0).unsqueeze(1))
        if head.label_smoothing and head.class_weights is not None:
            grad.addr_(uniform, head.class_weights[columns].to(head.dtype), alpha=-1)
        elif head.label_smoothing:
            grad.sub_(uniform.unsqueeze(1))
        if slope is not None:
            grad.mul_(slope)
        return grad if head.logit_scale == 1 else grad.mul_(head.logit_scale)

    def _place(self, head: Head, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Where a row's label lies among these classes [R, 1], and whether it does [R]."""
        place = head.labels[rows] - (head.first_class + columns.start)
        inside = (place >= 0) & (place < columns.stop - columns.start) & (head.labels[rows] != head.ignore_index)
        return place.clamp(0, columns.stop - columns.start - 1).unsqueeze(1), inside


def _multiplies_into_float32(value: Tensor) -> bool:
    """CUDA multiplies half precision into float32 results; other devices need a cast."""
    return value.device.type == "cuda" and value.dtype in (torch.float16, torch.bfloat16)


REFERENCE = Reference()
