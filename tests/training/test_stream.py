"""A run over a stream: the same whatever its cut, resumed with the same samples, and refused where it could not be."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.tiny import TEXT_FIELDS, NextToken, TextModel, text_samples
from tests.training.test_trainer import plain, untimed, weights
from truebatch.errors import ConfigError, DataError, RunError
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.logging.metrics_jsonl import read_metrics
from truebatch.training.trainer import train

SAMPLES = text_samples([3, 31, 8, 17, 4, 29, 12, 5, 9, 22, 2, 14, 7, 19, 6, 11, 13, 21, 10, 25])


class Lines(IterableDataset):
    """As a file that is read line by line; counts what was read."""

    def __init__(self, samples=SAMPLES):
        self.samples, self.num_read = samples, 0

    def __iter__(self):
        for sample in self.samples:
            self.num_read += 1
            yield sample


class Stateful(Lines):
    """Goes on where it was, from a state of its own."""

    def __init__(self):
        super().__init__()
        self.at = 0

    def __iter__(self):
        while self.at < len(self.samples):
            self.num_read += 1
            self.at += 1
            yield self.samples[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Shuffled(Stateful):
    """Through a buffer, in an order keyed by the pass; its state forgets the buffer, as that of `datasets` does."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        draw, buffer = random.Random(self.epoch), []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 6:
                yield buffer.pop(draw.randrange(6))
        yield from buffer


def settings(**more):
    return TrainConfig(**{"samples_per_step": 4, "window": 7, "max_steps": 12, "learning_rate": 1e-2, **more})


def run(source=None, out=None, *, collected=None, **more):
    torch.manual_seed(0)
    model = TextModel()

    def note(sample, sample_id, epoch):
        if collected is not None:
            collected.append(sample_id)
        return sample

    data = TrainData(samples=source or Lines(), fields=TEXT_FIELDS, transform=note)
    result = train(model, NextToken(), data, settings(**more), groups=[plain(model)], out=out)
    return model, result


@pytest.mark.parametrize("cut", [{"cells": 31}, {"layout": "packed"}, {"true_batch": "off"}, {"workers": 2}])
def test_the_cut_of_a_step_of_a_stream_changes_nothing(cut):
    whole, cut_model = run()[0], run(**cut)[0]
    assert (weights(whole) - weights(cut_model)).norm() <= 1e-6 * weights(whole).norm()


def test_every_sample_of_a_pass_is_used_once_in_windows_of_whole_steps():
    seen: list[int] = []
    run(collected=seen, max_steps=10)
    assert len(seen) == 40
    # 8 is the window of 7 in whole steps; a pass of 20 ends with 4, and another pass goes on counting.
    for start, end in ((0, 8), (8, 16), (16, 20), (20, 28), (28, 36), (36, 40)):
        assert sorted(seen[start:end]) == list(range(start, end))


@pytest.mark.parametrize("kind", [Lines, Stateful, Shuffled])
@pytest.mark.parametrize(
    "first", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(5, marks=pytest.mark.slow), 7]
)
def test_a_resumed_run_gets_the_samples_it_would_have_got(tmp_path, kind, first):
    whole, result = run(kind(), tmp_path / "whole", save_every=1)
    run(kind(), tmp_path / "parts", save_every=1, max_steps=first)
    again = run(kind(), tmp_path / "parts", save_every=1)[0]
    assert torch.equal(weights(whole), weights(again))
    logs = [untimed(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("whole", "parts")]
    assert [r["loss"] for r in logs[0]] == [r["loss"] for r in logs[1]]
    assert result.step == 12


def test_a_source_with_a_state_is_not_read_from_its_beginning_again(tmp_path):
    run(Stateful(), tmp_path, max_steps=4, save_every=1)  # windows 0 and 1 of 8
    source = Stateful()
    run(source, tmp_path, max_steps=5, save_every=1)
    assert source.num_read == 8 + 8 + 4, "the first window to know the data, the one at hand, the next"


def test_a_stream_that_gives_other_samples_is_refused(tmp_path):
    run(Lines(), tmp_path, max_steps=3, save_every=1)
    with pytest.raises(RunError, match="not what this run began with"):
        run(Lines(list(reversed(SAMPLES))), tmp_path)
    with pytest.raises(RunError, match="no longer gives the samples"):
        run(Lines([*SAMPLES[:8], *reversed(SAMPLES[8:])]), tmp_path)


@pytest.mark.slow
def test_a_list_of_datasets_is_a_stream_too(tmp_path):
    datasets = pytest.importorskip("datasets")
    held = datasets.Dataset.from_list([{"input_ids": [int(i) for i in one["input_ids"]]} for one in SAMPLES])

    def stream():
        return held.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=6)

    whole = run(stream(), tmp_path / "whole", save_every=1)[0]
    for first in (3, 6):
        run(stream(), tmp_path / f"parts {first}", save_every=1, max_steps=first)
        assert torch.equal(weights(run(stream(), tmp_path / f"parts {first}", save_every=1)[0]), weights(whole))


def test_a_limit_reads_only_the_first_samples_of_every_pass():
    seen: list[int] = []
    source = Lines()
    run(source, collected=seen, limit=6, max_steps=4)
    assert sorted(seen[:6]) == list(range(6))
    assert source.num_read <= 14


@pytest.mark.parametrize(
    ("source", "more", "words"),
    [
        (lambda: Lines(), {"max_steps": None}, "set max_steps"),
        (lambda: (s for s in SAMPLES), {}, "read only once"),
        (lambda: Lines(), {"compile": True, "layout": "packed", "cells": 64}, "leave compile out"),
    ],
)
def test_what_cannot_work_says_what_to_do(source, more, words):
    with pytest.raises(ConfigError) as error:
        run(source(), **more)
    assert words in f"{error.value.wrong} {error.value.do}"


def test_an_empty_stream_and_a_stream_of_validation_are_named():
    with pytest.raises(DataError, match="gives no samples"):
        run(Lines([]))
    model = TextModel()
    data = TrainData(samples=Lines(), fields=TEXT_FIELDS, validation=Lines())
    with pytest.raises(DataError, match="validation dataset has no length"):
        train(model, NextToken(), data, replace(settings(), max_steps=1))
