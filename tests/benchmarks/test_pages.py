"""docs/benchmarks.md is what the kept results say, and every result says how it was made."""

from __future__ import annotations

import copy
import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.cli import BENCHMARKS, SCRIPTS, bench_app, load_benchmark
from benchmarks.cli import run as run_benchmarks
from benchmarks.harness.benchmark import make_parser
from benchmarks.harness.script import FOLDER
from benchmarks.pages.claims import CLAIMS, NOT_YET, note_tables
from benchmarks.pages.figures import FIGURES, figure_rows
from benchmarks.pages.tables import MADE_BY, missing_origin, pages, read_results, write_page
from benchmarks.pages.topics import REST, link, topic_of
from truebatch.cli.app import app
from truebatch.errors import DataError

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def results():
    return read_results(DOCS / "results")


def page(results):
    """All pages, one after the other."""
    return "\n".join(pages(results).values())


def test_the_pages_are_what_the_kept_results_give(results):
    made = pages(results)
    kept = {place: (DOCS / place).read_text(encoding="utf-8") for place in made if (DOCS / place).is_file()}
    assert kept == made, f"run `{MADE_BY}` and keep the pages"
    assert {f"benchmarks/{file.name}" for file in (DOCS / "benchmarks").glob("*.md")} == made.keys() - {"benchmarks.md"}


def test_every_result_has_a_topic_and_the_summary_is_read_in_one_go(results):
    assert [name for name in results if topic_of(name) == REST] == []
    summary = pages(results)["benchmarks.md"]
    assert len(summary.splitlines()) <= 200
    assert "| the same, truebatch, packed and compiled |" in summary
    assert all(link(name) in summary for name in results)


def test_every_result_says_its_command_its_date_and_its_hardware(results):
    assert {name: lacks for name, result in results.items() if (lacks := missing_origin(result))} == {}


def test_what_is_not_recorded_is_said_and_not_made_up(results):
    made = page({"x": {"rows": [{"way": "a", "seconds": 1.5}]}})
    assert "command not recorded\n\ndate not recorded; hardware not recorded" in made
    assert page(results).count("not recorded") == sum(len(missing_origin(result)) for result in results.values())


@pytest.mark.parametrize("name", ["command", "date", "hardware"])
def test_a_result_without_its_origin_is_noticed(results, name):
    result = copy.deepcopy(dict(results["planning"]))
    del result[name]
    assert missing_origin(result) == [name]
    assert missing_origin({"facts": result}) == [name]


def test_without_results_the_notes_tables_hold_claims_only():
    for claim, header, rows in note_tables({}):
        assert len(header) == len(claim.header) + max(len(claim.measured), 1)
        assert all(cell == NOT_YET for row in rows for cell in row[len(claim.header) :])


def test_all_five_notes_have_their_tables():
    named = {claim.title.partition(":")[0] for claim in CLAIMS}
    assert named == {"chinese_gpt", "seqset_vae", "stitched_llm", "vl_reward", "vlm_pruning"}


def test_a_measured_cell_follows_the_result(results):
    changed = copy.deepcopy(dict(results["seqset_vae_cuda"]))
    changed["ratios"]["batch 4 / our batch 1"] = 1234.5
    assert "1234.50x" in page({"seqset_vae_cuda": changed})
    assert "1234.50x" not in page(results)


def test_memory_that_was_not_taken_is_not_shown():
    rows = [{"way": "a", "tokens_per_second": 5.0, "peak_gib": 0.0}]
    assert "peak gib" not in page({"x": {"rows": rows}})
    assert "peak gib" in page({"x": {"rows": [*rows, {"way": "b", "tokens_per_second": 5.0, "peak_gib": 2.0}]}})


def test_ratios_of_which_there_are_none_make_no_table():
    made = page({"x": {"ratios": {"a case": {}}, "rows": [{"way": "a", "speed": 1.5}]}})
    assert "|  |" not in made
    assert "1.5" in made


def test_a_bar_or_a_line_break_in_a_value_does_not_break_the_table():
    made = page({"x": {"rows": [{"way": "a | b\nc", "seconds": 1}]}})
    assert "| a \\| b c | 1 |" in made


def test_the_command_writes_to_the_place_of_the_file():
    kept = {"command": "python -m benchmarks training --out /elsewhere/a.json --quick", "rows": []}
    assert "--out docs/results/t.json --quick`" in page({"t": kept})


def test_links_of_the_page_lead_somewhere(results):
    for place, text in pages(results).items():
        for target, _, anchor in re.findall(r"\]\(([^)#]+)(#([^)]+))?\)", text):
            assert ((DOCS / place).parent / target).is_file()
            assert not anchor or f"\n## {anchor}\n" in pages(results)[target]


def test_the_command_names_what_is_missing(tmp_path, capsys, results):
    out = tmp_path / "page.md"
    assert run_benchmarks(["tables", "--results", str(DOCS / "results"), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"{len(results)} results" in said
    for name, result in results.items():
        assert (f"{name} does not say" in said) == bool(missing_origin(result))


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(DataError, match="no kept results"):
        write_page(folder=tmp_path, out=tmp_path / "page.md")


def test_every_figure_is_made_by_one_command_that_exists_and_knows_its_options():
    commands = {one.name: one for one in (*app.registered_commands, *bench_app.registered_commands)}
    for figure in FIGURES:
        name, *rest = figure.command.split()
        assert name in commands, figure.command
        if name in BENCHMARKS:
            known = make_parser(load_benchmark(name)).format_help()
        elif name in SCRIPTS:
            known = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        else:
            known = inspect.getsource(commands[name].callback)
        for option in (word.removeprefix("--") for word in rest if word.startswith("--")):
            assert re.search(rf"\b{option}\b", known), (figure.command, option)


def test_every_kept_result_belongs_to_a_figure_and_a_figure_is_kept_or_says_it_is_not(results):
    for name in results:
        assert len([figure.what for figure in FIGURES if figure.kept_in([name])]) == 1, name
    kept = {row[0]: row[2] for row in figure_rows({"planning"})}
    assert kept["seconds of a proof of a tiny model"] == "not kept"


def test_every_benchmark_makes_a_figure():
    made = {figure.command.split()[0] for figure in FIGURES}
    assert {one.name for one in bench_app.registered_commands} - made == {"tables"}


def test_every_benchmark_that_a_page_names_exists():
    pages = [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md"), *(DOCS.parent / ".github").rglob("*.yml")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"python -m benchmarks (\w+)", text)) - {"NAME"}
    assert len(named) > 10
    assert named <= {one.name for one in bench_app.registered_commands}
    modules = re.findall(r"python -m (benchmarks\.[\w.]+)", text)
    assert [name for name in modules if find_spec(name) is None] == []
    former = [page.name for page in pages if re.search(r"truebatch bench\b", page.read_text(encoding="utf-8"))]
    assert set(former) <= {"CHANGELOG.md"}  # which says that the command moved
