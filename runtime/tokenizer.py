"""Text to token ids: bytes as they are, or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moec.compiler.errors import DataError, MoecError

Tokens = NDArray[np.int64]


class Tokenizer(Protocol):
    """What packing needs of a tokenizer.

    name: changes whenever the same text could give other ids. vocabulary: ids are below it.
    begin, end: ids put around each document, None for none.
    """

    name: str
    vocabulary: int
    begin: int | None
    end: int | None

    def encode(self, text: str) -> Tokens:
        """Token ids of a text, int64, without begin and end."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        ...


class ByteTokenizer:
    """One token per UTF-8 byte, id = byte; 256 begins a document, 257 ends it, 258 is padding."""

    name = "bytes"
    vocabulary = 259
    begin: int | None = 256
    end: int | None = 257
    padding = 258

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(int(token) for token in tokens if token < 256).decode(errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`, read by the `tokenizers` library (extra `tokenizers`).

    Which tokens begin and end a document is not in that file: `begin` and `end` name them ("<s>", "</s>"), otherwise
    bos_token and eos_token of a `tokenizer_config.json` in the same folder do, otherwise there are none.
    """

    def __init__(self, path: str | Path, begin: str | None = None, end: str | None = None) -> None:
        path = Path(path)
        self._tokenizer = _load(path)
        self.name = f"{path.name}:{hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()}"
        # Ids may have gaps, so the count of tokens is no bound.
        self.vocabulary: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        beside = _special_tokens(path.with_name("tokenizer_config.json"))
        self.begin = self._id(path, begin if begin is not None else beside.get("bos_token"))
        self.end = self._id(path, end if end is not None else beside.get("eos_token"))

    def encode(self, text: str) -> Tokens:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True))

    def _id(self, path: Path, token: str | None) -> int | None:
        if token is None:
            return None
        found: int | None = self._tokenizer.token_to_id(token)
        if found is None:
            raise DataError(f"the tokenizer has no token {token!r}", where=str(path), hint="name one that it has")
        return found


def _load(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer as Library
    except ImportError as error:
        raise MoecError(
            "tokenizer files need the `tokenizers` library", hint="pip install 'moec[tokenizers]'"
        ) from error
    if not path.is_file():
        raise DataError(f"no tokenizer file {path}", hint="give the path of a tokenizer.json")
    try:
        return Library.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"{path} is no tokenizer file", why=str(error), hint="give a Hugging Face tokenizer.json"
        ) from error


def _special_tokens(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no JSON file", why=str(error)) from error
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token"):
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if content is not None:
            found[name] = str(content)
    return found
