"""Errors: one text form for all of them."""

from __future__ import annotations

from moec.compiler import errors
from moec.compiler.errors import MoecError, PlanError


def test_the_text_has_what_is_known_in_a_fixed_order() -> None:
    full = PlanError("batch is 0", where="plan.batch", why="it is at least 1", hint="set it")
    assert str(full) == "batch is 0\n  where: plan.batch\n  why:   it is at least 1\n  do:    set it"
    assert str(PlanError("batch is 0", hint="set it")) == "batch is 0\n  do:    set it"
    assert (full.what, full.where, full.why, full.hint) == ("batch is 0", "plan.batch", "it is at least 1", "set it")


def test_every_error_is_a_moec_error_with_a_docstring() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(classes) > 10
    assert all(issubclass(cls, MoecError) and cls.__doc__ for cls in classes)
