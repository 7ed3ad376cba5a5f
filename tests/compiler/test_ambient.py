"""Ambient tensors: scopes nest, hide and end, also by an exception."""

from __future__ import annotations

import pytest
import torch

from moec.compiler.ambient import ambient, ambient_scope, current


def test_scopes_nest_hide_and_end() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    assert ambient("a") is None
    with ambient_scope(a=one, b=None):
        assert ambient("a") is one
        assert ambient("b") is None
        with ambient_scope(b=two):
            assert list(current()) == ["a", "b"]
            with ambient_scope(a=None):
                assert ambient("a") is None
                assert list(current()) == ["b"]
        assert list(current()) == ["a"]
    assert current() == {}


def test_an_exception_ends_a_scope() -> None:
    with pytest.raises(RuntimeError), ambient_scope(a=torch.ones(1)):
        raise RuntimeError
    assert ambient("a") is None


def test_what_current_returns_is_a_copy() -> None:
    with ambient_scope(a=torch.ones(1)):
        current().clear()
        assert ambient("a") is not None
