"""The loader: the same micro-batches for any number of workers, and no fault of a worker without a name."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields as dataclass_fields
from multiprocessing import active_children
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truebatch.errors import BatchError, ConfigError, DataError, LoaderError
from truebatch.planning.plan import Plan, build_plan
from truebatch.planning.settings import PlanConfig
from truebatch.tensors import watch
from truebatch.tensors.collating import collate
from truebatch.tensors.field import Field
from truebatch.tensors.loader import LoaderConfig, load_steps

FIELDS = (
    Field(name="input_ids", pad=-1),
    Field(name="labels", source="input_ids", shift=1, pad=-100),
    Field(name="patches", kind="flat", axis="patches"),
    Field(name="weight", kind="once"),
)
LENGTHS = [3, 17, 5, 9, 1, 12, 8, 8, 2, 30, 4, 6, 11, 7, 19, 1, 13, 5, 5, 10, 3, 2, 27, 6, 9, 4]
BAD = 9
"""The sample that is broken in one way or another."""


class Texts:
    """Samples made from their id; one of them may misbehave."""

    def __init__(self, lengths=LENGTHS, fault: str = "", bad: int = BAD, once: Path | None = None) -> None:
        self.lengths, self.fault, self.bad, self.once = list(lengths), fault, bad, once

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Any:
        if i == self.bad and self.fault and not self._was_seen():
            return misbehave(self.fault)
        rng = np.random.default_rng(i)
        n = self.lengths[i]
        patches = torch.from_numpy(rng.normal(size=(i % 3, 2, 2)))
        return {"input_ids": rng.integers(1, 99, n), "patches": patches, "weight": i / 7}

    def _was_seen(self) -> bool:
        if self.once is None:
            return False
        seen = self.once.exists()
        self.once.touch()
        return seen


def misbehave(fault: str) -> Any:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "segfault":
        faulthandler.disable()  # its report would only blur the output of the tests
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fault == "exit":
        os._exit(3)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "hang":
        time.sleep(600)
    elif fault == "raise":
        raise OSError("the disk said no")
    elif fault == "leave":
        sys.exit(4)
    elif fault == "list":
        return [1, 2, 3]
    return {"input_ids": [1, 2], "patches": np.zeros((0, 2, 2)), "weight": 0.5}  # shorter than measured


def text_plan(layout="padded", *, ranks=1, epoch=0, lengths=LENGTHS, **more) -> Plan:
    config = PlanConfig(**{"layout": layout, "cells": 40, "samples_per_step": 8, "seed": 3, **more})
    return build_plan(lengths, config, epoch=epoch, ranks=ranks, counts={"tokens": lengths} if not more else None)


def two(**more) -> LoaderConfig:
    return LoaderConfig(**{"workers": 2, "timeout_seconds": 20.0, **more})


def assert_same(first: Any, second: Any) -> None:
    """Equal to the bit, whatever it is made of."""
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert first.shape == second.shape
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        assert_same(list(first.values()), list(second.values()))
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            assert_same(a, b)
    elif hasattr(first, "__dataclass_fields__"):
        for f in dataclass_fields(first):
            assert_same(getattr(first, f.name), getattr(second, f.name))
    else:
        assert first == second


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    assert not [p for p in active_children() if p.name.startswith("truebatch")]


@settings(deadline=None, max_examples=8)
@given(st.sampled_from(["padded", "packed"]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.data())
def test_the_number_of_workers_changes_nothing(layout, workers, prefetch, ranks_more, data):
    plan = text_plan(layout, ranks=1 + ranks_more)
    place = {"rank": data.draw(st.integers(0, ranks_more)), "start_step": data.draw(st.integers(0, plan.num_steps))}
    side = data.draw(st.sampled_from(["left", "right"]))
    here = list(load_steps(plan, Texts(), FIELDS, **place, config=LoaderConfig(side=side)))
    config = LoaderConfig(workers=workers, prefetch=prefetch, side=side)
    assert_same(list(load_steps(plan, Texts(), FIELDS, **place, config=config)), here)


def test_a_loaded_step_is_the_planned_one():
    plan = text_plan("packed", ranks=2)
    dataset = Texts()
    seen = []
    for rank in range(2):
        steps = list(load_steps(plan, dataset, FIELDS, rank=rank))
        assert [s.number for s in steps] == list(range(plan.num_steps))
        for step in steps:
            assert step.counts == plan.step_counts(step.number)
            assert len(step) == len(plan.step(step.number)[rank])
            for rows, batch in zip(plan.step(step.number)[rank], step, strict=True):
                counts = {"tokens": sum(LENGTHS[i] for i in rows.ids)}
                assert_same(batch, collate([dataset[int(i)] for i in rows.ids], rows, FIELDS, counts=counts))
                seen += batch.sample_ids
    assert sorted(seen) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_every_way_to_start_a_process_gives_the_same_and_names_the_sample(method, tmp_path, caplog):
    plan = text_plan()
    here = list(load_steps(plan, Texts(), FIELDS))
    dataset = Texts(fault="kill", once=tmp_path / "killed")
    there = load_steps(plan, dataset, FIELDS, transform=leave_alone, config=two(start_method=method, restarts=1))
    assert_same(list(there), here)
    assert f"died while loading sample {BAD}\n  seen: killed by SIGKILL" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_starts_at_any_step_and_on_any_number_of_ranks(workers):
    plan = text_plan("packed", ranks=2)
    config = LoaderConfig(workers=workers)
    whole = list(load_steps(plan, Texts(), FIELDS, config=config))
    assert_same(list(load_steps(plan, Texts(), FIELDS, start_step=2, config=config)), whole[2:])
    assert not list(load_steps(plan, Texts(), FIELDS, start_step=plan.num_steps, config=config))
    for ranks in (1, 3):
        ids = [
            sorted(i for r in parts for b in r for i in b.sample_ids)
            for parts in zip(
                *(load_steps(plan, Texts(), FIELDS, rank=r, ranks=ranks, start_step=1) for r in range(ranks)),
                strict=True,
            )
        ]
        assert ids == [sorted(plan.step_sample_ids(s)) for s in range(1, plan.num_steps)]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_with_nothing_to_do_gets_empty_micro_batches(layout, workers):
    plan = text_plan(layout, ranks=4, lengths=[3, 5])
    config = LoaderConfig(workers=workers)
    steps = [list(load_steps(plan, Texts([3, 5]), FIELDS, rank=r, config=config)) for r in range(4)]
    batches = [b for part in steps for s in part for b in s]
    assert sorted(b.num_samples for b in batches) == [0, 0, 1, 1]
    assert sorted(b.counts["tokens"] for b in batches) == [0, 0, 3, 5]
    for batch in batches:
        assert batch["input_ids"].shape[0] == batch.num_samples
        assert batch["input_ids"].dim() == 2


def leave_alone(sample: Any, sample_id: int, epoch: int) -> Any:
    return sample


def add_noise(sample: Any, sample_id: int, epoch: int) -> Any:
    noise = np.random.default_rng((7, epoch, sample_id)).normal()
    return {**sample, "weight": sample["weight"] + noise}


def weights(steps) -> dict[int, float]:
    return {i: w for s in steps for b in s for i, w in zip(b.sample_ids, b["weight"].tolist(), strict=True)}


def test_a_transform_is_keyed_by_sample_and_epoch_not_by_worker_rank_or_place():
    first = weights(load_steps(text_plan(), Texts(), FIELDS, transform=add_noise))
    assert len(set(first.values())) == len(LENGTHS)
    assert weights(load_steps(text_plan(), Texts(), FIELDS, transform=add_noise, config=two())) == first
    late = weights(load_steps(text_plan("packed", ranks=2), Texts(), FIELDS, rank=1, start_step=1, transform=add_noise))
    assert late
    assert late.items() <= first.items()
    other = weights(load_steps(text_plan(epoch=1), Texts(), FIELDS, transform=add_noise))
    assert not set(other.values()) & set(first.values())


@pytest.mark.parametrize("workers", [0, 1])
def test_only_what_the_plan_cuts_is_cut_and_no_label_comes_from_behind_the_cut(workers):
    plan = text_plan(cells=16, overlong="cut")
    assert {int(i) for i in plan.samples.cut_ids} == {i for i, n in enumerate(LENGTHS) if n > 16}
    texts = Texts()
    for step in load_steps(plan, texts, FIELDS, config=LoaderConfig(workers=workers)):
        for batch in step:
            pairs = (batch.per_sample(batch[name]) for name in ("input_ids", "labels"))
            for i, ids, labels in zip(batch.sample_ids, *pairs, strict=True):
                assert ids.tolist() == texts[i]["input_ids"][:16].tolist()
                assert labels.tolist() == [*texts[i]["input_ids"][1:16].tolist(), -100]
    changed = [n - (i == BAD) for i, n in enumerate(LENGTHS)]
    with pytest.raises(DataError, match=f"sample {BAD} is not as long.*\n.*29 tokens now, 30 then"):
        list(load_steps(plan, Texts(changed), FIELDS, config=LoaderConfig(workers=workers)))


@pytest.mark.parametrize(
    ("fault", "wrong", "seen"),
    [
        ("kill", "died while loading", "killed by SIGKILL"),
        ("segfault", "died while loading", "killed by SIGSEGV"),
        ("exit", "died while loading", "exit code 3"),
        ("leave", "died while loading", "exit code 4"),
        ("hang", "hangs while loading", "timeout_seconds=0.7"),
        ("stop", "hangs while loading", "timeout_seconds=0.7"),
    ],
)
def test_a_lost_worker_is_reported_with_the_sample_it_was_on(fault, wrong, seen):
    plan = text_plan()
    step = next(s for s in range(plan.num_steps) if BAD in plan.step_sample_ids(s))
    with pytest.raises(LoaderError, match=rf"worker \d {wrong} sample {BAD}\n") as caught:
        list(load_steps(plan, Texts(fault=fault), FIELDS, config=two(timeout_seconds=0.7)))
    assert seen in caught.value.seen
    assert f"step {step}, micro-batch" in caught.value.seen
    assert caught.value.do


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_sample_that_raises_is_named_at_its_own_step_with_its_traceback(workers):
    plan = text_plan()
    step = next(s for s in range(plan.num_steps) if BAD in plan.step_sample_ids(s))
    steps = load_steps(plan, Texts(fault="raise"), FIELDS, config=LoaderConfig(workers=workers))
    here = list(load_steps(plan, Texts(), FIELDS))
    assert_same([next(steps) for _ in range(step)], here[:step])
    with pytest.raises(LoaderError, match=f"sample {BAD} could not be loaded\n.*OSError: the disk said no") as caught:
        next(steps)
    assert "in misbehave" in caught.value.seen
    cause = caught.value.__cause__
    text = str(cause) if workers else repr(cause)
    assert "the disk said no" in text
    assert ("Traceback (most recent call last)" in text) == bool(workers)


def test_workers_that_die_or_hang_are_replaced_when_asked_and_the_order_stays(tmp_path, caplog):
    plan = text_plan("packed")
    here = list(load_steps(plan, Texts(), FIELDS))
    for fault in ("kill", "hang"):
        dataset = Texts(fault=fault, once=tmp_path / fault)
        config = two(restarts=1, timeout_seconds=0.7)
        assert_same(list(load_steps(plan, dataset, FIELDS, config=config)), here)
        assert f"while loading sample {BAD}" in caplog.text
        caplog.clear()


def test_a_sample_that_ends_two_workers_is_named_however_many_restarts_are_left():
    with pytest.raises(LoaderError, match=f"sample {BAD} ended 2 workers"):
        list(load_steps(text_plan(), Texts(fault="exit"), FIELDS, config=two(restarts=50)))


def test_workers_killed_from_outside_again_and_again_change_nothing():
    plan = text_plan(samples_per_step=2)
    here = list(load_steps(plan, Texts(), FIELDS))
    there = []
    for step in load_steps(plan, Texts(), FIELDS, config=two(restarts=1000)):
        there.append(step)
        os.kill(active_children()[len(there) % 2].pid, signal.SIGKILL)
    assert_same(there, here)


def test_an_idle_worker_that_is_killed_is_reported_too():
    steps = load_steps(text_plan(), Texts(), FIELDS, config=two())
    next(steps)
    for process in active_children():
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(LoaderError, match="killed by SIGKILL"):
        list(steps)


def test_a_worker_that_cannot_start_in_time_is_reported(monkeypatch):
    monkeypatch.setattr(watch, "START_SECONDS", 0.5)
    monkeypatch.setattr("truebatch.tensors.worker._settle_in", lambda: time.sleep(600))
    with pytest.raises(LoaderError, match="hangs while starting"):
        list(load_steps(text_plan(), Texts(), FIELDS, config=two(timeout_seconds=0.5, start_method="fork")))


def test_closing_dropping_or_failing_half_way_ends_the_workers():
    steps = load_steps(text_plan(), Texts(), FIELDS, config=two())
    next(steps)
    assert len(active_children()) == 2
    steps.close()
    assert not active_children()

    second = int(text_plan().step_sample_ids(1)[0])  # hangs while the first step is in use
    for _ in load_steps(text_plan(), Texts(fault="hang", bad=second), FIELDS, config=two()):
        break
    gc.collect()
    assert not active_children()

    with pytest.raises(KeyError, match="a fault in the loop"):
        fail_in_a_loop()
    gc.collect()
    assert not active_children()


def fail_in_a_loop() -> None:
    for _ in load_steps(text_plan(), Texts(), FIELDS, config=two()):
        raise KeyError("a fault in the loop")


def test_two_loaders_at_once_do_not_disturb_each_other():
    plan = text_plan()
    here = list(load_steps(plan, Texts(), FIELDS))
    first = load_steps(plan, Texts(), FIELDS, config=two())
    head = [next(first)]
    second = load_steps(plan, Texts(), FIELDS, config=two())
    next(second)
    second.close()
    assert_same(head + list(first), here)


PARENT = """
import sys, time
from multiprocessing import active_children
from tests.tensors.test_loader import FIELDS, Texts, load_steps, text_plan, two
steps = load_steps(text_plan(), Texts(), FIELDS, config=two())
kept = next(steps)
print(*[p.pid for p in active_children()], flush=True)
{then}
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("then", "sent", "code"),
    [("time.sleep(600)", signal.SIGKILL, -9), ("time.sleep(600)", signal.SIGINT, -2), ("", 0, 0)],
    ids=["killed", "interrupted", "exits with the iterator open"],
)
def test_no_worker_outlives_the_main_process(then, sent, code):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(then=then)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    if sent == signal.SIGINT:
        os.killpg(parent.pid, sent)  # as a terminal does: to the workers too
    elif sent:
        parent.send_signal(sent)
    _, errors = parent.communicate(timeout=30)
    assert parent.returncode == code
    assert errors.count("Traceback") == (sent == signal.SIGINT)  # the parent's own, none of a worker
    until = time.monotonic() + 20
    while any(map(is_alive, workers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))


