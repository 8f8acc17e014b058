"""Options in dataclasses: the command line sees every field, the command sees the dataclass, none is ignored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer

from truebatch.cli.app import run
from truebatch.cli.options import AsJson, changed_options, refuse_changed, with_option_groups
from truebatch.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldOptions:
    times: Annotated[int, typer.Option(help="How often.")] = 1
    name: Annotated[list[str] | None, typer.Option(help="A name.")] = None
    as_json: AsJson = False


SEEN: list[tuple[str, FoldOptions, int]] = []


@with_option_groups
def fold(paper: Annotated[str, typer.Argument(help="What is folded.")], options: FoldOptions, width: int = 3) -> int:
    """Fold."""
    SEEN.append((paper, options, width))
    return 0


def command() -> typer.Typer:
    app = typer.Typer()
    app.command("fold")(fold)
    app.command("other")(lambda: 0)
    return app


def test_every_field_is_an_option_and_the_command_gets_the_dataclass():
    assert (
        run(["fold", "a4", "--times", "2", "--name", "x", "--name", "y", "--json", "--width", "5"], commands=command())
        == 0
    )
    assert SEEN[-1] == ("a4", FoldOptions(times=2, name=["x", "y"], as_json=True), 5)


def test_defaults_are_those_of_the_dataclass():
    assert run(["fold", "a4"], commands=command()) == 0
    assert SEEN[-1] == ("a4", FoldOptions(), 3)
    assert changed_options(SEEN[-1][1]) == []


def test_options_that_would_be_ignored_are_named():
    with pytest.raises(ConfigError) as error:
        refuse_changed(FoldOptions(times=4, as_json=True), wrong="no folding here")
    assert error.value.seen == "--times, --json"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("score x.jsonl --model scripted --yesno --temperature 0.5", "--temperature"),
        ("score x.jsonl --model scripted --yesno --concurrency 3", "--concurrency"),
        ("score x.jsonl --model scripted --yesno --served large", "--served"),
        ("score x.jsonl --model http://localhost:1/v1 --yesno --dtype float32 --engine ray", "--dtype, --engine"),
        ("score vl_reward --yesno --workers 2", "--workers, --yesno"),
    ],
)
def test_score_ignores_no_option(line: str, said: str, tmp_path: Any, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    assert run(line.split()) == 2
    assert said in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
