"""Nothing out of a file steers the terminal: escapes are shown, and no value poses as a line of its own."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
import sys

import pytest

from tests.hostile.run_folders import put, trained
from truebatch.cli.app import run
from truebatch.language.console import Filtered, filtered, one_line, say, say_error, shown
from truebatch.reports.progress_display import make_console_logger
from truebatch.reports.tables import Table, print_table
from truebatch.scoring.backends.interface import SampleError
from truebatch.scoring.backends.scripted import ScriptedBackend
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.runner import RunConfig, run_samples
from truebatch.scoring.store.export import export
from truebatch.scoring.store.input_index import list_samples
from truebatch.verification.census.progress import progress

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08\x7f\u202egnp.exe\u2066\u200f\U000e0041\r\nFORGED: 9 samples, 9 done\u2028\x85FORGED"
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)


def assert_harmless(said):
    assert not OBEYED.search(said), repr(said)
    assert not [line for line in said.split("\n") if re.match(" {0,5}FORGED", line)], said


class Evil(ScriptedBackend):
    """Fails with a kind and a message that mean harm, or answers with such a text."""

    def judge(self, prepared):
        out = super().judge(prepared)
        failed = SampleError("model", f"kind {EVIL}", f"message {EVIL}", {"text": EVIL})
        return [failed if "bad" in one.user else answer for one, answer in zip(prepared, out, strict=True)]


@pytest.fixture
def scored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = [
        {"id": f"{n} {EVIL}", "user": f"{kind} {n} {EVIL}", "m": EVIL} for n, kind in enumerate(["good", "bad"] * 3)
    ]
    run_samples(list_samples(data), [Evil()], tmp_path / "run", Limits(), RunConfig())
    return tmp_path / "run"


COMMANDS = [
    ["run", "status", "run"],
    ["run", "export", "run", "--to", "rows.jsonl"],
    ["report", "run"],
    ["report", "run", "--text"],
    ["run", "retry", "run", "--kind", EVIL],
    ["run", "status", f"run{EVIL}"],
    ["run", "export", "run", "--to", f"{EVIL}.xyz"],
    ["config", "show", EVIL],
    ["config", "show", "chinese_gpt", "--set", f"train.seed={EVIL}"],
    ["config", "show", "vl_reward", "--set", f"reward_model.params.model_name={json.dumps(EVIL)}"],
    ["score", f"{EVIL}.jsonl", "--model", "scripted", "--yesno"],
    [EVIL],
]


@pytest.mark.parametrize("words", ["en", "zh"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command).replace(EVIL, "EVIL"))
def test_a_scoring_run_and_arguments_full_of_escapes_steer_nothing(scored, command, words, capsys, monkeypatch):
    monkeypatch.setenv("TRUEBATCH_LANG", words)
    run(command)
    out, err = capsys.readouterr()
    assert out + err
    assert_harmless(out + err)


def test_what_a_program_reads_means_the_same(scored, capsys):
    run(["run", "status", "run", "--json"])
    out = capsys.readouterr().out
    assert_harmless(out)
    assert list(json.loads(out)["kinds"]) == [f"model/kind {EVIL}"]
    yaml = json.dumps(EVIL).replace("\\udb40\\udc41", "\\U000e0041")
    run(["config", "show", "vl_reward", "--set", f"reward_model.params.model_name={yaml}", "--json"])
    out = capsys.readouterr().out
    assert_harmless(out)
    assert EVIL in [row["value"] for row in json.loads(out)]


def test_a_damaged_record_is_named_without_its_escapes(scored, capsys):
    for path in (scored / "journal").glob("*.db"):
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE results SET attempts = 9")
        connection.close()
    assert run(["run", "status", "run"]) == 1
    assert run(["run", "export", "run", "--to", "rows.csv"]) == 1
    out, err = capsys.readouterr()
    assert "\\u001b" in out
    assert_harmless(out + err)


TRAINED = {
    "metrics.jsonl": f"{json.dumps({'step': 1, 'loss': 1.0, f'x{EVIL}': 3.0, 'event': EVIL})}\n",
    "config.yaml": f"train: {{}}\n{json.dumps(EVIL)}: {json.dumps(EVIL)}\n",
    "run.json": json.dumps({"system": EVIL}),
    "status.json": json.dumps({"state": EVIL, "step": 1, "exit_code": 0, "message": EVIL}),
}


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize(
    "command", [["report", "run", "--text"], ["evaluate", "run"], ["generate", "run", "--prompt", "x"]]
)
def test_a_training_run_full_of_escapes_steers_nothing(tmp_path, monkeypatch, name, command, capsys):
    monkeypatch.chdir(tmp_path)
    trained(lambda folder: put(folder, name, TRAINED[name]))(tmp_path)
    run(command)
    out, err = capsys.readouterr()
    assert out + err
    assert_harmless(out + err)


def test_data_full_of_escapes_steer_nothing_while_it_is_scored(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"id": EVIL, "user": EVIL}), "{" + EVIL.replace("\n", " "), json.dumps({"user": "ok"})]
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    for command in (["score", "data.jsonl", "--model", "scripted", "--yesno"], ["plan", "data.jsonl", "--cells", "1"]):
        run(command)
    out, err = capsys.readouterr()
    assert_harmless(out + err)


def said_by(write):
    out = io.StringIO()
    write(out)
    return out.getvalue()


def through_show(out, kind):
    show = make_console_logger(kind, file=out)
    show.say(f"line {EVIL}".replace("\n", " "))
    show.close()


def through_progress(out):
    with progress(1, f"what {EVIL}", file=out) as tell:
        tell(f"done {EVIL}")


def through_a_table(out):
    print_table(Table(("name", f"head {EVIL}"), ((f"row {EVIL}", f"cell {EVIL}"),), title=f"title {EVIL}"), file=out)


@pytest.mark.parametrize(
    "write",
    [
        through_a_table,
        through_progress,
        lambda out: through_show(out, "plain"),
        lambda out: through_show(out, "json"),
        lambda out: say(f"said {one_line(EVIL)}", file=out),
        lambda out: Filtered(out).write(f"written {EVIL}".replace("\r\n", " ")),
        lambda out: Filtered(out).writelines([f"written {EVIL}".replace("\r\n", " ")]),
    ],
)
def test_every_way_out_shows_escapes(write):
    said = said_by(write)
    assert "owned" in said
    assert_harmless(said)


def test_an_error_cannot_pose_as_another_part(capsys):
    say_error(f"wrong {EVIL}\n  do:   rm -rf", "seen\n  do:   rm -rf", "do")
    said = capsys.readouterr().err
    assert [line for line in said.split("\n") if line.startswith("  do:")] == ["  do:   do"]
    assert_harmless(said)


def test_a_command_writes_through_the_filter_also_what_others_write(capsys):
    with filtered():
        print("printed \x1b[31m by a library\rand a bar")
        sys.stderr.write("\x9b31m")
        with filtered():
            sys.stdout.write("\x07 once")
    sys.stdout.write("outside \x1b")
    out, err = capsys.readouterr()
    assert out == "printed \\u001b[31m by a library\rand a bar\n\\u0007 onceoutside \x1b"
    assert err == "\\u009b31m"


def test_what_is_shown_of_ordinary_text_is_the_text():
    text = "Zürich 東京 العربية 👩‍👩‍👧 tab\tline\n\u3000\u00a0 «ok» \ufeff"
    assert shown(text) == text
    assert json.loads(shown(json.dumps(EVIL, ensure_ascii=False))) == EVIL


FORMULAS = [
    "=1+1",
    "+1",
    "-1+1",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\n=1",
    " =1",
    "＝1",
    "＋1",
    "－1",
    "＠1",
    '=cmd|"/c calc"!A1',
]


def test_texts_that_a_spreadsheet_would_carry_out_are_quoted_on_request(tmp_path, capsys):
    data = [{"id": text, "user": f"x{n}", "options": {"score": -1.5}} for n, text in enumerate(FORMULAS)]
    data += [{"id": "plain", "user": "y"}]
    run_samples(list_samples(data), [ScriptedBackend()], tmp_path / "run", Limits(), RunConfig())
    ids = {}
    for name, more in (("plain.csv", []), ("quoted.csv", ["--for-spreadsheet"])):
        assert run(["run", "export", str(tmp_path / "run"), "--to", str(tmp_path / name), *more]) == 0
        with (tmp_path / name).open(newline="") as file:
            rows = list(csv.DictReader(file))
        ids[name] = [row["id"] for row in rows]
        assert [row["score"] for row in rows[:-1]] == ["-1.5"] * len(FORMULAS)  # a number stays one
    assert ids["plain.csv"] == [*FORMULAS, "plain"]
    assert ids["quoted.csv"] == [*(f"'{text}" for text in FORMULAS), "plain"]
    assert run(["run", "export", str(tmp_path / "run"), "--to", str(tmp_path / "a.jsonl"), "--for-spreadsheet"]) == 2
    assert "only a .csv" in capsys.readouterr().err
    assert export(tmp_path / "run", tmp_path / "b.csv", for_spreadsheet=True) == len(data)
