"""Bytes and tokenizer files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from moec.compiler.errors import DataError, MoecError
from moec.runtime import ByteTokenizer, FileTokenizer


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A word-level tokenizer in the Hugging Face format, with a gap in its ids."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "<s>": 3, "</s>": 9}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_bytes_are_their_own_ids() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert tokenizer.decode([256, 97, 0xC3, 0xA9, 257, 258]) == "aé"
    assert max(tokenizer.begin, tokenizer.end, tokenizer.padding) == tokenizer.vocabulary - 1


def test_a_file_gives_ids_without_special_tokens_by_itself(tokenizer_file: Path) -> None:
    tokenizer = FileTokenizer(tokenizer_file)
    assert tokenizer.encode("one two three").tolist() == [1, 2, 0]
    assert tokenizer.decode([1, 2]) == "one two"
    assert (tokenizer.begin, tokenizer.end) == (None, None)
    assert tokenizer.vocabulary == 10  # the largest id is 9, although there are 5 tokens


def test_special_tokens_come_from_arguments_or_the_config_beside(tokenizer_file: Path) -> None:
    assert FileTokenizer(tokenizer_file, begin="<s>", end="</s>").end == 9
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    (tokenizer_file.parent / "tokenizer_config.json").write_text(json.dumps(config))
    found = FileTokenizer(tokenizer_file)
    assert (found.begin, found.end) == (3, 9)
    assert FileTokenizer(tokenizer_file, end="two").end == 2


def test_the_name_follows_the_content(tokenizer_file: Path) -> None:
    before = FileTokenizer(tokenizer_file).name
    assert FileTokenizer(tokenizer_file).name == before
    tokenizer_file.write_text(tokenizer_file.read_text().replace('"two"', '"too"'))
    assert FileTokenizer(tokenizer_file).name != before


def test_errors_name_the_file(tokenizer_file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer file .*absent\.json"):
        FileTokenizer(tmp_path / "absent.json")
    with pytest.raises(DataError, match=r"has no token '<bos>'\n  where: .*tokenizer.json"):
        FileTokenizer(tokenizer_file, begin="<bos>")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(DataError, match=r"other\.json is no tokenizer file"):
        FileTokenizer(tmp_path / "other.json")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is no JSON file"):
        FileTokenizer(tokenizer_file)


def test_without_the_library_the_error_says_what_to_install(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MoecError, match=r"pip install 'moec\[tokenizers\]'"):
        FileTokenizer(tokenizer_file)
