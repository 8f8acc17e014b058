"""What a run shows: enough to follow it, bounded whatever its length."""

from __future__ import annotations

import io
import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.reports.progress_display import FIRST_SECONDS, JsonLines, PlainLines, TerminalBar, make_console_logger


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def record(step: int, seconds: float = 1.0, loss: float = 2.5) -> dict:
    return {"step": step, "loss": loss, "tokens": 50, "fill": 0.93, "seconds": seconds}


def lines_of(seconds: list[float], first: int = 0) -> list[str]:
    clock, out = Clock(), io.StringIO()
    show = PlainLines(out, clock)
    show.begin(first, first + len(seconds))
    for at, each in enumerate(seconds, first + 1):
        clock.now += each
        show.record(record(at, each))
    show.close()
    return out.getvalue().splitlines()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1e-4, 3e3), min_size=1, max_size=200), st.integers(0, 10**6))
def test_plain_lines_are_few_begin_with_the_first_step_and_end_with_the_last(seconds, first):
    lines = lines_of(seconds, first)
    most = 3 + math.log(max(sum(seconds), 1) / FIRST_SECONDS + 1) / math.log(1 / 0.9) + 10
    assert len(lines) <= most
    assert lines[0].startswith(f"step {first + 1}/")
    assert lines[-1].startswith(f"step {first + len(seconds)}/{first + len(seconds)} ")
    assert len(set(lines)) == len(lines)


def test_a_long_run_prints_hundreds_of_lines_and_not_millions():
    assert len(lines_of([1.0] * 100_000)) < 150


def test_a_line_has_loss_speed_fill_memory_and_the_time_left():
    line = lines_of([2.0, 2.0, 2.0, 2.0])[0]
    assert line.startswith("step 1/4  loss 2.5000  25 tokens/s  fill 93%  memory ")
    assert line.endswith("ETA 0:00:06")


def test_validation_is_no_step():
    out = io.StringIO()
    show = PlainLines(out, Clock())
    show.begin(0, 2)
    show.record({"step": 1, "validation_loss": 3.0})
    show.close()
    assert out.getvalue() == ""


def test_json_lines_have_null_for_nan():
    out = io.StringIO()
    show = make_console_logger("json", file=out)
    assert isinstance(show, JsonLines)
    show.say("损失")
    show.begin(0, 1)
    show.record(record(1, loss=math.nan))
    show.close()
    said, begun, one = [json.loads(line) for line in out.getvalue().splitlines()]
    assert said == {"message": "损失"}
    assert begun == {"begin": 0, "num_steps": 1}
    assert one["loss"] is None
    assert one["step"] == 1


def test_a_pipe_gets_plain_lines_and_a_terminal_a_bar():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(make_console_logger(file=io.StringIO()), PlainLines)
    assert isinstance(make_console_logger("plain", file=Terminal()), PlainLines)
    out = Terminal()
    show = make_console_logger(file=out)
    assert isinstance(show, TerminalBar)
    show.begin(3, 5)
    show.record(record(4))
    show.say("a line [in brackets]")
    show.close()
    show.close()
    assert "a line [in brackets]" in out.getvalue()
