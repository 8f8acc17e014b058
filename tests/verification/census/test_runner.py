"""The census as a whole: resumed, limited in time, written down, and its exit code."""

from __future__ import annotations

import json
import os

import pytest

from tests.verification.census import works
from truebatch.cli.app import run
from truebatch.errors import ConfigError
from truebatch.testing.tiny_hf.model import tiny_types
from truebatch.verification.census import journal as census_journal
from truebatch.verification.census.journal import append_row, journal_key, read_journal
from truebatch.verification.census.media import MEDIA_HEADS
from truebatch.verification.census.popular import most_used, popular_names
from truebatch.verification.census.runner import (
    HEADS,
    CensusConfig,
    census_tasks,
    finish,
    main,
    run_census,
    split_names,
)
from truebatch.verification.census.tables import markdown, summary_counts


def config(tmp_path, *only, **more):
    more = {"heads": ("causal_lm",), "journal": tmp_path / "rows.jsonl", "only": only, **more}
    return CensusConfig(**more)


def test_a_finished_row_is_not_made_again_unless_asked_for(tmp_path, monkeypatch):
    notes = works.notes_of(os.getpid())
    notes.unlink(missing_ok=True)
    monkeypatch.setattr(census_journal, "_code", lambda: "the code as it is")  # not as somebody is editing it
    first = run_census(config(tmp_path, "llama"), work=works.noted)
    again = run_census(config(tmp_path, "llama", "qwen2"), work=works.noted)
    assert first.rows == again.rows[:1]
    assert notes.read_text().split() == ["llama", "qwen2"]
    run_census(config(tmp_path, "llama", fresh=True), work=works.noted)
    assert notes.read_text().split() == ["llama", "qwen2", "llama"]
    notes.unlink()


def test_an_architecture_that_hangs_is_killed_reported_and_tried_again(tmp_path):
    settings = config(tmp_path, "llama", "qwen2", time_limit_s=1.5)
    census = run_census(settings, work=works.sleepy)
    assert {row["model_type"]: row["verdict"] for row in census.rows} == {"llama": "equal", "qwen2": "killed"}
    assert census.exit_code == 0
    known = read_journal(settings.journal, journal_key("cpu", "float32"))
    assert [name for _, name in known] == ["llama"]


def test_a_planted_fault_ends_the_census_with_exit_code_1(tmp_path, capsys):
    census = run_census(config(tmp_path, "llama"), work=works.planted)
    assert finish(census, json_file=None, markdown_file=None) == 1
    assert "WRONG: causal_lm llama" in capsys.readouterr().out


def test_rows_of_other_versions_and_a_line_cut_off_do_not_count(tmp_path):
    path, key = tmp_path / "rows.jsonl", journal_key("cpu", "float32")
    row = {"head": "causal_lm", "model_type": "llama", "verdict": "equal"}
    append_row(path, {**key, "transformers": "0.1"}, row)
    with path.open("a") as file:
        file.write('{"key": {"tor')
    append_row(path, key, {**row, "model_type": "qwen2"})
    assert list(read_journal(path, key)) == [("causal_lm", "qwen2")]


@pytest.mark.parametrize(
    "wrong", [{"device": "tpu"}, {"dtype": "int8"}, {"heads": ("tail",)}, {"jobs": 0}, {"time_limit_s": 0.0}]
)
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError):
        CensusConfig(**wrong)


def test_an_unknown_architecture_is_refused_by_name():
    with pytest.raises(ConfigError, match="lama"):
        census_tasks(CensusConfig(only=("lama",)))


def test_all_heads_of_the_installed_transformers_are_counted():
    tasks = census_tasks(CensusConfig(heads=("all",)))
    number = {head: sum(task.head == head for task in tasks) for head in {task.head for task in tasks}}
    assert number["causal_lm"] >= 140
    assert sum(number.values()) - number["causal_lm"] >= 60


def test_names_are_split_at_commas():
    assert split_names(" llama, qwen2,") == ("llama", "qwen2")


FACTS = {
    "command": "truebatch census", "date": "2026-01-02", "transformers": "5.0", "torch": "2.0", "truebatch": "0.1",
    "python": "CPython 3.11", "hardware": "2 CPU cores", "dtype": "float32",
}  # fmt: skip


def equal_row(name, **more):
    cell = {"verdict": "equal", "check": {"verdict": "equal", "outputs": 1e-7, "gradient": 1e-7}}
    layouts = dict.fromkeys(("packed", "padded", "grouped", "left padded", "packed under a dense mask"), cell)
    row = {
        "model_type": name,
        "head": "causal_lm",
        "verdict": "equal",
        "why": "",
        "chosen": "packed",
        "layouts": layouts,
    }
    return {**row, "leak": {"planted": 12345.0}, "plain": {"packed": {"verdict": "different"}}, **more}


