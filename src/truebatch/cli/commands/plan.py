"""`truebatch plan`: how a dataset would be cut into micro-batches, before anything is run."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from truebatch.cli.options import AsJson, ConfigFile, Overrides, changed_options, option_name, with_option_groups
from truebatch.errors import ConfigError
from truebatch.language.console import say

# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
if TYPE_CHECKING:
    from truebatch.config.yaml_files import Document
    from truebatch.planning.config import PlanConfig
    from truebatch.planning.lengths.measure import Measured

DEFAULT_CELLS = 8192
LIMITS = ("cells", "pairs", "samples", "costs")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureOptions:
    """How the lengths of the samples are found."""

    lengths: Annotated[Path | None, typer.Option(help="A .npy file of lengths instead of DATA.")] = None
    field: Annotated[str | None, typer.Option(help="The field that gives the length of a sample.")] = None
    tokenizer: Annotated[Path | None, typer.Option(help="A folder with tokenizer.json: text counts tokens.")] = None
    cache: Annotated[Path | None, typer.Option(help="Folder where measured lengths are cached.")] = None
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Measure again and cache nothing.")] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Settings of a plan that have an option of their own."""

    cost: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=LIMIT", help="Limit the sum of another field too.")
    ] = None
    layout: Annotated[str | None, typer.Option(help="padded (the default) or packed.")] = None
    grouping: Annotated[str | None, typer.Option(help="budget, fixed or bucketed (padded), packed (packed).")] = None
    cells: Annotated[int | None, typer.Option(help="Maximum cells (tokens and padding) per micro-batch.")] = None
    pairs: Annotated[int | None, typer.Option(help="Maximum query-key pairs per micro-batch.")] = None
    samples: Annotated[int | None, typer.Option(help="Maximum samples per micro-batch.")] = None
    bucket_width: Annotated[int | None, typer.Option(help="Bucket width for grouping bucketed.")] = None
    samples_per_step: Annotated[int | None, typer.Option(help="A step is this many samples.")] = None
    tokens_per_step: Annotated[int | None, typer.Option(help="A step is as many samples as fit.")] = None
    rows_per_step: Annotated[int | None, typer.Option(help="A step is this many packed rows of --cells.")] = None
    micro_batches_per_step: Annotated[int | None, typer.Option(help="A step is this many micro-batches.")] = None
    overlong: Annotated[str | None, typer.Option(help="A sample over a limit: refuse, drop or cut.")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of every random choice.")] = None

    def settings(self) -> dict[str, Any]:
        """The settings that were given."""
        given = {name: value for name in changed_options(self) if (value := getattr(self, name)) is not None}
        costs = _cost_limits(given.pop("cost", None) or [])
        return {**given, **({"costs": costs} if costs else {})}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRunOptions:
    """Which plans are made, and what becomes of them."""

    epoch: Annotated[int, typer.Option(help="Another epoch has another order.")] = 0
    ranks: Annotated[int, typer.Option(help="Devices that share a step.")] = 1
    compare: Annotated[bool, typer.Option("--compare", help="All groupings side by side.")] = False
    as_json: AsJson = False
    save: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None


@with_option_groups
def show_plan(
    measuring: MeasureOptions,
    flags: PlanOptions,
    run: PlanRunOptions,
    data: Annotated[str, typer.Argument(help="A data file, or package.module:name, or file.py:name.")] = "",
    config: ConfigFile = None,
    set_: Overrides = None,
) -> int:
    """Show how samples would be grouped: micro-batches, fill, waste, balance. No model is loaded.

    Examples:

      truebatch plan train.jsonl --compare
    """
    _refuse_together(data, measuring.lengths, compare=run.compare, save=run.save)
    given = flags.settings()
    settings = _settings(config, set_ or [], given, compare=run.compare)
    measured = _measure(data or str(measuring.lengths), measuring, settings)
    assumed = _assume_cells(settings, measured)
    rows = _plan_all(settings, measured, run) if run.compare else [_plan_one(settings, measured, run)]
    if run.as_json:
        sys.stdout.write(json.dumps(_as_json(rows, measured, compare=run.compare), indent=2) + "\n")
        return 0
    say(_found(measured) + assumed)
    again = _again(data or f"--lengths={measuring.lengths}", given, measuring.field, run.ranks)
    _show(rows, again, compare=run.compare, save=run.save)
    return 0


def _refuse_together(data: str, lengths: Path | None, *, compare: bool, save: Path | None) -> None:
    if bool(data) == (lengths is not None):
        raise ConfigError(
            "name either DATA or --lengths FILE.npy",
            seen=f"DATA {data!r} and --lengths {lengths}" if data else "neither",
            do="for example: truebatch plan train.jsonl --cells 8192",
        )
    if lengths is not None and lengths.suffix != ".npy":
        raise ConfigError("--lengths takes a .npy file", seen=str(lengths), do=f"truebatch plan {lengths}")
    if compare and save is not None:
        raise ConfigError(
            "--compare makes several plans, so there is not one to save",
            seen=f"--compare and --save {save}",
            do="omit --compare and choose the --layout and --grouping to save",
        )


def _cost_limits(costs: list[str]) -> dict[str, int]:
    limits = {}
    for text in costs:
        name, _, limit = text.partition("=")
        if not name or not (limit.isascii() and limit.isdigit()):
            raise ConfigError("--cost is written FIELD=LIMIT", seen=repr(text), do="for example --cost patches=4096")
        limits[name] = int(limit)
    return limits


def _settings(file: Path | None, overrides: list[str], flags: dict[str, Any], *, compare: bool) -> Document:
    from truebatch.config.load import apply_override, read_document

    document = read_document(file)
    for override in overrides:
        apply_override(document, override)
    for name, value in flags.items():
        document.values[name] = value
        document.places[(name,)] = "--cost" if name == "costs" else option_name(PlanOptions(), name)
    if document.values.get("grouping") == "packed":
        document.values.setdefault("layout", "packed")  # The only layout that has this grouping.
    _refuse_early(document, compare=compare)
    return document


def _refuse_early(document: Document, *, compare: bool) -> None:
    """Check the settings before the data is measured, which may take minutes."""
    from truebatch.reports.plan_tables import compared_settings

    values = {"cells": DEFAULT_CELLS} | document.values
    for one in compared_settings(values) if compare else [values]:
        _checked(document, one)


def _checked(document: Document, values: dict[str, Any]) -> PlanConfig:
    from truebatch.config.load import check_config
    from truebatch.config.yaml_files import Document
    from truebatch.planning.config import PlanConfig

    return check_config(PlanConfig, Document(values, document.places))


def _measure(source: str, options: MeasureOptions, settings: Document) -> Measured:
    from truebatch.cli.data_argument import read_data
    from truebatch.planning.lengths.measured_values import cache_folder

    costs = {name: name for name in settings.values.get("costs") or {}}
    cache = None if options.no_cache else options.cache or cache_folder()
    return read_data(source, field=options.field, tokenizer=options.tokenizer, costs=costs, cache=cache)


def _assume_cells(settings: Document, measured: Measured) -> str:
    if any(settings.values.get(name) for name in LIMITS):
        return ""
    from truebatch.planning.sample_table import LONGEST

    longest = int(measured.lengths.max()) if len(measured.lengths) else 0
    settings.values["cells"] = max(DEFAULT_CELLS, min(longest, LONGEST))  # a longer one is refused as a length
    return f"\nno limit given: assuming --cells {settings.values['cells']}"


def _plan_one(settings: Document, measured: Measured, run: PlanRunOptions) -> dict[str, Any]:
    from truebatch.planning.plan_file import save_plan
    from truebatch.reports.plan_tables import plan_and_count

    plan, row = plan_and_count(measured, _checked(settings, settings.values), epoch=run.epoch, ranks=run.ranks)
    if run.save is not None:
        save_plan(plan, run.save)
    return row


def _plan_all(settings: Document, measured: Measured, run: PlanRunOptions) -> list[dict[str, Any]]:
    from truebatch.reports.plan_tables import compared_settings, plan_and_count

    configs = [_checked(settings, values) for values in compared_settings(settings.values)]
    return [plan_and_count(measured, config, epoch=run.epoch, ranks=run.ranks)[1] for config in configs]


def _as_json(rows: list[dict[str, Any]], measured: Measured, *, compare: bool) -> dict[str, Any]:
    about = {"found": measured.found, "unit": measured.unit, "fingerprint": measured.fingerprint}
    return {**about, "plans": rows} if compare else {**rows[0], **about}


def _found(measured: Measured) -> str:
    lengths = measured.lengths
    spread = f"{lengths.min():,} to {lengths.max():,}, mean {lengths.mean():,.1f}" if len(lengths) else "none"
    words = f"{len(lengths):,} samples, {measured.unit} from the {measured.found}: {spread}"
    hint = "\ncharacters, not tokens: use --tokenizer DIR to count tokens" if measured.unit == "characters" else ""
    return words + hint


def _again(source: str, flags: dict[str, Any], field: str | None, ranks: int) -> str:
    parts = ["truebatch", "plan", source, *(["--field", field] if field else [])]
    for name, value in flags.items():
        if name == "costs":
            parts += [part for cost, limit in value.items() for part in ("--cost", f"{cost}={limit}")]
        elif name not in ("layout", "grouping"):
            parts += [option_name(PlanOptions(), name), str(value)]
    return shlex.join(parts + (["--ranks", str(ranks)] if ranks > 1 else []))


def _show(rows: list[dict[str, Any]], again: str, *, compare: bool, save: Path | None) -> None:
    from truebatch.reports.plan_tables import plans_table
    from truebatch.reports.tables import Table, print_table

    say("")
    if compare:
        print_table(plans_table(rows))
        best = min(rows, key=lambda row: (row["micro_batches"], row["cells"]))
        say(f"\nnext: {again} --layout {best['layout']} --grouping {best['grouping']} --save epoch.plan")
        return
    print_table(Table(("figure", "value"), tuple((name, _text(value)) for name, value in rows[0].items())))
    say(
        f"\nsaved: {save}\nnext, in Python: truebatch.load_plan({str(save)!r})"
        if save
        else f"\nnext: {again} --compare"
    )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
