"""`truebatch config`: show the settings of a command with their origin, check them, and print their schema."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from truebatch.cli.options import ConfigFile, Overrides
from truebatch.cli.settings import read_settings
from truebatch.io.atomic_files import write_text
from truebatch.language.console import say

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PAGE = Path("docs/config.md")

config_app = typer.Typer(help="Settings: show, check, schema.", no_args_is_help=True, rich_markup_mode=None)

Target = Annotated[
    str, typer.Argument(help="plan, vl_reward, hf, the name of a system, package.module:name, or file.py:name.")
]


@config_app.callback()
def _config() -> None:
    """Settings: show, check, schema."""


@config_app.command("show", short_help="Every setting with its value and where the value comes from.")
def show_config(
    target: Target,
    config: ConfigFile = None,
    set_: Overrides = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The same as JSON, with a description of each setting.")
    ] = False,
) -> int:
    """Show every setting of a target: from --set, else from the file with its line, else the default.

    A value derived from the data is set when a run begins; here it is still null. No data is read.

    Examples:

      truebatch config show chinese_gpt

      truebatch config show plan --set cells=8192 --json
    """
    # Imported here so that `truebatch --help` answers at once.
    from truebatch.config.load import check_config
    from truebatch.reports.tables import Table, print_table

    kind, document = _kind(target), read_settings(config, set_ or [], {})
    rows = list(_rows(check_config(kind, document), document.values, (), document.places))
    if as_json:
        sys.stdout.write(json.dumps(rows, ensure_ascii=False, indent=2) + "\n")
        return 0
    print_table(Table(("setting", "value", "from"), tuple((r["setting"], _text(r["value"]), r["from"]) for r in rows)))
    return 0


@config_app.command("check", short_help="Check settings; errors name the line.")
def show_check(target: Target, config: ConfigFile = None, set_: Overrides = None) -> int:
    """Check settings without reading data or starting anything.

    Exit code 0: valid. 2: a key or a value is wrong; the message says which, where, and what to do.

    Examples:

      truebatch config check chinese_gpt --set train.learning_rate=1e-4

      truebatch config check plan --set cells=8192 --set layout=packed
    """
    # Imported here so that `truebatch --help` answers at once.
    from truebatch.config.load import check_config

    check_config(_kind(target), read_settings(config, set_ or [], {}))
    say(f"valid: {config or 'the settings given'}, for {target}")
    return 0


@config_app.command("schema", short_help="The JSON schema of the settings, for editors.")
def show_schema(target: Target) -> int:
    """Write the JSON schema of a target's settings: editors complete and check YAML files with it.

    Examples:

      truebatch config schema seqset_vae > seqset_vae.schema.json
    """
    # Imported here so that `truebatch --help` answers at once.
    from truebatch.config.load import config_schema

    sys.stdout.write(json.dumps(config_schema(_kind(target)), ensure_ascii=False, indent=2) + "\n")
    return 0


@config_app.command("reference", short_help="Regenerate docs/config.md: every setting, its default and its meaning.")
def show_reference(out: Annotated[Path, typer.Option(help="The page to write.")] = PAGE) -> int:
    """Generate the page of all settings from the code.

    Examples:

      truebatch config reference
    """
    write_text(out, reference())
    say(f"wrote {out}")
    return 0


def reference() -> str:
    """All settings of all targets as one page of Markdown."""
    from truebatch.plugins import settings, systems
    from truebatch.verification.census.tables import markdown_table

    parts = [
        "# Settings",
        "Made by `truebatch config reference`; do not edit. A setting stands in a YAML file (`--config FILE`) or is given as "
        "`--set a.b=value`. `truebatch config show TARGET` says where each value comes from.",
    ]
    for target in sorted({*systems(), *settings()}):
        rows = [[name, _cell(default), _cell(about)] for name, default, about in _known(_kind(target), ())]
        parts += [f"## {target}", markdown_table(["setting", "default", "what it means"], rows)]
    return "\n\n".join(parts) + "\n"


def _known(kind: type[Any], path: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of every setting, without a value for any."""
    from truebatch.config.load import field_notes, plain_value

    notes = field_notes(kind)
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(made) and not isinstance(made, type):
            yield from _known(type(made), (*path, field.name))
            continue
        default = "required" if made is dataclasses.MISSING else _text(plain_value(made))
        yield ".".join((*path, field.name)), default, notes.get(field.name, "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _kind(target: str) -> type[Any]:
    """The dataclass of a target's settings."""
    from truebatch.plugins import load_plugin, settings

    if target in settings():
        found: type[Any] = load_plugin(settings()[target])
        return found
    from truebatch.training.registry import find_system
    from truebatch.training.train_system import settings_type

    return settings_type(find_system(target))


def _rows(
    config: DataclassInstance, given: Any, path: tuple[str, ...], places: dict[Any, str]
) -> Iterator[dict[str, Any]]:
    """One row per setting, nested ones by their dotted name."""
    from truebatch.config.load import field_notes, plain_value

    notes = field_notes(type(config))
    for field in dataclasses.fields(config):
        if not field.init:
            continue
        value, here = getattr(config, field.name), (*path, field.name)
        inner = given.get(field.name) if isinstance(given, dict) else None
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _rows(value, inner, here, places)
            continue
        is_given = isinstance(given, dict) and field.name in given
        yield {
            "setting": ".".join(here),
            "value": plain_value(value),
            "from": places.get(here, "given") if is_given else "default",
            "about": notes.get(field.name, ""),
        }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
