"""Safe YAML for settings: knows the line of every key and explains common mistakes.

text -> nodes -> plain values + the line of each key

Plain scalars follow YAML 1.2, so `1e-4` is a number, `on` and `no` are words and `012` is twelve.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from truebatch.errors import ConfigError
from truebatch.io.text_encoding import read_text

MAX_BYTES = 2**20
MAX_NODES = 10_000
MAX_DEPTH = 50

KeyPath = tuple[str | int, ...]

_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[-+]?([0-9]+(_[0-9]+)*(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}
_WORDS |= {".inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "map", "seq")}
# What the YAML 1.1 resolver converts; read as text here.
_PLAIN_TAGS |= {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}
_LONGEST_NUMBER = 400
_WIDE = {"：": ":", "，": ",", "　": "a space", "“": '"', "”": '"', "‘": "'", "’": "'", "＃": "#", "－": "-"}
_WIDE |= {"［": "[", "］": "]", "｛": "{", "｝": "}", "【": "[", "】": "]", "＝": "=", "\u00a0": "a space"}
_WIDE_NUMBER = re.compile(r"[-+.eE0-9０-９．－＋]*[０-９．－＋][-+.eE0-9０-９．－＋]*")


@dataclass(slots=True)
class Document:
    """Plain values and, for error messages, where each key was read from."""

    values: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """Where a key was given: its own line, or that of the closest key around it."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, "")


def read_yaml(path: Path) -> Document:
    """Read the mapping in a YAML file. Never runs code, never exceeds a fixed number of values."""
    return parse_yaml(read_text(path, max_bytes=MAX_BYTES), name=str(path))


def parse_yaml(text: str, *, name: str) -> Document:
    """Like `read_yaml`, for text already in memory; messages refer to it as `name`."""
    root = _compose(text, name)
    if root is None or (isinstance(root, ScalarNode) and root.value == ""):
        return Document({})
    if not isinstance(root, MappingNode):
        _blame_wide(text, name)
        _fail(
            name,
            root,
            "the file must be a list of `key: value` lines",
            seen=_excerpt(root),
            do="write `key: value`, with a space after the colon",
        )
    reader = _NodeReader(name)
    return Document(reader.mapping(root, ()), reader.places)


def parse_value(text: str) -> Any:
    """One value as YAML reads it (for `key=value`); invalid YAML is taken as plain text."""
    try:
        node = _Loader(text).get_single_node()
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError):
        return text
    return None if node is None else _NodeReader(text).value(node, ())


def write_yaml(values: dict[str, Any]) -> str:
    """YAML text that `parse_yaml` reads back to equal values."""
    return str(yaml.dump(values, Dumper=_QuotingDumper, allow_unicode=True, sort_keys=False))


