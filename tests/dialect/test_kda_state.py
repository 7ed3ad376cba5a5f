"""moec::kda_with_state: what a sequence in pieces gives is what it gives in one, on one rank or several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moec.compiler import dialect
from tests.dialect.contract import check_gradients, check_op, documents, leaves_of, rand
from tests.dialect.test_delta_rule import assert_same, with_gradients
from tests.dialect.test_kda import CASES, OPTIONAL, arguments

# What tokens have one of.
ROWS = ("q", "k", "v", "gate", "beta", "output_gate", "document_ids")


def with_state(length: int, **settings: Any) -> dict[str, Any]:
    given = arguments(length, **settings)
    batch, width, values = given["q"].shape[0], given["q"].shape[2], given["v"].shape[2]
    heads, value_heads = given["heads"], given["value_heads"]
    return given | {"initial_state": rand(batch, value_heads, width // heads, values // value_heads, seed=13)}


@pytest.mark.parametrize("case", ["K3", "bare"])
def test_op(case: str) -> None:
    sizes = {"batch": 1, "heads": 1, "value_heads": 2, "width": 2, "values": 2} | CASES[case]
    if case == "K3":
        sizes["document_ids"] = documents([2, 1])
    check_op("kda_with_state", tuple(with_state(3, **sizes).values()))


def test_only_the_final_state_is_used() -> None:
    given = with_state(3, batch=1, heads=1, value_heads=1, width=2, values=2, without=OPTIONAL)
    check_gradients(lambda *args: dialect.kda_with_state(*args)[1], tuple(given.values()))


def test_without_a_state_it_is_kda() -> None:
    given = arguments(20, document_ids=documents([11, 9], [3, 17]))
    y, final = dialect.kda_with_state(**given)
    torch.testing.assert_close(y, dialect.kda(**given), rtol=0, atol=0)
    assert (final.shape, final.dtype) == ((2, 4, 3, 2), torch.float64)


@pytest.mark.parametrize("cut", [1, 16, 21])
def test_pieces_chain(cut: int) -> None:
    """Packed documents that the cut goes through; the convolutions are outside, as they see the tokens before."""
    given = with_state(37, document_ids=documents([4, 30, 3], [37]), without=("conv_q", "conv_k", "conv_v"))
    pieces = [given | {name: given[name][:, rows] for name in ROWS} for rows in (slice(None, cut), slice(cut, None))]
    first, middle = dialect.kda_with_state(**pieces[0])
    second, final = dialect.kda_with_state(**pieces[1] | {"initial_state": middle})
    leaves = tuple(given.values())
    whole = with_gradients(dialect.kda_with_state(**given), leaves)
    assert_same(with_gradients((torch.cat((first, second), 1), final), leaves), whole, 1e-11)


def test_ranks_exchange_transitions_once() -> None:
    """S' = X S + Y for every piece of a sequence: the entering states follow from all X and Y, and so do gradients."""
    ranks, length = 3, 13
    given = with_state(
        ranks * length, document_ids=documents([20, 19], [7, 32]), without=("conv_q", "conv_k", "conv_v")
    )
    batch, heads, width, _ = given["initial_state"].shape
    one = torch.eye(width, dtype=torch.float64).expand(batch, heads, width, width)
    pieces = [given | {name: given[name].split(length, 1)[rank] for name in ROWS} for rank in range(ranks)]
    transitions = []
    for piece in pieces:
        _, begun = dialect.kda_with_state(**piece | {"initial_state": None})
        nothing = piece["v"].new_zeros(batch, length, heads * width)
        bare = {"v": nothing, "output_gate": None, "norm_weight": None, "initial_state": one}
        _, moved = dialect.kda_with_state(**piece | bare)
        transitions.append((moved, begun))
    outs = []
    for rank, piece in enumerate(pieces):
        entering = given["initial_state"]
        for moved, begun in transitions[:rank]:
            entering = moved @ entering + begun
        y, final = dialect.kda_with_state(**piece | {"initial_state": entering})
        outs.append(y)
    leaves = tuple(given.values())
    whole = with_gradients(dialect.kda_with_state(**given), leaves)
    assert_same(with_gradients((torch.cat(outs, 1), final), leaves), whole, 1e-11)


def test_no_tokens_keep_the_state() -> None:
    given = with_state(0)
    y, final = dialect.kda_with_state(**given)
    assert y.shape == given["v"].shape
    torch.testing.assert_close(final, given["initial_state"])
    (grad,) = torch.autograd.grad(final.sum(), leaves_of((given["initial_state"],)))
    assert bool((grad == 1).all())


def test_a_state_of_another_shape_is_named() -> None:
    given: dict[str, Tensor] = with_state(4)
    with pytest.raises(ValueError, match="moec::kda_with_state: initial_state has shape"):
        dialect.kda_with_state(**given | {"initial_state": rand(2, 4, 2, 3)})
