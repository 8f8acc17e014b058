"""A result onto the disk, again after every row: a run that is stopped keeps the rows it has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def keep_result(result: Mapping[str, Any], out: Path | None) -> None:
    """Write all that was measured so far as JSON; nothing without a file to write to."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
