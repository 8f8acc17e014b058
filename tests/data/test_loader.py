"""The loader: the same micro-batches for any number of workers, starts and ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from multiprocessing import active_children
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.texts import (
    BAD,
    FIELDS,
    LENGTHS,
    Texts,
    add_noise,
    assert_same,
    leave_alone,
    text_plan,
    two,
)
from truebatch.batch.collate import collate
from truebatch.batch.fields import Field
from truebatch.data.loader import LoaderConfig, load_steps
from truebatch.errors import BatchError, ConfigError, DataError, LoaderError
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan


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
            # Back on the host it still says which of its tensors share memory; one that was never pinned has none that do.
            back = other.to("cuda", non_blocking=True).to("cpu")
            assert back.pieces
            assert_same(replace(back, pieces=()), one)


def test_packed_rows_come_the_longest_sample_first_and_as_wide_as_asked_for():
    lengths = np.array([3, 9, 1, 7, 5, 2, 8, 4])
    samples = [{"input_ids": np.arange(n)} for n in lengths]
    plan = build_plan(lengths, PlanConfig(layout="packed", cells=16, samples_per_step=4))
    config = LoaderConfig(row_cells=20, slots=12)
    seen = []
    for step in load_steps(plan, samples, [Field(name="input_ids")], config=config):
        for batch in step:
            assert batch.segments.shape == (1, 20)
            assert len(batch.segments.starts) == 13
            assert list(batch.rows().lengths) == sorted(batch.rows().lengths, reverse=True)
            for i, ids in zip(batch.sample_ids, batch.per_sample(batch["input_ids"]), strict=True):
                assert ids.tolist() == list(range(lengths[i]))
            seen += batch.sample_ids
    assert sorted(seen) == list(range(8))
