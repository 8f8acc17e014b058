"""The benchmark file: pairs of a source image and an instruction, by category, checked before any model is loaded.

A JSON list of records, or an object of lists by category. Images are base64 text (a data URL is fine) or a path.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from truebatch.errors import ConfigError, DataError
from truebatch.io.images import rgb_image
from truebatch.io.text_encoding import nearest, open_file, read_text
from truebatch.planning.lengths.image_size import MAX_PIXELS, opened_image

Language = Literal["en", "zh"]
MOST_BYTES = 4 << 30
_NAMES = {
    "物理": "physical", "环境": "environmental", "environment": "environmental", "社会": "social", "文化": "cultural",
    "因果": "causal", "指代": "referential", "reference": "referential",
}  # fmt: skip
"""Categories under other names they go by; the file's own name is kept for show."""
_TEXTS = {"instruction": "edit_instruction", "description": "original_description", "rationale": "rationale_short"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EditPair:
    """One thing to edit and to judge."""

    id: str
    category: str
    instruction: str
    description: str = ""
    rationale: str = ""
    image: str
    """Base64 text, or a path: the picture is decoded when it is needed."""
    is_path: bool = False
    difficulty: str = ""
    tags: Sequence[str] = ()
    seed: int | None = None
    index: int = 0
    """Place in the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Which pairs of a file are used; empty means all."""

    categories: Sequence[str] = ()
    difficulties: Sequence[str] = ()
    tags: Sequence[str] = ()
    limit: int | None = None
    """Pairs of a category at most."""
    language: Language = "en"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong with a record, a prompt or the file."""

    index: int | None
    words: str

    def __str__(self) -> str:
        return self.words if self.index is None else f"record {self.index}: {self.words}"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The pairs that are asked for, and all that is wrong with the file."""

    path: Path
    pairs: Sequence[EditPair]
    faults: Sequence[Fault] = field(default=())
    offered: str = ""
    """What filters may ask for, in words."""


def read_benchmark(path: Path, wanted: Wanted) -> Benchmark:
    """Read and check a benchmark file; every fault has the place of its record. Nothing is dropped silently."""
    pairs: list[EditPair] = []
    faults: list[Fault] = []
    seen: dict[str, int] = {}
    for index, record in enumerate(_records(path)):
        found = _pair(index, record, wanted.language, path.parent)
        if isinstance(found, Fault):
            faults.append(found)
            continue
        if found.id in seen:
            faults.append(Fault(index, f"its id {found.id!r} is that of record {seen[found.id]} too"))
            continue
        seen[found.id] = index
        pairs.append(found)
    known = sorted({pair.category for pair in pairs})
    faults += [
        Fault(None, f"there is no category {name!r}{nearest(name, known)}; the file has {', '.join(known)}")
        for name in wanted.categories
        if plain_category(name) not in {plain_category(one) for one in known}
    ]
    return Benchmark(path, list(_chosen(pairs, wanted)), faults, _offered(pairs))


def require_sound(benchmark: Benchmark) -> None:
    """Refuse a benchmark with faults, naming the first ones: a smaller total would look like a whole one."""
    if benchmark.faults:
        raise DataError(
            f"{benchmark.path} has {len(benchmark.faults)} fault(s)",
            seen="; ".join(str(fault) for fault in benchmark.faults[:5]),
            do="mend them, or see them all with `truebatch vl_reward validate`",
        )
    if not benchmark.pairs:
        raise DataError(
            f"no pair of {benchmark.path} is asked for", seen=benchmark.offered, do="ask for what the file has"
        )


def source_hash(pair: EditPair) -> str:
    """A hash of the source picture as it is given."""
    try:
        if pair.is_path:
            with open_file(Path(pair.image)) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(
            f"the image of {pair.id!r} cannot be read", seen=f"{pair.image}: {error.strerror}", do="check the file"
        ) from error
    return hashlib.sha256(pair.image.encode()).hexdigest()


def decode_image(pair: EditPair, *, max_pixels: int = MAX_PIXELS) -> Any:
    """The source picture as RGB, transparency on white. What cannot be decoded raises `DataError` with the pair's id."""
    from PIL import Image

    try:
        source = Path(pair.image) if pair.is_path else io.BytesIO(_raw(pair.image))
        with opened_image(source, max_pixels=max_pixels) as opened:
            opened.load()
            return rgb_image(opened)
    except (OSError, ValueError, SyntaxError, binascii.Error, Image.DecompressionBombError) as error:
        raise DataError(
            f"the image of {pair.id!r} cannot be decoded",
            seen=f"record {pair.index}: {type(error).__name__}: {str(error)[:120]}",
            do="replace it in the benchmark file",
        ) from error


def image_faults(pairs: Sequence[EditPair]) -> Iterator[Fault]:
    """Every picture decoded once: what fails, with its place."""
    for pair in pairs:
        try:
            decode_image(pair)
        except DataError as error:
            yield Fault(pair.index, f"{error.wrong} ({error.seen})")


def plain_category(name: str) -> str:
    """One name for a category, whichever of its names is used."""
    return _NAMES.get(name.strip().lower(), name.strip().lower())


def _records(path: Path) -> list[Any]:
    text = read_text(path, max_bytes=MOST_BYTES)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON", seen=str(error), do="write the file again") from error
    if isinstance(found, dict) and all(isinstance(part, list) for part in found.values()):
        return [record for part in found.values() for record in part]
    if not isinstance(found, list):
        raise DataError(
            f"{path} is not a benchmark",
            seen=f"a {type(found).__name__}",
            do="a JSON list of records, or lists by category",
        )
    return found


def _pair(index: int, record: Any, language: Language, folder: Path) -> EditPair | Fault:
    if not isinstance(record, Mapping):
        return Fault(index, f"it is a {type(record).__name__}, not an object")
    category = record.get("subset")
    if not isinstance(category, str) or not category.strip():
        return Fault(index, "it has no category (`subset`)")
    suffix = "_en" if language == "en" else ""
    texts = {name: record.get(f"{key}{suffix}") or "" for name, key in _TEXTS.items()}
    wrong = [f"{_TEXTS[name]}{suffix}" for name, text in texts.items() if not isinstance(text, str)]
    if wrong or not str(texts["instruction"]).strip():
        return Fault(index, f"`{wrong[0]}` is not a text" if wrong else f"it has no `edit_instruction{suffix}`")
    place = _image(record, folder)
    if isinstance(place, str):
        return Fault(index, place)
    tags, seed = record.get("tags") or [], record.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        return Fault(index, f"its `seed` is {seed!r}, not a whole number")
    name = Path(str(record.get("original_image_path") or "")).name
    return EditPair(
        id=name.removesuffix(".png").removesuffix(".jpg") or f"{category.strip()}_{index}",
        category=category.strip(), image=place[0], is_path=place[1], index=index,
        difficulty=str(record.get("difficulty") or ""), seed=seed,
        tags=tuple(str(tag) for tag in tags) if isinstance(tags, list) else (str(tags),), **texts,
    )  # fmt: skip


def _image(record: Mapping[str, Any], folder: Path) -> tuple[str, bool] | str:
    """Where the picture is, or what is wrong with it."""
    text = record.get("src_img_b64")
    if isinstance(text, str) and text.strip():
        try:
            _raw(text)
        except (binascii.Error, ValueError) as error:
            return f"`src_img_b64` is not base64: {error}"
        return text, False
    path = record.get("original_image_path")
    if isinstance(path, str) and path and (folder / path).is_file():
        return str(folder / path), True
    return "it has no image (`src_img_b64`, or a file at `original_image_path`)"


def _raw(text: str) -> bytes:
    plain = text.partition(",")[2] if text.startswith("data:") else text
    return base64.b64decode("".join(plain.split()), validate=True)


def _chosen(pairs: Sequence[EditPair], wanted: Wanted) -> Iterator[EditPair]:
    """In the order of the categories that were named, else of the file."""
    if wanted.limit is not None and wanted.limit < 1:
        raise ConfigError("limit must be 1 or more", seen=f"limit={wanted.limit}", do="leave it away for all pairs")
    names = [plain_category(name) for name in wanted.categories] or list(
        dict.fromkeys(plain_category(pair.category) for pair in pairs)
    )
    for name in dict.fromkeys(names):
        kept = [pair for pair in pairs if plain_category(pair.category) == name and _is_wanted(pair, wanted)]
        yield from kept[: wanted.limit]


def _offered(pairs: Sequence[EditPair]) -> str:
    """The categories, difficulties and tags of a file."""
    found = {
        "categories": [pair.category for pair in pairs],
        "difficulties": [pair.difficulty for pair in pairs if pair.difficulty],
        "tags": [tag for pair in pairs for tag in pair.tags],
    }
    words = [f"{name}: {', '.join(sorted(set(values)))}" for name, values in found.items() if values]
    return f"the file has {'; '.join(words)}"[:500] if words else "the file has no pair"


def _is_wanted(pair: EditPair, wanted: Wanted) -> bool:
    has_tag = not wanted.tags or bool(set(wanted.tags) & set(pair.tags))
    return has_tag and (not wanted.difficulties or pair.difficulty in wanted.difficulties)
