"""Count the tokens of a text with the tokenizer of the user's model.

Only the `tokenizers` package is used, never transformers: planning does not import torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truebatch.errors import ConfigError
from truebatch.planning.lengths.tokenizer_file import read_tokenizer_text


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer and a hash of the file it came from."""

    inner: Any
    fingerprint: str

    def count(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of every text, including the special tokens the tokenizer adds; never truncated or
        padded."""
        return [len(one.ids) for one in self.inner.encode_batch_fast(list(texts))]


def load_tokenizer(folder: str | Path | None) -> Tokenizer | None:
    """The tokenizer in a local folder (its tokenizer.json); None without a folder."""
    if folder is None:
        return None
    file = Path(folder)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise ConfigError(
            "the tokenizer must be a local folder with a tokenizer.json",
            seen=f"no file {file}",
            do="save it there: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)",
        )
    data = read_tokenizer_text(file).encode()
    return Tokenizer(_parse(file, data), hashlib.blake2b(data, digest_size=16).hexdigest())


def _parse(file: Path, data: bytes) -> Any:
    try:
        from tokenizers import Tokenizer as Inner
    except ImportError as error:
        raise ConfigError(
            "counting tokens needs the package tokenizers", seen=str(error), do="pip install tokenizers"
        ) from error
    try:
        inner = Inner.from_buffer(data)
    except ValueError as error:
        raise ConfigError(f"{file} is not a tokenizer", seen=str(error)[:200], do="save the tokenizer again") from error
    # A saved tokenizer may still have truncation and padding enabled; a length needs neither.
    inner.no_truncation()
    inner.no_padding()
    return inner
