"""A run goes on with the data it began with, or says what it cannot know."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from tests.tiny import TEXT_FIELDS, NextToken
from tests.training.test_faults import SAMPLES, data, model_of, settings
from truebatch.batch.fields import Field
from truebatch.errors import DataError, RunError
from truebatch.training.checkpoint.store import load_newest
from truebatch.training.data import TrainData, content_of
from truebatch.training.trainer import train


def trained(folder, steps=2, said=None, **more):
    say = None if said is None else said.append
    return train(model_of(), NextToken(), data(**more), settings(max_steps=steps, save_every=1), out=folder, say=say)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"samples": 12}', '{"samples": "12", "lengths": "x"}', "{"])
def test_a_run_whose_note_of_its_data_is_empty_or_damaged_does_not_take_any_data(text, tmp_path):
    trained(tmp_path / "run")
    (tmp_path / "run" / "plan" / "data.json").write_text(text)
    with pytest.raises(RunError, match=r"no longer says which data it began with[\s\S]*data\.json"):
        trained(tmp_path / "run", steps=4, samples=list(reversed(SAMPLES)))


def test_a_missing_data_file_is_reported_and_written_again(tmp_path):
    trained(tmp_path / "run")
    kept = (tmp_path / "run" / "plan" / "data.json").read_text()
    (tmp_path / "run" / "plan" / "data.json").unlink()
    said = []
    trained(tmp_path / "run", steps=4, said=said)
    assert any("data.json is missing" in line for line in said)
    assert (tmp_path / "run" / "plan" / "data.json").read_text() == kept


def test_a_note_of_an_earlier_version_without_content_is_still_read(tmp_path):
    trained(tmp_path / "run")
    file = tmp_path / "run" / "plan" / "data.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "content"}))
    assert trained(tmp_path / "run", steps=4).step == 4


class Failing(list):
    def __getitem__(self, sample_id):
        if sample_id == 5:
            raise OSError("the share is gone")
        return super().__getitem__(sample_id)


def test_a_sample_that_cannot_be_read_does_not_turn_the_comparison_off(tmp_path):
    trained(tmp_path / "run")
    measured = TrainData(samples=SAMPLES, fields=TEXT_FIELDS)
    assert content_of(measured)
    with pytest.raises(DataError, match=r"sample 5 could not be loaded[\s\S]*the share is gone"):
        content_of(TrainData(samples=Failing(SAMPLES), fields=TEXT_FIELDS))
    with pytest.raises(DataError, match=r"sample 5 could not be loaded"):
        trained(tmp_path / "run", steps=4, samples=Failing(SAMPLES))


class Unreadable:
    def __array__(self, *args, **kwargs):
        raise ValueError("no numbers in here")


def test_what_has_no_hash_is_told_with_its_sample_and_field():
    samples, said = [{"x": Unreadable()}], []
    assert content_of(TrainData(samples=samples, fields=[Field(name="x")]), say=said.append) == ""
    assert len(said) == 1
    assert "sample 0, 'x': ValueError: no numbers in here" in said[0]


def test_samples_that_are_drawn_anew_are_told(tmp_path):
    class Drawn:
        def __len__(self):
            return 4

        def __getitem__(self, sample_id):
            return {"x": np.random.default_rng().random(3)}

    said = []
    assert content_of(TrainData(samples=Drawn(), fields=[Field(name="x")]), say=said.append) == ""
    assert "differs each time it is read" in said[0]


def test_samples_that_a_transform_makes_into_fields_are_compared_by_what_they_hold():
    fields = [Field(name="ids")]
    a, b = ([{"text": text} for text in texts] for texts in (("one", "two"), ("one", "six")))
    hashes = [content_of(TrainData(samples=samples, fields=fields)) for samples in (a, a, b)]
    assert hashes[0] == hashes[1] != hashes[2]
    assert hashes[0]


def test_a_log_with_a_line_too_few_is_told_and_the_run_goes_on(tmp_path):
    trained(tmp_path / "run")
    log = tmp_path / "run" / "metrics.jsonl"
    first, second = log.read_text().splitlines()
    log.write_text(f"{second}\n")
    said = []
    trained(tmp_path / "run", steps=3, said=said)
    assert any("1 of 2 steps have no line in metrics.jsonl: 1" in line for line in said)
    log.write_text(f"{first}\n{second[:20]}\n")
    said.clear()
    trained(tmp_path / "run", steps=4, said=said)
    assert any("line 2 of metrics.jsonl is damaged" in line and second[:20] in line for line in said)


class Drawing(NextToken):
    """With a number from every global generator, as user code may draw it."""

    def sums(self, model, batch):
        drawn = random.random() + np.random.random() + float(torch.rand(()))
        return {"nll": super().sums(model, batch)["nll"] * (1 + drawn)}


def generators(folder):
    return load_newest(folder / "checkpoints").checkpoint.parts["random"]


@pytest.mark.parametrize("stop", [0, 1, 3])
def test_user_code_that_draws_globally_ends_alike_whatever_was_drawn_before_and_wherever_it_was_stopped(stop, tmp_path):
    config = {"save_every": 1, "allow": ("dropout",)}
    ends = []
    for name, stops in (("whole", [4]), ("parts", [stop, 4] if stop else [4])):
        for steps in stops:
            random.seed(), np.random.seed(), torch.seed()  # as every new process begins
            model = model_of()
            torch.seed()
            train(model, Drawing(), data(), settings(max_steps=steps, **config), out=tmp_path / name)
        ends.append((torch.cat([p.detach().flatten() for p in model.parameters()]), generators(tmp_path / name)))
    (a, drawn_a), (b, drawn_b) = ends
    assert torch.equal(a, b)
    assert torch.equal(drawn_a["torch"], drawn_b["torch"])
    assert drawn_a["python"] == drawn_b["python"]
    assert all(np.array_equal(x, y) for x, y in zip(drawn_a["numpy"], drawn_b["numpy"], strict=True))
