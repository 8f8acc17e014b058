"""How a run ended is decided by an enum; checkpoints that hold only the words of it are read as well."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.tiny import TEXT_FIELDS, NextToken, TextModel, text_samples
from truebatch.training.callbacks import CallbackAction
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.run_dir.run_dir import read_status
from truebatch.training.train_state import EndReason, TrainState
from truebatch.training.trainer import train

CONFIG = TrainConfig(epochs=3, samples_per_step=4, cells=64)
DATA = TrainData(samples=text_samples([3, 8, 17, 4, 12, 5, 9, 6]), fields=TEXT_FIELDS)
SENTENCES = {
    EndReason.ALL_STEPS_DONE: "all steps are done",
    EndReason.CHECK_FAILED: "stopped by a check: enough",
    EndReason.NO_IMPROVEMENT: "validation has not improved 2 times",
}


class StopsAt:
    name = "stops"

    def __init__(self, step):
        self.step = step

    def before_step(self, step): ...

    def after_step(self, step):
        return CallbackAction(stop="enough" if step == self.step else "")

    def ended(self, step): ...

    def state(self):
        return {}

    def restore(self, state): ...


def as_earlier_versions_wrote_it(state):
    """What stood in a checkpoint before a state had an `end`."""
    values = as_dict(state)
    return {**{k: v for k, v in values.items() if k != "end"}, "is_done": values["end"] is not None}


as_dict = TrainState.as_dict


def started(out, config=CONFIG, *, stop_at=0):
    torch.manual_seed(0)
    return train(TextModel(), NextToken(), DATA, config, out=out, callbacks=[StopsAt(stop_at)])


@pytest.mark.parametrize("end", [None, *SENTENCES])
def test_a_state_comes_back_from_its_dictionary_and_from_that_of_an_earlier_version(end):
    state = TrainState(step=7, epoch=2, best_loss=0.5, skipped_steps=[3], end=end, why=SENTENCES.get(end, ""))
    assert TrainState.from_dict(json.loads(json.dumps(state.as_dict()))) == state
    assert TrainState.from_dict(as_earlier_versions_wrote_it(state)) == state


def test_an_interruption_is_not_the_end_of_the_run_that_a_checkpoint_holds():
    state = TrainState(step=7, end=EndReason.INTERRUPTED, why="asked to stop by SIGTERM")
    assert TrainState.from_dict(state.as_dict()) == TrainState(step=7)


@pytest.mark.parametrize("is_earlier_version", [False, True])
def test_a_run_that_a_check_stopped_stays_stopped(tmp_path, monkeypatch, is_earlier_version):
    with monkeypatch.context() as patch:
        if is_earlier_version:
            patch.setattr(TrainState, "as_dict", as_earlier_versions_wrote_it)
        first = started(tmp_path / "run", stop_at=3)
    assert (first.step, first.end, first.exit_code) == (3, EndReason.CHECK_FAILED, 1)
    status = read_status(tmp_path / "run")
    assert (status["reason"], status["exit_code"], status["message"]) == ("check_failed", 1, first.why)
    again = started(tmp_path / "run")
    assert (again.step, again.end, again.why) == (3, EndReason.CHECK_FAILED, "stopped by a check: enough")


@pytest.mark.parametrize("is_earlier_version", [False, True])
def test_a_run_that_is_done_goes_on_with_more_steps(tmp_path, monkeypatch, is_earlier_version):
    with monkeypatch.context() as patch:
        if is_earlier_version:
            patch.setattr(TrainState, "as_dict", as_earlier_versions_wrote_it)
        assert started(tmp_path / "run").end is EndReason.ALL_STEPS_DONE
    assert started(tmp_path / "run").why == "all steps were done before"
    longer = started(tmp_path / "run", replace(CONFIG, epochs=5))
    assert (longer.step, longer.end) == (10, EndReason.ALL_STEPS_DONE)
    assert read_status(tmp_path / "run")["reason"] == "all_steps_done"


def test_words_do_not_decide(tmp_path):
    """A check may say what it likes: its reason is not taken for another's because of how its sentence begins."""

    class Misleading(StopsAt):
        def after_step(self, step):
            return CallbackAction(stop="asked to stop" if step == self.step else "")

    torch.manual_seed(0)
    result = train(TextModel(), NextToken(), DATA, CONFIG, out=tmp_path / "run", callbacks=[Misleading(2)])
    assert (result.end, result.is_interrupted, result.exit_code) == (EndReason.CHECK_FAILED, False, 1)


def test_an_error_is_the_reason_in_the_status(tmp_path):
    broken = replace(DATA, transform=lambda sample, sample_id, epoch: 1 / 0)
    with pytest.raises(Exception, match="division"):
        train(TextModel(), NextToken(), broken, CONFIG, out=tmp_path / "run")
    assert read_status(tmp_path / "run")["reason"] == "error"
