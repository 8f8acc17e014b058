"""Every sentence the package can say, read from its source, and the tool that shows what has no Chinese yet.

python -m tests.language.collect missing systems > list.txt    numbered lines: what a part of the package says
python -m tests.language.collect fill systems list.zh.txt list.txt   the same numbers with Chinese: into its catalogue
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

import truebatch
import truebatch_systems
from truebatch.cli.app import app
from truebatch.language.help_page import paragraphs
from truebatch.language.translate import CATALOGUES, HOLE

ROOTS = (Path(truebatch.__file__).parent, Path(truebatch_systems.__file__).parent)
WORDS = re.compile(r"[A-Za-z]{2,}")
WORD_AND_HOLE = re.compile(r"(?:^|[\s(])(?:[a-z]{2,}|ETA)[,:;]? [\0(]|\0[,;:]? \(?[a-z]{2,}(?=$|[\s,:;./)])")
SILENT = Path(__file__).parent / "silent"
"""What looks like a sentence and is none, such as SQL, prompts and the words of embedded texts: a list for each part."""
HEADERS = {"header", "heading"}
OF_CLICK = (
    *("Usage: {0}", "Options:", "Commands:", "Arguments:", "Examples:", "default", "required"),
    *("Show this message and exit.", "Install completion for the current shell."),
    "Show completion for the current shell, to copy it or customize the installation.",
    *("No such option: {0}", "No such option: {0} Did you mean {1}?", "No such option: {0} (Possible options: {1})"),
    *("No such option {0}.", "No such command {0}.", "No such command {0}. Did you mean {1}?"),
    *("{0} (Did you mean one of: {1}?)", "Missing command.", "Missing argument {0}.", "Missing option {0}."),
    *("Invalid value: {0}", "Invalid value for {0}: {1}", "Got unexpected extra argument(s) ({0})"),
    *("Got unexpected extra argument ({0})", "Got unexpected extra arguments ({0})"),
    *("Option {0} requires an argument.", "Option {0} requires {1} arguments.", "Option {0} does not take a value."),
    *("{0} is not one of {1}.", "{0} is not a valid integer.", "{0} is not a valid int.", "{0} is not a valid float."),
    *("{0} is not a valid boolean.", "{0} is not a valid boolean. Recognized values: {1}"),
    *("{0} is not in the range {1}.", "File {0} does not exist.", "Directory {0} does not exist."),
    *("Path {0} does not exist.", "file {0} is a directory.", "File {0} is a directory."),
)
"""What the command line's library says by itself, in the versions there are."""
OF_PYDANTIC = (
    *("a valid integer", "a valid integer, unable to parse string as an integer", "a valid number", "a finite number"),
    *("a valid integer, got a number with a fractional part", "a valid number, unable to parse string as a number"),
    *("a valid boolean", "a valid boolean, unable to interpret input", "a valid string", "a valid list"),
    *("a valid tuple", "a valid dictionary", "a dictionary or an instance of {0}", "an instance of {0}"),
    *("greater than {0}", "greater than or equal to {0}", "less than {0}", "less than or equal to {0}"),
)
"""What the library of settings says a value should be; the command line's says it too."""


@cache
def all_sentences() -> dict[str, list[str]]:
    """English sentences with numbered holes, by the part of the package that says them first."""
    found: dict[str, dict[str, None]] = {"help": dict.fromkeys(help_texts())}
    taken = set(help_texts())
    for path in (path for root in ROOTS for path in sorted(root.rglob("*.py"))):
        part = part_of(path)
        new = [one for one in sentences_of(path, raised_only=path.parent.name == "census") if one not in taken]
        taken.update(new)
        found.setdefault(part, {}).update(dict.fromkeys(new))
    return {part: [text for text in texts if text not in silent(part)] for part, texts in found.items()}


def part_of(path: Path) -> str:
    """The part of the package a file belongs to: its room, `systems`, or `top` for what lies beside the rooms."""
    if ROOTS[1] in path.parents:
        return "systems"
    name = path.relative_to(ROOTS[0])
    return name.parts[0] if len(name.parts) > 1 else "top"


