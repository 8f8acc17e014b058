"""`truebatch vlm_pruning`: what only vision-token pruning has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from truebatch.cli.system_commands import SystemCommand
from truebatch.language.console import say

vlm_pruning_app = typer.Typer(help="What only vision-token pruning has.", no_args_is_help=True, rich_markup_mode=None)


@vlm_pruning_app.callback()
def _vlm_pruning() -> None:
    """What only vision-token pruning has."""


def _say(line: str) -> None:
    say(f"{line}")
    sys.stdout.flush()


@vlm_pruning_app.command("pretrain", short_help="Train a tiny LLaVA on made shapes, to try pruning on a CPU.")
def show_pretrain(
    out: Annotated[Path, typer.Option(help="The folder to work in.")] = Path("runs/vlm_backbone"),
    seed: Annotated[int, typer.Option(min=0, help="Of weights and data.")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the samples.")] = 8,
) -> int:
    """Train a tiny LLaVA that answers questions about made shapes, a few minutes on a CPU; the same command goes on.

    Exit code 0: done; it prints the settings to prune it with.

    Examples:

      truebatch vlm_pruning pretrain --out runs/vlm_backbone
    """
    # Imported here so that `truebatch --help` answers at once.
    from truebatch_systems.vlm_pruning.train.pretrain import LESSONS, PROMPT, Lessons, pretrain_tiny

    attempts = LESSONS.attempts if epochs >= LESSONS.epochs else 1  # a short trial is not expected to learn it
    folder = pretrain_tiny(out, seed=seed, lessons=Lessons(epochs=epochs, attempts=attempts), say=_say)
    say(f"\nbackbone: {folder}")
    say("its prompt is part of it; prune it with:")
    say("  truebatch init vlm_pruning")
    sys.stdout.write(
        "  truebatch train vlm_pruning --config configs/vision_token_pruning.yaml "
        f"--set backbone_settings.name={folder} --set 'backbone_settings.prompt=\"{PROMPT}\"'\n"
    )
    return 0


COMMAND = SystemCommand(vlm_pruning_app, "Vision-token pruning: a tiny backbone to try it on.")