class _QuotingDumper(yaml.SafeDumper):
    """Quotes text that would otherwise be read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(writer: _QuotingDumper, text: str) -> Node:
    is_plain = text.isascii() and _plain(text) is text
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')


_QuotingDumper.add_representer(str, _write_text)


class _Loader(yaml.SafeLoader):
    """Stops at the maximum number of values and levels: composing a whole megabyte takes half a minute."""

    composed = 0
    depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self.composed, self.depth = self.composed + 1, self.depth + 1
        if self.composed > MAX_NODES:
            raise ConfigError(
                f"{self.name} holds too many values",
                seen=f"more than {MAX_NODES:,} by line {self.line + 1}",
                do="check that this is a file of settings",
            )
        if self.depth > MAX_DEPTH + 1:  # the file itself is the first level
            raise ConfigError(
                f"{self.name}:{self.line + 1} is nested too deeply",
                seen=f"more than {MAX_DEPTH} levels",
                do="write a flat list of `key: value` lines",
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _compose(text: str, name: str) -> Node | None:
    loader = None
    try:
        loader = _Loader(text)
        loader.name = name
        return loader.get_single_node()
    except ConfigError:
        raise
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        raise ConfigError(
            f"{name}:{line} holds a character YAML does not allow",
            seen=f"character {chr(error.character)!r}"
            if isinstance(error.character, int)
            else f"character {error.character!r}",
            do="delete that character",
        ) from error
    except yaml.MarkedYAMLError as error:
        _blame_wide(text, name)
        _blame_yaml(text, name, error)
    except ValueError as error:  # an escape such as "\U00110000" is not a character
        raise ConfigError(
            f"{name}:{loader.line + 1 if loader else 1} not readable as YAML: an escape that is not a character",
            seen=str(error),
            do="write the character itself, or an escape up to \\U0010ffff",
        ) from error


def _blame_yaml(text: str, name: str, error: yaml.MarkedYAMLError) -> NoReturn:
    mark = error.problem_mark or error.context_mark
    number = mark.line if mark else 0
    lines = text.splitlines()
    shown = lines[number] if number < len(lines) else (lines[-1] if lines else "")
    tab = "\t" in shown[: len(shown) - len(shown.lstrip())] or "\\t" in str(error.problem)
    place = f"{name}:{number + 1}"
    wrong = f"{place} a tab is used for indentation" if tab else f"{place} not readable as YAML: {error.problem}"
    do = "replace tabs by spaces" if tab else "write `key: value`, with a space after the colon; quote text with : or #"
    raise ConfigError(wrong, seen=repr(shown[:80]), do=do) from error


def _blame_wide(text: str, name: str) -> None:
    for number, line in enumerate(text.splitlines(), 1):
        body = re.sub(r"\"[^\"]*\"|'[^']*'|(^|\s)#.*", "", line)
        found = next((c for c in body if c in _WIDE), None)
        if found:
            _refuse_wide(f"{name}:{number}", found, line)


def _refuse_wide(place: str, found: str, text: str) -> NoReturn:
    raise ConfigError(
        f"{place} uses the full-width character {found!r} where YAML needs {_WIDE.get(found, 'its ASCII form')!r}",
        seen=repr(text.strip()[:80]),
        do='type it with the input method switched to English (half-width), or quote the text with "..."',
    )


def _fail(name: str, node: Node, wrong: str, *, seen: str, do: str) -> NoReturn:
    raise ConfigError(f"{name}:{node.start_mark.line + 1} {wrong}", seen=seen, do=do)


def _excerpt(node: Node) -> str:
    kind = {ScalarNode: "text", SequenceNode: "a list", MappingNode: "a mapping"}.get(type(node), "a value")
    return f"{kind} {str(node.value)[:60]!r}" if isinstance(node, ScalarNode) else kind


class _NodeReader:
    """Converts nodes to values and counts every use: an alias costs what it expands to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.places: dict[KeyPath, str] = {}
        self.used = 0

    def value(self, node: Node, path: KeyPath, *, in_flow: bool = False) -> Any:
        self.used += 1
        if self.used > MAX_NODES or len(path) > MAX_DEPTH:
            _fail(
                self.name,
                node,
                "the file expands to too many values",
                seen=f"more than {MAX_NODES:,} values or {MAX_DEPTH} levels, aliases (*name) written out",
                do="remove the aliases and the nesting",
            )
        if node.tag not in _PLAIN_TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            _fail(
                self.name,
                node,
                "YAML tags are not supported",
                seen=f"tag {tag!r}",
                do="write the plain value without it",
            )
        if isinstance(node, MappingNode):
            return self.mapping(node, path)
        if isinstance(node, SequenceNode):
            flow = bool(node.flow_style)
            return [self.value(part, (*path, i), in_flow=flow) for i, part in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        return self.scalar(node, in_flow=in_flow)

    def mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.key(key_node)
            if key in values:
                first = self.places[(*path, key)]
                _fail(self.name, key_node, f"the key {key!r} is given twice", seen=f"first at {first}", do="keep one")
            self.places[(*path, key)] = f"{self.name}:{key_node.start_mark.line + 1}"
            values[key] = self.value(value_node, (*path, key), in_flow=bool(node.flow_style))
        return values

    def key(self, node: Node) -> str:
        if not isinstance(node, ScalarNode) or node.tag == "tag:yaml.org,2002:merge":
            _fail(self.name, node, "a key must be a plain name", seen=_excerpt(node), do="write `name: value`")
        wide = next((c for c in node.value if node.style is None and c in _WIDE), None)
        if wide:
            _refuse_wide(f"{self.name}:{node.start_mark.line + 1}", wide, node.value)
        return str(node.value)

    def scalar(self, node: ScalarNode, *, in_flow: bool) -> Any:
        text = str(node.value)
        if node.style is not None:
            return text
        opens = text[:1] in "“”‘’" and text != ""
        wide_number = _WIDE_NUMBER.fullmatch(text)
        if opens or wide_number or (in_flow and "，" in text):
            found = next(c for c in text if c in _WIDE or c in "０１２３４５６７８９．＋")
            _refuse_wide(f"{self.name}:{node.start_mark.line + 1}", found, text)
        return _plain(text)


def _plain(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if len(text) > _LONGEST_NUMBER:
        return text
    if _INT.fullmatch(text):
        return int(text)
    return float(text.replace("_", "")) if _FLOAT.fullmatch(text) else text
