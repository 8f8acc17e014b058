"""Records reach the trackers that are named, as the numbers they are."""

from __future__ import annotations

import math

import pytest

from truebatch.errors import ConfigError
from truebatch.training.logging.trackers import Trackers, check_trackers

RECORDS = [
    {"step": 1, "loss": 2.5, "updated": True, "equality": {"verdict": "equal", "samples": 8}},
    {"step": 2, "loss": math.nan, "updated": False},
    {"step": 2, "validation_loss": 2.0},
]


@pytest.mark.parametrize(
    ("name", "words"),
    [("tensorbord", "did you mean 'tensorboard'"), ("aim", "pip install 'aim'"), ("", "no tracker ''")],
)
def test_a_tracker_that_cannot_be_used_is_named_with_what_to_do(name, words):
    with pytest.raises(ConfigError) as caught:
        check_trackers([name])
    assert words in str(caught.value)


def test_no_trackers_is_no_work(tmp_path):
    check_trackers([])
    trackers = Trackers([], tmp_path, {})
    trackers.begin(0, 3)
    trackers.record(RECORDS[0])
    trackers.close()
    assert not list(tmp_path.iterdir())


def test_tensorboard_gets_every_number_at_its_step_and_no_nan(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    check_trackers(["tensorboard"])
    trackers = Trackers(["tensorboard"], tmp_path, {"width": 3, "train": {"learning_rate": 0.1, "allow": []}})
    trackers.begin(0, 2)
    for record in RECORDS:
        trackers.record(record)
    trackers.close()
    trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5)]
    assert [(event.step, event.value) for event in events.Scalars("validation_loss")] == [(2, 2.0)]
    assert "equality" not in events.Tags()["scalars"]
    stored = list((tmp_path / "tensorboard").glob("*/hparams.yml"))
    assert "train.learning_rate: 0.1" in stored[0].read_text()
