"""`truebatch train` as a user meets it: what a run prints, leaves behind, refuses, and how it goes on."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.test_public import HEAVY, loaded_after
from truebatch.cli.app import run
from truebatch.cli.commands.train import _say_end
from truebatch.training.context import TrainResult
from truebatch.training.logging.metrics_jsonl import read_metrics

SYSTEM = f"{Path(__file__).parents[1] / 'tasks.py'}:system"
UNTIMED = ("seconds", "tokens_per_second")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder with a configuration in it, as the current folder."""
    (tmp_path / "run.yaml").write_text(
        "width: 12\ntrain:\n  epochs: 2\n  samples_per_step: 4\n  learning_rate: 1e-2\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def train(*more: str) -> int:
    return run(["train", SYSTEM, "--config", "run.yaml", *more])


def losses(where: str) -> list[float]:
    return [record["loss"] for record in read_metrics(Path(where) / "metrics.jsonl")]


def status(where: str) -> dict:
    return json.loads((Path(where) / "status.json").read_text())


def test_a_run_says_what_it_does_and_where_it_is(folder, capsys):
    assert train() == 0
    out = capsys.readouterr().out
    assert "4 samples per step over 1 device(s)" in out
    assert "12 steps, fp32 on cpu" in out
    assert "equality: checked on 4 samples, loss " in out
    assert status("runs/numbers")["equality"]["verdict"] == "equal"
    assert "run: runs/numbers; model: runs/numbers/model" in out
    assert "step 12/12  loss" in out
    assert status("runs/numbers")["exit_code"] == 0
    assert len(losses("runs/numbers")) == 12
    assert (folder / "runs/numbers/model/weights.pt").is_file()
    assert "learning_rate: 0.01" in (folder / "runs/numbers/config.yaml").read_text()


def test_the_next_command_runs(folder, capsys):
    train()
    (following,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: truebatch ")]
    assert run(following.split()[2:]) == 0


def test_a_stopped_run_ends_with_75_and_goes_on_as_if_it_had_not_been_stopped(folder, capsys):
    train("--out", "whole")
    assert train("--out", "cut", "--set", "stop_at=30") == 75
    assert "next: run the same command again to resume" in capsys.readouterr().out
    assert status("cut")["state"] == "interrupted"
    assert not (folder / "cut/model").exists()
    assert train("--out", "cut", "--set", "stop_at=30") == 0
    assert losses("cut") == losses("whole")
    weights = [torch.load(Path(name) / "model/weights.pt", weights_only=True) for name in ("whole", "cut")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_finished_run_is_kept_and_fresh_moves_it_aside(folder, capsys):
    train()
    before = (folder / "runs/numbers/model/weights.pt").stat().st_mtime_ns
    assert train() == 0
    assert "all steps were done before" in capsys.readouterr().out
    assert (folder / "runs/numbers/model/weights.pt").stat().st_mtime_ns == before
    assert train("--fresh", "--set", "train.learning_rate=0.5") == 0
    assert "the earlier run is now runs/numbers.previous-1" in capsys.readouterr().out
    assert losses("runs/numbers") != losses("runs/numbers.previous-1")


def test_more_epochs_go_on_where_the_run_ended(folder):
    train()
    assert train("--set", "train.epochs=3") == 0
    assert [record["step"] for record in read_metrics(Path("runs/numbers/metrics.jsonl"))] == list(range(1, 19))


def test_other_data_is_not_the_same_run(folder, capsys):
    train("--set", "train.max_steps=2")
    assert train("--set", "train.max_steps=4", "--limit", "8") == 2
    assert "train.limit" in capsys.readouterr().err
    Path("runs/numbers/plan/data.json").write_text('{"fingerprint": "other", "samples": 24}')
    assert train("--set", "train.max_steps=4") == 2
    assert "the data is not what this run began with" in capsys.readouterr().err


def test_limit_trains_on_the_first_samples_only(folder):
    assert train("--limit", "8") == 0
    records = read_metrics(Path("runs/numbers/metrics.jsonl"))
    assert len(records) == 4
    from tests.tasks import Samples, Settings

    samples = Samples(Settings())
    assert sum(r["tokens"] for r in records[:2]) == sum(len(samples[i]["x"]) for i in range(8))


def test_a_dry_run_says_what_a_run_then_does_and_takes(folder, capsys):
    assert train("--dry-run", "--log-format", "json") == 0
    row = json.loads(capsys.readouterr().out)["plans"]["padded"]
    assert row["memory_gib"] >= 0
    assert "hours" not in row  # nothing was timed yet
    assert not Path("runs").exists()
    train()
    records = read_metrics(Path("runs/numbers/metrics.jsonl"))
    assert row["steps_in_all"] == len(records) == 12
    assert row["tokens"] == sum(r["tokens"] for r in records[:6])
    capsys.readouterr()
    assert train("--dry-run") == 0
    text = capsys.readouterr().out
    assert "memory, GiB" in text
    assert "estimated, nothing was run" in text
    assert "waste" in text


def test_json_lines_are_json_and_hold_every_step(folder, capsys):
    assert train("--log-format", "json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines if "step" in line] == list(range(1, 13))
    assert all(line["memory_bytes"] > 0 for line in lines if "step" in line)
    assert {"begin": 0, "num_steps": 12} in lines


def test_a_step_that_is_not_finite_ends_the_run_and_its_status_says_the_exit_code(folder, capsys):
    assert train("--set", "poison=3") == 1
    assert "is not finite" in capsys.readouterr().err
    assert (status("runs/numbers")["state"], status("runs/numbers")["exit_code"]) == ("failed", 1)


WRONG = {
    "train": "target",
    "train numbers": "systems: chinese_gpt, hf, ",
    "train hff": "did you mean 'hf'",
    "train {file}:number": "is not a system",
    "train {file}:sistem": "did you mean 'system'",
    "train {file}:system --config nowhere.yaml": "no file nowhere.yaml",
    "train {file}:system --set widht=3": "did you mean 'width'",
    "train {file}:system --set train.learning_rte=3": "did you mean 'learning_rate'",
    "train {file}:system --set train.learning_rate=fast": "train.learning_rate",
    "train {file}:system --set train=3": "train",
    "train {file}:system --model x": "unknown key 'model'",
    "train {file}:system --resume never": "--resume",
    "train {file}:system --resume required": "no run to resume",
    "train {file}:system --log-format xml": "--log-format",
    "train {file}:system --devices 0": "devices",
    "train {file}:system --limit 0": "limit",
    "train {file}:system --track tensorbord": "did you mean 'tensorboard'",
    "train {file}:system --track aim": "pip install 'aim'",
    "train {file}:system --set train.layout=pakced": "did you mean 'packed'",
    "train hf --data x.jsonl --task causal_lm": "the required key 'model' is missing",
    "train hf --model x --data x.jsonl --task causal": "did you mean 'causal_lm'",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_gets_three_lines_and_exit_code_2(folder, capsys, line):
    assert run(line.format(file=SYSTEM.rpartition(":")[0]).split()) == 2
    error = capsys.readouterr().err
    assert WRONG[line] in error
    assert [text.split(":")[0].strip() for text in error.splitlines() if text[:6] in ("error:", "  seen", "  do: ")] == [
        "error", "seen", "do",
    ]  # fmt: skip
    assert "Traceback" not in error
    assert not Path("runs").exists()


def test_under_a_launcher_the_number_of_processes_is_only_checked(folder, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert train("--devices", "2") == 2
    assert "WORLD_SIZE=4, devices=2" in capsys.readouterr().err


def test_help_loads_nothing_heavy():
    loaded = loaded_after("from truebatch.cli.app import run; assert run(['train', '--help']) == 0")
    assert not loaded & {*HEAVY, "numpy", "yaml"}


def start(*more: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "truebatch", "train", SYSTEM, "--config", "run.yaml", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def wait_for_steps(where: str, number: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        if (Path(where) / "metrics.jsonl").exists() and len(losses(where)) >= number:
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate())


@pytest.mark.timeout(900)
def test_two_processes_are_stopped_together_go_on_together_and_give_the_run_of_one(folder):
    assert train("--out", "one", "--set", "sleep_seconds=0.04") == 0
    process = start("--out", "two", "--devices", "2", "--set", "sleep_seconds=0.04")
    wait_for_steps("two", 2, process)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=600)
    assert process.returncode == 75, (out, error)
    assert status("two")["exit_code"] == 75
    process = start("--out", "two", "--devices", "2", "--set", "sleep_seconds=0.04")
    out, error = process.communicate(timeout=600)
    assert process.returncode == 0, (out, error)
    assert "resuming after step" in out
    assert out.count("run: two;") == 1
    assert losses("two") == pytest.approx(losses("one"), rel=1e-5)


def test_a_reader_that_stops_early_does_not_stop_the_run(folder):
    process = start("--set", "sleep_seconds=0.01")
    assert process.stdout.readline().startswith("precision:")
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(600) == 0
    assert status("runs/numbers")["state"] == "done"
    assert len(losses("runs/numbers")) == 12


def test_on_a_terminal_there_is_a_bar(folder):
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    command = [sys.executable, "-m", "truebatch", "train", SYSTEM, "--config", "run.yaml"]
    process = subprocess.Popen(command, stdout=child, stderr=subprocess.PIPE, env=environment)
    os.close(child)
    shown = b""
    try:
        while part := os.read(parent, 65536):
            shown += part
    except OSError:
        pass  # The terminal is gone with the process.
    os.close(parent)
    with process.stderr:
        assert process.wait(600) == 0, process.stderr.read()
    text = shown.decode()
    last = next(line for line in reversed(text.split("\r")) if "step 12/12" in line)
    assert "ETA 0:00:00" in last
    assert "\x1b[" in text
    assert "next: truebatch verify" in text


@pytest.mark.parametrize(
    ("record", "said"), [({"loss": 1.0}, ""), ({"loss": 1.0, "quarantined": 1234}, ", 1,234 samples")]
)
def test_the_end_of_a_run_says_how_many_samples_were_left_out(tmp_path, record, said):
    lines = []
    (tmp_path / "config.yaml").write_text("train: {layout: padded}")
    (tmp_path / "run.json").write_text('{"system": "chinese_gpt"}')
    result = TrainResult(step=3, records=[record], best_loss=None, why="all steps are done")
    _say_end(SimpleNamespace(say=lines.append), result, tmp_path)
    assert lines[0].startswith("done: 3 steps (all steps are done), last loss 1.0000")
    assert lines[0].partition("1.0000")[2].startswith(said)
    assert ("left out" in lines[0]) == bool(said)
