"""The reference of the public names, docs/api.md, from their docstrings: `python docs/pages/api.py`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import truebatch as tb

PAGE = Path(__file__).parents[2] / "docs/api.md"
GROUPS = {
    "Is a batch right?": ("verify", "assert_batchable", "choose_layout", "VerifyConfig"),
    "Models of transformers": ("register", "key_dropout", "collate_packed", "logprobs", "reward"),
    "Planning": (
        "build_plan", "PlanConfig", "Plan", "measure", "Measured", "save_plan", "load_plan", "TokenBudgetSampler",
    ),
    "Samples into micro-batches": ("Field", "collate", "Rows", "MicroBatch", "load_steps"),
    "Attention and randomness": ("attend", "attend_across", "KeyedDropout"),
    "Losses and training": (
        "Objective", "CoupledObjective", "step_loss", "train", "TrainConfig", "TrainData", "System", "Task",
    ),
    "Scoring": ("Scorer",),
    "Errors": ("TruebatchError",),
}  # fmt: skip
HEAD = """\
# Reference

The public names of `import truebatch as tb`, made by `python docs/pages/api.py` from their docstrings; do not edit. Each
example is run by the tests. Settings of commands have [a page of their own](config.md), errors [another](codes.md)."""
WIDTH = 110


def page() -> str:
    """Every public name once, by what it is for."""
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts += [f"## {title}", *(entry(name) for name in names)]
    return "\n\n".join(parts) + "\n"


def entry(name: str) -> str:
    """Signature, summary, the rest of the docstring, fields and methods, and the example."""
    named = getattr(tb, name)
    prose, example = split(inspect.getdoc(named) or "")
    if not example:
        example = split(inspect.getdoc(inspect.getmodule(named)) or "")[1]
    parts = [f"### {name}", fenced("text", [signature(name, named)]), *paragraphs(prose)]
    parts += [table for table in (fields_of(named), methods_of(named)) if table]
    return "\n\n".join([*parts, fenced("python-console", [example])])


def split(docstring: str) -> tuple[str, str]:
    """What is said, and the examples."""
    prose, mark, example = docstring.partition(">>> ")
    return prose.rstrip(), textwrap.dedent(mark + example).rstrip()


def signature(name: str, named: Any) -> str:
    """How it is called; of a class that is made to be subclassed, that."""
    if inspect.isclass(named) and (getattr(named, "_is_protocol", False) or inspect.isabstract(named)):
        return f"class tb.{name}"
    found = inspect.signature(named)
    given = [parameter(one) for one in found.parameters.values() if one.name != "self"]
    if any(one.kind is one.KEYWORD_ONLY for one in found.parameters.values()):
        at = next(i for i, one in enumerate(found.parameters.values()) if one.kind is one.KEYWORD_ONLY)
        is_open = any(one.kind is one.VAR_POSITIONAL for one in found.parameters.values())
        given.insert(at, "*") if not is_open else None
    returns = "" if inspect.isclass(named) else f" -> {words(found.return_annotation)}"
    line = f"tb.{name}({', '.join(given)}){returns}"
    return line if len(line) <= WIDTH else f"tb.{name}(\n    " + ",\n    ".join(given) + f",\n){returns}"


def parameter(one: inspect.Parameter) -> str:
    """A parameter as it is written."""
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    hint = "" if one.annotation is one.empty else f": {words(one.annotation)}"
    if one.default is one.empty:
        return f"{stars}{one.name}{hint}"
    default = "..." if re.search(r" at 0x|<factory>", repr(one.default)) else repr(one.default)
    return f"{one.name}{hint} = {default}"


def words(annotation: Any) -> str:
    """A type as it is written."""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def paragraphs(prose: str) -> Iterator[str]:
    """Paragraphs as they are; lines in columns or indented as a block."""
    for part in filter(None, re.split(r"\n\s*\n", prose)):
        is_block = any(line.startswith("    ") or re.search(r"\S {3,}\S", line) for line in part.splitlines())
        yield fenced("text", [textwrap.dedent(part)]) if is_block else escaped(part)


def escaped(text: str) -> str:
    """Prose in which brackets, stars and angles mean themselves, except in code."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else re.sub(r"([\[\]*<>_|])", r"\\\1", piece) for piece in pieces)


def fenced(kind: str, lines: Sequence[str]) -> str:
    """A block of code."""
    return "\n".join([f"```{kind}", *lines, "```"])


def fields_of(named: Any) -> str:
    """The fields of a dataclass that say what they are."""
    if not dataclasses.is_dataclass(named) or not inspect.isclass(named):
        return ""
    said = {name: text for base in reversed(named.__mro__) for name, text in _said(base).items()}
    rows = [(one.name, said[one.name]) for one in dataclasses.fields(named) if one.name in said]
    return table(("field", "means"), rows)


def _said(named: type) -> dict[str, str]:
    """Field -> the string under it, from the source."""
    if not dataclasses.is_dataclass(named):
        return {}
    body = ast.parse(textwrap.dedent(inspect.getsource(named))).body[0]
    assert isinstance(body, ast.ClassDef)
    pairs = zip(body.body, body.body[1:], strict=False)
    return {
        first.target.id: inspect.cleandoc(second.value.value)
        for first, second in pairs
        if isinstance(first, ast.AnnAssign) and isinstance(first.target, ast.Name)
        and isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant)
    }  # fmt: skip


def methods_of(named: Any) -> str:
    """Public methods and properties with their first sentence."""
    if not inspect.isclass(named):
        return ""
    rows = []
    for name, one in vars(named).items():
        plain = one.__func__ if isinstance(one, (classmethod, staticmethod)) else one
        text = inspect.getdoc(plain)
        if not name.startswith("_") and text and (inspect.isfunction(plain) or isinstance(plain, property)):
            rows.append((name if isinstance(plain, property) else f"{name}()", re.split(r"\n\s*\n", text)[0]))
    return table(("member", "gives"), rows)


def table(header: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    """A table of names and what they mean, or nothing."""
    if not rows:
        return ""
    lines = [f"| {header[0]} | {header[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {escaped(' '.join(text.split()))} |" for name, text in rows)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