class Counted(Texts):
    """Counts in shared memory how often each sample was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = RawArray("q", len(LENGTHS))

    def __getitem__(self, i: int) -> Any:
        self.loads[i] += 1
        return super().__getitem__(i)


def test_no_more_micro_batches_are_made_ahead_than_asked_for():
    plan = text_plan(samples=1, samples_per_step=2)
    dataset = Counted()
    steps = load_steps(plan, dataset, FIELDS, config=two(prefetch=2, start_method="fork"))
    for taken in range(1, 5):
        next(steps)
        time.sleep(0.05)
        assert sum(dataset.loads) <= 2 * taken + 4
    list(steps)
    assert list(dataset.loads) == [1] * len(LENGTHS)


class Threads(Texts):
    """Says how many threads torch has where samples are loaded, after work that would use them."""

    def __getitem__(self, i: int) -> Any:
        torch.ones(300, 300) @ torch.ones(300, 300)
        return {**super().__getitem__(i), "weight": torch.get_num_threads()}


def test_torch_works_in_a_fork_of_a_process_that_used_its_threads():
    torch.ones(400, 400) @ torch.ones(400, 400)
    steps = load_steps(text_plan(), Threads(), FIELDS, config=two(start_method="fork"))
    assert set(weights(steps).values()) == {1}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (Texts(LENGTHS[:20]), DataError, "it has no sample 20\n  seen: 20 samples, 26 when"),
        (Texts(fault="list"), DataError, rf"sample {BAD} is not a mapping.*\n  seen: list: \[1, 2, 3\]"),
        (Texts(fault="short"), DataError, rf"sample {BAD} is not as long.*\n  seen: 2 tokens now, 30 then"),
        ({i: {"input_ids": [1] * n} for i, n in enumerate(LENGTHS)}, BatchError, "has no field 'patches'"),
        (
            {i: Texts()[i % 26] for i in range(1, 27)},
            LoaderError,
            "sample 0 could not be loaded\n  seen: KeyError",
        ),
    ],
    ids=["shorter", "no mapping", "changed", "no such field", "a hole"],
)
def test_a_dataset_that_is_not_the_planned_one_is_refused_by_sample(workers, dataset, error, message):
    with pytest.raises(error, match=message):
        list(load_steps(text_plan(), dataset, FIELDS, config=LoaderConfig(workers=workers)))


def test_what_cannot_be_sent_to_a_spawned_worker_is_refused_in_words():
    with pytest.raises(LoaderError, match=r"could not be started\n.*start method 'spawn'\n.*picklable"):
        list(load_steps(text_plan(), Texts(), FIELDS, transform=lambda s, i, e: s, config=two(start_method="spawn")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2}, "rank=2, ranks=2"),
        ({"rank": -1}, "rank=-1"),
        ({"rank": 1, "ranks": 1}, "rank=1, ranks=1"),
        ({"start_step": 99}, "start_step=99, the plan has 4 steps"),
        ({"start_step": -1}, "start_step=-1"),
    ],
)
def test_a_place_the_plan_does_not_have_is_refused_before_anything_is_loaded(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_steps(text_plan(ranks=2), Texts(), FIELDS, **arguments)


@pytest.mark.parametrize(
    "setting",
    [
        {"workers": -1},
        {"workers": 1.5},
        {"workers": True},
        {"prefetch": 0},
        {"restarts": -1},
        {"timeout_seconds": 0},
        {"timeout_seconds": float("nan")},
        {"start_method": "thread"},
        {"side": "top"},
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_with_its_value(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ConfigError, match=f"seen: {name}={value!r}"):
        LoaderConfig(**setting)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_pinning_without_a_cuda_device_is_refused():
    with pytest.raises(ConfigError, match="pin_memory=True"):
        load_steps(text_plan(), Texts(), FIELDS, config=LoaderConfig(pin_memory=True))


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_micro_batches_are_the_same_and_reach_the_device(workers):
    plan = text_plan("packed")
    config = LoaderConfig(workers=workers, pin_memory=True)
    torch.zeros(1, device="cuda")  # workers are forked from a process that uses the device
    for here, pinned in zip(
        load_steps(plan, Texts(), FIELDS), load_steps(plan, Texts(), FIELDS, config=config), strict=True
    ):
        for one, other in zip(here, pinned, strict=True):
            assert all(t.is_pinned() for t in other.fields.values() if t.numel())
            assert_same(other.to("cuda", non_blocking=True).to("cpu"), one)
