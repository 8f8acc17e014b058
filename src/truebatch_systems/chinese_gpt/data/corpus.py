"""Corpora of users: a file, a pattern or a folder of them, every text with the place it came from.

path -> files in natural order -> records -> texts; nothing is skipped: what cannot be read stops with file and place
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from truebatch.errors import DataError
from truebatch.hf.finetune.record_formats import Chat, Plain, PromptCompletion, read_record
from truebatch.io.data_files import FORMATS, is_data_file, read_samples, read_texts
from truebatch.io.text_encoding import nearest, unpacked_suffix
from truebatch_systems.chinese_gpt.data.dialogues import ASSISTANT, USER

STAGES = ("pretraining", "chat")
"""Folders of a corpus in two stages; both are read."""
DIALOGUE = "用户：...助手：..."
"""How a dialogue is written, for messages."""
TEXT_KEYS = ("text", "content", "paragraphs")
"""Where the text of an object or a row is looked for."""
_RECORDS = ("messages", "conversations", "instruction", "prompt", "completion")
"""Keys of dialogues, read as `truebatch train hf` reads them."""


@dataclass(frozen=True, slots=True)
class Text:
    """One sample of a corpus as it was written."""

    text: str
    file: str
    number: int
    """Its place in the file, from 1; of a plain file the line it begins at."""
    part: int = 0
    """Which part of a text that was split, from 1."""
    unit: Literal["entry", "line"] = "entry"

    @property
    def place(self) -> str:
        """For messages."""
        whole = f"{self.file}, {self.unit} {self.number}"
        return f"{whole}, part {self.part}" if self.part else whole


def read_corpus(path: Path, *, field: str | None = None, until: str = "line") -> list[Text]:
    """All texts of a file, a pattern or a folder, in order, empty ones too.

    `field` is the key or column that holds the text; `until` says where a text of a plain file ends, see `read_texts`.
    """
    texts = [text for file in corpus_files(path) for text in _read_file(file, field, until)]
    if not texts:
        raise DataError(
            f"{path} holds no samples",
            seen=f"{len(corpus_files(path))} files, each empty",
            do="write a text per line (.txt), or each sample as a string of a JSON array",
        )
    return texts


def corpus_files(path: Path) -> list[Path]:
    """The files of a corpus: numbers in names count as numbers, and names with numbers come first.

    A folder gives its data files, or those of its folders pretraining/ and chat/; a pattern such as poems/*.json what
    fits it. A file foo.json brings foo_extra.json.
    """
    if not path.exists() and glob.has_magic(str(path)):
        return _fitting(path)
    if not path.is_dir():
        extra = path.with_name(f"{path.stem}_extra{path.suffix}")
        return [path, extra] if extra.is_file() else [path]
    stages = [path / name for name in STAGES if (path / name).is_dir()]
    found = [f for folder in stages or [path] for f in _in_order(f for f in folder.iterdir() if is_data_file(f.name))]
    if not found:
        names = sorted(file.name for file in path.iterdir())
        raise DataError(
            f"the folder {path} holds no file of texts",
            seen=f"{', '.join(names[:5]) or 'nothing'}",
            do=f"put {' '.join(FORMATS)} files there (also .gz, .zst), or into its folders pretraining/ and chat/",
        )
    return found


def _fitting(path: Path) -> list[Path]:
    found = _in_order(Path(name) for name in glob.glob(str(path)))
    if not found:
        raise DataError(f"no file fits {path}", seen="a pattern", do="check the folder and the ending")
    return found


def _in_order(files: Iterator[Path]) -> list[Path]:
    return sorted((file for file in files if file.is_file()), key=_natural)


def _natural(file: Path) -> tuple[bool, list[tuple[bool, int, str]], str]:
    parts = re.findall(r"\d+|\D+", file.stem)
    keys = [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
    return not any(part.isdigit() for part in parts), keys, file.name


def _is_plain(file: Path) -> bool:
    """A file of texts: .txt, or one without an ending."""
    return unpacked_suffix(file) in (".txt", "")


def _read_file(file: Path, field: str | None, until: str) -> Iterator[Text]:
    if _is_plain(file):
        yield from (Text(text, str(file), number, unit="line") for number, text in read_texts(file, until=until))
        return
    for number, (_, value) in enumerate(read_samples(file), start=1):
        text = text_of(value, f"{file}, entry {number}", field)
        _check_characters(text, f"{file}, entry {number}")
        yield Text(text, str(file), number)


def text_of(value: Any, place: str, field: str | None = None) -> str:
    """The text of a record: a string, the text of an object or a row, or a dialogue in the words of 用户 and 助手."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise DataError(
            f"{place} is not a text",
            seen=f"a {_kind(value)}: {json.dumps(value, ensure_ascii=False, default=str)[:60]}",
            do=f"write every sample as one string, or as an object with `text`; a dialogue as {DIALOGUE}",
        )
    if field is None and any(key in value for key in _RECORDS):
        return _dialogue(value, place)
    key = field if field is not None else next((key for key in TEXT_KEYS if key in value), None)
    key = _only_text(value) if key is None else key
    if key is None or key not in value:
        raise DataError(
            f"{place} holds no text" + (nearest(field, list(map(str, value))) if field is not None else ""),
            seen=f"{'' if field is None else f'text_field={field}; '}keys: {', '.join(map(str, value)) or 'none'}",
            do="name the key or column that holds the text: --set text_field=NAME",
        )
    return _joined(value[key], f"{place}, {key}")


def _only_text(value: Mapping[str, Any]) -> str | None:
    texts = [key for key, one in value.items() if isinstance(one, str)]
    return texts[0] if len(texts) == 1 else None


def _joined(value: Any, place: str) -> str:
    """A text, the lines of one, or nothing."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise DataError(
        f"{place} is not a text",
        seen=f"a {_kind(value)}: {json.dumps(value, ensure_ascii=False, default=str)[:60]}",
        do="write a string, or a list of lines",
    )


def _dialogue(value: Mapping[str, Any], place: str) -> str:
    record = read_record("causal_lm", value, place)
    if isinstance(record, Plain):
        return record.text
    if isinstance(record, PromptCompletion):
        return f"{USER}{record.prompt}{ASSISTANT}{record.answer}"
    assert isinstance(record, Chat)
    return _turns(record, place)


def _turns(record: Chat, place: str) -> str:
    """What the system says stands in front of the first question."""
    said, before = "", ""
    for message in record.messages:
        role, content = message["role"], str(message["content"])
        if role in ("system", "developer"):
            before += content + "\n"
        elif role in ("user", "assistant"):
            said += f"{USER if role == 'user' else ASSISTANT}{before}{content}"
            before = ""
        else:
            raise DataError(
                f"{place} has a turn that is neither 用户 nor 助手", seen=f"role={role!r}", do="remove that turn"
            )
    return said


def _check_characters(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} holds half a character (a lone surrogate)",
            seen=f"{text[error.start]!r} at character {error.start}",
            do="write the text again: a character such as an emoji was cut in two",
        ) from error


def _kind(value: object) -> str:
    return {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}.get(
        type(value), "number"
    )


def refuse_unknown(name: str, known: Sequence[str]) -> DataError:
    """The error for a corpus that is neither a path nor a name."""
    return DataError(
        f"there is no corpus {name!r}{nearest(name, list(known))}",
        seen="neither a file, a folder nor the name of a corpus",
        do=f"give a file ({' '.join(FORMATS)}) or a folder, or one of: {', '.join(known)}",
    )
