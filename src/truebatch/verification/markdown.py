"""A report as Markdown: for a pull request, or the summary of a job."""

from __future__ import annotations

from truebatch.verification.engines.report import AgainstReport
from truebatch.verification.report import VerifyReport, describe, mark


def report_markdown(target: str, report: VerifyReport | AgainstReport) -> str:
    """The verdict as a heading, a table of arrangements, and what is said beneath it."""
    lines = str(report).splitlines()
    if isinstance(report, AgainstReport):
        return "\n".join([f"### `{_cell(target)}`", "", "```text", *lines, "```", ""])
    rows = [f"| `{mark(r)}` | {_cell(r.name)} | {_cell(describe(r))} |" for r in report.results]
    table = ["| | arrangement | differences |", "|---|---|---|", *rows, ""] if rows else []
    # The lines of arrangements stand between the headline and the words, two blanks deep.
    words = [f"- {_cell(line.strip())}" for line in lines[1 + len(report.results) :]]
    return "\n".join([f"### `{_cell(target)}`", "", f"**{_cell(lines[0])}**", "", *table, *words, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
