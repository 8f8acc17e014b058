"""`--shard`: the same run, gradient and export as with whole parameters, on any number of processes, from any of them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.hf.finetune.folders import chats, model_folder, write_lines
from tests.training.distributed import sharded_folders
from tests.training.distributed.test_processes import relative
from truebatch.errors import CheckpointError, ConfigError
from truebatch.generation.config import Generation
from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.finetune.system import FINETUNING
from truebatch.training.checkpoint.store import load_checkpoint
from truebatch.training.config import TrainConfig
from truebatch.training.distributed.fsdp import shard_model
from truebatch.training.load_trained import open_trained

ADAPTER = "adapter_model.safetensors"
pytestmark = pytest.mark.xdist_group("sharded")


def start(what, folder, ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.training.distributed.sharded_folders", what, str(folder)],
            env={**os.environ, **common, "RANK": str(r), "LOCAL_RANK": str(r)},
            cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(ranks)
    ]
    said = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [0] * ranks, "\n".join(said)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of one and two processes, and runs that were begun by one number of them and ended by another."""
    folder = tmp_path_factory.mktemp("shards")
    model_folder(folder / "model")
    write_lines(folder / "chats.jsonl", chats(12))
    write_lines(folder / "held_out.jsonl", chats(3))  # fewer than four ranks: one has nothing to do
    sharded_folders.run(folder, "whole", shard=False)
    sharded_folders.run(folder, "lora whole", shard=False, lora=True)
    sharded_folders.run(folder, "one then two", steps=2, shard=False)
    start("two", folder, 2)
    sharded_folders.run(folder, "two then one", shard=False)
    return folder


@pytest.fixture(scope="module")
def runs_of_four(runs):
    """What four processes have done beside: more than the model has layers, and than there are held-out samples."""
    start("four", runs, 4)
    return runs


def exported(run, file="model.safetensors"):
    tensors = load_file(run / "model" / file)
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def losses(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [value for record in records for name, value in record.items() if name in ("loss", "validation_loss")]


@pytest.mark.parametrize("name", ["by two", "two then one", "one then two"])
def test_a_sharded_run_is_the_run_of_one_process_whoever_began_it(runs, name):
    assert relative(exported(runs / name), exported(runs / "whole")) <= 1e-6
    assert losses(runs / name) == pytest.approx(losses(runs / "whole"), rel=1e-6)
    assert len(losses(runs / name)) > sharded_folders.STEPS  # validation was logged, too


@pytest.mark.slow
def test_four_processes_go_on_with_what_two_have_begun(runs_of_four):
    assert relative(exported(runs_of_four / "two then four"), exported(runs_of_four / "whole")) <= 1e-6
    assert losses(runs_of_four / "two then four") == pytest.approx(losses(runs_of_four / "whole"), rel=1e-6)
    found, whole = (exported(runs_of_four / f"lora {by}", ADAPTER) for by in ("by four", "whole"))
    assert relative(found, whole) <= 1e-6


@pytest.mark.slow
def test_the_gradient_of_a_step_over_four_processes_is_that_of_whole_parameters(runs_of_four):
    assert gradient_error(runs_of_four, 4) <= 1e-6


def test_an_adapter_beside_sharded_weights_is_the_same(runs):
    assert relative(exported(runs / "lora by two", ADAPTER), exported(runs / "lora whole", ADAPTER)) <= 1e-6
    config, text = read_run(runs / "lora by two")
    assert config.train.shard
    assert text
    assert (runs / "lora by two" / "model" / "adapter_config.json").is_file()


def test_the_gradient_of_a_step_is_that_of_whole_parameters(runs):
    assert gradient_error(runs, 2) <= 1e-6


def read_run(folder):
    """A run of several processes as commands of one process use it."""
    trained = open_trained(folder)
    settings = Generation(max_new_tokens=2)
    return trained.config, list(FINETUNING.generate(trained.config, trained.model, ["what is"], settings))


def gradient_error(runs, ranks):
    found = torch.load(runs / f"gradient-{ranks}.pt", weights_only=True)
    whole = sharded_folders.gradient(runs, shard=False)
    assert found.keys() == whole.keys()
    return relative(*(torch.cat([one[name].flatten() for name in whole]) for one in (found, whole)))


def test_a_checkpoint_has_a_file_for_each_rank_and_is_read_whole(runs):
    saved = runs / "by two" / "checkpoints" / "step-4"
    names = {path.name for path in saved.iterdir()}
    assert {"model-1-of-2.safetensors", "model-2-of-2.safetensors", "shards.json", "manifest.json"} <= names
    assert "model.safetensors" not in names
    rows = [load_file(saved / f"model-{at}-of-2.safetensors")["lm_head.weight"] for at in (1, 2)]
    whole = load_checkpoint(saved).parts["model"]["lm_head.weight"]
    assert torch.equal(torch.cat(rows), whole)
    assert all(rows[at].numel() < whole.numel() for at in (0, 1))


def test_a_checkpoint_whose_rows_do_not_add_up_is_refused(runs, tmp_path):
    import shutil

    from truebatch.io.atomic_files import hash_file
    from truebatch.training.checkpoint.manifest import manifest_text, read_manifest

    folder = tmp_path / "step-4"
    shutil.copytree(runs / "by two" / "checkpoints" / "step-4", folder)
    tables = json.loads((folder / "shards.json").read_text())
    next(iter(tables["model"].values()))["rows"][0] += 1
    (folder / "shards.json").write_text(json.dumps(tables))
    manifest = read_manifest(folder)
    manifest.files["shards.json"] = hash_file(folder / "shards.json")
    (folder / "manifest.json").write_text(manifest_text(manifest))
    with pytest.raises(CheckpointError, match="cannot be trusted"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"devices": 1},
        {"exactness": "bits"},
        {"true_batch": "compare"},
        {"oom": "quarantine"},
        {"compile": True, "layout": "packed", "cells": 64},
    ],
)
def test_what_does_not_go_with_shards_is_refused_by_name(settings):
    with pytest.raises(ConfigError) as refused:
        TrainConfig(**{"devices": 2, **settings}, shard=True)
    name, value = next(iter(settings.items()))
    assert f"{name}={value!r}" in refused.value.seen


def test_four_bits_and_one_process_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="quantised"):
        FinetuneConfig(
            model=tmp_path, data=tmp_path, task="causal_lm", lora=True, load_in_4bit=True,
            train=TrainConfig(devices=2, shard=True),
        )  # fmt: skip
    with pytest.raises(ConfigError, match="nothing to share"):
        shard_model(torch.nn.Linear(2, 2), torch.device("cpu"))
