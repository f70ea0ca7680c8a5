"""Text to token ids, without anything that a tokenizer would add by itself: separators are the corpus's business."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedshard.core.errors import Fault, InputError

BYTES = "bytes"
BYTE_SEPARATOR = 256


class Tokenizer(Protocol):
    """What the corpus needs of a tokenizer."""

    separator: int
    """The id that ends a document."""
    highest_id: int
    """The highest id it can give, added tokens included."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, nothing added."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0–255; the separator is 256.

    >>> ByteTokenizer().encode(["hé"])[0].tolist()
    [104, 195, 169]
    """

    separator = BYTE_SEPARATOR
    highest_id = BYTE_SEPARATOR

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


class FolderTokenizer:
    """A folder's `tokenizer.json`; the separator is its end-of-text token.

    Raises InputError where the folder holds no readable `tokenizer.json`, or names no end-of-text token that is in
    the vocabulary.
    """

    def __init__(self, folder: Path):
        import tokenizers  # a third of a second that byte runs and cached corpora need not pay

        path = folder / "tokenizer.json"
        if not path.is_file():
            mend = "Give a folder with one; `save_pretrained` of a transformers tokenizer writes it."
            raise InputError([Fault("data.tokenizer", f"{folder} holds no tokenizer.json", mend)])
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise InputError([Fault("data.tokenizer", f"{path} cannot be read ({error})", "Save it anew.")]) from error
        # A document is encoded whole, and text that merely looks like a special token must not end it.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.highest_id = max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.separator = self._end_of_text(folder)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, on all cores."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.uint32) for each in encoded]

    def _end_of_text(self, folder: Path) -> int:
        tokens = [settings["eos_token"] for settings in _settings(folder) if settings.get("eos_token")]
        if not tokens:
            says = f"{folder} names no end-of-text token, which separates documents"
            raise InputError([Fault("data.tokenizer", says, "Set eos_token in its tokenizer_config.json.")])
        token = tokens[0]["content"] if isinstance(tokens[0], dict) else tokens[0]
        separator = self._tokenizer.token_to_id(token)
        if separator is None:
            says = f"the end-of-text token {token!r} of {folder} is not in its vocabulary"
            raise InputError([Fault("data.tokenizer", says, "Set eos_token to a token that is.")])
        return separator


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `bytes`, or a folder. Raises InputError as FolderTokenizer does."""
    return ByteTokenizer() if name == BYTES else FolderTokenizer(Path(name))


def tokenizer_digest(name: str) -> str:
    """A hash of all that decides what the tokenizer gives; cheap, the tokenizer is not built."""
    if name == BYTES:
        return BYTES
    digest = hashlib.blake2b(digest_size=16)
    for path in _files(Path(name)):
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()


def _settings(folder: Path) -> Iterator[dict[str, Any]]:
    """What the files beside `tokenizer.json` say, the most binding first."""
    for path in _files(folder)[1:]:
        try:
            yield json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError([Fault("data.tokenizer", f"{path} is not JSON ({error})", "Save it anew.")]) from None


def _files(folder: Path) -> list[Path]:
    """The files that decide what the tokenizer gives, `tokenizer.json` first."""
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    return [folder / name for name in names if (folder / name).is_file()]
