"""Attendants: called around every step, saved with the run, and able to end it."""

from __future__ import annotations

import json

import pytest
import torch

from tests.tiny import TEXT_FIELDS, NextToken, TextModel, text_samples
from truebatch.errors import MemoryLimitError
from truebatch.training.callbacks import CallbackAction, join_actions
from truebatch.training.checkpoint.retention import kept_step, list_checkpoints
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.trainer import train

DATA = TrainData(samples=text_samples([3, 5, 4, 6, 2, 7, 3, 4]), fields=TEXT_FIELDS)


class Counter:
    """Counts steps; keeps one, and stops after another."""

    name = "counter"

    def __init__(self, *, keep_at=(), stop_at=None):
        self.keep_at, self.stop_at = keep_at, stop_at
        self.seen: list[tuple[str, int]] = []
        self.total = 0

    def before_step(self, step):
        self.seen.append(("before", step))

    def after_step(self, step):
        self.seen.append(("after", step))
        self.total += step
        return CallbackAction(keep=step in self.keep_at, stop="enough" if step == self.stop_at else "")

    def ended(self, step):
        self.seen.append(("ended", step))

    def state(self):
        return {"total": self.total}

    def restore(self, state):
        self.total = state.get("total", 0)


def run(callback, folder=None, **settings):
    torch.manual_seed(0)
    config = TrainConfig(**{"epochs": 3, "samples_per_step": 2, **settings})
    return train(TextModel(), NextToken(), DATA, config, out=folder, callbacks=[callback])


def test_a_callback_is_called_before_and_after_every_step():
    counter = Counter()
    run(counter, max_steps=3)
    assert counter.seen == [
        ("before", 0),
        ("after", 1),
        ("before", 1),
        ("after", 2),
        ("before", 2),
        ("after", 3),
        ("ended", 3),
    ]


def test_the_state_of_a_callback_comes_back_with_the_run(tmp_path):
    run(Counter(), tmp_path, max_steps=5)
    again, whole = Counter(), Counter()
    run(again, tmp_path)
    run(whole)
    assert again.total == whole.total == sum(range(1, 13))
    assert again.seen[0] == ("before", 5)


def test_a_stop_ends_the_run_at_that_step_with_exit_code_1(tmp_path):
    result = run(Counter(stop_at=7), tmp_path)
    assert (result.step, result.exit_code) == (7, 1)
    assert result.why == "stopped by a check: enough"
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert run(Counter(), tmp_path).exit_code == 1  # It does not go on by itself.


def test_a_kept_checkpoint_outlives_all_later_ones(tmp_path):
    run(Counter(keep_at=(2, 5)), tmp_path, save_every=1, keep=1)
    assert kept_step(tmp_path / "checkpoints") == 5
    assert [saved.step for saved in list_checkpoints(tmp_path / "checkpoints")] == [5, 12]


@pytest.mark.parametrize(
    ("actions", "joined"),
    [
        ([], CallbackAction()),
        ([CallbackAction(keep=True), CallbackAction()], CallbackAction(keep=True)),
        ([CallbackAction(stop="a"), CallbackAction(), CallbackAction(stop="b")], CallbackAction(stop="a; b")),
    ],
)
def test_actions_are_joined(actions, joined):
    assert join_actions(actions) == joined


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA error: out of memory")], ids=["host", "card"])
def test_memory_that_runs_out_beside_a_step_is_said_and_no_fault_of_ours(error, tmp_path):
    class Greedy(Counter):
        def after_step(self, step):
            raise error

    with pytest.raises(MemoryLimitError, match="outside the training step"):
        run(Greedy(), tmp_path / "run", max_steps=3)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 2)
    assert run(Counter(), tmp_path / "run", max_steps=3).step == 3