def silent(part: str) -> set[str]:
    """What one part of the package holds and never says."""
    path = SILENT / f"{part}.json"
    return set(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else set()


def sentences_of(path: Path, *, raised_only: bool = False) -> Iterator[str]:
    """What one file says, line by line; of benchmarks what they raise, their tables being written as they are kept."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = _not_said(tree)
    raised = (part for node in ast.walk(tree) if isinstance(node, ast.Raise) for part in ast.walk(node))
    for node in raised if raised_only else ast.walk(tree):
        if isinstance(node, ast.expr) and id(node) not in inner:
            text = _text(node)
            for line in (text or "").split("\n"):
                if is_sentence(line):
                    yield numbered(line.strip())
    if not raised_only:
        yield from _headers(tree)
    yield from _single_words(tree)


def is_sentence(text: str) -> bool:
    """Two words at least, or one beside a hole; a path, a key or a flag is none."""
    bare = re.sub(r"\b[\w.]+=\S*", " ", text).replace("\0", " ")
    if re.search(r"\\[bdsSwW]|\{%|[\u4e00-\u9fff]", text):  # a pattern, a template, or both languages at once
        return False
    if WORD_AND_HOLE.search(text) and not re.search("[<>]", text):
        return True
    return len(WORDS.findall(bare)) >= 2 and bool(re.search(r"[A-Za-z,;:)'`]\s+[(`'A-Za-z]", text))


def _not_said(tree: ast.AST) -> set[int]:
    """Docstrings, parts of a longer string, patterns, types and names of things."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            found.update(id(value) for value in node.values)
            specs = [value.format_spec for value in node.values if isinstance(value, ast.FormattedValue)]
            found.update(id(part) for spec in specs if spec for part in ast.walk(spec))
        elif isinstance(node, ast.BinOp) and _text(node) is not None:
            found.update(id(part) for part in (node.left, node.right) if _text(part) is not None)
        elif isinstance(node, ast.Call) and _name(node.func) in {"compile", "execute", "executescript", "fullmatch"}:
            found.update(id(part) for argument in node.args for part in ast.walk(argument))
        elif isinstance(node, ast.AnnAssign):
            found.update(id(part) for part in ast.walk(node.annotation))
    return found


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _text(node: ast.expr) -> str | None:
    """A string with NUL for every hole; None for what is no string."""
    if isinstance(node, ast.Constant):
        return re.sub(r"\{[a-z_]\w*\}", "\0", node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        if left is None and right is None:
            return None
        return (left if left is not None else "\0") + (right if right is not None else "\0")
    return None


def _headers(tree: ast.AST) -> Iterator[str]:
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        tops: list[ast.expr] = []
        if isinstance(node, ast.Call) and _name(node.func) == "Table" and node.args:
            tops = [node.args[0], *node.args[2:]]
        elif isinstance(node, ast.Call) and _name(node.func) == "Section":
            tops = [one.value for one in node.keywords if one.arg == "title"]
        elif isinstance(node, ast.Assign) and any(getattr(target, "id", "") in HEADERS for target in node.targets):
            tops = [node.value]
        for part in (part for top in tops for part in ast.walk(top)):
            text = part.value if isinstance(part, ast.Constant) and id(part) not in inner else None
            if isinstance(text, str) and WORDS.search(text):
                yield text


def _single_words(tree: ast.AST) -> Iterator[str]:
    """A part of an error, or all that is said, may be one word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            said = node.args if _name(node.func) in {"say", "say_error"} else []
            parts = [*said, *(one.value for one in node.keywords if one.arg in {"wrong", "seen", "do"})]
            for part in (inner for top in parts for inner in _choices(top)):
                word = part.value if isinstance(part, ast.Constant) else None
                if isinstance(word, str) and re.fullmatch("[a-z]{3,}", word):
                    yield word


def _choices(node: ast.expr) -> Iterator[ast.expr]:
    """What an expression may give: itself, or the branches of a choice."""
    inner = [node.body, node.orelse] if isinstance(node, ast.IfExp) else getattr(node, "values", [])
    yield from (one for part in inner for one in _choices(part)) if inner else [node]


def numbered(text: str) -> str:
    parts = text.split("\0")
    return "".join(part + (f"{{{i}}}" if i < len(parts) - 1 else "") for i, part in enumerate(parts))


@cache
def help_texts() -> tuple[str, ...]:
    """What `--help` of every command says: paragraphs, options, and the lines that click and typer add."""
    found: dict[str, None] = {}

    def visit(command: Any) -> None:
        for text in (command.help, command.short_help, command.epilog):
            found.update(dict.fromkeys(paragraphs(text or "")))
        for param in command.params:
            found.update(dict.fromkeys(paragraphs(getattr(param, "help", None) or "")))
        for inner in getattr(command, "commands", {}).values():
            visit(inner)

    visit(typer.main.get_command(app))
    should_be = (f"{start} {text}" for text in OF_PYDANTIC for start in ("Input should be", "it must be"))
    others = ("Input is not a valid path", "is not a valid path")
    return (*OF_CLICK, *should_be, *others, *(text for text in found if WORDS.search(text)))


def catalogue_of(part: str) -> dict[str, str]:
    """What has a Chinese sentence, of one part."""
    path = CATALOGUES / f"{part}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def everything_known() -> dict[str, str]:
    """All catalogues together."""
    return {k: v for path in sorted(CATALOGUES.glob("*.json")) for k, v in catalogue_of(path.stem).items()}


def missing(part: str) -> list[str]:
    """What one part of the package says and no catalogue has."""
    known = everything_known()
    return [text for text in all_sentences()[part] if text not in known]


def faults(english: str, chinese: str) -> str:
    """Why a translation cannot be right, or an empty string."""
    if sorted(set(HOLE.findall(english))) != sorted(set(HOLE.findall(chinese))):
        return "the holes differ"
    return "" if re.search(r"[\u4e00-\u9fff]", chinese) else "no Chinese"


def fill(part: str, path: Path, listed: Path) -> None:
    """Numbered Chinese lines into the catalogue of a part; `-` says that a text is no message.

    A line that cannot be right is named and left out.
    """
    numbered_lines = (line.partition("\t") for line in listed.read_text(encoding="utf-8").splitlines())
    asked = {int(number): text for number, _, text in numbered_lines}
    known, mute = catalogue_of(part), silent(part)
    for line in path.read_text(encoding="utf-8").splitlines():
        number, _, chinese = line.partition("\t")
        if not number.strip().isdigit():
            continue
        english, chinese = asked[int(number)], chinese.strip()
        if chinese == "-":
            mute.add(english)
        elif wrong := faults(english, chinese):
            sys.stderr.write(f"{number}: {wrong}: {english!r} -> {chinese!r}\n")
        else:
            known[english] = chinese
    _write(SILENT / f"{part}.json", sorted(mute))
    all_sentences.cache_clear()
    _write(CATALOGUES / f"{part}.json", {text: known[text] for text in all_sentences()[part] if text in known})
    sys.stderr.write(f"{len(missing(part))} missing\n")


def _write(path: Path, values: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(values, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "missing":
        sys.stdout.write("".join(f"{i}\t{text}\n" for i, text in enumerate(missing(sys.argv[2]))))
    elif sys.argv[1] == "fill":
        fill(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        sys.stdout.write("".join(f"{part} {len(missing(part))}\n" for part in all_sentences()))
