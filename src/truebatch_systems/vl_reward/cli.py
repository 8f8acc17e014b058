"""`truebatch vl_reward`: what only the edit-then-judge benchmark has: run, validate, compare, gallery."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from truebatch.cli.options import AsJson, ConfigFile, Overrides
from truebatch.cli.pipelines import ScoringPipeline
from truebatch.cli.system_commands import SystemCommand
from truebatch.errors import ConfigError
from truebatch.language.console import say
from truebatch.language.translate import in_words

# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
if TYPE_CHECKING:
    from truebatch_systems.vl_reward.config import RewardConfig
    from truebatch_systems.vl_reward.pipeline import Report

CHECK_FAILED = 1
vl_reward_app = typer.Typer(help="The edit-then-judge benchmark.", no_args_is_help=True, rich_markup_mode=None)


def _load(config: Path | None, set_: list[str] | None) -> RewardConfig:
    from truebatch.config.load import load_config
    from truebatch_systems.vl_reward.config import RewardConfig

    return load_config(RewardConfig, config, overrides=set_ or [])


def run_reward(config: Path | None, set_: list[str] | None) -> int:
    """Edit, judge, report; what `truebatch score vl_reward` and `truebatch vl_reward run` do."""
    from truebatch_systems.vl_reward.pipeline import run_benchmark

    return _tell_report(run_benchmark(_load(config, set_), say=_say))


def _tell_report(report: Report) -> int:
    from truebatch_systems.vl_reward.eval.report import markdown

    say()
    for line in markdown(report.summary).split("\n"):
        say(_in_cells(line) if line.startswith("| category |") else line)
    for file in report.files:
        _say(f"wrote {file}")
    return report.exit_code


def _in_cells(line: str) -> str:
    """A header of a table in Markdown, in the language of the person."""
    return "| " + " | ".join(in_words(cell) for cell in line.strip("| ").split(" | ")) + " |"


@vl_reward_app.command("run", short_help="Edit everything, judge everything, report.")
def show_run(config: ConfigFile = None, set_: Overrides = None) -> int:
    """Edit and judge a benchmark; without a file, made pictures with a scripted editor and judge.

    Exit code 0: done. 1: more failures than allowed. 3: some samples failed. 75: interrupted, run it again to go on.

    Examples:

      truebatch vl_reward run --set evaluation.output_dir=runs/shapes

      truebatch vl_reward run --config config.yaml
    """
    return run_reward(config, set_)


@vl_reward_app.command("validate", short_help="Check a benchmark file, its prompts and its pictures; load no model.")
def show_validate(config: ConfigFile = None, set_: Overrides = None) -> int:
    """Name every fault of a benchmark file with its record. Exit code 0: sound. 1: faults were found.

    Examples:

      truebatch vl_reward validate --config config.yaml
    """
    from truebatch_systems.vl_reward.pipeline import load_pairs

    pairs, faults = load_pairs(_load(config, set_), with_images=True)
    for fault in faults:
        _say(str(fault))
    _say(f"{len(pairs)} pairs, {len(faults)} fault(s)")
    return CHECK_FAILED if faults else 0


@vl_reward_app.command("compare", short_help="Two runs pair by pair, with significance.")
def show_compare(
    first: Annotated[Path, typer.Argument(help="The folder of a run.")],
    second: Annotated[Path, typer.Argument(help="The folder of another run over the same pairs.")],
    as_json: AsJson = False,
) -> int:
    """Compare the scores of two runs by sample id, over the samples that are valid in both.

    Runs over different benchmarks or with different metrics are refused with exit code 2.

    Examples:

      truebatch vl_reward compare runs/before runs/after
    """
    from truebatch_systems.vl_reward.eval.compare import compare_runs

    found, note = compare_runs(first, second)
    if as_json:
        sys.stdout.write(json.dumps({**asdict(found), "note": note}) + "\n")
        return 0
    if note:
        _say(note)
    if found.difference is None:
        _say("no sample is valid in both runs")
        return 0
    interval = f" (95 %: {found.interval[0]:+.3f} to {found.interval[1]:+.3f})" if found.interval else ""
    _say(
        f"{found.pairs} pairs valid in both; {found.only_first} only in the first, {found.only_second} only in the second"
    )
    _say(f"second minus first: {found.difference:+.3f}{interval}, p = {found.p_value:.4f}")
    _say(f"improved {found.improved}, unchanged {found.unchanged}, regressed {found.regressed}")
    return 0


@vl_reward_app.command("gallery", short_help="Write the reports of a run again, from its journals.")
def show_gallery(config: ConfigFile = None, set_: Overrides = None) -> int:
    """Make report.json, report.md and gallery.html again; nothing is edited or judged.

    Examples:

      truebatch vl_reward gallery --config config.yaml
    """
    from truebatch_systems.vl_reward.eval.report import require_begun, write_reports
    from truebatch_systems.vl_reward.pipeline import load_pairs
    from truebatch_systems.vl_reward.stages import read_results

    settings = _load(config, set_)
    run = settings.evaluation.output_dir
    require_begun(run)
    pairs, _ = load_pairs(settings)
    for file in write_reports(pairs, read_results(pairs, run), run)[1]:
        _say(f"wrote {file}")
    return 0


def is_benchmark_run(run: Path) -> bool:
    """Whether a folder is a run of this benchmark: two scoring runs and their settings."""
    return (run / "run.yaml").is_file() and (run / "edits").is_dir()


def stage_folders(run: Path) -> list[Path]:
    """The scoring runs inside of a benchmark's folder that have begun: edits, then scores."""
    from truebatch_systems.vl_reward.stages import EDITS, SCORES, has_begun

    return [run / name for name in (EDITS, SCORES) if has_begun(run / name)]


