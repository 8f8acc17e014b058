"""What the tokens of a tokenizer mean in bytes, however it spells them: `▁the` and `Ġthe` are both b" the".

tokenizer -> how it spells (its decoder) -> bytes of every token; special tokens mean no bytes, they have roles
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

Speller = Callable[[str], bytes]
ROLES = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
"""Special tokens are matched by what they are for."""
_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Any, *, size: int) -> list[bytes | None]:
    """[size] the bytes of every id; None for special tokens and ids without a token."""
    spell, special = spelling_of(tokenizer), set(tokenizer.all_special_ids)
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    found: list[bytes | None] = [None] * size
    for token, number in tokenizer.get_vocab().items():
        if number < size and number not in special:
            found[number] = added[number].encode() if number in added else spell(token)
    return found


def ids_of_bytes(tokenizer: Any) -> dict[bytes, int]:
    """The id of every run of bytes; a piece of one byte only where nothing else spells it."""
    single = _byte_pieces(tokenizer)
    found: dict[bytes, int] = {}
    for number, spelled in enumerate(token_bytes(tokenizer, size=1 + max(tokenizer.get_vocab().values()))):
        if spelled and (spelled not in found or (found[spelled] in single and number not in single)):
            found[spelled] = number
    return found


def _byte_pieces(tokenizer: Any) -> set[int]:
    """Ids of pieces such as <0x41>, which write a byte that no other token spells."""
    return {number for token, number in tokenizer.get_vocab().items() if _BYTE.fullmatch(token)}


def spelling_of(tokenizer: Any) -> Speller:
    """How a tokenizer writes bytes as text: byte for byte in the letters of GPT-2, with ▁ for a space, or plainly."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str())["decoder"] if backend is not None else None
    kinds = _kinds(decoder)
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"Metaspace", "ByteFallback"} or _SPACE in json.dumps(decoder, ensure_ascii=False):
        return _with_space
    return str.encode


def begins_with_space(tokenizer: Any) -> bool:
    """Whether a text is read as if a space stood in front of it, as sentencepiece does."""
    ids = [i for i in tokenizer("a")["input_ids"] if i not in set(tokenizer.all_special_ids)]
    spelled = token_bytes(tokenizer, size=1 + max(tokenizer.get_vocab().values()))
    return bool(ids) and (spelled[ids[0]] or b"").startswith(b" ")


def special_ids(tokenizer: Any) -> dict[str, int]:
    """The special tokens that have a role, by role."""
    found = {role: getattr(tokenizer, role, None) for role in ROLES}
    return {role: number for role, number in found.items() if number is not None}


def _kinds(part: Any) -> set[str]:
    """Names of all steps of a decoder, however they are nested."""
    if isinstance(part, dict):
        inner = [_kinds(value) for value in part.values()]
        return set().union({part["type"]} if isinstance(part.get("type"), str) else set(), *inner)
    return set().union(*map(_kinds, part)) if isinstance(part, list) else set()


def _with_space(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def _byte_level(token: str) -> bytes:
    table = _byte_of_letter()
    return bytes(table[letter] for letter in token) if all(letter in table for letter in token) else token.encode()


@cache
def _byte_of_letter() -> dict[str, int]:
    """Printable bytes stand for themselves; the others, in order, for the letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
