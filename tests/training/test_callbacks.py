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


class Judge(Counter):
    """Judges the end as well."""

    def __init__(self, verdict):
        super().__init__()
        self.verdict = verdict

    def at_end(self, step):
        self.seen.append(("end", step))
        return CallbackAction(stop=self.verdict, say="all is well" if not self.verdict else "")


def test_the_end_is_judged_once_and_a_bad_one_is_a_failed_check_each_time_the_run_is_started(tmp_path):
    judge = Judge("dead")
    result = run(judge, tmp_path, max_steps=3)
    assert judge.seen[-3:] == [("before", 2), ("end", 3), ("ended", 3)]
    assert (result.step, result.exit_code) == (3, 1)
    assert result.why == "failed a check at the end: dead"
    again = run(Judge("never asked"), tmp_path, max_steps=3)
    assert (again.exit_code, again.why) == (1, "failed a check at the end: dead")
    longer = run(Judge(""), tmp_path, max_steps=5)
    assert (longer.step, longer.exit_code) == (5, 0)


def test_a_run_that_validation_ends_is_judged_too():
    judge = Judge("dead")
    torch.manual_seed(0)
    data = TrainData(samples=DATA.samples, fields=TEXT_FIELDS, validation=DATA.samples)
    config = TrainConfig(epochs=9, samples_per_step=8, validate_every=1, patience=1, min_delta=1e9)
    result = train(TextModel(), NextToken(), data, config, callbacks=[judge])
    assert (result.step, result.exit_code) == (2, 1)
    assert ("end", 2) in judge.seen


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
