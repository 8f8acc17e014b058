"""`truebatch fit` as a user meets it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.hf.finetune.folders import chats, model_folder, write_lines
from truebatch.cli.app import run
from truebatch.cli.commands.fit import _advice, _next
from truebatch.reports.sections.fit import sizes_table
from truebatch.training.memory import batch_size_table
from truebatch.training.memory.batch_size_table import HERE, BatchSize, Sizing
from truebatch.training.memory.cost_model import Point, fit_points

SYSTEM = f"{Path(__file__).parents[1] / 'tasks.py'}:system"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text("width: 12\ntrain:\n  samples_per_step: 4\n  max_steps: 2\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal gets the table one size below the other
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_table_has_every_size_and_the_next_command_runs(folder, capsys):
    assert run(["fit", SYSTEM, "--config", "run.yaml", "--memory", "0.00005", "--memory", "80"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line[:1].isdigit() and "fit" in line}
    assert list(rows) == ["1", "2", "4", "8", "16"]
    assert rows["16"].split()[-4:] == ["does", "not", "fit", "fits"]
    assert "a larger budget never changes the result of a step" in out
    assert "batching" in out
    assert "on the probes it was made from" in out
    assert (folder / "runs/numbers/fit.json").is_file()
    (following,) = [line for line in out.splitlines() if line.startswith("next: truebatch ")]
    assert "train.cells=" in following
    assert run(following.split()[2:]) == 0
    assert "no longer holds" not in capsys.readouterr().out


def test_a_run_says_when_its_budget_was_measured_for_something_else(folder, capsys):
    assert run(["fit", SYSTEM, "--config", "run.yaml"]) == 0
    out = capsys.readouterr().out
    (following,) = [line for line in out.splitlines() if line.startswith("next: truebatch ")]
    changed = [*following.split()[2:], "--set", "width=14"]
    assert run(changed) == 0
    out = capsys.readouterr().out
    assert "the memory fit in runs/numbers/fit.json no longer holds (parameters was 500, is 580" in out
    assert run([*following.split()[2:], "--fresh", "--out", "elsewhere"]) == 0
    assert "no longer holds" not in capsys.readouterr().out


def test_json_holds_the_same_figures(folder, capsys):
    assert run(["fit", SYSTEM, "--set", "train.layout=packed", "--memory", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["layout"] == "packed"
    assert list(said["limits"]) == ["this machine", "1 GiB"]
    assert said["cells"]["1 GiB"] > said["longest"] == 29
    sizes = said["sizes"]
    assert all(a["worst_bytes"] <= b["worst_bytes"] for a, b in pairwise(sizes))
    assert sizes[0]["samples_per_second"] >= sizes[0]["slowest_per_second"] > 0
    assert sizes[0]["fits"] == {"this machine": True, "1 GiB": True}
    assert said["fit"]["fingerprint"]


def test_where_even_the_longest_sample_does_not_fit_the_check_fails(folder, capsys, monkeypatch):
    monkeypatch.setattr("truebatch.training.memory.batch_size_table.free_bytes_of", lambda device: 9000)
    assert run(["fit", SYSTEM, "--config", "run.yaml"]) == 1
    out = capsys.readouterr().out
    assert "the longest sample (29 tokens) does not fit on this machine" in out
    assert "none" in out


def test_a_model_of_hugging_face_is_fitted_in_the_layout_it_is_proven_for(folder, capsys):
    model_folder(folder / "model")
    write_lines(folder / "chats.jsonl", chats())
    given = ["--model", "model", "--data", "chats.jsonl", "--task", "causal_lm"]
    assert run(["fit", "hf", *given, "--memory", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["layout"] == "packed"
    assert any("proven equal" in line for line in said["lines"])
    assert said["fit"]["facts"]["parameters"] > 1000


def test_an_estimate_neither_reads_the_weights_nor_proves_the_layout(folder, capsys, monkeypatch):
    model_folder(folder / "model")
    write_lines(folder / "chats.jsonl", chats())
    given = ["--model", "model", "--data", "chats.jsonl", "--task", "causal_lm"]

    def refuse(*_args, **_kwargs):
        raise AssertionError("the model is run")

    monkeypatch.setattr("truebatch.verification.runner.prove", refuse)
    monkeypatch.setattr("truebatch.verification.choose_layout.prove", refuse)
    for weights in (folder / "model").glob("*.safetensors"):
        weights.unlink()
    assert run(["fit", "hf", *given, "--memory", "1", "--estimate", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["layout"] == "padded"
    assert any("estimated for padded rows" in line for line in said["lines"])
    assert "train.layout" not in said["next"]  # a run chooses
    assert run(["fit", "hf", *given, "--estimate", "--set", "train.layout=packed", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["layout"], "train.layout=packed" in said["next"]) == ("packed", True)


def test_a_fit_that_errs_by_much_is_not_called_safe():
    points = [Point(8, 1, 1, 10), Point(8, 1, 1, 100), Point(16, 2, 2, 30), Point(16, 2, 2, 210)]
    fit = fit_points(points, resident_bytes=0, optimiser_bytes=0, facts={})
    assert fit.uncertainty > 0.3
    known = {"layout": "padded", "limits": {HERE: 9}, "cells": {HERE: 9}, "sizes": [], "longest": 3, "shortest": 1}
    (line,) = _advice(Sizing(fit=fit, **known))
    assert "do not rely on it" in line
    assert "safe" not in line
    for cells, begun in ((9, 4), (5, 3), (40, 20)):  # half, and the longest sample at least
        found = Sizing(fit=fit, **{**known, "cells": {HERE: cells}})
        said = _next("x", None, ["a=1", "train.cells=7"], {}, found, Path("runs"), chosen={"layout": "padded"})
        assert said == f"truebatch train x --set a=1 --set train.layout=padded --set train.cells={begun} --out runs"
        assert "safe" not in str(sizes_table(found.to_dict()))


def test_a_fit_that_was_cut_off_says_what_to_do(folder, capsys):
    (folder / "runs/numbers").mkdir(parents=True)
    (folder / "runs/numbers/fit.json").write_text("{")
    assert run(["train", SYSTEM, "--config", "run.yaml", "--set", "train.cells=64"]) == 2
    said = capsys.readouterr().err
    assert "fit.json is not a memory fit" in said
    assert "measure again" in said


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["fit", "nothing"], "there is no system 'nothing'"),
        (["fit", SYSTEM, "--memory", "0"], "a memory size is a number of GiB above 0"),
        (["fit", SYSTEM, "--memory", "1e300"], "a memory size is a number of GiB above 0"),
        (["fit", SYSTEM, "--set", "train.true_batch=off"], "nothing to fit where samples run one at a time"),
        (["fit", SYSTEM, "--set", "train.cels=5"], "cels"),
    ],
)
def test_mistakes_are_named_and_end_with_2(folder, capsys, arguments, wrong):
    assert run(arguments) == 2
    assert wrong in capsys.readouterr().err


@pytest.mark.parametrize(
    ("one", "four", "said"),
    [
        ((10.0, 9.0), (40.0, 30.0), "batching pays: the fastest batch size runs 3.00 to 4.44 times"),
        ((10.0, 9.8), (10.2, 9.9), "batching does not pay on this machine"),
        ((10.0, 1.8), (57.8, 8.7), "whether batching pays cannot be told"),
    ],
)
def test_a_verdict_on_speed_is_given_only_where_all_passes_agree(one, four, said):
    fit = fit_points([Point(1, 1, 1, 10)], resident_bytes=0, optimiser_bytes=0, facts={})
    sizes = [BatchSize(1, *one, 0, 0), BatchSize(4, *four, 0, 0), BatchSize(8, None, None, 0, 0)]
    batch_size_table = Sizing(
        fit=fit, layout="padded", limits={HERE: 9}, cells={HERE: 9}, sizes=sizes, longest=3, shortest=1
    )  # fmt: skip
    assert _advice(batch_size_table)[0].startswith(said)


def test_a_size_that_runs_out_of_memory_all_the_same_is_not_timed(folder, capsys, monkeypatch):
    plain = batch_size_table._seconds

    def scarce(engine, data, cuts, layout):
        if len(cuts[0]) > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return plain(engine, data, cuts, layout)

    monkeypatch.setattr(batch_size_table, "_seconds", scarce)
    assert run(["fit", SYSTEM, "--json"]) == 0
    sizes = {size["samples"]: size["samples_per_second"] for size in json.loads(capsys.readouterr().out)["sizes"]}
    assert [n for n, speed in sizes.items() if speed is not None] == [1, 2, 4]
    assert list(sizes) == [1, 2, 4, 8, 16]
