"""What a command is doing stands on standard error while it says nothing else, and is gone before it says something."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from tests.cli.silence import listen
from truebatch import progress
from truebatch.language.console import Filtered
from truebatch.progress import ProgressLine, Stage, counted, fitted, stage


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        raise OSError


@pytest.fixture(autouse=True)
def _clock_that_stands(monkeypatch):
    """However slow the machine is."""
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 50_000.0))


def silent_since(line: ProgressLine, seconds: float) -> None:
    line.said_at = progress.time.monotonic() - seconds


def test_a_silent_command_on_a_terminal_says_its_stage_and_how_much_is_left():
    line = ProgressLine(Terminal())
    with stage("reading x.jsonl", 100) as reading:
        reading.advance(25)
        reading.began -= 10
        line.look()
        assert not line.out.getvalue(), "nothing, as long as the command has just spoken"
        silent_since(line, 2)
        line.look()
    assert line.out.getvalue() == "\r\033[Kreading x.jsonl: 25/100, 0:10 so far, 0:30 left"


def test_the_line_is_taken_away_before_the_command_writes(monkeypatch):
    line = ProgressLine(Terminal())
    monkeypatch.setattr("truebatch.language.console.before_output", [line.erase])
    silent_since(line, 2)
    line.look()
    Filtered(line.out).write("a result\n")
    assert line.out.getvalue().endswith("\r\033[Ka result\n")
    line.look()
    assert line.out.getvalue().endswith("a result\n"), "and not drawn again at once"


def test_nothing_is_drawn_behind_a_prompt():
    line = ProgressLine(Terminal())
    line.erase("> ")
    silent_since(line, 60)
    line.look()
    assert not line.out.getvalue()


def test_a_file_gets_a_line_now_and_then_ever_more_rarely():
    line = ProgressLine(io.StringIO())
    silent_since(line, 9000)
    with stage("loading the model") as loading:
        line.look()
        line.look()
        assert line.out.getvalue().count("\n") == 1
        line.shown_at -= 6
        line.look()
        assert line.out.getvalue().count("\n") == 2
        line.shown_at -= 6
        loading.began -= 3600  # after an hour, a line every six minutes
        line.look()
        assert line.out.getvalue().count("\n") == 2
    assert "\033" not in line.out.getvalue()


def test_the_innermost_stage_is_shown_and_an_error_closes_it():
    with stage("outer"):
        with stage("inner"):
            assert progress.open_stages()[-1].what == "inner"
        with pytest.raises(ValueError, match="wrong"), stage("failing"):
            raise ValueError("wrong")
        assert progress.open_stages()[-1].what == "outer"
    assert not progress.open_stages()


def test_items_are_counted_as_they_are_used():
    items = counted("abc", "reading", 3)
    next(items), next(items)
    assert (progress.open_stages()[-1].done, progress.open_stages()[-1].total) == (1, 3)
    assert list(items) == ["c"]
    assert not progress.open_stages()


def test_another_display_takes_the_terminal():
    line = ProgressLine(Terminal())
    silent_since(line, 60)
    line.paused = 1
    line.look()
    assert not line.out.getvalue()


def test_a_name_out_of_a_file_steers_no_terminal():
    assert "\033" not in Stage("reading \033[2J\n.jsonl").line()


def test_a_line_is_cut_to_the_width_of_the_terminal():
    assert fitted("正在读取 x", 7) == "正在读"


@pytest.mark.parametrize("is_file", [False, True], ids=["terminal", "file"])
def test_a_slow_command_names_what_it_does(is_file):
    slow = {"truebatch.doctor:check_machine": 4.0}
    heard = listen(["doctor"], slow=slow, is_file=is_file)
    assert heard.code == 0, heard.text
    assert "checking this machine: 0:0" in heard.text
