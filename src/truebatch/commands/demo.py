"""`truebatch demo`: the main job on embedded data."""

from __future__ import annotations

from typing import Annotated

import typer


def show_demo(
    seed: Annotated[int, typer.Option(help="Other samples and other weights.")] = 0,
) -> int:
    """Plan ragged samples, build micro-batches and show that they equal one by one. Needs no files."""
    # Imported here so that `truebatch --help` answers at once: the demo needs torch.
    from truebatch.demo import run_demo

    return 0 if run_demo(seed=seed) else 1
