"""`truebatch seqset_vae`: what only this system has."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from truebatch.cli.options import AsJson, ConfigFile, Overrides
from truebatch.cli.run_folder import open_named
from truebatch.cli.system_commands import SystemCommand
from truebatch.errors import ConfigError
from truebatch.language.console import one_line, say

# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
if TYPE_CHECKING:
    from truebatch_systems.seqset_vae.config import SeqSetConfig
    from truebatch_systems.seqset_vae.data.validate import Validation

seqset_vae_app = typer.Typer(
    help="What only stays as sequences of sets have.", no_args_is_help=True, rich_markup_mode=None
)


@seqset_vae_app.callback()
def _seqset_vae() -> None:
    """What only stays as sequences of sets have."""


@seqset_vae_app.command("validate", short_help="Every fault of the data, and what becomes of it.")
def show_validate(
    data: Annotated[
        str,
        typer.Argument(help="generated, nafld, a folder (patient_ehr/, MEDS, OMOP, PhysioNet 2012), or a long table."),
    ],
    config: ConfigFile = None,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Read everything and report every fault: how often, where first, and what a run does with it.

    Exit code 0: a run would start. 1: it would stop at a fault named here. 2: usage, or nothing can be read.

    Examples:

      truebatch seqset_vae validate /data/mimic

      truebatch seqset_vae validate /data/MIMIC-IV-DEMO-MEDS

      truebatch seqset_vae validate events.csv --set columns.patient=stay_id --set columns.time=hours
    """
    from truebatch_systems.seqset_vae.data.validate import validate

    found = validate(_settings(config, [f"data={json.dumps(data)}", *(set_ or [])]))
    if as_json:
        sys.stdout.write(json.dumps({**asdict(found), "is_usable": found.is_usable}, ensure_ascii=False) + "\n")
    else:
        _print_validation(found)
    return 0 if found.is_usable else 1


@seqset_vae_app.command("prepare", short_help="Carry values forward and write the stays again.")
def show_prepare(
    input_dir: Annotated[Path, typer.Option(help="The folder with patient_ehr/.")],
    output_dir: Annotated[Path, typer.Option(help="Where the new files go, in the same layout.")],
    event_emb_csv: Annotated[Path | None, typer.Option(help="Vectors of the variables. Default: cached.csv.")] = None,
    value_stats_csv: Annotated[Path | None, typer.Option(help="variable, mean, std. Default: stats.csv.")] = None,
    lvcf_minutes: Annotated[float, typer.Option(help="How long a value holds.")] = 60.0,
    always_carry_vars: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A variable that holds however old it is; again for more.")
    ] = None,
    drop_faulty: Annotated[
        bool, typer.Option("--drop-faulty", help="Leave out and count events without a value.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite existing files.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Only the first files of every split, for a try.")] = False,
) -> int:
    """Normalise all values, carry each forward until it is too old, and write one Parquet file a stay.

    The new folder is trained on like the old one: truebatch train seqset_vae --set data=OUTPUT_DIR

    Exit code 0: written. 2: usage, or a fault of the data named with file and row.

    Examples:

      truebatch seqset_vae prepare --input-dir /data/mimic --output-dir /data/mimic_lvcf --smoke
    """
    from truebatch_systems.seqset_vae.data.export import CarryConfig, prepare_folder

    if not lvcf_minutes >= 0:
        raise ConfigError("a value holds for 0 minutes or more", seen=f"--lvcf-minutes {lvcf_minutes}", do="give 60")
    done = prepare_folder(
        CarryConfig(
            input_dir=input_dir,
            output_dir=output_dir,
            event_emb_csv=event_emb_csv,
            value_stats_csv=value_stats_csv,
            lvcf_minutes=lvcf_minutes,
            always_carry_vars=tuple(always_carry_vars or ()),
            overwrite=overwrite,
            smoke=smoke,
            drop_faulty=drop_faulty,
        )
    )
    share = done.carried / max(done.events, 1)
    lines = [
        *done.lines,
        f"wrote {done.files:,} stays with {done.events:,} events, {share:.0%} of them carried forward",
    ]
    say("\n".join([*lines, f"next: truebatch train seqset_vae --set data={output_dir}"]))
    return 0


