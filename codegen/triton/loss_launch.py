"""The launches of the loss kernels: logits in the dtype of hidden, products by the library, sums in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from moec.codegen.triton.loss_kernels import WIDE, loss_both, loss_gradient, loss_statistics, scaled_copy
from moec.compiler.dialect.head import (
    Coefficients,
    Head,
    Reference,
    Statistics,
    even_blocks,
    only_rows,
    targets,
    weight_of_all_classes,
)


@dataclass(frozen=True)
class Launch:
    """Classes per block and warps of a program, chosen on an H200; they change speed only."""

    block: int = 4096
    warps: int = 8
    copy_block: int = 4096


LAUNCH = Launch()


class TritonKernels(Reference):
    """The work inside a chunk on a GPU; what the library does as well stays with the reference."""

    def __init__(self, launch: Launch = LAUNCH) -> None:
        self.launch = launch

    def unit(self, head: Head, *coefficients: Tensor | None) -> Tensor | None:
        """Float16 ends at 6e-5 and 65504: the largest coefficient becomes 1."""
        if head.hidden.dtype != torch.float16 or not head.hidden.shape[0]:
            return None
        largest = torch.stack([value.abs().max() for value in coefficients if value is not None]).max().float()
        return torch.where((largest > 0) & largest.isfinite(), largest, 1)

    def prepared(self, head: Head) -> Head:
        return head

    def blocks(self, head: Head) -> Iterator[slice]:
        return even_blocks(head.hidden.shape[0], head.rows)

    def product(self, head: Head, rows: slice, columns: slice) -> Tensor:
        return torch.mm(head.hidden[rows], head.weight[columns].t())

    def add_statistics(self, head: Head, product: Tensor, rows: slice, columns: slice, carried: Statistics) -> None:
        loss_statistics[(product.shape[0],)](
            *self._of_chunk(head, product, rows, columns), *carried, product.stride(0), product.shape[1],
            head.first_class + columns.start, head.ignore_index, *self._form(head), **self._constants(head, product),
        )  # fmt: skip

    def differentiate(
        self, head: Head, product: Tensor, rows: slice, columns: slice, coefficients: Coefficients
    ) -> Tensor:
        given = (value.contiguous() for value in coefficients)
        loss_gradient[(product.shape[0],)](
            *self._of_chunk(head, product, rows, columns), *given, product.stride(0), product.shape[1],
            head.first_class + columns.start, head.ignore_index, *self._form(head), **self._constants(head, product),
        )  # fmt: skip
        return product

    def losses_and_gradient(
        self, head: Head, product: Tensor, rows: slice, token_weights: Tensor, z_weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses, lse = (torch.empty(product.shape[0], dtype=torch.float32, device=product.device) for _ in range(2))
        tokens = token_weights.contiguous()
        everything = weight_of_all_classes(head)
        if not isinstance(everything, Tensor):  # made on the device: a copy from the host would wait for it
            everything = torch.full((1,), everything, dtype=torch.float32, device=product.device)
        loss_both[(product.shape[0],)](
            *self._of_chunk(head, product, rows, slice(0, head.classes)), self._label_weights(only_rows(head, rows)),
            tokens, tokens if z_weights is None else z_weights.contiguous(), losses, lse, product.stride(0),
            product.shape[1], head.ignore_index, *self._form(head), head.label_smoothing, everything,
            **self._constants(head, product), Z_LOSS=z_weights is not None,
        )  # fmt: skip
        return losses, lse, product

    def _of_chunk(self, head: Head, product: Tensor, rows: slice, columns: slice) -> tuple[Tensor, ...]:
        """Product, labels, bias and class weights; the product stands for one that is absent."""
        optional = (product if value is None else value[columns] for value in (head.bias, head.class_weights))
        return product, head.labels[rows].contiguous(), *(value.contiguous() for value in optional)

    def _label_weights(self, head: Head) -> Tensor:
        if head.class_weights is None:
            return head.labels
        return head.class_weights.to(torch.float32)[targets(head)[0]]

    def _form(self, head: Head) -> tuple[float, float, float]:
        """scale, soft cap, and z over the kernel's v."""
        return head.logit_scale, head.softcap, head.logit_scale if self._is_positive(head) else 1.0

    def _is_positive(self, head: Head) -> bool:
        return head.softcap <= 0 and head.logit_scale > 0

    def _constants(self, head: Head, product: Tensor) -> dict[str, Any]:
        return {
            "HAS_BIAS": head.bias is not None,
            "FORM": 0 if self._is_positive(head) else 2 if head.softcap > 0 else 1,
            "SMOOTHED": head.label_smoothing > 0,
            "CLASS_WEIGHTS": head.class_weights is not None,
            "BLOCK": max(WIDE.value, min(self.launch.block, triton.next_power_of_2(product.shape[1]))),
            "num_warps": self.launch.warps,
        }


KERNELS = TritonKernels()


def sum_backward(
    grad_total: Tensor,
    losses: Tensor,
    hidden_slope: Tensor,
    weight_slope: Tensor,
    bias_slope: Tensor,
    grad_dtype: torch.dtype,
    launch: Launch = LAUNCH,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`moec::linear_cross_entropy_sum_backward`: each slope read once and written once."""
    factor = grad_total.to(torch.float32)

    def scaled(slope: Tensor) -> Tensor:
        result = torch.empty(slope.shape, dtype=grad_dtype, device=slope.device)
        count = slope.numel()
        if count:
            scaled_copy[(triton.cdiv(count, launch.copy_block),)](
                slope.contiguous(), factor, result, count, BLOCK=launch.copy_block, num_warps=8
            )
        return result

    return scaled(hidden_slope), scaled(weight_slope), scaled(bias_slope), losses * factor
