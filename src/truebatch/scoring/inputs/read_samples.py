"""Samples out of data files and Python values: what cannot be read is a record of its own, and never stops the others.

.jsonl .json .csv .tsv .parquet, dicts, lists of messages -> Asked, or Broken with the reason
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from truebatch.errors import DataError
from truebatch.io.data_files import read_samples
from truebatch.io.text_encoding import MAX_LINE_BYTES, bounded_lines, nearest, open_file, read_lines
from truebatch.scoring.backends.interface import SampleError, ScoreRequest

PROMPTS = ("user", "prompt", "question", "text")
"""Names under which a plain prompt is found, the first that is there."""
KNOWN = ("id", "system", "messages", "image", "images", "options", "meta", *PROMPTS)
_UNCARRIED = {*KNOWN} - {"meta"}
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_NUL_SIGN = "\\u0000"
_ENCODER = json.JSONEncoder(ensure_ascii=False, default=lambda one: "")
_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """A sample that could not be read."""

    id: str
    kind: str
    message: str
    raw: str
    """As much of it as there was; its key is made of it."""


def read_requests(source: Path | str | Iterable[Any]) -> Iterator[ScoreRequest | Broken]:
    """Every sample of a data file, or of dicts, lists of messages and `Asked` values, in order.

    Only a file that is no data file at all raises; a broken line, row or value comes as `Broken`.
    """
    if not isinstance(source, Path | str):
        for index, value in enumerate(source):
            yield value if isinstance(value, ScoreRequest) else _asked(value, f"sample {index}", str(index), Path())
        return
    path = Path(source)
    folder = path.parent
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        for index, (place, value, is_text) in enumerate(_json_lines(path)):
            yield _asked(value, place, str(index), folder, is_text=is_text)
        return
    for index, (place, value) in enumerate(_values(path)):
        yield _asked(value, place, str(index), folder)


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    kind = path.suffix.lower()
    if kind in (".csv", ".tsv"):
        return _csv_rows(path, "\t" if kind == ".tsv" else ",")
    return read_samples(path)


def _json_lines(path: Path) -> Iterator[tuple[str, Any, bool]]:
    """Places and values, and whether a line can hold nothing but text: no escape of a character and no half of one."""
    name = str(path)
    for number, line in _lines(path):
        place = f"{name}:{number}"
        if line is None:
            message = f"{place} has more than {MAX_LINE_BYTES:,} bytes without a line end: write one JSON object a line"
            yield place, Broken(id="", kind="too_long", message=message, raw=place), False
            continue
        if not line or line.isspace():
            continue
        try:
            value, end = _DECODER.raw_decode(line) if line[0] == "{" else (None, 0)
            if not end or not line[end:].isspace():
                value = _DECODER.decode(line)  # text after it is refused, white space before it is not
        except (ValueError, RecursionError) as error:
            yield place, Broken(id="", kind="invalid_json", message=f"{place}: {error}", raw=line), False
            continue
        yield place, value, "\\u" not in line and (line.isascii() or not _has_half(line))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[str, Any]]:
    reader = csv.reader(_short_lines(path), delimiter=delimiter)
    before = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        header = _next_row(reader) or []
        if isinstance(header, str):
            raise DataError(
                f"{path}:1 is no header of a CSV file", seen=header, do="write the names of the columns first"
            )
        while (row := _next_row(reader)) is not None:
            place = f"{path}:{reader.line_num}"
            if isinstance(row, str):
                yield place, Broken(id="", kind="invalid_csv", message=f"{place}: {row}", raw=row + place)
                continue
            if row and len(row) != len(header):
                message = f"{place} has {len(row)} cells, the header has {len(header)}"
                yield place, Broken(id="", kind="wrong_cells", message=message, raw=delimiter.join(row))
            elif row:
                yield place, {name: cell for name, cell in zip(header, row, strict=True) if cell}
    finally:
        csv.field_size_limit(before)


def _next_row(reader: Any) -> list[str] | str | None:
    """The next row, the words of what is wrong with it, or None at the end."""
    try:
        return next(reader, None)
    except csv.Error as error:
        return str(error)


def _short_lines(path: Path) -> Iterator[str]:
    for number, line in _lines(path):
        if line is None:
            raise DataError(
                f"{path}:{number} is too long for a line of a CSV file",
                seen=f"more than {MAX_LINE_BYTES:,} bytes without a line end",
                do="close every quote and write one sample a row",
            )
        yield line


def _lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """Lines of a file, None for one that is too long; bytes that are not UTF-8 come as lone surrogates, which `_asked`
    names."""
    with open_file(path) as file:
        for number, line in enumerate(bounded_lines(file), start=1):
            if line is None:
                yield number, None
                continue
            if number == 1 and line.startswith(_MARKS):
                next(read_lines(path))  # says how to convert the file
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            yield number, text.decode("utf-8", "surrogateescape")


def _asked(value: Any, place: str, id_: str, folder: Path, *, is_text: bool = False) -> ScoreRequest | Broken:
    if isinstance(value, Broken):
        return replace(value, id=id_)
    try:
        return _read(value, place, id_, folder, is_text=is_text)
    except SampleError as error:
        named = str(value["id"]) if isinstance(value, Mapping) and isinstance(value.get("id"), str | int) else id_
        return Broken(id=_shown(named), kind=error.kind, message=str(error), raw=repr(value))


def _read(value: Any, place: str, id_: str, folder: Path, *, is_text: bool) -> ScoreRequest:
    if isinstance(value, str):
        value = {"user": value}
    if isinstance(value, list | tuple):
        value = {"messages": value}
    if not isinstance(value, Mapping):
        raise SampleError("read", "wrong_type", f"{place} is a {type(value).__name__}, an object is needed")
    if not is_text:
        _refuse_halves(value, place)
    messages, inside = _messages(_from_json(value["messages"]), place) if "messages" in value else ((), [])
    prompt = _prompt(value)
    if prompt is None and not messages:
        close = next((hint for key in value if (hint := nearest(str(key), list(KNOWN)))), "")
        raise SampleError(
            "read", "no_prompt", f"{place} has no prompt{close}: it needs one of {', '.join(PROMPTS)} or messages"
        )
    system, options = value.get("system") or "", _from_json(value.get("options")) or {}
    for name, found, kind in (("prompt", prompt or "", str), ("system", system, str), ("options", options, Mapping)):
        if not isinstance(found, kind):
            raise SampleError("read", "wrong_type", f"{place}: {name} is a {type(found).__name__}: {str(found)[:40]!r}")
    images = [*inside, *_images(value)] if inside or "image" in value or "images" in value else ()
    return ScoreRequest(
        id=str(value.get("id", id_)), system=system, user=prompt or "", messages=messages,
        images=tuple(_located(image, folder, place) for image in images) if images else (), options=dict(options),
        meta={} if value.keys() <= _UNCARRIED else _meta(value),
    )  # fmt: skip


def _prompt(value: Mapping[str, Any]) -> Any:
    """What stands under the first name for a prompt that is there."""
    for name in PROMPTS:
        if value.get(name) not in (None, ""):
            return value[name]
    return None


def _messages(value: Any, place: str) -> tuple[tuple[dict[str, Any], ...], list[Any]]:
    """Messages with places for images, and the images that were in them."""
    if value is None:
        return (), []
    if not isinstance(value, list | tuple) or not value:
        raise SampleError(
            "read", "wrong_type", f"{place}: messages must be a list of messages, not {str(value)[:40]!r}"
        )
    out, images = [], []
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise SampleError("read", "wrong_type", f"{place}: a message needs role and content: {str(message)[:60]!r}")
        content = message["content"]
        if not isinstance(content, str):
            content, found = _parts(content, place)
            images += found
        out.append({**message, "content": content})
    return tuple(out), images


def _parts(content: Any, place: str) -> tuple[list[dict[str, Any]], list[Any]]:
    if not isinstance(content, list | tuple) or not all(isinstance(part, Mapping) for part in content):
        raise SampleError(
            "read", "wrong_type", f"{place}: content is a text or a list of parts, not {str(content)[:40]!r}"
        )
    parts, images = [], []
    for part in content:
        if part.get("type") not in ("image", "image_url"):
            parts.append(dict(part))
            continue
        address = part.get("image_url")
        found = part.get("image", part.get("path", address.get("url") if isinstance(address, Mapping) else address))
        images += [] if found is None else [found]
        parts.append({"type": "image"})
    return parts, images


def _images(value: Mapping[str, Any]) -> list[Any]:
    found = [_from_json(value.get(name)) for name in ("image", "images")]
    out: list[Any] = []
    for one in found:
        if one is not None and one != "":
            out += one if isinstance(one, list | tuple) else [one]
    return out


def _located(image: Any, folder: Path, place: str) -> Any:
    if isinstance(image, Mapping):  # as datasets writes them: {"bytes": ..., "path": ...}
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str | Path):
        return str(folder / image)
    if isinstance(image, bytes) or hasattr(image, "tobytes"):
        return image
    raise SampleError(
        "read", "wrong_type", f"{place}: an image is a path, bytes or a PIL image, not {str(image)[:40]!r}"
    )


def _from_json(value: Any) -> Any:
    """A cell of a CSV file may hold JSON where a list or an object is meant."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _meta(value: Mapping[str, Any]) -> dict[str, Any]:
    """What is carried to the export: `meta`, and fields of other names, where they are plain data."""
    given = value.get("meta")
    others = {str(name): one for name, one in value.items() if name not in KNOWN}
    return {
        name: one for name, one in {**others, **(given if isinstance(given, Mapping) else {})}.items() if _is_plain(one)
    }


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _refuse_halves(value: Mapping[str, Any], place: str) -> None:
    texts = _ENCODER.encode(value)
    if texts.isascii() and _NUL_SIGN not in texts:
        return
    at = (
        next((at for at, letter in enumerate(texts) if "\ud800" <= letter <= "\udfff"), None)
        if _has_half(texts)
        else None
    )
    if at is not None:
        what = "bytes that are not UTF-8" if "\udc80" <= texts[at] <= "\udcff" else "half a character"
        raise SampleError("read", "not_text", f"{place} holds {what} after {texts[max(0, at - 20) : at]!r}")
    if _NUL.search(texts):
        raise SampleError("read", "not_text", f"{place} holds a NUL character")


def _has_half(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _shown(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def check_data(path: Path) -> None:
    """Refuse a path that holds no samples at all, before a model is loaded."""
    if next(iter(read_requests(path)), None) is None:
        raise DataError(f"{path} holds no samples", seen="an empty file", do="name a file with one sample a line")
