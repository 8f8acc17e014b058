"""`truebatch evaluate`: metrics of a trained run on held-out samples."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any, cast

from truebatch.cli.options import AsJson, RunFolder, RunOverrides, SystemOption
from truebatch.cli.run_folder import open_named, own_folder
from truebatch.errors import ConfigError, DataError
from truebatch.language.console import say
from truebatch.progress import stage

# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
if TYPE_CHECKING:
    from truebatch.training.load_trained import Trained
    from truebatch.training.system import SizedDataset

FOLDER, FIGURES = "evaluation", "figures.json"


def show_evaluate(
    run: RunFolder, set_: RunOverrides = None, as_json: AsJson = False, system: SystemOption = None
) -> int:
    """Measure a trained run on held-out samples; the figures also go to RUN/evaluation/figures.json.

    Exit code 0: done. 2: usage, or there is nothing to evaluate.

    Examples:

      truebatch evaluate runs/chinese_gpt

      truebatch evaluate runs/seqset_vae --json
    """
    from truebatch.io.atomic_files import write_json

    trained = open_named(run, set_ or [], system)
    evaluate = trained.task.commands.evaluate
    if evaluate is None:
        raise ConfigError(
            f"the system {trained.system.name!r} has no evaluation",
            seen="its `evaluate` is None",
            do="read the validation loss in the run's metrics.jsonl",
        )
    samples = held_out(trained)
    out = own_folder(run, FOLDER)
    with stage(f"evaluating on {len(samples):,} samples"):
        found = evaluate(trained.model, samples, out)
    figures = {"step": trained.step, "samples": len(samples), **found}
    write_json(out / FIGURES, figures)
    if as_json:
        sys.stdout.write(json.dumps(figures, ensure_ascii=False) + "\n")
        return 0
    _print(figures)
    say(f"\nfiles: {out}")
    return 0


def held_out(trained: Trained[Any]) -> SizedDataset:
    """The test samples of a run, else those it was validated on."""
    task = trained.task
    sources: tuple[object, ...] = (task.test() if task.test is not None else None, task.data.validation)
    for found in sources:
        if isinstance(found, Sized) and len(found):
            return cast("SizedDataset", found)
    raise DataError(
        "there are no held-out samples to evaluate on",
        seen=f"{trained.system.name} gave none with these settings",
        do=_where_to_give_samples(trained.config),
    )


def _where_to_give_samples(config: Any) -> str:
    if hasattr(config, "validation"):
        return "name a file of held-out samples: --set validation=FILE"
    return "give a larger share or a file of held-out samples in the settings (--set)"


def _print(figures: Mapping[str, Any]) -> None:
    from truebatch.reports.tables import figures_table, print_table

    print_table(figures_table(figures))
