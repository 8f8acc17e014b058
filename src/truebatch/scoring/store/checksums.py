"""A checksum for a record of a journal: whether it still is what was written, not who wrote it.

It finds a score that was edited by hand, a bit that the disk has turned, a record moved to another batch. Who can write
the file can also compute the checksum: it is no signature.
"""

from __future__ import annotations

import hashlib
from typing import Any

Record = tuple[str, int, str, float | None, str, int, str, str, str, int]
"""key, batch, status, score, output as JSON, tokens, stage, kind, message, attempts: as a journal holds them."""
_NUM_BYTES = 8


def record_checksum(record: Record | tuple[Any, ...]) -> str:
    """Of all values of a record, each with its length: no text can stand for a part of another."""
    key, batch, status, score, output, tokens, stage, kind, message, attempts = record
    text = (
        f"{batch!r} {status!r} {score!r} {tokens!r} {attempts!r} {len(key)} {len(output)} {len(stage)} {len(kind)} "
        f"{key}{output}{stage}{kind}{message}"
    )
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_NUM_BYTES).hexdigest()


def is_whole(record: tuple[Any, ...], checksum: object) -> bool:
    """Whether a record that was read is the one that was written."""
    try:
        return record_checksum(record) == checksum
    except (TypeError, ValueError):  # a value of another kind than any that is written
        return False
