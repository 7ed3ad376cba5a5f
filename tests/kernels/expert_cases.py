"""Cases of the expert kernels: activations as text and in PyTorch, routings, and an explicit loop as the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moec.codegen.triton.epilogue import Epilogue


@dataclass(frozen=True)
class Activation:
    epilogue: Epilogue
    plain: Callable[..., Tensor]


ACTIVATIONS = {
    "swiglu": Activation(
        Epilogue(
            ("gate", "up"),
            "result = gate * tl.sigmoid(gate) * up",
            """
            s = tl.sigmoid(gate)
            result = gate * s * up
            grad_gate = grad * up * s * (1 + gate * (1 - s))
            grad_up = grad * gate * s
            """,
        ),
        lambda gate, up: torch.nn.functional.silu(gate) * up,
    ),
    "situ": Activation(
        Epilogue(
            ("gate", "up"),
            """
            t = 2 * tl.sigmoid(2 * (gate / 4.0)) - 1
            b = 25.0 * (2 * tl.sigmoid(2 * (up / 25.0)) - 1)
            result = 4.0 * t * tl.sigmoid(gate) * b
            """,
            """
            t = 2 * tl.sigmoid(2 * (gate / 4.0)) - 1
            s = tl.sigmoid(gate)
            u = 2 * tl.sigmoid(2 * (up / 25.0)) - 1
            result = 4.0 * t * s * 25.0 * u
            grad_gate = grad * 25.0 * u * ((1 - t * t) * s + 4.0 * t * s * (1 - s))
            grad_up = grad * 4.0 * t * s * (1 - u * u)
            """,
        ),
        lambda gate, up: 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25),
    ),
    "clamped": Activation(
        Epilogue(
            ("gate", "up"),
            """
            g = tl.minimum(gate, 0.7)
            u = tl.minimum(tl.maximum(up, -0.7), 0.7)
            result = g * tl.sigmoid(1.702 * g) * (u + 1)
            """,
            """
            g = tl.minimum(gate, 0.7)
            u = tl.minimum(tl.maximum(up, -0.7), 0.7)
            s = tl.sigmoid(1.702 * g)
            result = g * s * (u + 1)
            grad_gate = tl.where(gate <= 0.7, grad * (u + 1) * s * (1 + 1.702 * g * (1 - s)), 0.0)
            grad_up = tl.where((up >= -0.7) & (up <= 0.7), grad * g * s, 0.0)
            """,
        ),
        lambda gate, up: gate.clamp(max=0.7) * torch.sigmoid(1.702 * gate.clamp(max=0.7)) * (up.clamp(-0.7, 0.7) + 1),
    ),
    "relu squared": Activation(
        Epilogue(
            ("up",),
            "result = tl.maximum(up, 0.0) * tl.maximum(up, 0.0)",
            "result = tl.maximum(up, 0.0) * tl.maximum(up, 0.0)\ngrad_up = grad * 2 * tl.maximum(up, 0.0)",
        ),
        lambda up: torch.relu(up).square(),
    ),
    "gelu": Activation(
        Epilogue(
            ("up",),
            "result = 0.5 * up * (1 + tl.erf(up * 0.7071067811865476))",
            """
            c = 0.5 * (1 + tl.erf(up * 0.7071067811865476))
            result = up * c
            grad_up = grad * (c + up * 0.3989422804014327 * tl.exp(-0.5 * up * up))
            """,
        ),
        lambda up: torch.nn.functional.gelu(up),
    ),
    # No published model has this one; it is not zero at zero.
    "invented": Activation(
        Epilogue(
            ("left", "right"),
            "result = tl.exp(-left * left) + tl.sin(right) * left",
            """
            result = tl.exp(-left * left) + tl.sin(right) * left
            grad_left = grad * (-2 * left * tl.exp(-left * left) + tl.sin(right))
            grad_right = grad * tl.cos(right) * left
            """,
        ),
        lambda left, right: torch.exp(-left * left) + torch.sin(right) * left,
    ),
}


@dataclass(frozen=True)
class Case:
    """routing: uniform, skewed (one expert has most), one (all to one expert), single (one token)."""

    tokens: int = 37
    experts: int = 6
    choices: int = 2
    width: int = 40
    hidden: int = 24
    routing: str = "skewed"
    activation: str = "swiglu"
    transposed: bool = False
    interleaved: bool = False
    biased: bool = False
    before: bool = False


CASES = {
    "plain": Case(),
    "interleaved, transposed, biased, clamped": Case(
        interleaved=True, transposed=True, biased=True, activation="clamped"
    ),
    "weights before, invented": Case(before=True, activation="invented", biased=True),
    "not gated": Case(activation="relu squared", transposed=True, width=33, hidden=19, choices=3),
    "gelu, biased": Case(activation="gelu", biased=True, experts=1, choices=1, routing="one"),
    "situ, all to one": Case(activation="situ", routing="one", tokens=70),
    "one token": Case(tokens=1, routing="uniform"),
    "more experts than rows": Case(tokens=9, experts=60, choices=4, routing="uniform", interleaved=True),
    "128 experts, one with 30 times the rows of the others": Case(experts=128, choices=4, width=24, hidden=16),
    "384 experts": Case(
        tokens=25, experts=384, choices=8, width=24, hidden=16, routing="uniform", transposed=True, activation="gelu"
    ),
    "896 experts, 16 choices": Case(
        tokens=9, experts=896, choices=16, width=24, hidden=16, routing="uniform", activation="situ", biased=True
    ),
    "60 experts, all to one": Case(tokens=33, experts=60, choices=1, routing="one", interleaved=True),
    "one row": Case(tokens=1, choices=1, routing="uniform", before=True),
    "odd sizes": Case(width=35, hidden=21, interleaved=True, activation="invented"),
}

LARGE = {
    name: replace(case, tokens=16 * case.tokens, width=8 * case.width, hidden=8 * case.hidden)
    for name, case in CASES.items()
}


@dataclass(frozen=True)
class Operands:
    x: Tensor
    indices: Tensor
    weights: Tensor
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    grad: Tensor

    def tensors(self) -> dict[str, Tensor]:
        named = {"x": self.x, "weights": self.weights, "up": self.up, "down": self.down}
        biases = {"up_bias": self.up_bias, "down_bias": self.down_bias}
        return named | {name: bias for name, bias in biases.items() if bias is not None}


def operands(case: Case, dtype: torch.dtype, device: str = "cpu") -> Operands:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    parts = len(ACTIVATIONS[case.activation].epilogue.inputs) * case.hidden
    up = random(case.experts, parts, case.width, scale=case.width**-0.5)
    down = random(case.experts, case.width, case.hidden, scale=case.hidden**-0.5)
    return Operands(
        random(case.tokens, case.width),
        routed(case, generator).to(device),
        torch.rand(case.tokens, case.choices, generator=generator).to(device),
        up.transpose(1, 2).contiguous() if case.transposed else up,
        random(case.experts, parts) if case.biased else None,
        down.transpose(1, 2).contiguous() if case.transposed else down,
        random(case.experts, case.width) if case.biased else None,
        random(case.tokens, case.width),
    )


def routed(case: Case, generator: torch.Generator) -> Tensor:
    """Different experts for each token; expert 3 gets nothing where others are enough."""
    scores = torch.rand(case.tokens, case.experts, generator=generator)
    if case.routing == "skewed":
        scores[:, 1] += 0.9
    if case.routing == "one":
        scores[:, 0] += 2
    if case.experts > case.choices + 2:
        scores[:, 3] = -1
    return scores.topk(case.choices, dim=1).indices


def reference(case: Case, given: Operands, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of an explicit loop over the experts in `dtype`."""
    leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in given.tensors().items()}
    x, weights = leaves["x"], leaves["weights"]
    y = torch.zeros_like(x)
    for expert in range(case.experts):
        token, choice = (given.indices == expert).nonzero(as_tuple=True)
        up, down = leaves["up"][expert], leaves["down"][expert]
        pre = x[token] @ (up if case.transposed else up.t())
        if case.biased:
            pre = pre + leaves["up_bias"][expert]
        act = _activated(case, pre)
        weight = weights[token, choice].unsqueeze(1).to(dtype)
        rows = (act * weight if case.before else act) @ (down if case.transposed else down.t())
        if case.biased:
            rows = rows + leaves["down_bias"][expert]
        y = y.index_add(0, token, rows if case.before else rows * weight)
    y.backward(given.grad.to(dtype))
    return y.detach(), {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()
    }


def _activated(case: Case, pre: Tensor) -> Tensor:
    activation = ACTIVATIONS[case.activation]
    if len(activation.epilogue.inputs) == 1:
        return activation.plain(pre)
    if case.interleaved:
        return activation.plain(pre[:, 0::2], pre[:, 1::2])
    return activation.plain(*pre.chunk(2, 1))
