"""When copies to and from host memory begin and end, on calls with round numbers."""

from __future__ import annotations

import random

import pytest

from moec.compiler.cache_schedule import END, outside
from moec.compiler.cache_timing import Call, prefetches, releases


def layers(*copies: float) -> list[Call]:
    """Layers "0", "1", ... of one second each; each makes, or reads, a value that is copied for so many seconds."""
    return [Call(str(n), n, n + 1, ((0.5, seconds),) if seconds else ()) for n, seconds in enumerate(copies)]


def test_copies_out_are_waited_for_behind_the_first_layer_that_ends_later() -> None:
    found, wait = releases(layers(1.0, 0.0, 2.0, 0.0, 0.0), 5.0)
    assert found == {"1": ("0",), "4": ("2",)}
    assert wait == 0.0


def test_the_link_moves_one_value_after_the_other_and_forward_waits_for_the_last() -> None:
    found, wait = releases(layers(3.0, 3.0, 0.0), 3.0)
    assert found == {END: ("0", "1")}
    assert wait == pytest.approx(0.5 + 3.0 + 3.0 - 3.0)


def test_copies_back_start_as_late_as_they_can() -> None:
    found, wait = prefetches(layers(0.0, 0.0, 0.0, 1.0))
    assert found == {"2": ("3",)}
    assert wait == 0.0


def test_backward_waits_for_what_cannot_be_there_in_time() -> None:
    found, wait = prefetches(layers(2.0, 1.0))
    assert found == {END: ("0",), "0": ("1",)}
    assert wait == pytest.approx(1.5)


def test_a_value_outside_of_layers_is_waited_for_and_starts_at_layers() -> None:
    early, late = Call(outside("x"), 0.0, 0.0, ((0.0, 1.5),)), Call(outside("y"), 3.0, 3.0, ((0.0, 0.25),))
    calls = [early, *layers(0.0, 0.0, 0.0), late]
    assert releases(calls, 3.5) == ({"1": (":x",), END: (":y",)}, 0.0)
    assert prefetches(calls) == ({END: (":x",), "2": (":y",)}, 1.5)


@pytest.mark.parametrize("seed", range(20))
def test_every_copy_out_ends_before_the_first_copy_back(seed: int) -> None:
    """Each holder is released once, by the end of forward, and prefetched once, in backward: the link is never busy in
    both directions."""
    chance = random.Random(seed)
    forward = layers(*(chance.choice([0.0, 0.3, 1.0, 2.5]) for _ in range(12)))
    backward = [Call(c.holder, 11 - n, 12 - n, c.copies) for n, c in enumerate(forward)][::-1]
    released, forward_wait = releases(forward, 12.0)
    fetched, _ = prefetches(backward)
    holders = sorted(call.holder for call in forward if call.copies)
    for schedule in (released, fetched):
        assert sorted(holder for held in schedule.values() for holder in held) == holders
        assert schedule.keys() <= {END, *(call.holder for call in forward)}
    free = 0.0
    for call in forward:
        for made, took in call.copies:
            free = max(free, call.begin + made) + took
    assert free <= 12.0 + forward_wait
