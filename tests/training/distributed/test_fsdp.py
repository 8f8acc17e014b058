"""Sharded parameters in checkpoints: whole tensors on the disk, for any number of processes, to the bit."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny import TEXT_FIELDS, NextToken, TextModel
from tests.training.checkpoint.test_resume import same
from tests.training.distributed import sharded
from tests.training.distributed.test_processes import relative
from truebatch.errors import CheckpointError
from truebatch.training.checkpoint.retention import list_checkpoints
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.distributed.fsdp import deal_out, split_rows
from truebatch.training.trainer import train

pytestmark = pytest.mark.xdist_group("sharded")


def start(what, folder, **environment):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.training.distributed.sharded", what, str(folder)],
            env={**common, "RANK": str(r), "LOCAL_RANK": str(r), **(environment if r == 0 else {})},
            cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(2)
    ]
    said = [process.communicate(timeout=600)[0] for process in ranks]
    return [process.returncode for process in ranks], "\n".join(said)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A sharded run that was killed inside a save, and all that two ranks do after it."""
    folder = tmp_path_factory.mktemp("sharded")
    codes, said = start("killed", folder, TRUEBATCH_FAILPOINT="checkpoint.file_synced:kill:20")
    assert codes[0] == -signal.SIGKILL, said
    assert codes[1] != 0, said  # it lost its neighbour
    sharded.run(folder / "from one", 3, shard=False)
    left = [saved.step for saved in list_checkpoints(folder / "killed" / "checkpoints")]
    codes, said = start("rest", folder)
    assert codes == [0, 0], said
    return folder, left, json.loads((folder / "results.json").read_text())


def test_a_sharded_run_killed_inside_a_save_goes_on_to_the_bit(two):
    folder, left, _ = two
    assert left == [1, 2]
    assert same(sharded.parts(folder / "killed"), sharded.parts(folder / "whole adamw"))


@pytest.mark.parametrize("optimiser", sharded.OPTIMISERS)
def test_a_sharded_run_in_two_parts_is_the_run_in_one(two, optimiser):
    parts, whole = (sharded.parts(two[0] / f"{name} {optimiser}") for name in ("parts", "whole"))
    assert whole["progress"]["step"] == sharded.STEPS
    assert same(parts, whole)


def test_a_sharded_checkpoint_holds_what_a_plain_one_does(two, tmp_path):
    sharded.run(tmp_path / "plain", shard=False)
    plain, whole = sharded.parts(tmp_path / "plain"), sharded.parts(two[0] / "whole momentum")
    assert [(k, v.shape, v.dtype) for k, v in whole["model"].items()] == [
        (k, v.shape, v.dtype) for k, v in plain["model"].items()
    ]
    assert "pos.weight" not in whole["model"]
    assert whole["frozen"] == pytest.approx(plain["frozen"], rel=1e-6)
    assert relative(flat(whole), flat(plain)) <= 1e-6
    assert relative(momentum(whole), momentum(plain)) <= 1e-6


@pytest.mark.parametrize("name", ["from one", "for one", "for plain"])
def test_a_run_goes_from_plain_to_sharded_and_back_and_on_another_number_of_processes(two, name):
    folder = two[0]
    if name == "for one":
        sharded.run(folder / name, shard=False)
    found, whole = sharded.parts(folder / name), sharded.parts(folder / "whole momentum")
    assert found["progress"] == whole["progress"]
    assert relative(flat(found), flat(whole)) <= 1e-6
    assert relative(momentum(found), momentum(whole)) <= 1e-6


def test_loss_scaling_of_sharded_parameters_updates_on_all_ranks(two):
    assert relative(flat(sharded.parts(two[0] / "half")), flat(sharded.parts(two[0] / "whole momentum"))) < 0.05


def test_a_full_disk_stops_all_ranks_with_the_reason_and_the_run_goes_on(two):
    folder, _, results = two
    assert [code for code, _ in results["full"]] == [2, 2]
    assert all("the disk is full" in words for _, words in results["full"])
    assert "(on rank 0)" in results["full"][1][1]
    assert same(sharded.parts(folder / "full"), sharded.parts(folder / "whole momentum"))


def test_memory_that_runs_out_on_sharded_ranks_ends_with_75_and_the_run_goes_on_cut_smaller(two):
    folder, _, results = two
    assert [code for code, _ in results["memory"]] == [75, 75]
    assert json.loads((folder / "memory" / "budget.json").read_text())["cells"] > 0
    found, whole = sharded.parts(folder / "memory"), sharded.parts(folder / "whole momentum")
    assert relative(flat(found), flat(whole)) <= 1e-6


def flat(parts):
    return torch.cat([value.flatten() for value in parts["model"].values()])


def momentum(parts):
    return torch.cat([state["momentum_buffer"].flatten() for state in parts["optimisers"]["main"]["state"].values()])


def test_what_is_not_sharded_is_left_as_it_is():
    value = {"a": [torch.ones(2), (1, "x")], "b": None}
    assert split_rows(value)["a"][0] is value["a"][0]
    assert split_rows(value) == value
    assert deal_out(value["a"][0], torch.zeros(2)) is value["a"][0]


def test_a_model_of_another_shape_is_refused_by_name(tmp_path):
    torch.manual_seed(0)
    data = TrainData(samples=sharded.TEXTS, fields=TEXT_FIELDS)
    config = TrainConfig(samples_per_step=4, max_steps=1)
    train(TextModel(vocab=17), NextToken(), data, config, out=tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"'tok.weight' has another shape"):
        train(TextModel(vocab=18), NextToken(), data, config, out=tmp_path / "run")
