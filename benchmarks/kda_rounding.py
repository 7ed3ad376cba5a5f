"""Where the error of A_log's gradient comes from: one chunk of KDA on a CPU, with and without the kernels' rounding.

    python benchmarks/kda_rounding.py [--draws 40] [--gates mixed]

The gradient of A_log is one sum over all tokens and channels that mostly cancels. The steps of the kernels that lead to
it, for one chunk of 64 tokens with "bounded" gates and K = V = 128, are made in float32 with what the kernels round to
bfloat16 rounded, or not; beside them the reference in bfloat16, all against float64. Without rounding the error is
that of the float32 sums.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moec.compiler.dialect  # noqa: F401  registers moec::kda
from moec.compiler.dialect.conv import mix

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.kernels import kda_cases

CHUNK, HALF = 64, 32
PLACE = kda_cases.NAMES.index("A_log")
Round = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--gates", choices=("mixed", "fast", "slow", "bound"), default="mixed")
    options = parser.parse_args()
    errors: dict[str, list[Tensor]] = {"rounded": [], "not rounded": [], "reference": []}
    sizes = []
    for seed in range(options.draws):
        arguments = kda_cases.inputs(
            CHUNK, heads=2, value_heads=2, width=128, value_width=128, dtype=torch.bfloat16, seed=seed,
            gates=options.gates,
        )  # fmt: skip
        grad = kda_cases.grad_for(arguments, seed + 1000)
        truth = kda_cases.reference(arguments, grad)[1 + PLACE]
        found = {
            "rounded": emulated(arguments, grad, lambda x: x.bfloat16().float()),
            "not rounded": emulated(arguments, grad, lambda x: x),
            "reference": torch.ops.moec.kda_backward(grad, *arguments)[PLACE].double(),
        }
        sizes.append(truth.norm())
        for name, value in found.items():
            errors[name].append((value - truth).norm())
    size = torch.stack(sizes)
    reference = torch.stack(errors["reference"])
    for name, values in errors.items():
        error = torch.stack(values)
        relative, ratio = error / size, error / reference
        print(
            f"{name}: median {relative.median():.1e}, most {relative.max():.1e} of the gradient; root mean square "
            f"{error.square().mean().sqrt() / reference.square().mean().sqrt():.2f} of the reference's, in one draw at "
            f"most {ratio.max():.1f}"
        )


def emulated(arguments: list[Any], grad: Tensor, rounded: Round) -> Tensor:
    """The gradient of A_log [HV] by the steps of the kernels, for as many value heads as heads and one chunk."""
    q, k, v, gate, beta, A_log, dt_bias, *taps, output_gate, norm_weight = (value.float() for value in arguments[:12])
    lower_bound, l2_eps, norm_eps, scale = (arguments[place] for place in (16, 17, 18, 20))
    heads = arguments[13]
    q, k, v = (torch.nn.functional.silu(mix(x, w, None)) for x, w in zip((q, k, v), taps, strict=True))
    by_head = (x[0].unflatten(-1, (heads, -1)).unbind(1) for x in (q, k, v, gate, output_gate, grad.float()))
    found = []
    for head, (q_row, k_row, value, logits, opening, grad_y) in enumerate(zip(*by_head, strict=True)):
        unit_q, unit_k = (x * torch.rsqrt((x * x).sum(1, keepdim=True) + l2_eps) for x in (q_row, k_row))
        unit_q, unit_k, value = rounded(scale * unit_q), rounded(unit_k), rounded(value)
        rate = A_log[head].exp()
        logits = logits + dt_bias.unflatten(0, (heads, -1))[head]
        sums = (lower_bound * torch.sigmoid(rate * logits) / math.log(2)).cumsum(0)
        strength = torch.sigmoid(beta[0, :, head])[:, None]

        keys, queries = torch.zeros(CHUNK, CHUNK), torch.zeros(CHUNK, CHUNK)
        for down, up, meet in _meetings(sums):
            right = rounded(unit_k * up).T
            keys += (rounded(unit_k * down) @ right).where(meet, torch.zeros(()))
            queries += (rounded(unit_q * down) @ right).where(meet, torch.zeros(()))
        pairs = rounded(queries.tril())
        system = torch.eye(CHUNK) + strength * keys.tril(-1)
        inverse = rounded(torch.linalg.solve_triangular(system, torch.eye(CHUNK), upper=False))
        updates = rounded(inverse @ rounded(strength * value))

        grad_o = rounded(_through_norm(grad_y, pairs @ updates, torch.sigmoid(opening) * norm_weight, norm_eps))
        right = rounded((inverse.T @ rounded(pairs.T @ grad_o)) * strength)
        grad_keys, grad_queries = -(right @ updates.T).tril(-1), (grad_o @ updates.T).tril(-1)
        range_ = 2.0 ** math.ceil(math.log2(max(grad_keys.abs().max(), grad_queries.abs().max())))
        grad_keys, grad_queries = rounded(grad_keys / range_), rounded(grad_queries / range_)
        along = torch.zeros_like(sums)
        for down, up, meet in _meetings(sums):
            right, left, key_left = rounded(unit_k * up), rounded(unit_q * down), rounded(unit_k * down)
            of_keys, of_queries = (x.where(meet, torch.zeros(())) for x in (grad_keys, grad_queries))
            along += (of_queries @ right) * left + (of_keys @ right) * key_left
            along -= (of_queries.T @ left + of_keys.T @ key_left) * right
        grad_g = range_ * along.flip(0).cumsum(0).flip(0)
        slope = lower_bound * rate * torch.sigmoid(rate * logits) * torch.sigmoid(-rate * logits)
        found.append((grad_g * slope * logits).sum())
    return torch.stack(found).double()


def _meetings(sums: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Factors of rows and columns up to where they meet, and which pairs do: across the middle, then in each half."""
    row = torch.arange(CHUNK)
    later = (row >= HALF)[:, None]
    factor = torch.exp2(-(sums - sums[HALF - 1]).abs())
    yield factor * later, factor * ~later, later & ~later.T
    exponent = sums - torch.where(later, sums[HALF + HALF // 2], sums[HALF // 2])
    yield torch.exp2(exponent), torch.exp2(-exponent), later == later.T


def _through_norm(grad: Tensor, o: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The gradient of o, from that of its RMS norm times `weight`."""
    inverse = torch.rsqrt((o * o).mean(1, keepdim=True) + eps)
    normal, grad = o * inverse, grad * weight
    return inverse * (grad - normal * (grad * normal).mean(1, keepdim=True))


if __name__ == "__main__":
    main()
