"""Check a tokenizer.json: whatever file came with a model, it must not blow up a short text.

tokenizer.json -> replacements, pads, templates and patterns in it -> rejected where a short text could become a huge
one
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from truebatch.errors import DataError
from truebatch.io.text_encoding import read_text

TOKENIZER = "tokenizer.json"
MAX_BYTES = 128 << 20
MAX_GROWTH = 1000.0
"""Maximum number of characters that one may become."""
MAX_ADDED = 1_000_000
"""Maximum number of tokens that padding or a template may add to a sample."""
_REPEATED = re.compile(r"\((?:[^()\\]|\\.)*(?:[*+]|\{\d*,\d*\})\)?(?:[^()\\]|\\.)*\)(?:[*+](?!\+)|\{\d*,\})")
"""A repeated group with a repetition in it, such as `(a+)+`: a near match can take for ever."""


def read_tokenizer_text(file: Path) -> str:
    """Read a tokenizer.json and check it for rules no real tokenizer has."""
    text = read_text(file, max_bytes=MAX_BYTES)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not a tokenizer", seen=str(error)[:200], do="save the tokenizer again") from error
    if not isinstance(values, dict):
        raise DataError(f"{file} is not a tokenizer", seen=type(values).__name__, do="save the tokenizer again")
    check_tokenizer(values, file)
    return text


def check_tokenizer(values: Mapping[str, Any], file: Path) -> None:
    """Reject rules by which a short text becomes a huge one, or matching never ends."""
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        rules = list(_rules(values.get(part)))
        growth = 1.0
        for rule in rules:
            growth *= max(1.0, _growth(rule))
            _check_pattern(file, rule)
        if growth > MAX_GROWTH:
            _refuse(file, f"its {part} makes {growth:.3g} characters of one, by {len(rules)} rules")
    padding = values.get("padding")
    for name, number in _numbers(padding, "padding"):
        if number > MAX_ADDED:
            _refuse(file, f"{name}={number:,}")
    _check_template(file, values.get("post_processor"))


def _rules(part: Any) -> Iterator[Mapping[str, Any]]:
    """The rules of a part in order, including nested sequences."""
    left = [part]
    while left:
        one = left.pop()
        if not isinstance(one, Mapping):
            continue
        inner = [
            rule for name in ("normalizers", "pretokenizers", "decoders", "processors") for rule in one.get(name) or ()
        ]
        left += inner
        if not inner:
            yield one


def _growth(rule: Mapping[str, Any]) -> float:
    """The most characters that a replacing rule makes of one."""
    if rule.get("type") != "Replace":
        return 1.0
    pattern, content = rule.get("pattern"), rule.get("content")
    literal = pattern.get("String") if isinstance(pattern, Mapping) else None
    made = len(content) if isinstance(content, str) else 0
    # A regular expression may match the empty text before every character.
    return made / max(1, len(literal)) if isinstance(literal, str) else 1.0 + made


def _check_pattern(file: Path, rule: Mapping[str, Any]) -> None:
    pattern = rule.get("pattern")
    text = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    if isinstance(text, str) and (len(text) > 10_000 or _REPEATED.search(text)):
        _refuse(file, f"a pattern with nested repetition: {text[:80]!r}")


def _numbers(part: Any, name: str) -> Iterator[tuple[str, int]]:
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield from _numbers(value, f"{name}.{key}")
    elif isinstance(part, int) and not isinstance(part, bool) and not name.endswith(("_id", "direction")):
        yield name, part


def _check_template(file: Path, processor: Any) -> None:
    for rule in _rules(processor):
        for name in ("single", "pair"):
            pieces = rule.get(name)
            if isinstance(pieces, list):
                texts = sum(isinstance(piece, Mapping) and "Sequence" in piece for piece in pieces)
                if texts > 8:
                    _refuse(file, f"its post_processor writes the text {texts:,} times")


def _refuse(file: Path, seen: str) -> NoReturn:
    raise DataError(
        f"{file} has rules no tokenizer needs: a short text would become a huge one, or never end",
        seen=seen,
        do="use the tokenizer the model was published with, or save it again with save_pretrained",
    )
