"""Two processes with DistributedDataParallel make the updates that one makes."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from tests.adapters import processes
from tests.adapters.trainers import relative


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.adapters.processes", str(folder)],
            env={**common, "RANK": str(r), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(2)
    ]
    said = [process.communicate(timeout=110)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(said)
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]


@pytest.mark.parametrize(("case", "layout"), processes.CASES)
def test_two_processes_make_the_updates_of_one(tmp_path, two, case, layout):
    alone = processes.updates(tmp_path, case, "padded", per_device_train_batch_size=2, gradient_accumulation_steps=4)
    for rank in two:
        found = rank[f"{case} {layout}"]
        assert len(found["gradients"]) == len(alone["gradients"]) == 2
        for a, b in zip(found["gradients"], alone["gradients"], strict=True):
            assert relative(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)) <= 1e-6
        assert found["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-5)
        assert found["wrapped"] == "DistributedDataParallel"
    assert two[0][f"{case} {layout}"]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
