"""Packed batches: every token once per epoch, boundaries, a fixed order, and going on from a saved position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moec.compiler.errors import DataError
from moec.runtime import ByteTokenizer, PackedText, data, sources
from moec.runtime.packing import IGNORED, pack_row
from moec.runtime.tokenizer import Tokens
from tests.runtime.toy import toy_data, write_corpus

REUSE_FOLDER = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _stream(batches: PackedText, tokens: int) -> list[int]:
    """The first tokens of the stream, row after row."""
    found: list[int] = []
    while len(found) < tokens:
        found += next(batches)["input_ids"].flatten().tolist()
    return found[:tokens]


def _documents(stream: list[int]) -> list[bytes]:
    """Whole documents of a byte stream."""
    found: list[bytes] = []
    for token in stream:
        if token == 256:
            found.append(b"")
        elif token < 256:
            found[-1] += bytes([token])
    return found


def test_pack_row_marks_every_start() -> None:
    row = pack_row([np.array([5, 6, 7]), np.array([8]), np.array([9, 4])])
    assert row.tokens.tolist() == [5, 6, 7, 8, 9, 4]
    assert row.labels.tolist() == [IGNORED, 6, 7, IGNORED, IGNORED, 4]
    assert row.document_ids.tolist() == [0, 0, 0, 1, 2, 2]


def test_a_batch_has_the_shapes_of_the_plan(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    batch = next(toy_data(tmp_path))
    assert {name: (tuple(value.shape), value.dtype) for name, value in batch.items()} == {
        name: ((2, 2, 16), torch.int64) for name in ("input_ids", "labels", "document_ids")
    }
    assert next(toy_data(tmp_path, accumulation=1))["labels"].shape == (2, 16)
    assert set(next(toy_data(tmp_path, packing=False))) == {"input_ids", "labels"}


def test_a_document_that_does_not_fit_goes_on_as_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh")
    (tmp_path / "b.txt").write_text("XY")
    batch = next(PackedText([tmp_path], batch=3, length=5, shuffle=False))
    a, b = [256, *b"abcdefgh", 257], [256, *b"XY", 257]
    assert batch["input_ids"].flatten().tolist() == [*a, *b, 256]
    assert batch["document_ids"].tolist() == [[0] * 5, [0] * 5, [0, 0, 0, 0, 1]]
    starts = batch["labels"] == IGNORED
    assert starts.tolist() == [[True] + [False] * 4, [True] + [False] * 4, [True, False, False, False, True]]
    assert torch.equal(batch["labels"][~starts], batch["input_ids"][~starts])


def test_each_epoch_reads_every_document_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, files=12)
    wanted = sorted(path.read_bytes() for path in folder.iterdir())
    size = sum(len(text) + 2 for text in wanted)
    stream = _stream(toy_data(folder), 2 * size)
    first, second = _documents(stream[:size]), _documents(stream[size:])
    assert sorted(first) == wanted
    assert sorted(second) == wanted
    assert first != second


def test_the_order_depends_on_the_seed_alone(tmp_path: Path) -> None:
    one, two = write_corpus(tmp_path / "one"), write_corpus(tmp_path / "two")
    first = _stream(toy_data(one), 700)
    assert _stream(toy_data(two), 700) == first
    assert _stream(toy_data(one, seed=4), 700) != first
    unshuffled = _documents(_stream(toy_data(one, shuffle=False), 700))
    assert unshuffled[:5] == [path.read_bytes() for path in sorted(one.iterdir())]


def test_the_order_is_the_same_on_every_machine(tmp_path: Path) -> None:
    write_corpus(tmp_path, files=8)
    stream = toy_data(tmp_path, seed=0)
    names = [document[:6] for document in _documents(_stream(stream, 2000))[:8]]
    assert names == [b"file %d" % index for index in (3, 4, 2, 6, 5, 0, 1, 7)]


@REUSE_FOLDER
@given(
    texts=st.lists(st.text(min_size=1, max_size=40).filter(lambda text: "\0" not in text), min_size=1, max_size=6),
    length=st.integers(2, 20),
    block=st.integers(5, 30),
    stop=st.integers(0, 12),
)
def test_packing_loses_nothing_and_resumes_anywhere(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], length: int, block: int, stop: int
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    for index, text in enumerate(texts):
        (folder / f"{index:02}").write_text(text, encoding="utf-8", newline="")
    options: dict[str, Any] = {"batch": 2, "length": length, "seed": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "BLOCK", block)
        patch.setattr(sources, "BLOCK", block)
        whole = PackedText([folder], **options)
        contents = [(folder / file.name).read_bytes() for file in whole.sources.files]
        size = sum(len(content) + 2 for content in contents)
        batches = [next(whole) for _ in range(stop + size // (2 * length) + 1)]
        stream = [token for batch in batches for token in batch["input_ids"].flatten().tolist()]
        assert sorted(_documents(stream[:size])) == sorted(contents)
        for batch in batches:
            ids, starts = batch["document_ids"], batch["labels"] == IGNORED
            assert starts[:, 0].all()
            assert torch.equal(starts[:, 1:], ids.diff() == 1)
            assert torch.equal(starts[:, 1:], batch["input_ids"][:, 1:] == 256)
        early = PackedText([folder], **options)
        for _ in range(stop):
            next(early)
        position = json.loads(json.dumps(early.state_dict()))
        later = PackedText([folder], **options)
        next(later)
        later.load_state_dict(position)
        for expected in batches[stop:]:
            found = next(later)
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def _rows_of_steps(folder: Path, ranks: int, batch: int, accumulation: int, steps: int) -> list[list[list[int]]]:
    """Per step, the rows that all ranks read, in the order (microbatch, rank, row)."""
    own = [toy_data(folder, batch=batch, accumulation=accumulation, ranks=ranks, rank=rank) for rank in range(ranks)]
    found = []
    for _ in range(steps):
        batches = [next(data)["input_ids"].view(accumulation, batch, -1) for data in own]
        found.append(torch.stack(batches, dim=1).flatten(0, 2).tolist())
    assert all(data.state_dict() == own[0].state_dict() for data in own)
    return found


@pytest.mark.parametrize(("ranks", "batch", "accumulation"), [(2, 3, 2), (3, 2, 2), (4, 3, 1), (1, 6, 2), (12, 1, 1)])
def test_a_step_reads_the_same_rows_on_any_number_of_ranks(
    tmp_path: Path, ranks: int, batch: int, accumulation: int
) -> None:
    write_corpus(tmp_path)
    expected = _rows_of_steps(tmp_path, 1, 12, 1, 5)
    assert len({tuple(row) for step in expected for row in step}) > 25
    assert _rows_of_steps(tmp_path, ranks, batch, accumulation, 5) == expected


def test_a_position_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    expected = _rows_of_steps(tmp_path, 1, 12, 1, 4)
    first = toy_data(tmp_path, batch=3, accumulation=1, ranks=4, rank=2)
    next(first)
    next(first)
    later = [toy_data(tmp_path, batch=6, accumulation=1, ranks=2, rank=rank) for rank in range(2)]
    for source in later:
        source.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in expected[2:]:
        assert [row for source in later for row in next(source)["input_ids"].tolist()] == step


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "BLOCK", 64)
    lines = "".join(f"line {index}\n" for index in range(1000))
    (tmp_path / "long.txt").write_text(lines)
    longest = 0

    class Watching(ByteTokenizer):
        def encode(self, text: str) -> Tokens:
            nonlocal longest
            longest = max(longest, len(text))
            assert text.endswith("\n")
            return super().encode(text)

    batches = PackedText([tmp_path], batch=1, length=500, tokenizer=Watching())
    assert _documents(_stream(batches, len(lines) + 2)) == [lines.encode()]
    assert 0 < longest <= 64


def test_describe_says_what_was_left_out(tmp_path: Path) -> None:
    write_corpus(tmp_path, files=2)
    (tmp_path / "x.bin").write_bytes(b"\0")
    assert toy_data(tmp_path).describe().endswith("skipped 1: 1 binary; tokenizer bytes, vocabulary 259")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 9}, "seed was 3, now it is 9"),
        ({"shuffle": False}, "shuffle was True, now it is False"),
        ({"patterns": ["[0-3].txt"]}, "files was 5, now it is 4"),
    ],
)
def test_a_position_of_other_data_is_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    write_corpus(tmp_path)
    position = toy_data(tmp_path).state_dict()
    with pytest.raises(DataError, match=f"the data differs from the checkpoint's: {text}"):
        toy_data(tmp_path, **change).load_state_dict(position)


def test_a_resized_or_renamed_file_is_other_data(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    position = toy_data(tmp_path).state_dict()
    (tmp_path / "0.txt").rename(tmp_path / "00.txt")
    with pytest.raises(DataError, match="names_and_sizes was"):
        toy_data(tmp_path).load_state_dict(position)


def test_a_file_that_changes_during_the_run_is_named(tmp_path: Path) -> None:
    write_corpus(tmp_path, files=1)
    batches = toy_data(tmp_path)
    with (tmp_path / "0.txt").open("a") as stream:
        stream.write("!")
    with pytest.raises(DataError, match=r"0\.txt changed while it is being trained on\n  why:   it had 33 bytes, now"):
        next(batches)
    (tmp_path / "0.txt").write_bytes(b"x" * 32 + b"\xff")
    with pytest.raises(DataError, match="no UTF-8 at byte 32"):
        next(batches)
    (tmp_path / "0.txt").unlink()
    with pytest.raises(DataError, match="No such file"):
        next(batches)


def test_a_tokenizer_that_gives_nothing_is_an_error_not_an_endless_loop(tmp_path: Path) -> None:
    class Silent(ByteTokenizer):
        begin = end = None

        def encode(self, text: str) -> Tokens:
            return super().encode("")

    write_corpus(tmp_path)
    with pytest.raises(DataError, match="the tokenizer gives no token for any file"):
        next(toy_data(tmp_path, tokenizer=Silent()))


def test_a_small_vocabulary_and_impossible_sizes_are_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    with pytest.raises(DataError, match="the tokenizer bytes has 259 tokens, the model has 256"):
        toy_data(tmp_path, vocabulary=256)
    for name, least in (("batch", 1), ("length", 2), ("accumulation", 1)):
        with pytest.raises(DataError, match=f"{name} is {least - 1}, the least is {least}"):
            toy_data(tmp_path, **{name: least - 1})
