"""A name always stands for whole content, whatever moment the process dies at."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from moec.runtime import durable


class Killed(BaseException):
    """Stands in for the end of the process."""


def _die(*args: object, **options: object) -> None:
    raise Killed


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_file_is_the_old_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    path = tmp_path / "x"
    durable.write_file(path, b"old")
    monkeypatch.setattr(os, moment, _die)
    with pytest.raises(Killed):
        durable.write_file(path, b"new")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    durable.write_file(path, b"new")
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("x", b"new")]


def test_content_is_flushed_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda source, target: (calls.append("replace"), replace(source, target)))
    durable.write_file(tmp_path / "x", b"content")
    assert calls == ["fsync", "replace", "fsync"]


def test_a_folder_under_removal_has_lost_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "file").write_text("content")
    calls: list[Path] = []

    def die_inside(path: Path, ignore_errors: bool = False) -> None:
        calls.append(path)
        if not ignore_errors:
            raise Killed

    monkeypatch.setattr(shutil, "rmtree", die_inside)
    with pytest.raises(Killed):
        durable.remove_folder(folder)
    assert not folder.exists()
    monkeypatch.undo()
    assert calls[-1].exists()
    durable.remove_partials(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_publishing_replaces_a_folder_as_a_whole(tmp_path: Path) -> None:
    for name, content in (("step", "old"), (".partial-step", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / content).write_text(content)
    durable.publish(tmp_path / ".partial-step", tmp_path / "step")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["step", "step/new"]
