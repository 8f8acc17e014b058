"""A run whose checkpoints take long saves the end of an epoch less often; what asks for a checkpoint gets one."""

from __future__ import annotations

import pytest

from tests import tasks
from truebatch.training import after_step
from truebatch.training.checkpoint import save_pace
from truebatch.training.checkpoint.save_pace import SavePace
from truebatch.training.config import TrainConfig
from truebatch.training.trainer import train


def paced(*times):
    return SavePace(clock=iter(times).__next__)


@pytest.mark.parametrize(("took", "waited", "is_worth_it"), [(1, 0, True), (20, 100, False), (20, 400, True)])
def test_a_slow_save_is_made_again_when_it_is_a_twentieth_of_the_time(took, waited, is_worth_it):
    pace = paced(0.0, took, took + waited)
    with pace.timed():
        pass
    assert pace.is_worth_it() is is_worth_it


def test_it_is_said_once():
    pace = paced(0.0, 20.0)
    with pace.timed():
        pass
    assert "takes 20 s" in pace.once()
    assert pace.once() is None


@pytest.mark.parametrize(("more", "steps"), [({}, [6, 24]), ({"save_every": 6}, [6, 12, 18, 24])])
def test_ends_of_epochs_are_left_out_and_what_was_asked_for_is_not(tmp_path, monkeypatch, more, steps):
    monkeypatch.setattr(save_pace, "NOTICED_SECONDS", 0.0)
    monkeypatch.setattr(save_pace, "SHARE", 1e-12)
    saved, lines, save = [], [], after_step.save_run

    def recorded(where, engine, state, **options):
        saved.append(state.step)
        return save(where, engine, state, **options)

    monkeypatch.setattr(after_step, "save_run", recorded)
    task = tasks.system.prepare(tasks.Settings())
    config = TrainConfig(samples_per_step=4, epochs=4, **more)
    train(task.build_model(), task.objective, task.measured_data(), config, out=tmp_path / "run", say=lines.append)
    assert saved == steps
    assert len([line for line in lines if "train.save_every=N" in line]) == (0 if more else 1)
