"""Killed at any moment, a benchmark goes on and ends with the same report; broken things of every kind are counted right."""

from __future__ import annotations

import base64
import json
import os
import signal
import time

import pytest

from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.runner import RunConfig
from truebatch.scoring.store.export import read_rows
from truebatch_systems.vl_reward import pipeline
from truebatch_systems.vl_reward.config import BenchmarkSettings, RewardConfig, RewardEvaluationSettings
from truebatch_systems.vl_reward.data.dataset import Wanted, read_benchmark
from truebatch_systems.vl_reward.data.toy_pictures import PROMPTS, ShapesJudge, edit_picture, make_records
from truebatch_systems.vl_reward.editors import ScriptedEditor
from truebatch_systems.vl_reward.eval.report import write_reports
from truebatch_systems.vl_reward.eval.statistics import summarise
from truebatch_systems.vl_reward.pipeline import run_benchmark
from truebatch_systems.vl_reward.stages import Judging, edit_all, judge_all_edits, read_results


def start(folder, telling):
    """A run in a forked process, which is much quicker than a new interpreter; every edit is told."""
    pid = os.fork()
    if pid:
        return pid
    try:

        def told(image, instruction, seed):
            time.sleep(0.01)
            os.write(telling, b".")
            return edit_picture(image, instruction, is_right=seed % 4 != 0)

        pipeline._edit_shape = told
        os._exit(run_benchmark(config_of(folder), say=lambda line: None).exit_code)
    except BaseException:
        os._exit(70)


def config_of(folder):
    return RewardConfig(benchmark=BenchmarkSettings(samples=16), evaluation=RewardEvaluationSettings(output_dir=folder))


def report_of(folder):
    found = json.loads((folder / "report.json").read_text())
    found.pop("speed")
    return found, (folder / "report.md").read_bytes()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_runs_end_with_the_report_of_one_that_was_not(tmp_path):
    assert run_benchmark(config_of(tmp_path / "whole"), say=lambda line: None).exit_code == 0
    for edits in (0, 3, 6, 7):  # the last one is killed in the second stage, or at its door
        reader, writer = os.pipe()
        pid = start(tmp_path / "killed", writer)
        os.close(writer)
        for _ in range(edits):
            os.read(reader, 1)  # an end of the child is told too
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
    assert 3 <= len(list((tmp_path / "killed" / "pictures").rglob("*.png"))) <= 16
    assert run_benchmark(config_of(tmp_path / "killed"), say=lambda line: None).exit_code == 0
    assert report_of(tmp_path / "killed") == report_of(tmp_path / "whole")
    ids = [row["id"] for row in read_rows(tmp_path / "killed" / "scores")]
    assert len(ids) == len(set(ids)) == 16
    assert not list((tmp_path / "killed").rglob("*.part"))


class Failing(ShapesJudge):
    """Out of memory above two at once, unreadable for some, raising for one."""

    def judge(self, prepared):
        if len(prepared) > 2:
            raise MemoryError("no room")
        if any(asked.id == "0007" for asked, _ in prepared):
            raise RuntimeError("device-side assert")
        return super().judge(prepared)


def test_broken_pictures_unreadable_answers_a_failing_sample_and_no_memory_are_counted_to_the_last_sample(tmp_path):
    records = make_records(40)
    for index in (3, 21):  # 5 % broken: cut off behind the header
        raw = base64.b64decode(records[index]["src_img_b64"])
        records[index]["src_img_b64"] = base64.b64encode(raw[: len(raw) // 2]).decode()
    (tmp_path / "b.json").write_text(json.dumps(records))
    pairs = read_benchmark(tmp_path / "b.json", Wanted()).pairs
    editor = ScriptedEditor(lambda image, instruction, seed: edit_picture(image, instruction))
    edit_all(pairs, [editor], tmp_path / "run", seed=0, how=RunConfig(threads=1))
    judging = Judging(prompts=PROMPTS, limits=Limits(rows=4))
    judge = Failing({"0010": "hard to say", "0030": "7 or 8"})  # 5 % unreadable
    judge_all_edits(pairs, lambda: judge, tmp_path / "run", judging, RunConfig(threads=1))
    results = read_results(pairs, tmp_path / "run")
    by_status = {}
    for row in results:
        by_status.setdefault(row.status, []).append(row.id)
    assert sorted(by_status["edit_failed"]) == ["0003", "0021"]
    assert (by_status["no_number"], by_status["ambiguous"]) == (["0010"], ["0030"])
    assert by_status["judge_failed"] == ["0007"]
    assert len(by_status["ok"]) == 35
    found = summarise(results)
    assert found["overall"]["mean"] == 10.0
    assert found["failure_rate"] == pytest.approx(5 / 40)
    summary, files = write_reports(pairs, results, tmp_path / "run")
    assert summary["overall"]["samples"] == 40
    assert all(file.is_file() for file in files)
