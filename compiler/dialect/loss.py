"""The output head and cross entropy in one op, so that logits exist for one chunk of rows at a time.

For each chunk of rows: x = hidden weight^T + bias, z = softcap * tanh(x / softcap) if softcap > 0, lse = log sum exp z,
loss = lse - z[label]. Backward recomputes z from the same inputs and uses the saved lse:

    dz = grad * (exp(z - lse) - onehot(label)) + grad_lse * exp(z - lse),  dx = dz * (1 - (z/softcap)^2)
    dhidden = dx weight,  dweight = sum over chunks of dx^T hidden (accumulated in float32),  dbias = sum of dx
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moec.compiler.dialect._define import define_op, math_dtype

# Logits per block of rows that fit a CPU's cache (2 MiB of fp32), and the fewest rows that keep the matmuls efficient.
CACHED_LOGITS = 1 << 19
MIN_ROWS = 128


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float = 0.0,
    chunk: int = 4096,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of hidden [N,D] against labels int64 [N] through the head weight [V,D] (and bias [V]).

    Returns losses [N], 0 where the label is ignore_index, and lse [N], the log of the softmax denominator; both float32
    (float64 for float64 inputs). The log-probability of a label is -losses. At most chunk x V logits exist at once; a
    device may take fewer rows at a time.
    A label that is neither ignore_index nor in [0, V) raises IndexError on CPU; on CUDA, where reading the labels would
    stall the device, its loss is NaN and its row adds nothing to any gradient. ValueError for a chunk below 1.
    """
    return torch.ops.moec.linear_cross_entropy(hidden, weight, labels, bias, ignore_index, softcap, chunk)


def _forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    softcap: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    _check_labels(labels, ignore_index, weight.shape[0])
    if chunk < 1:
        raise ValueError(f"moec::linear_cross_entropy: chunk={chunk} rows, expected at least 1")
    dtype = math_dtype(hidden.dtype)
    losses = hidden.new_empty(hidden.shape[0], dtype=dtype)
    lse = torch.empty_like(losses)
    matrix = _operand(weight)
    for rows in _blocks(hidden, weight, chunk):
        logits = _logits(hidden[rows], matrix, bias, softcap)
        label, ignored, wrong = _targets(labels[rows], ignore_index, weight.shape[0])
        # log_softmax is one fused pass; logsumexp takes several, and slower exponentials on a CPU.
        loss = logits.log_softmax(1).gather(1, label.unsqueeze(1)).squeeze(1).neg_()
        lse[rows] = logits.gather(1, label.unsqueeze(1)).squeeze(1) + loss
        losses[rows] = loss.masked_fill_(ignored, 0).masked_fill_(wrong, float("nan"))
    return losses, lse


def _backward(
    grad_losses: Tensor,
    grad_lse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    ignore_index: int,
    softcap: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = math_dtype(hidden.dtype)
    grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
    grad_bias = hidden.new_zeros(0 if bias is None else bias.shape[0], dtype=dtype)
    matrix = _operand(weight)
    for rows in _blocks(hidden, weight, chunk):
        logits = _logits(hidden[rows], matrix, bias, softcap)
        slope = None if softcap <= 0 else 1 - (logits / softcap).square_()
        label, ignored, wrong = _targets(labels[rows], ignore_index, weight.shape[0])
        grad = grad_losses[rows].to(dtype).masked_fill(ignored | wrong, 0).unsqueeze(1)
        total = grad if grad_lse is None else grad + grad_lse[rows].to(dtype).masked_fill(wrong, 0).unsqueeze(1)
        grad_logits = logits.sub_(lse[rows].unsqueeze(1)).exp_().mul_(total)
        grad_logits.scatter_add_(1, label.unsqueeze(1), -grad)
        if slope is not None:
            grad_logits.mul_(slope)
        if bias is not None:
            grad_bias += grad_logits.sum(0)
        operand = grad_logits.to(matrix.dtype)
        grad_hidden[rows] = operand @ matrix
        _add_product(grad_weight, operand.t(), hidden[rows].to(matrix.dtype))
    bias_dtype = hidden.dtype if bias is None else bias.dtype
    return grad_hidden, grad_weight.to(weight.dtype), grad_bias.to(bias_dtype)


def _fake(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    softcap: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    dtype = math_dtype(hidden.dtype)
    return hidden.new_empty(hidden.shape[0], dtype=dtype), hidden.new_empty(hidden.shape[0], dtype=dtype)


def _backward_fake(
    grad_losses: Tensor,
    grad_lse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    ignore_index: int,
    softcap: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_bias = hidden.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape), grad_bias


def _blocks(hidden: Tensor, weight: Tensor, chunk: int) -> Iterator[slice]:
    """Ranges of rows. Each holds at most half a chunk, because its logits exist twice for a moment."""
    step = max(1, chunk // 2)
    if hidden.device.type == "cpu":
        step = min(step, max(MIN_ROWS, CACHED_LOGITS // max(1, weight.shape[0])))
    return (slice(start, start + step) for start in range(0, hidden.shape[0], step))


def _check_labels(labels: Tensor, ignore_index: int, vocabulary: int) -> None:
    if labels.device.type != "cpu":
        return
    wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))]
    if wrong.numel():
        raise IndexError(
            f"moec::linear_cross_entropy: label {int(wrong[0])} is outside [0, V={vocabulary})"
            f" and is not ignore_index={ignore_index}; {wrong.numel()} such labels"
        )


def _targets(labels: Tensor, ignore_index: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Labels that are safe to gather with, which of them are ignored, and which are out of range."""
    ignored = labels == ignore_index
    wrong = ~ignored & ((labels < 0) | (labels >= vocabulary))
    return labels.clamp(0, max(vocabulary - 1, 0)), ignored, wrong


def _operand(weight: Tensor) -> Tensor:
    """The head as matmul operand: CUDA multiplies half precision into float32 results, other devices need a cast."""
    return weight if weight.device.type == "cuda" else weight.to(math_dtype(weight.dtype))


def _logits(hidden: Tensor, matrix: Tensor, bias: Tensor | None, softcap: float) -> Tensor:
    dtype = math_dtype(hidden.dtype)
    logits = hidden.new_empty(hidden.shape[0], matrix.shape[0], dtype=dtype)
    if matrix.dtype == dtype:
        torch.mm(hidden.to(dtype), matrix.t(), out=logits)
    else:
        logits = torch.mm(hidden.to(matrix.dtype), matrix.t(), out_dtype=dtype)
    if bias is not None:
        logits += bias.to(dtype)
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap > 0 else logits


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right with total in float32, whatever the dtype of the operands."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += torch.mm(left, right, out_dtype=total.dtype)


define_op(
    "linear_cross_entropy",
    "(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, int ignore_index, float softcap, int chunk)"
    " -> (Tensor losses, Tensor lse)",
    _forward,
    _fake,
    backward_schema="(Tensor grad_losses, Tensor? grad_lse, Tensor hidden, Tensor weight, Tensor labels, Tensor? bias,"
    " Tensor lse, int ignore_index, float softcap, int chunk)"
    " -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    backward=_backward,
    backward_fake=_backward_fake,
    shapes={"hidden": "N D", "weight": "V D", "labels": "N", "bias": "V"},
    flops="2*N*V*D",
    backward_flops="6*N*V*D",
    source="chunked head: arXiv 2410.10989, arXiv 2411.09009",
    summary="output head and cross entropy, chunked over rows",
)
