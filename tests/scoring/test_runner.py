"""A run gives every sample one outcome, the same bytes however often it is killed, and never an invented score."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from PIL import Image

from truebatch.errors import ConfigError, RestartError, RunError
from truebatch.scoring import bisect
from truebatch.scoring.backends.interface import Cost
from truebatch.scoring.backends.scripted import ScriptedBackend
from truebatch.scoring.batch_plan import Limits, load_batches, plan_batches
from truebatch.scoring.runner import RunConfig, run_samples
from truebatch.scoring.store.export import export, read_rows, read_status
from truebatch.scoring.store.input_index import list_samples
from truebatch.scoring.store.journal import read_journals
from truebatch.testing.failpoints import armed

LIMITS = Limits(cells=200)
QUICK = RunConfig(threads=2, ahead=2)


@pytest.fixture(autouse=True)
def without_collecting(monkeypatch):
    """Collecting garbage after every fake out of memory is not what is tested here."""
    monkeypatch.setattr(bisect, "free_memory", lambda _device, **_said: None)


def samples(number, seed=0):
    draw = random.Random(seed)
    return [{"id": f"s{n}", "user": f"{n:03d} " + "x" * draw.randrange(40)} for n in range(number)]


def score(data, run, backend=None, limits=LIMITS, how=QUICK):
    return run_samples(list_samples(data), [backend or ScriptedBackend()], run, limits, how)


def exported(run):
    file = run / "scores.jsonl"
    export(run, file)
    return file.read_bytes()


def test_every_sample_has_its_row_in_order_and_duplicates_are_judged_once(tmp_path):
    data = samples(30)
    data += [{**data[3], "id": "again"}, {**data[3], "id": "and again"}]
    done = score(data, tmp_path)
    rows = list(read_rows(tmp_path))
    assert [row["id"] for row in rows] == [one["id"] for one in data]
    assert [row["score"] for row in rows] == [float(len(one["user"])) for one in data]
    assert {row["level"] for row in rows} == {"plan"}
    assert done.judged == 30
    assert read_status(tmp_path).duplicates == 2
    assert score(data, tmp_path).judged == 0


def test_batches_are_the_dearest_first_and_within_the_budget():
    draw = random.Random(3)
    costs = {f"{n:04d}": Cost(tokens=draw.randrange(1, 300), patches=draw.randrange(50)) for n in range(500)}
    batches = plan_batches(costs, Limits(cells=256, patches=200, rows=20))
    assert sorted(key for batch in batches for key in batch) == sorted(costs)
    longest = [max(costs[key].tokens for key in batch) for batch in batches]
    assert longest == sorted(longest, reverse=True)
    for batch, length in zip(batches, longest, strict=True):
        fits = length * len(batch) <= 256 and sum(costs[key].patches for key in batch) <= 200 and len(batch) <= 20
        assert fits or len(batch) == 1
    cells = sum(length * len(batch) for batch, length in zip(batches, longest, strict=True))
    assert sum(cost.tokens for cost in costs.values()) > 0.9 * cells


def test_pinned_shapes_put_only_samples_of_one_width_together():
    draw = random.Random(3)
    costs = {f"{n:04d}": Cost(tokens=draw.randrange(1, 900), new_tokens=draw.randrange(9)) for n in range(200)}
    limits = Limits(level="shape", cells=1024)
    from truebatch.scoring.backends.fixed_shapes import Shapes

    shapes = Shapes(1024)
    batches = plan_batches(costs, limits)
    assert sorted(key for batch in batches for key in batch) == sorted(costs)
    for batch in batches:
        (width,) = {shapes.width(costs[key].tokens) for key in batch}
        assert len(batch) < shapes.rows(width)
    for length in range(1, 5000):
        assert length < shapes.width(length) <= max(length + 64, length * 1.25)


def test_data_that_grows_or_turns_around_keeps_all_work(tmp_path):
    data = samples(20)
    score(data, tmp_path)
    before = load_batches(tmp_path).batches
    more = [*samples(26)[::-1], {"user": "a new one"}]
    assert score(more, tmp_path).judged == 7
    assert load_batches(tmp_path).batches[: len(before)] == before
    assert [row["id"] for row in read_rows(tmp_path)] == [one.get("id", "26") for one in more]


def test_another_configuration_is_refused(tmp_path):
    score(samples(5), tmp_path)
    with pytest.raises(RunError, match="another configuration"):
        score(samples(5), tmp_path, ScriptedBackend(name="other"))
    with pytest.raises(RunError, match="another configuration"):
        score(samples(5), tmp_path, limits=Limits(cells=300))
    with pytest.raises(RunError, match="another configuration"):
        score(samples(5), tmp_path, limits=Limits(level="close"))


def test_at_level_close_the_budget_may_change(tmp_path):
    score(samples(5), tmp_path, limits=Limits(level="close", cells=200))
    assert score(samples(9), tmp_path, limits=Limits(level="close", cells=500)).judged == 4


def six_kinds(folder, number):
    """1 % bad samples of six kinds among good ones with images."""
    good = folder / "good.png"
    Image.new("RGB", (8, 8), "red").save(good)
    Image.effect_noise((64, 64), 50).convert("RGB").save(folder / "whole.jpg")
    whole = (folder / "whole.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "zero.png").write_bytes(b"")
    bad = {
        "truncated_image": {"images": [str(folder / "cut.jpg")]},
        "unreadable_image": {"images": [str(folder / "zero.png")]},
        "too_long": {"options": {"fail": "too_long"}},
        "nonfinite": {"options": {"fail": "nan"}},
        "raised": {"options": {"fail": "raise"}},
        "out_of_memory": {"options": {"fail": "memory"}},
    }
    data = [{**one, "images": [str(good)]} for one in samples(number)]
    expected = {}
    draw = random.Random(5)
    for at, kind in zip(draw.sample(range(number), number // 100), [*bad] * number, strict=False):
        data[at] |= bad[kind]
        expected[data[at]["id"]] = kind
    return data, expected


def test_one_percent_of_bad_samples_of_six_kinds_are_records_and_all_others_are_scored(tmp_path):
    data, expected = six_kinds(tmp_path, 1200)
    assert len(set(expected.values())) == 6
    done = score(data, tmp_path / "run", limits=Limits(cells=2000))
    rows = list(read_rows(tmp_path / "run"))
    assert {row["id"]: row["kind"] for row in rows if row["status"] == "failed"} == expected
    assert all(row["score"] is None and row["message"] for row in rows if row["status"] == "failed")
    good = {row["id"]: row["score"] for row in rows if row["status"] == "ok"}
    assert good == {one["id"]: float(len(one["user"])) for one in data if one["id"] not in expected}
    assert read_status(tmp_path / "run").kinds["decode/truncated_image"] == 2
    assert done.trouble.bisections > 0


def test_out_of_memory_splits_lowers_the_budget_and_loses_nothing(tmp_path):
    data = samples(100)
    done = score(data, tmp_path, ScriptedBackend(most_cells=60), limits=Limits(cells=240))
    assert [row["score"] for row in read_rows(tmp_path)] == [float(len(one["user"])) for one in data]
    assert done.trouble.splits > 0
    untaught = score(data, tmp_path / "again", ScriptedBackend(most_cells=60), limits=Limits(cells=60))
    assert untaught.trouble.splits == 0
    batches = len(load_batches(tmp_path).batches)
    parts = batches + done.trouble.splits  # every split makes one part more; what was learned was not tried again
    assert done.trouble.calls < batches + 2 * done.trouble.splits
    assert done.trouble.calls >= parts


def test_failures_stay_until_their_kind_is_retried(tmp_path):
    data = [*samples(5), {"id": "big", "user": "y" * 50}]
    score(data, tmp_path, ScriptedBackend(most_cells=45))
    assert read_status(tmp_path).kinds == {"model/out_of_memory": 1}
    assert score(data, tmp_path).judged == 0
    again = score(data, tmp_path, how=RunConfig(retry={"out_of_memory"}))
    assert (again.judged, read_status(tmp_path).failed) == (1, 0)


@pytest.mark.parametrize("worker_count", [1, 2, 3])
def test_several_workers_and_shards_give_the_same_export(tmp_path, worker_count):
    data = samples(60)
    score(data, tmp_path / "one")
    run_samples(list_samples(data), [ScriptedBackend()] * worker_count, tmp_path / "many", LIMITS, QUICK)
    for shard in range(worker_count):
        score(data, tmp_path / "shards", how=RunConfig(shard=(shard, worker_count)))
    assert exported(tmp_path / "one") == exported(tmp_path / "many") == exported(tmp_path / "shards")


def test_a_second_process_on_the_same_shard_is_refused(tmp_path):
    from filelock import FileLock

    tmp_path.joinpath("run").mkdir()
    with FileLock(tmp_path / "run" / ".shard-0-of-1.lock"), pytest.raises(RunError, match="another process"):
        score(samples(3), tmp_path / "run")


def test_a_shard_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="i/n"):
        RunConfig(shard=(2, 2))


def test_progress_counts_samples_and_tokens_and_tells_the_time_left(tmp_path):
    told = []
    data = samples(40)
    score(data, tmp_path, how=RunConfig(on_progress=told.append))
    assert [one.done for one in told] == sorted(one.done for one in told)
    assert (told[0].done, told[-1].done, told[-1].tokens_done) == (0, 40, told[-1].tokens)
    assert told[-1].tokens == sum(len(one["user"]) + 1 for one in data)
    assert told[0].seconds_left is None
    assert told[-1].seconds_left == 0
    assert "40/40 samples, 100.0%" in told[-1].line()


def test_a_signal_ends_the_run_after_the_batch_and_it_goes_on(tmp_path):
    def stop(progress):
        if progress.done:
            os.kill(os.getpid(), signal.SIGTERM)

    data = samples(40)
    with pytest.raises(RestartError, match="asked to stop"):
        score(data, tmp_path, how=RunConfig(on_progress=stop))
    some = read_status(tmp_path)
    assert 0 < some.ok < 40
    assert [row["status"] for row in read_rows(tmp_path)].count("pending") == 40 - some.ok
    score(data, tmp_path)
    assert read_status(tmp_path).ok == 40


@pytest.mark.parametrize("point", ["journal.before_commit", "journal.in_commit", "write.half_written", "write.synced"])
def test_a_full_disk_leaves_a_run_that_goes_on(tmp_path, point):
    data = samples(30)
    score(data, tmp_path / "whole")
    with armed(f"{point}:enospc:2"), pytest.raises((OSError, RunError)):
        score(data, tmp_path / "run")
    score(data, tmp_path / "run")
    assert exported(tmp_path / "run") == exported(tmp_path / "whole")


def in_child(call):
    """Run in a forked process, which is much quicker than a new interpreter; its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        call()
        os._exit(0)
    except BaseException:
        os._exit(1)


