"""Two and four processes take the gradient of the whole step of a coupled loss, not of their own share."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.training.coupled import processes
from tests.training.coupled.losses import LOSSES
from tests.training.coupled.test_coupled_step import CLOSE, Limited, engine_of, run
from tests.training.test_step import relative
from truebatch.training.memory.oom_retry import OomGuard

pytestmark = pytest.mark.xdist_group("processes")
SHARED = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}


def results_of(ranks, folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, **SHARED, "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.training.coupled.processes", str(folder)],
            env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}, cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for r in range(ranks)
    ]  # fmt: skip
    said = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [0] * ranks, "\n".join(said)
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    return results_of(request.param, tmp_path_factory.mktemp(f"ranks{request.param}"))


def assert_same(found, alone):
    assert len(found) == len(alone)
    for (loss, counts, gradient), (own_loss, own_counts, own) in zip(found, alone, strict=True):
        assert counts == own_counts
        assert loss == pytest.approx(own_loss, rel=CLOSE, abs=1e-7)
        if any(own):
            assert relative(torch.tensor(gradient), torch.tensor(own)) < CLOSE


@pytest.mark.parametrize("name", LOSSES)
def test_ranks_have_the_gradient_of_one(found, name):
    assert_same(found[name], processes.steps_of(engine_of(LOSSES[name]())))


def test_memory_that_runs_out_on_one_rank_changes_nothing(found):
    assert_same(found["out of memory"], processes.steps_of(engine_of(LOSSES["negatives"]())))


@pytest.mark.parametrize("with_graph", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_sample_that_one_rank_cannot_hold_leaves_the_loss_of_all(found, with_graph):
    guard = OomGuard(fields=processes.FIELDS, when_too_large="quarantine")
    assert_same(
        found[f"quarantine {with_graph}"],
        processes.steps_of(engine_of(Limited(28, with_graph=with_graph), guard=guard)),
    )


def test_a_run_of_several_ranks_ends_where_one_rank_does(found):
    assert relative(torch.tensor(found["run"]), run(batch_size=8)[1]) < CLOSE


def test_sharded_parameters_get_the_same_gradient(found):
    if "sharded" in found:
        assert_same(found["sharded"], processes.steps_of(engine_of(LOSSES["discrepancy"]())))
