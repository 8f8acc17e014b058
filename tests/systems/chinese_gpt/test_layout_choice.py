"""The layout that is quicker is found under the memory there is."""

import pytest
import torch

from tests.systems.chinese_gpt.small import SAMPLES, small_model
from tests.training.memory.test_oom_retry import Limited
from truebatch.batch.microbatch import MicroBatch
from truebatch.training.config import TrainConfig
from truebatch_systems.chinese_gpt.train import layout_choice
from truebatch_systems.chinese_gpt.train.objective import NextToken

CONFIG = TrainConfig(batch_size=16)


def limited_to(cells, monkeypatch):
    objective = Limited(NextToken(), cells)
    monkeypatch.setattr(layout_choice, "NextToken", lambda: objective)
    return objective


def chosen(model):
    return layout_choice.choose_layout(model, SAMPLES, CONFIG)


@pytest.mark.parametrize("cells", [10**6, 400])
def test_what_memory_allows_is_timed_and_nothing_changes(cells, monkeypatch):
    model = small_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    objective = limited_to(cells, monkeypatch)
    layout, why = chosen(model)
    assert layout in ("padded", "packed")
    assert "the faster of the two" in why
    assert f"--set train.layout={layout} fixes it" in why
    assert len(objective.ran) >= 2 * layout_choice.ROUNDS * layout_choice.STEPS
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_a_sample_that_does_not_fit_is_left_to_the_run(monkeypatch):
    limited_to(1, monkeypatch)
    layout, why = chosen(small_model())
    assert (layout, "not enough memory" in why) == ("packed", True)


def test_micro_batches_are_moved_one_at_a_time(monkeypatch):
    moved = []
    plain = MicroBatch.to
    monkeypatch.setattr(MicroBatch, "to", lambda self, *a, **k: moved.append(self.num_samples) or plain(self, *a, **k))
    chosen(small_model())
    assert len(moved) == 2 * layout_choice.ROUNDS * layout_choice.STEPS
