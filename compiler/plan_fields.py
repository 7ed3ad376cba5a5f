"""Typed fields of a plan: dataclasses built from plain values, each value checked and given its exact type.

An unknown field, a wrong type and a broken rule raise PlanError naming the field.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from moec.compiler.errors import PlanError


def convert_fields(plan: Any, prefix: str) -> None:
    """Check every field's type, and give it the exact one: a list becomes a tuple, a whole number a float."""
    for name, hint in typing.get_type_hints(type(plan)).items():
        object.__setattr__(plan, name, _convert(hint, getattr(plan, name), f"{prefix}{name}"))


def build_fields(cls: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    known = {item.name: item for item in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    arguments = {}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4)
            raise PlanError(
                f"unknown plan field {prefix}{name}",
                where=f"plan.{prefix}{name}",
                hint=f"did you mean {', '.join(near)}?" if near else f"known fields: {', '.join(known)}",
            )
        arguments[name] = _convert(hints[name], value, f"{prefix}{name}")
    return cls(**arguments)


def _convert(hint: Any, value: Any, name: str) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, typing.cast(type[Any], hint)):
            return value
        if not isinstance(value, Mapping):
            raise _type_error(name, value, "a mapping of fields")
        return build_fields(typing.cast(type[Any], hint), value, f"{name}.")
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        return _convert_to_one([option for option in options if option is not type(None)], value, name)
    if origin is Literal:
        if value not in options:
            raise _type_error(name, value, f"one of {', '.join(map(str, options))}")
        return value
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise _type_error(name, value, "a list")
        if options[-1] is not Ellipsis and len(options) != len(value):
            raise _type_error(name, value, f"a list of {len(options)}")
        return tuple(_convert(options[0], item, name) for item in value)
    given, value = value, number(value) if hint in (int, float) else value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise _type_error(name, given, _WORDS.get(hint, "text"))
    return value


def _convert_to_one(options: Sequence[Any], value: Any, name: str) -> Any:
    """The value as the first of several types that it is one of; the error is that of the last one."""
    for option in options[:-1]:
        try:
            return _convert(option, value, name)
        except PlanError:
            continue
    wants_list = typing.get_origin(options[-1]) is tuple and isinstance(value, str)
    return _convert(options[0] if wants_list else options[-1], value, name)


_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def number(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text; a plan means the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _type_error(name: str, value: Any, wanted: str) -> PlanError:
    return PlanError(f"plan field {name} is {value!r}", where=f"plan.{name}", why=f"it must be {wanted}")


def require(condition: bool, name: str, found: str, rule: str, hint: str = "") -> None:
    if not condition:
        raise PlanError(f"plan field {name} {found}", where=f"plan.{name}", why=rule, hint=hint)
