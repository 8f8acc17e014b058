"""A line a result where nobody looks at a terminal, one line of progress where somebody does."""

from __future__ import annotations

import io

from truebatch import progress as stages
from truebatch.verification.census.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_output_into_a_file_is_a_line_a_result():
    out = io.StringIO()
    with progress(2, "census", file=out) as tell:
        tell("llama: equal")
        tell("rwkv: fell back")
    assert out.getvalue() == "[1/2] llama: equal\n[2/2] rwkv: fell back\n"


def test_a_terminal_gets_a_stage_that_names_what_ended_last():
    out = Terminal()
    with progress(2, "census", file=out) as tell:
        tell("llama: equal")
        assert "census, last llama: equal: 1/2" in stages.open_stages()[-1].line()
    assert not out.getvalue()