def export_benchmark(run: Path, to: Path, *, for_spreadsheet: bool = False) -> int:
    """What `truebatch run export` writes of a benchmark: a row a pair, that of its score, else that of its edit."""
    from truebatch.scoring.store.export import write_rows
    from truebatch_systems.vl_reward.stages import EDITS, SCORES, stage_rows

    scores = stage_rows(run / SCORES)
    rows = [{**scores.get(name, edit), "index": edit["index"]} for name, edit in stage_rows(run / EDITS).items()]
    return write_rows(rows, to, for_spreadsheet=for_spreadsheet)


def retry_benchmark(run: Path, kinds: list[str], config: Path | None, set_: list[str] | None) -> int:
    """Edit and judge the failures of these kinds again, with the settings the user gives; those of the run are the
    same."""
    from truebatch.config.load import load_config
    from truebatch.scoring.runner import RunConfig
    from truebatch_systems.vl_reward.config import RewardConfig
    from truebatch_systems.vl_reward.pipeline import SETTINGS, run_benchmark

    place = f"evaluation.output_dir={json.dumps(str(run))}"
    mine = load_config(RewardConfig, config, overrides=[*(set_ or []), place])
    _refuse_other(run, mine, load_config(RewardConfig, run / SETTINGS, overrides=[place]))
    return _tell_report(run_benchmark(mine, say=_say, how=RunConfig(retry=tuple(kinds))))


def _refuse_other(run: Path, mine: RewardConfig, its: RewardConfig) -> None:
    """A folder may come from anybody: pictures, models, code and programs it names are used only if they are the
    user's."""
    from truebatch.config.load import plain_value
    from truebatch.reports.tables import flat

    given, known = (dict(flat(plain_value(config))) for config in (mine, its))
    other = [name for name in {**known, **given} if known.get(name) != given.get(name)]
    if other:
        shown = (f"{name}: {known.get(name)!r} in the folder, {given.get(name)!r} from you" for name in other[:8])
        raise ConfigError(
            f"the settings in {run} are not those you give, and are not used",
            seen="; ".join(shown),
            do="give your own, as you did at first: --config FILE, --set A.B=VALUE",
        )


def _say(line: str) -> None:
    say(line)
    sys.stdout.flush()


COMMAND = SystemCommand(vl_reward_app, "The edit-then-judge benchmark.")
PIPELINE = ScoringPipeline(
    score=run_reward,
    is_run=is_benchmark_run,
    stage_folders=stage_folders,
    export=export_benchmark,
    retry=retry_benchmark,
)
