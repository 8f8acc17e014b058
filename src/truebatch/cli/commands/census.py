"""`truebatch census`: every Hugging Face architecture in every layout, checked twice."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer


def show_census(
    head: Annotated[
        str,
        typer.Option(
            help="causal_lm, masked_lm, seq2seq, vision_language, speech_ctc, speech_seq2seq, audio_classification, "
            "audio_language, image_and_text, time_series or all; several with commas."
        ),
    ] = "all",
    only: Annotated[str, typer.Option(help="Only these architectures, such as llama,qwen2.")] = "",
    top: Annotated[
        int, typer.Option(help="Only the most used architectures of a kept list, in the layout used; 200 take minutes.")
    ] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    jobs: Annotated[int, typer.Option(help="Architectures examined at once.")] = 2,
    time_limit: Annotated[float, typer.Option(help="Seconds after which an architecture is killed.")] = 300.0,
    journal: Annotated[
        Path | None,
        typer.Option(help="Where finished rows are saved, to resume from. Default: runs/census/rows.jsonl."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard finished rows.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write all rows as JSON.")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the tables as Markdown.")] = None,
) -> int:
    """Build a tiny model of every architecture, verify all layouts, and check the verdicts independently.

    Nothing is downloaded. If interrupted, the same command resumes where it stopped.

    Exit code 0: no error went unnoticed. 1: at least one did.

    Examples:

      truebatch census --only llama,qwen2

      truebatch census --top 200

      truebatch census --markdown docs/census.md --json docs/results/census.json
    """
    # Imported here so that `truebatch --help` answers at once.
    from truebatch.verification.census.runner import JOURNAL, CensusConfig, finish, run_census, split_names

    config = CensusConfig(
        heads=split_names(head),
        only=split_names(only),
        top=top,
        device=cast(Any, device),
        dtype=cast(Any, dtype),
        jobs=jobs,
        time_limit_s=time_limit,
        journal=journal or JOURNAL,
        fresh=fresh,
    )
    return finish(run_census(config), json_file=json_file, markdown_file=markdown_file)
