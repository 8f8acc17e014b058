"""Settings: a YAML file and `key=value` overrides become one validated dataclass.

YAML file -> + overrides -> unknown keys rejected -> pydantic checks types -> the dataclass checks itself
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from truebatch.config.aliases import FOREIGN
from truebatch.config.yaml_files import Document, parse_value, read_yaml, write_yaml
from truebatch.errors import ConfigError, TruebatchError
from truebatch.io.text_encoding import nearest

T = TypeVar("T")
_SHOWN = 200
"""Maximum characters of a wrong value shown in a message."""


def load_config(
    kind: type[T],
    path: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> T:
    """One checked `kind` (a dataclass) from `defaults`, then a YAML file, then `key=value` overrides.

    Later ones win. Unknown keys, wrong types and values out of range raise `ConfigError`, which names the
    key, the value and the file and line it came from.
    """
    document = read_document(path, defaults=defaults)
    for override in overrides:
        apply_override(document, override)
    return check_config(kind, document)


def read_document(path: Path | None, *, defaults: Mapping[str, Any] | None = None) -> Document:
    """Read a YAML file on top of the defaults; without a file, just the defaults."""
    read = read_yaml(Path(path)) if path is not None else Document({})
    return Document({**(defaults or {}), **read.values}, read.places)


def apply_override(document: Document, override: str) -> None:
    """Set one `a.b=value` in the document; the value is read as YAML reads it."""
    key, equals, text = override.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    if not equals or not all(parts):
        wide = "; '＝' is the full-width sign, type '='" if "＝" in override else ""
        raise ConfigError(
            "an override must be key=value" + wide,
            seen=repr(override),
            do="write for example samples_per_step=64, or a.b=value for a nested key",
        )
    target = document.values
    for depth, part in enumerate(parts[:-1], 1):
        inner = target.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{'.'.join(parts[:depth])} holds a single value, so {key} cannot be set",
                seen=f"{'.'.join(parts[:depth])} = {inner!r}",
                do=f"set {'.'.join(parts[:depth])} itself",
            )
        target = inner
    target[parts[-1]] = parse_value(text.strip())
    document.places[parts] = f"override {override!r}"


def check_config(kind: type[T], document: Document) -> T:
    """Convert the document to a checked `kind`; raises `ConfigError` if it is invalid."""
    _refuse_unknown(kind, document, ())
    try:
        config = _adapter(kind).validate_python(document.values)
    except ValidationError as error:
        _explain(error, document)
    _refuse_bool_numbers(config, document.values, document, ())
    return config  # type: ignore[no-any-return]


def config_schema(kind: type[Any]) -> dict[str, Any]:
    """The JSON schema of a configuration dataclass, for editors and other tools; each setting has its description."""
    schema = dict(_adapter(kind).json_schema())
    kinds = {None: kind} | {inner.__name__: inner for inner in _inner_dataclasses(kind)}
    for name, part in ((None, schema), *schema.get("$defs", {}).items()):
        notes = field_notes(kinds[name]) if name in kinds else {}
        for key, about in part.get("properties", {}).items():
            part["additionalProperties"] = False
            about |= {"description": notes[key]} if key in notes else {}
    return schema


def _inner_dataclasses(kind: type[Any]) -> list[type[Any]]:
    found = [inner for hint in get_type_hints(kind).values() if (inner := _inner_dataclass(hint)) is not None]
    return found + [deeper for inner in found for deeper in _inner_dataclasses(inner)]


def field_notes(kind: type[Any]) -> dict[str, str]:
    """Docstrings under the fields of a dataclass and its bases, by field name."""
    notes: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if dataclasses.is_dataclass(owner) and owner.__module__ != "types":
            notes |= _own_notes(owner)
    return notes


def _own_notes(kind: type[Any]) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError):  # made by make_dataclass, or in an interactive session: there is no source
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    return {
        node.target.id: inspect.cleandoc(note.value.value)
        for node, note in pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant) and isinstance(note.value.value, str)
    }


def dump_config(config: object) -> str:
    """YAML text that `load_config` reads back to an equal value."""
    return write_yaml(plain_value(config))


def plain_value(value: Any) -> Any:
    """Convert a setting for YAML and JSON: dataclasses become mappings, paths strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain_value(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init
        }
    if isinstance(value, Mapping):
        return {str(key): plain_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _refuse_unknown(kind: type[Any], document: Document, path: tuple[str, ...]) -> None:
    values: Any = document.values
    for part in path:
        values = values[part]
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    hints = get_type_hints(kind)
    for key, value in values.items():
        if key not in known:
            _refuse_key(kind, str(key), known, document, (*path, key))
        inner = _inner_dataclass(hints[key])
        if inner is None or not isinstance(value, dict):
            continue
        # A mapping of settings by name (`prompts: {cats: {...}}`) has the user's own keys at this level.
        is_by_name = get_origin(hints[key]) in (dict, Mapping)
        named = [(*path, key, name) for name, one in value.items() if isinstance(one, dict)]
        for inside in named if is_by_name else [(*path, key)]:
            _refuse_unknown(inner, document, inside)


def _inner_dataclass(hint: Any) -> type[Any] | None:
    options = [hint, *get_args(hint)]
    return next((one for one in options if isinstance(one, type) and dataclasses.is_dataclass(one)), None)


def _meant(kind: type[Any], key: str, known: list[str]) -> str:
    """Suggest the setting an unknown key may mean: another program's name, one level deeper, or a misspelling."""
    name = FOREIGN.get(key, key)
    inside = [
        f"{outer}.{name}"
        for outer, hint in get_type_hints(kind).items()
        if (inner := _inner_dataclass(hint)) is not None and name in {field.name for field in dataclasses.fields(inner)}
    ]
    found = [name] if name in known else inside
    return f"; did you mean {found[0]!r}?" if found else nearest(key, known)


def _refuse_key(kind: type[Any], key: str, known: list[str], document: Document, path: tuple[str, ...]) -> NoReturn:
    place = document.place(path)
    raise ConfigError(
        f"unknown key {'.'.join(path)!r}{_meant(kind, key, known)}",
        seen=f"{place or 'given values'}: {key}",
        do=f"use one of: {', '.join(known)}",
    )


def _explain(error: ValidationError, document: Document) -> NoReturn:
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, TruebatchError):
        raise cause from None
    path = tuple(part for part in first["loc"] if not _is_branch(part, document, first))
    key = ".".join(str(part) for part in path) or "the configuration"
    place = document.place(path)
    if first["type"] in ("missing", "missing_argument"):
        raise ConfigError(
            f"the required key {key!r} is missing",
            seen=f"keys given: {', '.join(document.values) or 'none'}",
            do=f"add `{key}: ...` to the file, or give --set {key}=...",
        ) from None
    is_given = place.startswith(("--", "override"))
    change = f"change {place}" if is_given else f"change {key} at {place}" if place else f"change {key}"
    raise ConfigError(
        f"{key} does not accept this value: {_words(first)}",
        seen=f"{key} = {_short(first['input'])}" + (f", {place}" if place else ""),
        do=change,
    ) from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"


