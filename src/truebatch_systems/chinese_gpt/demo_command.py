"""`truebatch demo`: the main job on embedded data."""

from __future__ import annotations

from typing import Annotated

import typer

from truebatch.cli.system_commands import SystemCommand


def show_demo(
    seed: Annotated[int, typer.Option(help="Other samples and other weights.")] = 0,
) -> int:
    """Train a small Chinese GPT one by one and in true batches, show that both are the same, and let it answer.

    Needs no files; its report goes to runs/demo/report.html. Exit code 1: something was not equal.

    Examples:

      truebatch demo
    """
    # Imported here so that `truebatch --help` answers at once: the demo needs torch.
    from truebatch_systems.chinese_gpt.demo import run_demo

    return 0 if run_demo(seed=seed) else 1


COMMAND = SystemCommand(show_demo, "The main job on embedded data: plan, batch, compare.")
