"""The learning rate by step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.errors import PlanError
from moec.runtime import Schedule


def test_values_of_a_short_run() -> None:
    rate = Schedule(1.0, warmup_steps=4, total_steps=12, min_ratio=0.2)
    assert [rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(4) == 1.0
    assert rate(8) == pytest.approx(0.6)  # halfway down the cosine
    assert rate(12) == pytest.approx(0.2)
    assert rate(1000) == pytest.approx(0.2)


def test_constant_keeps_its_peak_after_the_warm_up() -> None:
    rate = Schedule(3e-4, kind="constant", warmup_steps=2)
    assert [rate(step) for step in (0, 1, 2, 10**6)] == [1.5e-4, 3e-4, 3e-4, 3e-4]


@given(warmup=st.integers(0, 50), rest=st.integers(1, 200), floor=st.floats(0, 1))
def test_rises_then_falls_within_its_bounds(warmup: int, rest: int, floor: float) -> None:
    rate = Schedule(2.0, warmup_steps=warmup, total_steps=warmup + rest, min_ratio=floor)
    values = [rate(step) for step in range(warmup + rest + 5)]
    assert values[:warmup] == sorted(values[:warmup])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
    assert values[warmup] == 2.0
    assert min(values[warmup:]) >= 2.0 * floor - 1e-12
    assert all(value > 0 for value in values[:warmup])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"peak": float("nan")}, "the learning rate is nan"),
        ({"peak": 1.0, "kind": "linear"}, "unknown schedule 'linear'"),
        ({"peak": 1.0, "kind": "constant", "warmup_steps": -1}, "warmup_steps is -1"),
        ({"peak": 1.0, "total_steps": 5, "min_ratio": 1.5}, "min_ratio is 1.5"),
        ({"peak": 1.0, "warmup_steps": 5, "total_steps": 5}, "a cosine over 5 steps has no room after 5 warm-up steps"),
    ],
)
def test_impossible_schedules_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Schedule(**options)