def kill_at_random(data, run, kills, seed=0):
    """Half of the kills come while a run starts, half when it has told of its beginning and of some batches."""
    draw = random.Random(seed)
    backend = ScriptedBackend(seconds=0.002)
    for number in range(kills):
        reader, writer = os.pipe()
        how = RunConfig(threads=1, ahead=2, on_progress=lambda _, writer=writer: os.write(writer, b"."))
        pid = in_child(lambda how=how: score(data, run, backend, how=how))
        os.close(writer)
        for _ in range(draw.randrange(1, 5) if number % 2 else 0):
            os.read(reader, 1)  # an end of the child is told too
        time.sleep(draw.uniform(0, 0.01 if number % 2 else 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("rounds", "kills"), [(1, 60), pytest.param(20, 50, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_kills_at_random_moments_leave_the_export_byte_for_byte(tmp_path, rounds, kills, record_property):
    record_property("trials", rounds * kills)
    for seed in range(rounds):
        data = [*samples(12 * kills, seed), {"user": "bad", "options": {"fail": "nan"}}, 5]
        whole, killed = tmp_path / f"whole {seed}", tmp_path / f"killed {seed}"
        score(data, whole)
        kill_at_random(data, killed, kills, seed)
        before = read_status(killed)
        assert 0 < before.ok < len(data)
        score(data, killed)
        assert exported(killed) == exported(whole)
        told = read_journals(killed)
        assert told.disagreements == told.suspects == ()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_sample_that_ends_the_interpreter_is_found_by_starting_again(tmp_path):
    data = [*samples(12), {"id": "killer", "user": "x" * 20, "options": {"fail": "exit"}}]
    for _ in range(40):
        _, state = os.waitpid(in_child(lambda: score(data, tmp_path)), 0)
        if os.waitstatus_to_exitcode(state) == 0:
            break
    rows = {row["id"]: row for row in read_rows(tmp_path)}
    assert (rows["killer"]["status"], rows["killer"]["kind"]) == ("failed", "crashed")
    assert all(row["status"] == "ok" for name, row in rows.items() if name != "killer")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_exports_hold_every_row_and_are_the_same_bytes_again(tmp_path, kind):
    data = [*samples(7), {"user": 'comma, "quote"\nline', "note": [1, 2]}, {"nothing": "here"}]
    score(data, tmp_path / "run")
    file = tmp_path / f"scores.{kind}"
    assert export(tmp_path / "run", file) == 9
    first = file.read_bytes()
    export(tmp_path / "run", file)
    assert file.read_bytes() == first
    if kind == "jsonl":
        rows = [json.loads(line) for line in first.splitlines()]
        assert rows[7]["meta"] == {"note": [1, 2]}
        assert rows[8]["kind"] == "no_prompt"


def test_an_export_of_another_kind_is_refused(tmp_path):
    score(samples(2), tmp_path)
    with pytest.raises(ConfigError, match=r"\.jsonl, \.csv, \.parquet"):
        export(tmp_path, Path("scores.xlsx"))


def test_a_folder_that_is_no_run_is_said(tmp_path):
    with pytest.raises(RunError, match="not a scoring run"):
        read_status(tmp_path)
