"""Samples from LLaVA's JSON (`image`, `conversations`) and from folders of images, one folder a class.

record -> a sample for each question and its answer;   CLASS/picture.jpg -> a question, with the class as its answer
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from truebatch.errors import DataError
from truebatch.io.text_encoding import read_text
from truebatch.language.console import say
from truebatch_systems.vlm_pruning.data.records import MOST_BYTES, SHORT_ANSWER, Placed, parse_json

FOLDER_QUESTION = f"What is shown in the image?\n{SHORT_ANSWER}"
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SPLIT_FOLDERS = {"train": ("train",), "validation": ("validation", "val"), "test": ("test",)}
_ASKS, _ANSWERS = ("human", "user"), ("gpt", "assistant")
_PLACE = re.compile(r"\s*<image>\s*")
_KEYS = ("id", "image", "conversations")


def read_llava(path: Path, root: Path) -> Iterator[Placed]:
    """A sample for each question of each record with an image; further keys are passed on as `extra`.

    Records without an image, which LLaVA's own mix has too, are left out, and their number is said.
    """
    records = parse_json(read_text(path, max_bytes=MOST_BYTES), str(path))
    if not isinstance(records, list):
        raise _bad(f"{path} is not a list of records", f"{type(records).__name__}: {str(records)[:80]}")
    without = 0
    for number, record in enumerate(records):
        place = f"{path}: record {number}"
        if not isinstance(record, Mapping) or not isinstance(record.get("conversations"), list):
            raise _bad(f"{place} has no conversations", str(record)[:120])
        if not record.get("image"):
            without += 1
            continue
        yield from _samples_of(record, number, place, root)
    if without:
        say(f"{path}: {without:,} records have no image and are left out", file=sys.stderr)


def read_image_folder(root: Path, split: str) -> tuple[list[Placed], bool]:
    """The images below a folder with their class as the answer; True if the folder has this split's own folder."""
    named = {one: root / name for one, names in SPLIT_FOLDERS.items() for name in names if (root / name).is_dir()}
    if named and split not in named:
        return [], True
    top = named.get(split, root)
    placed = [
        (str(path), _folder_sample(path, top, root))
        for path in sorted(top.rglob("*"))
        if path.suffix.lower() in SUFFIXES and path.is_file()
    ]
    return placed, bool(named)


def _samples_of(record: Mapping[str, Any], number: int, place: str, root: Path) -> Iterator[Placed]:
    given = record["image"]
    names = given if isinstance(given, list) else [given]
    if not all(isinstance(name, str) and name for name in names):
        raise _bad(f"{place} has an image that is not a path", f"image={str(given)[:80]!r}")
    images = [root / name for name in names]
    extra = {key: value for key, value in record.items() if key not in _KEYS}
    turns = _turns(record["conversations"], place)
    for turn, (question, answer) in enumerate(turns):
        name = str(record.get("id", number))
        yield (
            f"{place}, question {turn}",
            {
                "id": name if len(turns) == 1 else f"{name}-{turn}",
                "image": images[0] if len(images) == 1 else images,
                "image_id": " ".join(Path(one).as_posix() for one in names),
                "question": question,
                "answer": answer,
                "answers": [],
                "choices": [],
                "category": None if extra.get("category") is None else str(extra["category"]),
                "judge": "exact",
                "extra": extra,
            },
        )


def _turns(conversations: Sequence[Any], place: str) -> list[tuple[str, str]]:
    """Questions, without the placeholder of the image, and their answers."""
    said = []
    for one in conversations:
        speaker = one.get("from", one.get("role")) if isinstance(one, Mapping) else None
        words = one.get("value", one.get("content")) if isinstance(one, Mapping) else None
        if speaker == "system":
            continue
        if speaker not in (*_ASKS, *_ANSWERS) or not isinstance(words, str):
            raise _bad(f"{place} has a turn that is neither a question nor an answer", str(one)[:120])
        said.append((speaker in _ASKS, _PLACE.sub("\n", words).strip()))
    is_paired = len(said) % 2 == 0 and all(asks == (at % 2 == 0) for at, (asks, _) in enumerate(said))
    if not said or not is_paired or not all(words for _, words in said):
        raise _bad(f"{place} is not questions with an answer each", str([asks for asks, _ in said])[:120])
    return [(said[at][1], said[at + 1][1]) for at in range(0, len(said), 2)]


def _folder_sample(path: Path, top: Path, root: Path) -> dict[str, Any]:
    inside = path.relative_to(top)
    if len(inside.parts) < 2:
        raise _bad(f"{path} is in no folder of a class", f"in {top} itself")
    name = path.relative_to(root).as_posix()
    return {
        "id": name, "image": path, "image_id": name, "question": FOLDER_QUESTION,
        "answer": inside.parts[0].replace("_", " "), "answers": [], "choices": [], "category": inside.parts[0],
        "judge": "exact",
    }  # fmt: skip


def _bad(wrong: str, seen: str) -> DataError:
    return DataError(
        wrong, seen=seen, do="give `image` and `conversations` of human and gpt in turns, or CLASS/picture.jpg"
    )
