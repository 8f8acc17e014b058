"""Tables line up in the terminal, whatever the script and the width."""

from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from truebatch.language.columns import align
from truebatch.reports.tables import Table, print_table, render_table

WORDS = st.text(alphabet="ab1，。中文", min_size=1, max_size=8)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=4))
def test_every_line_is_equally_wide_with_chinese_text_too(rows):
    lines = render_table(Table(("名称", "fill", "waste"), tuple(rows)), width=200)
    assert {cell_len(line) for line in lines} == {cell_len(lines[0])}


def test_a_table_too_wide_for_the_terminal_is_stacked():
    table = Table(
        ("grouping", "micro-batches", "fill"), (("fixed", "12", "61.0 %"), ("packed", "7", "100.0 %")), "Plans"
    )
    lines = render_table(table, width=20)
    assert lines == [
        "Plans", "fixed", "  micro-batches: 12", "  fill: 61.0 %", "packed", "  micro-batches: 7", "  fill: 100.0 %",
    ]  # fmt: skip


def test_output_into_a_pipe_is_plain_text():
    out = io.StringIO()
    print_table(Table(("a", "b"), (("中文", "1"),)), file=out)
    assert out.getvalue() == "a     b\n----  -\n中文  1\n"


def test_nothing_is_read_as_markup_coloured_or_broken_however_long():
    rows = [("[red]a[/red]", ":smile:"), ("x" * 3000, "y z " * 1000)]
    lines = align(rows, header=("[b]name[/b]", "http://a/b"))
    assert len(lines) == 4
    assert lines[0].split() == ["[b]name[/b]", "http://a/b"]
    assert lines[2].split() == ["[red]a[/red]", ":smile:"]
    assert lines[3].split() == ["x" * 3000, *["y", "z"] * 1000]


def test_no_row_and_an_empty_cell():
    assert align([]) == []
    assert align([], header=("a", "bc")) == ["a  bc", "-  --"]
    assert align([("", "1"), ("ab", "")]) == ["    1", "ab"]
