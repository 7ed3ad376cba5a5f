"""Which files are read, in which order, and what is said about the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moec.compiler.errors import DataError
from moec.runtime import find_text, sources


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A folder with text in several places, and everything that is no text."""
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "b.py").write_text("after b/")
    (tmp_path / "b" / "deep" / "x.py").write_text("deep")
    (tmp_path / "a.md").write_text("märchen", encoding="utf-8")
    (tmp_path / "empty.py").write_bytes(b"")
    (tmp_path / "blob.py").write_bytes(b"text\0more")
    (tmp_path / "latin.py").write_bytes("café".encode("latin-1"))
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.py")
    return tmp_path


def test_folders_are_read_recursively_in_sorted_order(mixed: Path) -> None:
    found = find_text([mixed])
    assert [file.name for file in found.files] == ["a.md", "b.py", "b/deep/x.py"]
    assert found.bytes == len("märchen".encode()) + 8 + 4


def test_everything_left_out_of_a_folder_is_listed_with_its_reason(mixed: Path) -> None:
    found = find_text([mixed])
    assert {(skipped.path.name, skipped.kind, skipped.detail) for skipped in found.skipped} == {
        ("empty.py", "empty", ""),
        ("blob.py", "binary", "a NUL byte at byte 4"),
        ("latin.py", "binary", "no UTF-8 at byte 3"),
        ("gone.py", "unreadable", "No such file or directory"),
        ("pipe.py", "unreadable", "not a regular file"),
    }
    assert found.describe() == "3 files, 20 bytes; skipped 5: 2 binary, 1 empty, 2 unreadable"


def test_patterns_choose_among_the_files_of_a_folder_only(mixed: Path) -> None:
    found = find_text([mixed, mixed / "a.md"], patterns=["*.py", "*.txt"])
    assert [file.name for file in found.files] == ["b.py", "b/deep/x.py", "a.md"]


def test_paths_keep_their_order_and_may_repeat(mixed: Path) -> None:
    found = find_text([mixed / "b.py", mixed / "a.md", mixed / "b.py"])
    assert [file.name for file in found.files] == ["b.py", "a.md", "b.py"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("absent.txt", r"no file or folder .*absent\.txt"),
        ("empty.py", r"empty\.py is empty"),
        ("blob.py", r"blob\.py is not text\n  why:   a NUL byte at byte 4"),
        ("latin.py", r"latin\.py is not text\n  why:   no UTF-8 at byte 3"),
        ("pipe.py", r"pipe\.py cannot be read\n  why:   not a regular file"),
    ],
)
def test_a_file_that_was_named_must_be_text(mixed: Path, name: str, text: str) -> None:
    with pytest.raises(DataError, match=text):
        find_text([mixed / "a.md", mixed / name])


def test_nothing_to_read_is_an_error_that_counts_what_was_seen(mixed: Path) -> None:
    (mixed / "none").mkdir()
    with pytest.raises(DataError, match="no text to train on"):
        find_text([mixed / "none"])
    with pytest.raises(DataError, match=r"skipped 1: 1 empty; only names like empty\.\* count"):
        find_text([mixed], patterns=["empty.*"])
    with pytest.raises(DataError, match="no path was given"):
        find_text([])


@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_characters_across_blocks_are_text_and_offsets_stay_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(sources, "BLOCK", block)
    path = tmp_path / "x.txt"
    for content, flaw in (
        ("aé漢😀z".encode(), None),
        ("aé漢".encode() + b"\xff" + b"zzz", "no UTF-8 at byte 6"),
        ("aé漢".encode() + b"\0" + b"zzz", "a NUL byte at byte 6"),
        ("aé漢".encode()[:-1], "no UTF-8 at byte 3"),
        (b"ab\xe6zzz", "no UTF-8 at byte 2"),
    ):
        path.write_bytes(content)
        if flaw is None:
            assert find_text([path]).bytes == len(content)
        else:
            with pytest.raises(DataError, match=flaw):
                find_text([path])


def test_the_fingerprint_sees_names_sizes_and_order(tmp_path: Path) -> None:
    first, second = tmp_path / "1.txt", tmp_path / "2.txt"
    first.write_text("one")
    second.write_text("two!")
    original = find_text([first, second]).fingerprint()
    assert find_text([first, second]).fingerprint() == original
    assert find_text([second, first]).fingerprint() != original
    second.write_text("two")
    assert find_text([first, second]).fingerprint() != original
