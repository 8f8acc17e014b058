"""Batches by token budget: every sample once, as many on every rank, and gone on with where they were left."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import truebatch as tb
from truebatch.errors import ConfigError, PlanError, RunError

LENGTHS = np.random.default_rng(0).integers(1, 40, 101)


def make(**options: object) -> tb.TokenBudgetSampler:
    return tb.TokenBudgetSampler(LENGTHS, **{"cells": 64, "seed": 3, **options})


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_every_sample_once_within_the_budget_and_equally_many_batches_on_all_ranks(layout, ranks):
    samplers = [make(layout=layout, rank=rank, ranks=ranks) for rank in range(ranks)]
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        found = [list(sampler) for sampler in samplers]
        assert len({len(batches) for batches in found}) == 1 == len({len(sampler) for sampler in samplers})
        assert [len(batches) for batches in found] == [len(sampler) for sampler in samplers]
        batches = [batch for batches in found for batch in batches]
        assert sorted(index for batch in batches for index in batch) == list(range(101))
        for batch in batches:
            lengths = LENGTHS[batch]
            assert (lengths.sum() if layout == "packed" else len(lengths) * lengths.max()) <= 64
    assert list(samplers[0]) == found[0]
    samplers[0].set_epoch(0)
    assert list(samplers[0]) != found[0]


def test_a_state_goes_on_with_the_next_batch_and_refuses_other_batches():
    whole = list(make())
    first = make()
    reader = iter(first)
    head = [next(reader) for _ in range(5)]
    second = make()
    second.load_state_dict(first.state_dict())
    second.set_epoch(0)  # as a Trainer says at the start of the epoch
    assert head + list(second) == whole
    assert list(second) == whole, "and the whole epoch after that"
    ahead = make()
    ahead.load_state_dict(first.state_dict(batches=2))
    assert list(ahead) == whole[2:]
    for other in (make(seed=4), make(cells=65), make(ranks=2, rank=0), tb.TokenBudgetSampler(LENGTHS[1:], cells=64)):
        with pytest.raises(RunError, match="other batches"):
            other.load_state_dict(first.state_dict())


def test_what_cannot_be_is_refused_at_once():
    with pytest.raises(PlanError, match="exceed a limit"):
        make(cells=8)
    with pytest.raises(ConfigError, match="one of the ranks"):
        make(rank=2, ranks=2)
    with pytest.raises(PlanError, match="too few samples"):
        tb.TokenBudgetSampler([3, 3, 3], cells=3, rank=0, ranks=2)


def samples() -> list[dict[str, list[int]]]:
    return [{"input_ids": list(range(1, length + 1))} for length in LENGTHS.tolist()]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_plain_loader_reads_packed_rows(workers):
    loader = DataLoader(samples(), batch_sampler=make(), collate_fn=tb.collate_packed, num_workers=workers)
    rows = list(loader)
    assert len(rows) == len(loader)
    assert sum(row["input_ids"].numel() for row in rows) == LENGTHS.sum()


def test_accelerate_deals_the_batches_out_and_knows_epochs():
    accelerate = pytest.importorskip("accelerate.data_loader")
    shards = [
        accelerate.BatchSamplerShard(make(ranks=2), num_processes=2, process_index=rank, even_batches=False)
        for rank in range(2)
    ]
    found = [list(shard) for shard in shards]
    assert len(found[0]) == len(found[1])
    assert sorted(index for batches in found for batch in batches for index in batch) == list(range(101))
    loader = accelerate.prepare_data_loader(
        DataLoader(samples(), batch_sampler=make(), collate_fn=tb.collate_packed), put_on_device=False
    )
    first = [row["input_ids"] for row in loader]
    loader.set_epoch(1)
    second = [row["input_ids"] for row in loader]
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, second, strict=False))


def test_lightning_sets_its_epoch():
    data = pytest.importorskip("lightning.fabric.utilities.data")
    sampler = make()
    loader = DataLoader(samples(), batch_sampler=sampler, collate_fn=tb.collate_packed)
    data._set_sampler_epoch(loader, 4)
    assert sampler.epoch == 4


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stateful_loader_goes_on_in_the_middle_of_an_epoch(workers):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make_loader():
        return torchdata.StatefulDataLoader(
            samples(), batch_sampler=make(), collate_fn=tb.collate_packed, num_workers=workers
        )

    whole = [row["input_ids"].tolist() for row in make_loader()]
    loader = make_loader()
    reader = iter(loader)
    head = [next(reader)["input_ids"].tolist() for _ in range(4)]
    again = make_loader()
    again.load_state_dict(loader.state_dict())
    assert head + [row["input_ids"].tolist() for row in again] == whole
