"""C35: lengths that are no multiple of the chunk give the output and all gradients of the recurrence token by token."""

from __future__ import annotations

import pytest
import torch

from moec.compiler import dialect

from ..dialect.test_delta_rule import assert_same, delta, inputs, token_by_token
from ..dialect.test_kda import arguments, composition

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 130)
CHUNKS = (16, 32, 64)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_c35_the_delta_rule_ends_anywhere(length: int, chunk: int) -> None:
    given = inputs(length, batch=1, groups=1)
    assert_same(delta(given, chunk=chunk), token_by_token(given))


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_c35_the_fused_stages_end_anywhere(length: int, chunk: int) -> None:
    given = arguments(length, batch=1, value_heads=2, chunk=chunk)
    leaves = [value for value in given.values() if isinstance(value, torch.Tensor)]
    found, wanted = dialect.kda(**given), composition(**given)
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(found.shape, dtype=found.dtype, generator=generator)
    assert_same(
        [found, *torch.autograd.grad(found, leaves, gradient)],
        [wanted, *torch.autograd.grad(wanted, leaves, gradient)],
        1e-11,
    )


def test_c35_a_lost_end_is_seen() -> None:
    """The last token of a ragged chunk left out of the gate's gradient."""
    given = inputs(17, batch=1, groups=1)
    found, wanted = delta(given, chunk=16), token_by_token(given)
    found[5] = found[5].clone()
    found[5][:, 16:] = 0
    with pytest.raises(AssertionError, match="value 5"):
        assert_same(found, wanted)
