"""Which tensors share bytes: views of one memory, whether they overlap or only lie side by side."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moec.compiler.overlap import overlapping

MEMORY = torch.randn(6, 8)


@pytest.mark.parametrize(
    ("one", "two", "share"),
    [
        (MEMORY[:3], MEMORY[3:], False),
        (MEMORY[:4], MEMORY[3:], True),
        (MEMORY[:, :4], MEMORY[:, 4:], False),
        (MEMORY[:, :5], MEMORY[:, 4:], True),
        (MEMORY[::2], MEMORY[1::2], False),
        (MEMORY, MEMORY.t(), True),
        (MEMORY[2], MEMORY.view(torch.int32)[2, 3:], True),
        (MEMORY[0, :1].expand(5), MEMORY[0], True),
        (MEMORY[:0], MEMORY, False),
        (MEMORY, MEMORY.clone(), False),
        (nn.Parameter(MEMORY), nn.Parameter(MEMORY), True),
    ],
)
def test_pairs(one: Tensor, two: Tensor, share: bool) -> None:
    assert overlapping({"one": one, "two": two}) == ([("one", "two")] if share else [])
    assert bool(overlapping({"two": two, "one": one})) == share


def test_one_object_under_two_names_is_no_pair() -> None:
    assert overlapping({"one": MEMORY, "two": MEMORY}) == []


def test_every_pair_of_several_is_found() -> None:
    long, left, right = MEMORY.view(-1), MEMORY[0], MEMORY[5]
    assert sorted(map(sorted, overlapping({"long": long, "left": left, "right": right}))) == [
        ["left", "long"],
        ["long", "right"],
    ]


def test_tensors_without_data_share_what_their_storages_would() -> None:
    meta, other = torch.empty(3, device="meta"), torch.empty(3, device="meta")
    assert overlapping({"one": meta, "two": meta[:2]}) in ([("one", "two")], [("two", "one")])
    assert overlapping({"one": meta[:1], "two": meta[1:], "other": other}) == []
