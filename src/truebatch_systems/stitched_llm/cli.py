"""`truebatch stitched_llm`: what only this system has."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from truebatch.cli.options import AsJson, ConfigFile, Overrides
from truebatch.cli.run_folder import open_named
from truebatch.cli.system_commands import SystemCommand
from truebatch.language.console import say

# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
if TYPE_CHECKING:
    from truebatch_systems.stitched_llm.config import StitchConfig

stitched_llm_app = typer.Typer(
    help="What only models stitched from two donors have.", no_args_is_help=True, rich_markup_mode=None
)


@stitched_llm_app.callback()
def _stitched_llm() -> None:
    """What only models stitched from two donors have."""


@stitched_llm_app.command("inspect", short_help="Both donors, the cut, what is trained, and the mask self-test.")
def show_inspect(config: ConfigFile = None, set_: Overrides = None, as_json: AsJson = False) -> int:
    """Show what the settings make: donors side by side, where they are cut, and whether the result is causal.

    Without settings these are two tiny donors, which are trained first if they were not before (a minute or two).

    Exit code 0: a run would start. 1: the stitched model is not causal. 2: the donors do not fit, or usage.

    Examples:

      truebatch stitched_llm inspect

      truebatch stitched_llm inspect --set bottom=./small --set top=./large --set data=texts.jsonl
    """
    from truebatch.reports.tables import Table, print_table
    from truebatch_systems.stitched_llm.model.build import build, open_donors
    from truebatch_systems.stitched_llm.model.donors import describe_donors

    settings = _settings(config, set_)
    bottom, top = open_donors(settings)
    heading, *facts = describe_donors([("bottom", bottom), ("top", top)])
    built = build(settings)
    if as_json:
        table = {name: {"bottom": below, "top": above} for name, below, above in facts}
        found = {"donors": table, "cut": asdict(built.cut), "selftest": built.selftest.as_dict(), "lines": built.lines}
        sys.stdout.write(json.dumps(found, ensure_ascii=False) + "\n")
        return 0
    print_table(Table(tuple(heading), tuple(facts)))
    say("\n" + "\n".join([*built.lines, "", "next: truebatch train stitched_llm, with the same settings"]))
    return 0


@stitched_llm_app.command("search", short_help="Every pair of cuts by residual and by loss, with a picture.")
def show_search(
    config: ConfigFile = None,
    set_: Overrides = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the training text the maps are fitted on.")] = 8192,
    measure: Annotated[
        int | None,
        typer.Option(min=0, help="Perplexity of this many pairs, best residual first. Default: 64 at most."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where search.json and the heat maps go.")] = Path("stitched_search"),
    as_json: AsJson = False,
) -> int:
    """Try every pair of cuts: how well a linear map joins the two streams, and what perplexity that gives.

    Exit code 0: done. 2: usage, or the donors do not fit.

    Examples:

      truebatch stitched_llm search

      truebatch stitched_llm search --set bottom=./small --set top=./large --set data=texts.jsonl --measure 16

      truebatch stitched_llm search --set bottom=./small --set top=./other --set data=texts.jsonl --set vocabulary=retokenize
    """
    from truebatch_systems.stitched_llm.data.dataset import first_rows, prepare_texts, vocabulary_of
    from truebatch_systems.stitched_llm.data.vocab_map import refuse_other_vocabulary
    from truebatch_systems.stitched_llm.eval.layer_search import TwoVocabularies, search_cuts, write_search
    from truebatch_systems.stitched_llm.model.build import cut_of, open_donors
    from truebatch_systems.stitched_llm.model.donors import spelling_between

    settings = _settings(config, set_)
    bottom, top = open_donors(settings)
    spelling = spelling_between(bottom, top) if settings.vocabulary == "retokenize" else None
    between = TwoVocabularies(vocabulary_of(settings), spelling)
    if between.vocabulary is None and spelling is None:
        refuse_other_vocabulary(bottom, top)
    texts = prepare_texts(settings)
    rows = list(first_rows(texts.samples, tokens=tokens))
    held_out = texts.held_out or texts.samples
    number = min(bottom.depth * top.depth, 64) if measure is None else measure
    shape = cut_of(settings, bottom, top)
    pairs = search_cuts(bottom, top, rows, held_out, shape=shape, measured=number, between=between)
    files = write_search(pairs, out)
    if as_json:
        sys.stdout.write(json.dumps([asdict(pair) for pair in pairs]) + "\n")
        return 0
    _print_pairs(pairs)
    say("\nfiles: " + ", ".join(map(str, files)))
    say(f"next: {_train_command(config, set_ or [], pairs[0])}")
    return 0


@stitched_llm_app.command("export", short_help="A run as one merged model folder, donors included.")
def show_export(
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/stitched_llm.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not be there yet.")],
) -> int:
    """Write both cut donors, the trained adapter and the tokenizer into one folder.

    AutoModelForCausalLM and AutoTokenizer load it with from_pretrained(FOLDER, trust_remote_code=True) wherever
    truebatch is installed; without trust_remote_code after `import truebatch_systems.stitched_llm.model.model`.

    Exit code 0: written. 2: usage, or the run cannot be merged.

    Examples:

      truebatch stitched_llm export runs/stitched_llm --out merged
    """
    from truebatch.errors import ConfigError
    from truebatch.hf.pretrained import load_tokenizer
    from truebatch_systems.stitched_llm.data.dataset import sources_of
    from truebatch_systems.stitched_llm.model.save_load import export_merged

    if out.exists():
        raise ConfigError(f"{out} is there already", seen="--out", do="name a folder that is not there")
    trained = open_named(run, [], None)
    model: Any = trained.model
    export_merged(model, out, load_tokenizer(sources_of(trained.config).tokenizer, None))
    say(f"wrote {out}: the weights of step {trained.step}")
    say(f'next: AutoModelForCausalLM.from_pretrained("{out}", trust_remote_code=True), AutoTokenizer likewise')
    return 0


def _settings(file: Path | None, overrides: list[str] | None) -> StitchConfig:
    from truebatch.config.load import load_config
    from truebatch_systems.stitched_llm.config import StitchConfig

    return load_config(StitchConfig, file, overrides=overrides or [])


def _train_command(config: Path | None, given: list[str], best: Any) -> str:
    """What trains the best pair, with everything that was typed for the search."""
    kept = [one for one in given if one.partition("=")[0] not in ("cut_bottom", "cut_top")]
    parts = ["truebatch", "train", "stitched_llm", *(["--config", str(config)] if config is not None else [])]
    for one in (*kept, f"cut_bottom={best.cut_bottom}", f"cut_top={best.cut_top}"):
        parts += ["--set", one]
    return shlex.join(parts)


def _print_pairs(pairs: Any) -> None:
    from truebatch.reports.tables import Table, print_table

    body = tuple(
        (str(p.cut_bottom), str(p.cut_top), f"{p.residual:.3f}", "" if p.perplexity is None else f"{p.perplexity:.3f}")
        for p in pairs[:12]
    )
    print_table(Table(("cut_bottom", "cut_top", "residual", "perplexity"), body))


COMMAND = SystemCommand(stitched_llm_app, "What only models stitched from two donors have.")
