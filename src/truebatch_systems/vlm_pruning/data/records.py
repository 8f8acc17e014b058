"""Samples from files: one JSONL format of ours, and the files of VQAv2, GQA and POPE as their authors lay them out.

file -> (place, record) -> sample {id, image (a path), image_id, question, answer, answers, choices, category, judge}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from truebatch.errors import DataError
from truebatch.io.data_files import read_samples
from truebatch.io.text_encoding import read_lines, read_text
from truebatch_systems.vlm_pruning.eval.scorers import JUDGES

SPLITS = ("train", "validation", "test")
SHORT_ANSWER = "Answer the question using a single word or phrase."
YES_NO = "Answer yes or no."
KEYS = (
    "id", "image", "image_id", "question", "answer", "answers", "choices", "category", "judge", "group", "split",
)  # fmt: skip
"""What a line of a JSONL file may hold; `image` is a path (relative to the file) or a list of them."""
MOST_BYTES = 4 << 30
_POPE = ("random", "popular", "adversarial")

Sample = dict[str, Any]
Placed = tuple[str, Sample]


def read_jsonl(path: Path) -> Iterator[Placed]:
    """Samples of a JSONL file with the place of each ("file:line"); images are not opened."""
    for place, record in read_samples(path):
        yield place, _check_record(record, place, path.parent)


def _check_record(record: Any, place: str, folder: Path) -> Sample:
    if not isinstance(record, Mapping):
        raise _bad(f"{place} is not a JSON object", f"{type(record).__name__}: {str(record)[:80]}")
    unknown = sorted(set(record) - set(KEYS))
    if unknown:
        raise _bad(f"{place} has keys that mean nothing here: {', '.join(map(str, unknown))}", f"keys {sorted(record)}")
    question = record.get("question")
    if not isinstance(question, str) or not question.strip():
        raise _bad(f"{place} has no question", f"question={question!r}")
    answers = _texts(record.get("answers") or [], "answers", place)
    answer = record.get("answer", Counter(answers).most_common(1)[0][0] if answers else None)
    if isinstance(answer, bool) or not isinstance(answer, str | int) or not str(answer).strip():
        raise _bad(f"{place} has no answer", f"answer={answer!r}")
    if record.get("judge") is not None and record["judge"] not in JUDGES:
        raise _bad(f"{place} names a judge that is not known", f"judge={record['judge']!r}, known: {', '.join(JUDGES)}")
    if record.get("split") is not None and record["split"] not in SPLITS:
        raise _bad(f"{place} is in a split that is not known", f"split={record['split']!r}, known: {', '.join(SPLITS)}")
    images = _images(record.get("image"), place, folder)
    own = {key: record[key] for key in ("group", "split", "image_id") if record.get(key) is not None}
    return {
        "image_id": _names(record["image"]),
        **own,
        "id": str(record.get("id", place)),
        "image": images if len(images) != 1 else images[0],
        "question": question,
        "answer": answer,
        "answers": answers,
        "choices": _texts(record.get("choices") or [], "choices", place),
        "category": None if record.get("category") is None else str(record["category"]),
        "judge": str(record.get("judge") or "exact"),
    }


def _texts(values: Any, key: str, place: str) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(one, str | int | float) for one in values):
        raise _bad(f"{place} has {key} that are not a list of texts", f"{key}={str(values)[:80]}")
    return [str(one) for one in values]


def _images(given: Any, place: str, folder: Path) -> list[Path]:
    names = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise _bad(f"{place} has no image", f"image={str(given)[:80]!r}")
    return [folder / name for name in names]


def _names(given: Any) -> str:
    """Images as the file names them: where the file lies does not move an image to another split."""
    return " ".join(Path(name).as_posix() for name in (given if isinstance(given, list) else [given]))


def _bad(wrong: str, seen: str) -> DataError:
    return DataError(wrong, seen=seen, do="mend that line; `image`, `question` and `answer` are needed")


def read_vqav2(root: Path, part: str) -> Iterator[Placed]:
    """VQAv2, `part` train or val: questions, the ten human answers, and COCO images, under any of their usual names."""
    year = f"{part}2014"
    questions_at = _one_of(root, f"{part}_questions.json", f"v2_OpenEnded_mscoco_{year}_questions.json")
    answers_at = _one_of(root, f"{part}_annotations.json", f"v2_mscoco_{year}_annotations.json")
    folder = _one_of(root, f"{part}_images/{year}", year, f"images/{year}")
    known = {one["question_id"]: one for one in _listed(answers_at, "annotations", ("question_id", "answers"))}
    for at, one in enumerate(_listed(questions_at, "questions", ("question_id", "image_id", "question"))):
        place = f"{questions_at}: question {at}"
        found = known.get(one["question_id"])
        if found is None:
            raise _bad(f"{place} has no annotation", f"question_id={one['question_id']!r}, not in {answers_at.name}")
        answers = [str(human["answer"]) for human in found["answers"]]
        yield (
            place,
            {
                "id": str(one["question_id"]),
                "image": folder / f"COCO_{year}_{int(one['image_id']):012d}.jpg",
                "image_id": f"{part}-{one['image_id']}",
                "question": f"{one['question']}\n{SHORT_ANSWER}",
                "answer": str(found.get("multiple_choice_answer") or Counter(answers).most_common(1)[0][0]),
                "answers": answers,
                "choices": [],
                "category": f"{found.get('question_type', '')}-{found.get('answer_type', '')}",
                "judge": "vqav2",
            },
        )


def read_gqa(root: Path, part: str) -> Iterator[Placed]:
    """GQA, `part` train, val or testdev: balanced questions, images by their id."""
    path = _one_of(root, f"{part}_balanced_questions.json", f"questions/{part}_balanced_questions.json")
    folder = _one_of(root, "images", "allImages/images")
    questions = _document(path)
    if not isinstance(questions, Mapping):
        raise _bad(f"{path} is not a JSON object of questions", type(questions).__name__)
    for key, one in questions.items():
        place = f"{path}: question {key}"
        _need(one, ("imageId", "question", "answer"), place)
        yield (
            place,
            {
                "id": str(key),
                "image": folder / f"{one['imageId']}.jpg",
                "image_id": str(one["imageId"]),
                "question": f"{one['question']}\n{SHORT_ANSWER}",
                "answer": str(one["answer"]),
                "answers": [],
                "choices": [],
                "category": str((one.get("types") or {}).get("structural", "")) or None,
                "judge": "gqa",
            },
        )


def read_pope(root: Path) -> Iterator[Placed]:
    """POPE: its three files of JSON lines over COCO images; an image of one file is in the others too."""
    folder = _one_of(root, "val2014", "images/val2014", "images")
    for kind in _POPE:
        path = _one_of(root, f"coco_pope_{kind}.json", f"coco/coco_pope_{kind}.json")
        for at, (place, one) in enumerate(_lines(path)):
            _need(one, ("image", "text", "label"), place)
            if str(one["label"]).lower() not in ("yes", "no"):
                raise _bad(f"{place} has a label that is neither yes nor no", f"label={one['label']!r}")
            yield (
                place,
                {
                    "id": f"{kind}-{one.get('question_id', at + 1)}",
                    "image": folder / str(one["image"]),
                    "image_id": str(one["image"]),
                    "question": f"{one['text']}\n{YES_NO}",
                    "answer": str(one["label"]).capitalize(),
                    "answers": [],
                    "choices": [],
                    "category": kind,
                    "judge": "pope",
                },
            )


def _lines(path: Path) -> Iterator[Placed]:
    """JSON lines under a name that ends in .json, as POPE has them."""
    for number, line in read_lines(path):
        if not line.isspace():
            yield f"{path}:{number}", parse_json(line, f"{path}:{number}")


def _listed(path: Path, key: str, needed: Sequence[str]) -> list[Mapping[str, Any]]:
    """The list under a key of a JSON document, each of its objects with the needed keys."""
    document = _document(path)
    found = document.get(key) if isinstance(document, Mapping) else None
    if not isinstance(found, list):
        raise _bad(f"{path} has no list {key!r}", f"{type(document).__name__}: {str(document)[:80]}")
    for at, one in enumerate(found):
        _need(one, needed, f"{path}: {key} {at}")
    return found


def _need(one: Any, keys: Sequence[str], place: str) -> None:
    missing = [key for key in keys if not isinstance(one, Mapping) or one.get(key) is None]
    if missing:
        raise _bad(f"{place} has no {', '.join(missing)}", str(one)[:120])


def _document(path: Path) -> Any:
    return parse_json(read_text(path, max_bytes=MOST_BYTES), str(path))


def parse_json(text: str, place: str) -> Any:
    """A JSON document; what is wrong with it is named with its place."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        line = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) and "\n" in text.strip() else ""
        raise DataError(
            f"{place}{line} is not JSON", seen=f"{error}", do="copy or write the file again, it may be incomplete"
        ) from error


def _one_of(root: Path, *names: str) -> Path:
    """The first of these names that is there under the root."""
    for name in names:
        if (root / name).exists():
            return root / name
    there = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    raise DataError(
        f"{root} has none of {', '.join(names)}",
        seen=f"it holds {', '.join(there[:8]) or 'nothing'}" if root.is_dir() else "there is no such folder",
        do="set dataset_settings.root to the folder these files lie in",
    )
