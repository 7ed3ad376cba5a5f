"""Arithmetic on sizes: all functions that a graph may call beside registered ops, and how each is written.

The specs allow these and no others, and the emitted program writes them, so that the two cannot disagree.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

SIZE_OPS: dict[Callable[..., Any], str] = {
    operator.getitem: "{0}[{1}]",
    operator.add: "{0} + {1}",
    operator.sub: "{0} - {1}",
    operator.mul: "{0} * {1}",
    operator.floordiv: "{0} // {1}",
    operator.truediv: "{0} / {1}",
    operator.mod: "{0} % {1}",
    operator.pow: "{0} ** {1}",
    operator.neg: "-{0}",
    operator.eq: "{0} == {1}",
    operator.ne: "{0} != {1}",
    operator.lt: "{0} < {1}",
    operator.le: "{0} <= {1}",
    operator.gt: "{0} > {1}",
    operator.ge: "{0} >= {1}",
    math.floor: "int({0} // 1)",
    torch.sym_float: "float({0})",
    torch.sym_max: "max({0}, {1})",
    torch.sym_min: "min({0}, {1})",
    torch.sym_not: "not {0}",
}
"""Function -> Python text, {0} and {1} being its operands, in parentheses where they have operators of their own."""
