"""What a benchmark measures, chosen by name on its command line."""

from __future__ import annotations

from collections.abc import Sequence

from truebatch.errors import ConfigError
from truebatch.io.text_encoding import nearest


def read_names(text: str, known: Sequence[str], *, kind: str) -> tuple[str, ...]:
    """The names in a text with commas, in the order of `known`; names may hold commas themselves, others are refused."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    found: set[str] = set()
    while parts:
        sizes = [size for size in range(len(parts), 0, -1) if ", ".join(parts[:size]) in known]
        if not sizes:
            raise ConfigError(
                f"there is no such {kind}{nearest(parts[0], list(known))}",
                seen=repr(parts[0]),
                do=f"use {'; '.join(known)}",
            )
        found.add(", ".join(parts[: sizes[0]]))
        parts = parts[sizes[0] :]
    return tuple(name for name in known if name in found)
