"""A plan inside torch's own DataLoader."""

from __future__ import annotations

import pickle

import pytest
from torch.utils.data import DataLoader

from tests.data.texts import BAD, FIELDS, LENGTHS, Texts, add_noise, assert_same, text_plan
from truebatch.data.loader import LoaderConfig, load_steps
from truebatch.data.torch_dataloader import batch_sampler, collate_fn, planned_samples
from truebatch.errors import BatchError, ConfigError, LoaderError


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_an_ordinary_data_loader_gives_the_micro_batches_of_load_steps(workers, layout):
    plan = text_plan(layout, ranks=2, epoch=1)
    place = {"rank": 1, "ranks": 3, "start_step": 1}
    loader = DataLoader(
        planned_samples(Texts(), transform=add_noise, epoch=1),
        batch_sampler=batch_sampler(plan, **place),
        collate_fn=collate_fn(FIELDS, side="left"),
        num_workers=workers,
    )
    steps = load_steps(plan, Texts(), FIELDS, **place, transform=add_noise, config=LoaderConfig(side="left"))
    expected = [batch for step in steps for batch in step]
    found = list(loader)
    assert len(found) == len(expected) == len(loader)
    for one, other in zip(found, expected, strict=True):
        assert_same((one.fields, one.axes, one.sample_ids), (other.fields, other.axes, other.sample_ids))


def test_the_sampler_alone_gives_every_sample_once_over_all_ranks():
    plan = text_plan("packed", ranks=3)
    ids = [i for rank in range(3) for batch in batch_sampler(plan, rank=rank) for i in batch]
    assert sorted(ids) == list(range(len(LENGTHS)))


def test_sample_ids_keep_their_rows_on_the_way_to_a_worker():
    for sent in batch_sampler(text_plan("packed")):
        came = pickle.loads(pickle.dumps(sent))
        assert came == sent == sent.rows.ids.tolist()
        assert came.rows.starts.tolist() == sent.rows.starts.tolist()


def test_a_dataset_that_is_not_wrapped_is_refused_in_words():
    loader = DataLoader(Texts(), batch_sampler=batch_sampler(text_plan()), collate_fn=collate_fn(FIELDS))
    with pytest.raises(BatchError, match=r"do not say which rows they belong to\n.*\n.*planned_samples"):
        next(iter(loader))
    plain = DataLoader(planned_samples(Texts()), batch_size=2, collate_fn=collate_fn(FIELDS), sampler=range(4))
    with pytest.raises(BatchError, match="do not say which rows they belong to"):
        next(iter(plain))


def test_a_broken_sample_is_named():
    loader = DataLoader(
        planned_samples(Texts(fault="raise")), batch_sampler=batch_sampler(text_plan()), collate_fn=collate_fn(FIELDS)
    )
    with pytest.raises(LoaderError, match=f"sample {BAD} could not be loaded\n.*the disk said no"):
        list(loader)
    assert planned_samples(Texts())[3]["weight"] == 3 / 7


def test_plans_that_cut_and_places_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="cuts samples, which a DataLoader would not do\n  seen: 4 samples"):
        batch_sampler(text_plan(cells=16, overlong="cut"))
    with pytest.raises(ConfigError, match="rank=1, ranks=1"):
        batch_sampler(text_plan(), rank=1)
    with pytest.raises(ConfigError, match="start_step=9"):
        batch_sampler(text_plan(), start_step=9)