def _is_branch(part: str | int, document: Document, first: ErrorDetails) -> bool:
    # pydantic adds the tried branch of a union ("int", "constrained-str") to the path of the key.
    values: Any = document.values
    for step in first["loc"]:
        if step == part:
            return not _holds(values, part) and first["type"] != "missing"
        values = values[step] if _holds(values, step) else None
    return False


def _holds(values: Any, key: str | int) -> bool:
    if isinstance(values, dict):
        return key in values
    return isinstance(values, list) and isinstance(key, int) and key < len(values)


def _words(first: ErrorDetails) -> str:
    expected = first.get("ctx", {}).get("expected")
    if first["type"] == "literal_error":
        choices = str(expected).replace("'", "").replace(" or ", ", ").split(", ")
        return f"it must be one of {', '.join(map(repr, choices))}{nearest(str(first['input']), choices)}"
    return first["msg"].removeprefix("Value error, ").removeprefix("Input ").replace("should be", "it must be")


def _refuse_bool_numbers(config: Any, values: Any, document: Document, path: tuple[str, ...]) -> None:
    # pydantic converts true to 1, but a user who wrote `samples: true` did not mean one sample.
    for key, value in values.items():
        got = getattr(config, key) if dataclasses.is_dataclass(config) else config[key]
        if isinstance(value, bool) and not isinstance(got, bool):
            place = document.place((*path, key))
            raise ConfigError(
                f"{'.'.join((*path, key))} must be a number, not true or false",
                seen=f"{key} = {str(value).lower()}" + (f", {place}" if place else ""),
                do=f"give {key} a number",
            )
        if isinstance(value, dict) and (dataclasses.is_dataclass(got) or isinstance(got, dict)):
            _refuse_bool_numbers(got, value, document, (*path, key))