@seqset_vae_app.command("test-batch", short_help="Shapes, padding and memory of every batch size.")
def show_test_batch(
    data: Annotated[
        str,
        typer.Argument(help="generated, nafld, a folder (patient_ehr/, MEDS, OMOP, PhysioNet 2012), or a long table."),
    ] = "generated",
    batch_size: Annotated[
        list[int] | None, typer.Option(help="A batch size; again for more. Default: 1 4 8 16.")
    ] = None,
    max_sequence_length: Annotated[
        int | None, typer.Option(help="Most events of a stay, by whole recent sets.")
    ] = None,
    use_dynamic_padding: Annotated[
        bool,
        typer.Option(
            help="Pad to the longest stay of a batch; else to --max-sequence-length, or to the longest of all."
        ),
    ] = True,
    config: ConfigFile = None,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Cut the same stays into batches of every size, compare each with one stay at a time, and measure a step of all.

    Exit code 0: all batches equal one by one. 1: one does not. 2: usage or data.

    Examples:

      truebatch seqset_vae test-batch

      truebatch seqset_vae test-batch /data/mimic --batch-size 4 --batch-size 32 --max-sequence-length 1000
    """
    from truebatch_systems.seqset_vae.try_batch import note_lines, try_batches

    given = [f"data={json.dumps(data)}", *(set_ or [])]
    given += [f"max_events={max_sequence_length}"] if max_sequence_length is not None else []
    given += [] if use_dynamic_padding else ["use_dynamic_padding=false"]
    trials = []
    for trial in try_batches(_settings(config, given), batch_size or [1, 4, 8, 16]):
        trials.append(trial)
        if not as_json:
            say("\n".join([*note_lines(trial), ""]))
    if as_json:
        sys.stdout.write(json.dumps([asdict(trial) for trial in trials]) + "\n")
    return 0 if all(trial.is_equal for trial in trials) else 1


@seqset_vae_app.command("export", short_help="The latents of every set, from a trained run.")
def show_export(
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/seqset_vae.")],
    out: Annotated[Path | None, typer.Option(help="The .npz file. Default: RUN/latents.npz.")] = None,
    set_: Overrides = None,
) -> int:
    """Write posterior means, log variances and states of all sets of all splits into one .npz file.

    Examples:

      truebatch seqset_vae export runs/seqset_vae --out latents.npz
    """
    from truebatch_systems.seqset_vae.data.prepare import prepare
    from truebatch_systems.seqset_vae.eval.evaluate import export_latents

    trained = open_named(run, set_ or [], None)
    if trained.system.name != "seqset_vae":
        raise ConfigError(f"{run} is a run of another system", seen=trained.system.name, do="name a run of seqset_vae")
    path = out or run / "latents.npz"
    if out is None and path.is_symlink():
        raise ConfigError(
            f"{path} is a link, nothing was written", seen=f"it leads to {path.readlink()}", do="name a file: --out"
        )
    for split, number in export_latents(prepare(trained.config), trained.model, path).items():
        say(f"{split}: {number:,} sets")
    say(f"wrote {path}")
    return 0


def _settings(file: Path | None, overrides: list[str]) -> SeqSetConfig:
    from truebatch.config.load import load_config
    from truebatch_systems.seqset_vae.config import SeqSetConfig

    return load_config(SeqSetConfig, file, overrides=overrides)


def _print_validation(found: Validation) -> None:
    from truebatch.reports.tables import Table, print_table

    for split, line in found.splits.items():
        say(f"{one_line(split)}: {line}")
    header = ("", "least", "median", "95 %", "most")
    rows = tuple((name, *(f"{value:,.4g}" for value in values)) for name, values in found.shapes.items())
    if rows:
        print_table(Table(header, rows))
    for fault in found.faults:
        say(f"\n{fault['words']}: {fault['number']:,} in {fault['places']:,} places; {fault['outcome']}")
        sys.stdout.write("".join(f"  {one_line(str(place))}\n" for place in fault["first"]))
    verdict = "no faults" if not found.faults else "every fault is corrected or left out, and counted"
    stops = f"a run would stop: {', '.join(found.stops)}" if found.stops else "a run would stop: no training stays"
    say(f"\n{verdict if found.is_usable else stops}")


COMMAND = SystemCommand(seqset_vae_app, "Stays as sequences of sets: look at data and batches.")
