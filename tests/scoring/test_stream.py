"""Samples without an end are judged in windows, and every row is there as soon as it is on the disk."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

from truebatch.errors import ConfigError, RestartError, RunError
from truebatch.scoring.backends.scripted import ScriptedBackend
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.runner import RunConfig
from truebatch.scoring.scorer import Scorer
from truebatch.scoring.store.export import export, read_rows, read_status
from truebatch.scoring.stream import stream
from truebatch.scoring.windows import window_folders

QUICK = RunConfig(threads=1, ahead=1)


def scorer(**more):
    return Scorer(ScriptedBackend(**more), limits=Limits(cells=100))


def samples(number):
    return [{"id": f"s{n}", "user": f"{n:03d} " + "x" * (n * 7 % 23)} for n in range(number)]


def exported(run, kind="jsonl"):
    export(run, run / f"scores.{kind}")
    return (run / f"scores.{kind}").read_bytes()


def counted(values, consumed):
    for value in values:
        consumed.append(value)
        yield value


def score(data, run, **more):
    return scorer().score(data, run, check=False, **{"how": QUICK, **more})


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_windows_make_the_export_of_the_whole(tmp_path, kind):
    data = [*samples(50), 5, {"user": "bad", "options": {"fail": "raise"}}]
    score(data, tmp_path / "whole")
    done = score(iter(data), tmp_path / "cut", window=8)
    assert len(window_folders(tmp_path / "cut")) == 7
    assert exported(tmp_path / "cut", kind) == exported(tmp_path / "whole", kind)
    assert len(done.scores) == 52
    assert done.stats["judged"] == 51
    one, other = read_status(tmp_path / "cut"), read_status(tmp_path / "whole")
    for name in ("samples", "ok", "failed", "pending", "kinds", "tokens", "tokens_done", "level"):
        assert getattr(one, name) == getattr(other, name)


def test_only_a_window_is_read_ahead_of_what_is_judged(tmp_path):
    consumed, seen = [], []
    how = RunConfig(threads=1, ahead=1, on_outcomes=lambda _: seen.append(len(consumed)))
    score(counted(samples(60), consumed), tmp_path, window=10, how=how)
    assert seen[0] == 10
    assert sorted(set(seen)) == [10, 20, 30, 40, 50, 60]


def test_an_endless_input_is_streamed_until_nobody_reads(tmp_path):
    consumed = []
    endless = counted(({"user": f"{n}"} for n in itertools.count()), consumed)
    rows = scorer().stream(endless, tmp_path, check=False, how=QUICK, window=20)
    first = list(itertools.islice(rows, 50))
    rows.close()
    assert sorted(row["index"] for row in first)[:40] == list(range(40))
    assert len(consumed) < 400
    kept = sum(row["status"] == "ok" for row in read_rows(tmp_path))
    assert kept >= 50


def test_every_row_comes_once_those_of_an_earlier_call_first(tmp_path):
    data = [*samples(30), samples(30)[4], 5]
    score(data[:10], tmp_path, window=16)
    rows = list(scorer().stream(data, tmp_path, check=False, how=QUICK, window=16))
    assert sorted(row["index"] for row in rows) == list(range(32))
    assert {row["index"] for row in rows[:10]} == set(range(10))
    assert sorted(rows, key=lambda row: row["index"]) == list(read_rows(tmp_path))
    without_folder = list(scorer().stream(data, check=False, how=QUICK))
    assert sorted(without_folder, key=lambda row: row["index"]) == list(read_rows(tmp_path))


def test_what_goes_wrong_in_the_run_is_raised_where_it_is_read(tmp_path):
    def fails(numbers):
        raise ConfigError("no such label", seen="x", do="y")

    with pytest.raises(ConfigError, match="no such label"):
        list(Scorer(fails).stream(samples(5), tmp_path, check=False))
    with pytest.raises(ZeroDivisionError):
        list(stream(lambda give: give([1 / 0])))


def test_a_run_in_windows_that_is_stopped_goes_on(tmp_path):
    data = samples(60)
    score(data, tmp_path / "whole")

    def stop(progress, told=[]):  # noqa: B006
        told.append(progress.done)
        if len(told) == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(RestartError):
        score(iter(data), tmp_path / "cut", window=20, how=RunConfig(threads=1, ahead=1, on_progress=stop))
    some = read_status(tmp_path / "cut")
    assert 0 < some.ok < 60
    score(iter(data), tmp_path / "cut", window=20)
    assert exported(tmp_path / "cut") == exported(tmp_path / "whole")


def test_windows_of_another_size_are_refused_and_shorter_data_have_fewer(tmp_path):
    score(samples(30), tmp_path, window=10)
    with pytest.raises(RunError, match="other windows"):
        score(samples(30), tmp_path, window=7)
    with pytest.raises(ConfigError, match="at least one sample"):
        score(samples(30), tmp_path, window=0)
    score(samples(15), tmp_path, window=10)
    assert [row["id"] for row in read_rows(tmp_path)] == [f"s{n}" for n in range(15)]


def test_a_failure_that_is_gone_from_the_data_is_not_retried(tmp_path):
    data = [*samples(5), {"user": "bad", "options": {"fail": "raise"}}]
    score(data, tmp_path)
    assert score(data[:5], tmp_path, how=RunConfig(retry={"raised"})).stats["judged"] == 0
