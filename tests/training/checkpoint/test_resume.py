"""A run resumed at any step is the run that was never stopped, to the bit."""

import os
import random
import shutil
import signal

import numpy as np
import pytest
import torch

from tests.tiny import TEXT_FIELDS, NextToken, text_samples
from tests.training.test_trainer import Dropping, augment, model_of, untimed, weights
from truebatch.training.checkpoint.store import load_newest
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.logging.metrics_jsonl import read_metrics
from truebatch.training.trainer import train

pytestmark = pytest.mark.xdist_group("resume")

STEPS = 60
FEW = 24
"""Steps of the runs that are resumed in the default suite."""
LENGTHS = np.random.default_rng(0).integers(2, 30, 80).tolist()
SAMPLES = text_samples(LENGTHS)


def config_of(layout, steps, **more):
    return TrainConfig(
        epochs=4, max_steps=steps, samples_per_step=5, cells=64, layout=layout, learning_rate=1e-2,
        schedule="cosine_restarts", restarts=3, warmup_steps=5, **more,
    )  # fmt: skip


def run(folder, config, transform, model=None):
    model = model or model_of(Dropping)
    data = TrainData(samples=SAMPLES, fields=TEXT_FIELDS, transform=transform)
    result = train(model, NextToken(), data, config, out=folder)
    return model, result


def state(folder):
    return load_newest(folder / "checkpoints").checkpoint.parts


def same(a, b):
    """Nested values equal to the bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that were never stopped, with a checkpoint of every step, made once each."""
    made = {}

    def get(layout, is_augmented, steps):
        if (layout, is_augmented, steps) not in made:
            folder = tmp_path_factory.mktemp("whole") / "run"
            config = config_of(layout, steps, save_every=1, keep=steps + 1)
            model, _ = run(folder, config, augment if is_augmented else None)
            made[layout, is_augmented, steps] = folder, weights(model)
        return made[layout, is_augmented, steps]

    return get


def resume_at(step, layout, workers, is_augmented, whole, folder, steps=FEW):
    """Take the run as it was after `step`, and let it go on."""
    source, expected = whole(layout, is_augmented, steps)
    shutil.copytree(
        source, folder, ignore=lambda _, names: [n for n in names if n.startswith("step-") and n != f"step-{step}"]
    )
    model, _ = run(folder, config_of(layout, steps, workers=workers), augment if is_augmented else None)
    assert torch.equal(weights(model), expected)
    assert same(state(folder), state(source))
    kept = [untimed(read_metrics(f / "metrics.jsonl")) for f in (folder, source)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("is_augmented", [False, True], ids=["plain", "augmented"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(("step", "workers"), [(1, 0), (15, 0), (16, 2), (23, 0)])
def test_a_run_resumes_to_the_bit(step, workers, layout, is_augmented, whole, tmp_path):
    resume_at(step, layout, workers, is_augmented, whole, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_augmented", [False, True], ids=["plain", "augmented"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_run_resumes_to_the_bit_at_every_step(layout, is_augmented, workers, whole, tmp_path, record_property):
    for step in range(1, STEPS):
        resume_at(step, layout, workers, is_augmented, whole, tmp_path / str(step), STEPS)
    record_property("trials", STEPS - 1)


class StopAt:
    """A scheduler's SIGTERM at the nth sample that is loaded."""

    def __init__(self, number):
        self.number = number

    def __call__(self, sample, sample_id, epoch):
        self.number -= 1
        if self.number == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return augment(sample, sample_id, epoch)


def stop_and_go(seed, folder):
    """Asked to stop at random moments until it is done; every part ends with 75 but the last."""
    chance = random.Random(seed)
    config = config_of(chance.choice(["padded", "packed"]), FEW)
    codes = []
    while not codes or codes[-1] == 75:
        torch.seed(), np.random.seed(), random.seed()  # as in the new process it is
        model, result = run(folder, config, StopAt(chance.randint(1, 90)))
        codes.append(result.exit_code)
    return config, model, codes


@pytest.mark.parametrize("seed", range(4))
def test_a_run_stopped_at_random_moments_ends_like_one_that_was_not(seed, whole, tmp_path):
    config, model, codes = stop_and_go(seed, tmp_path / "run")
    assert set(codes[:-1]) <= {75}
    source, expected = whole(config.layout, True, FEW)
    assert torch.equal(weights(model), expected)
    assert same(state(tmp_path / "run"), state(source))  # with the generators: a new process seeds its own otherwise


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_sixty_requests_to_stop_at_random_moments(whole, tmp_path, record_property):
    stops = 0
    seed = 100
    while stops < 60:
        config, model, codes = stop_and_go(seed, tmp_path / str(seed))
        assert torch.equal(weights(model), whole(config.layout, True, FEW)[1])
        stops += codes.count(75)
        seed += 1
    record_property("trials", stops)
