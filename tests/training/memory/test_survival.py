"""Whole runs in which memory runs out: injected at every place of the loop, and for real under a limit of the system."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny import TEXT_FIELDS, NextToken, TextModel, text_samples
from tests.training.memory.test_oom_retry import _small_heap  # noqa: F401
from tests.training.test_step import relative
from truebatch.testing.failpoints import FAILPOINTS, armed, recorded
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.optim.param_groups import Group
from truebatch.training.trainer import train

LENGTHS = [3, 31, 8, 17, 4, 29, 12, 5, 9, 22, 2, 14]
PLACES = [name for name in FAILPOINTS if name.startswith("step.")]


def trained(**more):
    torch.manual_seed(0)
    model = TextModel()
    groups = [Group(optimiser=torch.optim.SGD(model.parameters(), 0.3, momentum=0.9))]
    seen = []

    def transform(sample, sample_id, epoch):
        seen.append((epoch, sample_id))
        return sample

    samples = text_samples(LENGTHS)
    data = TrainData(samples=samples, fields=TEXT_FIELDS, transform=transform, validation=samples[:5])
    settings = TrainConfig(**{"epochs": 2, "samples_per_step": 6, "cells": 96, "validate_every": 2, **more})
    result = train(model, NextToken(), data, settings, groups=groups)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return result, weights, seen


@pytest.fixture(scope="module")
def quiet():
    with recorded() as visits:
        return *trained(), visits


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_ends_the_same_wherever_memory_ran_out(quiet, place, layout):
    result, expected, _, visits = quiet
    for nth in {1, visits[place] // 2, visits[place]} if layout == "padded" else {2}:
        with armed(f"{place}:oom:{nth}"):
            again, got, seen = trained(layout=layout)
        assert relative(got, expected) <= 1e-6
        assert [r["loss"] for r in again.records] == pytest.approx([r["loss"] for r in result.records], rel=1e-6)
        assert again.best_loss == pytest.approx(result.best_loss, rel=1e-6)
        assert set(seen) == {(epoch, i) for epoch in range(2) for i in range(len(LENGTHS))}


def test_workers_change_nothing_about_it(quiet):
    with armed("step.loading:oom:2"):
        assert relative(trained(workers=1)[1], quiet[1]) <= 1e-6


REAL = """
import gc, json, resource, sys
import torch
from tests.tiny import TEXT_FIELDS, NextToken, TextModel, padded, text_samples
from truebatch.objective import add_counts
from truebatch.training.memory.oom_retry import OomGuard, most_tries
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine, take_gradients

torch.set_num_threads(1)
torch.manual_seed(0)
model = TextModel(vocab=2000, dim=16, max_length=64)
groups = make_groups([Group(optimiser=torch.optim.SGD(model.parameters(), 0.1))], model)
samples = text_samples([40 + i % 24 for i in range(32)], vocab=2000)
batches = [padded(samples, list(range(32)), TEXT_FIELDS)]
counts = add_counts(NextToken().counts(b) for b in batches)

def gradient(guard):
    engine = StepEngine(model=model, objective=NextToken(), groups=groups, guard=guard)
    take_gradients(engine, batches, counts, epoch=0)
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double()

small = OomGuard(fields=TEXT_FIELDS, cells=300)
expected = gradient(small)  # all that is ever loaded is loaded before the limit
gc.freeze()
page = resource.getpagesize()
used = int(open("/proc/self/statm").read().split()[0]) * page
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[2]) << 20), -1))
rss = lambda: int(open("/proc/self/statm").read().split()[1]) * page
worst = most = errors = 0
said = []
begun = 0
while errors < int(sys.argv[1]):
    guard = OomGuard(fields=TEXT_FIELDS, say=said.append)
    got = gradient(guard)
    worst = max(worst, float((got - expected).norm() / expected.norm()))
    most = max(most, guard.recoveries + 1)
    errors += guard.recoveries
    begun = begun or rss()
    if not guard.recoveries:
        break
print(json.dumps({"errors": errors, "worst": worst, "most": most, "bound": most_tries(batches),
                  "grown": rss() - begun, "said": said[0] if said else ""}))
"""


@pytest.mark.parametrize("errors", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_real_errors_under_a_limit_of_the_system_change_nothing(errors):
    done = subprocess.run(
        [sys.executable, "-c", REAL, str(errors), "12"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["errors"] >= errors
    assert "allocate" in found["said"]
    assert found["worst"] <= 1e-6
    assert found["most"] <= found["bound"]
    assert found["grown"] <= 50 << 20
