"""Memory estimated from shapes, against memory that is really taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.model_shapes import SHAPES, build_model
from tests.tiny import TEXT_FIELDS, NextToken, TextModel, text_samples
from truebatch.errors import MemoryLimitError
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.memory.fake_tensor_estimate import estimate_added
from truebatch.training.memory.fit import fit_memory, make_batch, run_batch, untouched
from truebatch.training.memory.measure import added_bytes
from truebatch.training.optim.param_groups import default_group, make_groups
from truebatch.training.step import StepEngine

CPU = torch.device("cpu")
LENGTHS = np.random.default_rng(0).integers(5, 60, 24)


def engine_of(model: nn.Module, objective: object) -> StepEngine:
    groups = make_groups([default_group(model, TrainConfig())], model)
    return StepEngine(model=model, objective=objective, groups=groups)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", ["llama-tiny", "bert-tiny"])
def test_estimates_of_language_models_are_within_one_percent(name, layout):
    model = build_model(SHAPES[name], longest=64, device="cpu", dtype=torch.float32)
    head = head_of(model)
    engine = engine_of(model, HeadObjective(head=head))
    random = np.random.default_rng(1)
    samples = [{"input_ids": ids, "labels": ids} for ids in (random.integers(0, 1000, n) for n in LENGTHS)]
    data = TrainData(samples=samples, fields=head.fields)
    batches = [make_batch(data, np.arange(number), layout)[0] for number in (3, 24)]
    estimates = estimate_added(engine, batches)
    assert all(p.grad is None for p in model.parameters())
    with untouched(engine):
        real = [added_bytes(lambda batch=batch: run_batch(engine, batch), device=CPU) for batch in batches]
    assert estimates == pytest.approx(real, rel=0.01)


def test_a_fit_can_be_estimated_and_then_says_so():
    torch.manual_seed(0)
    data = TrainData(samples=text_samples(LENGTHS.tolist()), fields=TEXT_FIELDS)
    engine = engine_of(TextModel(), NextToken())
    config = TrainConfig(layout="packed")
    estimated, measured = (fit_memory(engine, data, config, is_estimate=flag) for flag in (True, False))
    assert (estimated.is_estimate, measured.is_estimate) == (True, False)
    assert [p.num_bytes for p in estimated.points] == pytest.approx([p.num_bytes for p in measured.points], rel=0.02)


class ReadsValues(NextToken):
    def sums(self, model, batch):
        sums = super().sums(model, batch)
        return sums if float(next(iter(sums.values()))) > -1 else {}


def test_a_model_that_looks_at_values_cannot_be_estimated_and_that_is_said():
    data = TrainData(samples=text_samples([5, 3]), fields=TEXT_FIELDS)
    engine = engine_of(TextModel(), ReadsValues())
    with pytest.raises(MemoryLimitError, match="without running"):
        estimate_added(engine, [make_batch(data, np.arange(2), "packed")[0]])
