"""`oom: quarantine`: the step of the samples that fit, divided by their own counts, and the others written down."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.tiny import TEXT_FIELDS, NextToken, TextModel, packed, padded, text_samples
from tests.training.memory.test_oom_retry import Limited, _small_heap, engine_of, gradient  # noqa: F401
from tests.training.test_step import CASES, relative
from truebatch.batch.split import cells_of, leave_out
from truebatch.errors import ConfigError, MemoryLimitError
from truebatch.training.checks.compare_one_by_one import compare_with_one_by_one
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.logging.metrics_jsonl import read_metrics
from truebatch.training.memory.oom_retry import OomGuard, SampleTooLarge
from truebatch.training.memory.quarantine import QUARANTINE, open_guard
from truebatch.training.optim.param_groups import Group
from truebatch.training.step import take_gradients
from truebatch.training.trainer import train

LENGTHS = [3, 31, 8, 17, 4, 29, 12, 5, 9, 22, 2, 14, 7, 19, 6, 11]


class Without:
    """The slow obvious way: an objective for which these samples do not exist."""

    def __init__(self, inner, fields, ids):
        self.inner, self.fields, self.ids = inner, fields, frozenset(ids)

    def counts(self, batch):
        left = leave_out(batch, self.fields, ids=self.ids)
        return self.inner.counts(left[0]) if left else {"nll": 0}

    def sums(self, model, batch):
        left = leave_out(batch, self.fields, ids=self.ids)
        return self.inner.sums(model, left[0]) if left else {"nll": model.tok.weight.sum() * 0}


@pytest.mark.parametrize("layout", [padded, packed], ids=["padded", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_the_step_is_that_of_the_samples_that_fit(case, layout):
    build, objective, fields, samples = CASES[case]
    sizes = {i: cells_of(padded(samples, [i], fields)) for i in range(8)}
    largest = max(sizes, key=lambda i: sizes[i])
    limit = sorted(sizes.values())[-2]
    others = [i for i in range(8) if i != largest]
    torch.manual_seed(0)
    engine = engine_of(build(), objective(), fields)
    whole, expected = gradient(engine, [padded(samples, others, fields)])
    limited = Limited(objective(), limit)
    engine = engine_of(engine.model, limited, fields, when_too_large="quarantine")
    batches = [layout(samples, list(range(5)), fields), layout(samples, [5, 6, 7], fields)]
    outcome, got = gradient(engine, batches)
    assert outcome.counts == whole.counts
    assert outcome.loss == pytest.approx(whole.loss, rel=1e-6)
    assert relative(got, expected) <= 1e-6
    assert list(engine.guard.quarantined) == [largest]
    limited.ran.clear()
    assert relative(gradient(engine, batches)[1], expected) <= 1e-6
    assert largest not in sum(limited.ran, ()), "what is known not to fit is not tried again"


def test_several_samples_and_whole_micro_batches_are_left_out():
    samples = text_samples(LENGTHS)
    torch.manual_seed(0)
    engine = engine_of(TextModel(), NextToken(), TEXT_FIELDS)
    _, expected = gradient(engine, [padded(samples, [0, 2], TEXT_FIELDS)])
    engine = engine_of(engine.model, Limited(NextToken(), 20), TEXT_FIELDS, when_too_large="quarantine")
    batches = [padded(samples, [1, 5], TEXT_FIELDS), padded(samples, [0, 9, 2], TEXT_FIELDS)]
    outcome, got = gradient(engine, batches)
    assert sorted(engine.guard.quarantined) == [1, 5, 9]
    assert outcome.counts == {"nll": 2 + 7}
    assert relative(got, expected) <= 1e-6


def config(**more):
    return TrainConfig(**{"epochs": 2, "samples_per_step": 4, "cells": 64, "save_every": 3, **more})


def trained(objective, settings, *, momentum=0.9, **more):
    torch.manual_seed(0)
    model = TextModel()
    groups = [Group(optimiser=torch.optim.SGD(model.parameters(), 0.3, momentum=momentum))]
    data = TrainData(samples=text_samples(LENGTHS), fields=TEXT_FIELDS)
    train(model, objective, data, settings, groups=groups, **more)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_run_goes_on_without_the_sample_and_says_which(tmp_path):
    lines = []
    expected = trained(Without(NextToken(), TEXT_FIELDS, [1]), config())
    got = trained(Limited(NextToken(), 30), config(oom="quarantine"), out=tmp_path / "run", say=lines.append)
    assert relative(got, expected) <= 1e-6
    entries = [json.loads(line) for line in (tmp_path / "run" / QUARANTINE).read_text().splitlines()]
    assert [entry["id"] for entry in entries] == [1]
    assert "does not fit" in entries[0]["reason"]
    assert any("sample 1 is left out" in line for line in lines)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["quarantined"] == 1


def test_a_second_start_knows_what_the_first_has_found(tmp_path):
    expected = trained(Without(NextToken(), TEXT_FIELDS, [1]), config())
    trained(Limited(NextToken(), 30), config(oom="quarantine", max_steps=5), out=tmp_path / "run")
    path = tmp_path / "run" / QUARANTINE
    path.write_text(path.read_text() + '{"id": 7, "rea')  # a kill in the middle of a line
    limited = Limited(NextToken(), 30)
    got = trained(limited, config(oom="quarantine"), out=tmp_path / "run")
    assert relative(got, expected) <= 1e-6
    assert 1 not in sum(limited.ran, ())


def test_without_the_policy_the_run_ends_with_the_name(tmp_path):
    with pytest.raises(SampleTooLarge, match="sample 1 does not fit"):
        trained(Limited(NextToken(), 30), config(), out=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 2
    assert not (tmp_path / "run" / QUARANTINE).exists()


def test_an_unknown_policy_and_sharded_parameters_are_refused():
    with pytest.raises(ConfigError, match="oom is not known"):
        config(oom="ignore")
    with pytest.raises(ConfigError, match="sharded"):
        open_guard(OomGuard(fields=TEXT_FIELDS, when_too_large="quarantine"), None, is_sharded=True)


def test_where_no_sample_of_a_step_fits_none_is_blamed(tmp_path):
    lines = []
    settings = config(samples_per_step=8, oom="quarantine")
    with pytest.raises(MemoryLimitError, match="not one sample fits") as raised:
        trained(Limited(NextToken(), 1), settings, out=tmp_path / "run", say=lines.append)
    assert "8 samples in a row; sample" in raised.value.seen
    assert not (tmp_path / "run" / QUARANTINE).exists()
    assert not any("left out" in line for line in lines)
    expected = trained(NextToken(), config(samples_per_step=8))
    assert relative(trained(NextToken(), settings, out=tmp_path / "run"), expected) <= 1e-6


@pytest.mark.parametrize("size", [1, 2, 4])
def test_small_steps_that_never_fit_one_after_the_other_blame_no_sample_either(tmp_path, size):
    """Something else takes the memory: nothing is written down, and with memory back the run is as if it had begun then."""
    settings = config(samples_per_step=size, oom="quarantine", save_every=1)
    with pytest.raises(MemoryLimitError, match="not one sample fits"):
        trained(Limited(NextToken(), 1), settings, out=tmp_path / "run")
    assert not (tmp_path / "run" / QUARANTINE).exists()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert not any(record["updated"] or "loss" in record for record in records)
    expected = trained(NextToken(), config(samples_per_step=size))
    assert relative(trained(NextToken(), settings, out=tmp_path / "run"), expected) <= 1e-6


def test_a_run_of_few_samples_in_which_none_fits_is_no_success(tmp_path):
    settings = config(samples_per_step=2, epochs=1, max_steps=2, oom="quarantine")
    with pytest.raises(MemoryLimitError, match="not one sample fits") as raised:
        trained(Limited(NextToken(), 1), settings, out=tmp_path / "run")
    assert "4 samples in a row" in raised.value.seen


def test_a_run_may_end_with_a_start_that_has_nothing_left_to_do(tmp_path):
    """All but the last step were done by an earlier start, and the sample of the last one is known not to fit."""
    settings = config(samples_per_step=1, epochs=1, oom="quarantine")
    steps = len(LENGTHS)
    trained(NextToken(), replace(settings, max_steps=steps - 1), out=tmp_path / "run")
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == steps - 1
    known = [json.dumps({"id": i, "reason": "did not fit"}) for i in range(steps)]
    (tmp_path / "run" / QUARANTINE).write_text("\n".join(known) + "\n")
    trained(NextToken(), settings, out=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "done"
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["passed_over"]


def test_a_run_that_begins_with_all_samples_left_out_says_so(tmp_path):
    (tmp_path / "run").mkdir()
    known = [json.dumps({"id": i, "reason": "did not fit"}) for i in range(len(LENGTHS))]
    (tmp_path / "run" / QUARANTINE).write_text("\n".join(known) + "\n")
    with pytest.raises(MemoryLimitError, match="not one sample fits") as raised:
        trained(NextToken(), config(oom="quarantine"), out=tmp_path / "run")
    assert QUARANTINE in raised.value.do


def test_the_two_samples_of_a_small_step_may_both_be_too_large(tmp_path):
    """They are written down with the next step that has a sample which fits; tokens are counted without them."""
    large = [i for i, n in enumerate(LENGTHS) if n > 20]
    settings = config(samples_per_step=1, epochs=1, save_every=1)
    expected = trained(Without(NextToken(), TEXT_FIELDS, large), settings, momentum=0)
    got = trained(Limited(NextToken(), 20), replace(settings, oom="quarantine"), momentum=0, out=tmp_path / "run")
    assert relative(got, expected) <= 1e-6
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert sum(record.get("tokens", 0) for record in records) == sum(n for n in LENGTHS if n <= 20)
    assert sorted(i for record in records if record.get("passed_over") for i in record["samples"]) == large


def test_comparing_with_one_by_one_leaves_the_same_samples_out(tmp_path):
    expected = trained(Without(NextToken(), TEXT_FIELDS, [1]), config())
    settings = config(oom="quarantine", true_batch="compare")
    assert relative(trained(Limited(NextToken(), 30), settings, out=tmp_path / "run"), expected) <= 1e-6
    assert [json.loads(line)["id"] for line in (tmp_path / "run" / QUARANTINE).read_text().splitlines()] == [1]


def test_looking_at_a_step_does_not_count_its_samples():
    """Three samples that do not fit are three in a row, and not nine, although the comparison runs them twice before."""
    samples = text_samples(LENGTHS)
    engine = engine_of(TextModel(), Limited(NextToken(), 1), TEXT_FIELDS, when_too_large="quarantine")
    batches = [padded(samples, [1, 5, 9], TEXT_FIELDS)]
    alone = lambda i: padded(samples, [i], TEXT_FIELDS)  # noqa: E731
    counts = {"nll": 30 + 28 + 21}
    compare_with_one_by_one(engine, batches, counts, alone, epoch=0, precision="fp32")
    assert (engine.guard.left_in_row, engine.guard.steps_without) == (0, 0)
    take_gradients(engine, batches, counts, epoch=0)
    assert (engine.guard.left_in_row, engine.guard.steps_without) == (3, 1)


def test_a_sample_that_is_a_whole_step_may_be_too_large(tmp_path):
    settings = config(samples_per_step=1, epochs=1)
    expected = trained(Without(NextToken(), TEXT_FIELDS, [1]), settings, momentum=0)
    settings = replace(settings, oom="quarantine")
    got = trained(Limited(NextToken(), 30), settings, momentum=0, out=tmp_path / "run")
    assert relative(got, expected) <= 1e-6
    assert [json.loads(line)["id"] for line in (tmp_path / "run" / QUARANTINE).read_text().splitlines()] == [1]