ROWS = [
    equal_row("llama"),
    equal_row("mamba", verdict="fell back", chosen="padded", why="raises a | state"),
    {"model_type": "odd", "head": "causal_lm", "verdict": "not built", "why": "ImportError: timm"},
]


def test_the_page_shows_the_counts_then_the_rows_then_what_was_left_out():
    page = markdown(FACTS, ROWS)
    order = ["| built tiny and examined | 2 |", "| llama | equal | packed |", "a / state: mamba", "ImportError: timm"]
    places = [page.index(text) for text in order]
    assert places == sorted(places)
    assert "`truebatch census`" in page
    assert "12,345x" in page
    assert "| verdict: wrong and not noticed | 0 |" in page


def test_every_line_of_a_table_has_as_many_cells_as_its_header():
    for table in markdown(FACTS, ROWS).split("\n\n"):
        lines = [line for line in table.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1


def test_a_layout_that_only_the_second_check_rejects_is_counted_and_named():
    row = equal_row("qwen3_5", chosen="padded", verdict="fell back", why="state")
    late = {"verdict": "different", "check": {"verdict": "different", "outputs": 1.5e-5, "gradient": 2e-6}}
    row["layouts"] = {**row["layouts"], "left padded": late}
    counts = summary_counts([row])["causal_lm"]
    assert counts["a layout that is not used differs in the second check only"] == 1
    assert "* qwen3_5: left padded (outputs 1.5e-05, gradient 2e-06)" in markdown(FACTS, [row])


def test_the_command_writes_json_and_markdown(tmp_path, capsys):
    files = [f"--json={tmp_path / 'c.json'}", f"--markdown={tmp_path / 'c.md'}", f"--journal={tmp_path / 'j.jsonl'}"]
    assert run(["census", "--only", "llama", "--head", "causal_lm", *files]) == 0
    written = json.loads((tmp_path / "c.json").read_text())
    assert [row["verdict"] for row in written["rows"]] == ["equal"]
    assert "| llama | equal | packed |" in (tmp_path / "c.md").read_text()
    # The same without the command line's packages goes on from the same rows.
    assert main(["--only", "llama", "--head", "causal_lm", f"--journal={tmp_path / 'j.jsonl'}"]) == 0
    assert "packed and equal" in capsys.readouterr().out


def test_a_wrong_name_is_a_usage_error(capsys):
    assert run(["census", "--only", "lama"]) == 2
    assert main(["--only", "lama"]) == 2
    assert "lama" in capsys.readouterr().err


KNOWN = {head: tiny_types(head) for head in HEADS}


def test_the_most_used_come_first_and_each_once():
    names = popular_names()
    assert len(set(names)) == len(names)
    assert len(most_used(200, KNOWN)) == 200
    assert most_used(3, KNOWN) == [("causal_lm", "llama"), ("causal_lm", "qwen2"), ("causal_lm", "qwen3")]
    assert most_used(2, {"masked_lm": ["roberta"]}) == [("masked_lm", "roberta")]


def test_the_quick_check_examines_the_most_used_in_the_layout_that_is_used():
    tasks = census_tasks(CensusConfig(top=30))
    assert [task.model_type for task in tasks[:2]] == ["llama", "qwen2"]
    assert {task.head for task in tasks} == set(HEADS) - set(MEDIA_HEADS)
    assert {head for head, _ in most_used(300, KNOWN)} == set(HEADS)
    assert all(task.is_quick for task in tasks)
    assert not any(task.is_quick for task in census_tasks(CensusConfig(only=("llama",))))


def test_quick_rows_are_kept_apart_from_those_of_every_layout(tmp_path):
    asked = config(tmp_path, top=1)
    assert run_census(asked, work=works.noted).rows[0]["model_type"] == "llama"
    assert read_journal(asked.journal, journal_key("cpu", "float32")) == {}
    assert list(read_journal(asked.journal, journal_key("cpu", "float32", quick=True))) == [("causal_lm", "llama")]
    works.notes_of(os.getpid()).unlink()


def test_a_number_beside_names_is_refused(capsys):
    assert run(["census", "--top", "5", "--only", "llama"]) == 2
    assert "top=5, only=['llama']" in capsys.readouterr().err
    assert run(["census", "--top", "-1"]) == 2
    assert main(["--top", "-1"]) == 2


def test_the_page_of_a_quick_check_counts_no_layout_that_was_not_examined():
    row = equal_row("llama", how="segment table", speed={"packed_s": 1.0, "padded_s": 1.5, "times": 1.5})
    other = equal_row("t5", how="rows of samples; T5Attention by groups of similar length")
    page = markdown({**FACTS, "layouts": "the one that is used"}, [row, other])
    assert "Only the layout that is used was examined" in page
    assert "right padded and equal" not in page
    assert "right padded and equal" in markdown(FACTS, [row, other])
    assert "| llama | equal | packed | equal | table | 1.5x |" in page
    assert "* rows of samples; T5Attention by groups of similar length: t5" in page
