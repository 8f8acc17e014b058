"""Two processes with DistributedDataParallel make the updates that one makes."""

import json

import pytest
import torch

from tests.adapters import processes
from tests.adapters.started import run_two
from tests.adapters.trainers import relative

pytestmark = pytest.mark.xdist_group("adapter_processes")  # started once


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_two("tests.adapters.processes", folder)
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
        assert found["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)
        assert found["wrapped"] == "DistributedDataParallel"
    assert two[0][f"{case} {layout}"]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
