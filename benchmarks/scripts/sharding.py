"""What a rank holds of a model of 21 million parameters, whole and in shards, after steps of AdamW on a CPU (gloo).

python -m benchmarks sharding --out docs/results/sharding.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness.benchmark import Options
from benchmarks.harness.result_file import origin
from truebatch.batch.fields import Field
from truebatch.training.callbacks import CallbackAction
from truebatch.training.checkpoint.retention import list_checkpoints
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.distributed.collectives import all_gather_list, rank
from truebatch.training.distributed.device import find_device
from truebatch.training.distributed.fsdp import shard_model
from truebatch.training.optim.param_groups import default_group
from truebatch.training.trainer import train

CASES = ((1, False), (2, False), (2, True), (4, True))
WIDTH, LAYERS, WORDS = 512, 6, 4000
STEPS = 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.wide, self.narrow = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 5 * WIDTH),
            nn.Linear(5 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        return x + self.narrow(functional.gelu(self.wide(x)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class NextWord:
    def counts(self, batch: Any) -> dict[str, int]:
        return {"loss": int((batch["labels"] != -100).sum())}

    def sums(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        logits = model(batch["ids"]).flatten(0, 1)
        return {"loss": functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum")}


class Held:
    """The bytes of this rank's parameters, gradients and optimiser state when a step is done."""

    name = "held"

    def __init__(self, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        self.model, self.optimiser = model, optimiser
        self.found: dict[str, int] = {}

    def before_step(self, step: int) -> None: ...

    def after_step(self, step: int) -> CallbackAction:
        states = [v for one in self.optimiser.state.values() for v in one.values() if isinstance(v, Tensor)]
        self.found = {
            "parameters": _bytes(self.model.parameters()),
            "gradients": _bytes(p.grad for p in self.model.parameters() if p.grad is not None),
            "optimiser": _bytes(states),
        }
        return CallbackAction()

    def ended(self, step: int) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None: ...


def _bytes(tensors: Iterator[Tensor] | list[Tensor]) -> int:
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


def run_rank(at: int, ranks: int, shard: bool, port: int, folder: Path) -> None:
    """One rank of one case; rank 0 writes what all have found."""
    os.environ.update(
        RANK=str(at), LOCAL_RANK=str(at), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if ranks > 1:
        dist.init_process_group("gloo")
    config = TrainConfig(samples_per_step=8, max_steps=STEPS, cells=128, devices=ranks, shard=shard, learning_rate=1e-4)
    samples = [{"ids": [(7 * i + j) % WORDS for j in range(20 + i)]} for i in range(16)]
    fields = [Field(name="ids"), Field(name="labels", source="ids", shift=1, pad=-100)]
    model = Words()
    if shard:
        shard_model(model, find_device(config).device)
    group = default_group(model, config)
    held = Held(model, group.optimiser)
    result = train(
        model, NextWord(), TrainData(samples=samples, fields=fields), config, groups=[group], out=folder / "run",
        callbacks=[held],
    )  # fmt: skip
    of_all = all_gather_list([held.found])
    if rank() == 0:
        about = {
            "ranks": of_all,
            "loss": result.records[-1]["loss"],
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        (folder / "found.json").write_text(json.dumps(about))
    if ranks > 1:
        dist.destroy_process_group()


def measure(ranks: int, shard: bool) -> dict[str, Any]:
    """One case, in processes of its own."""
    with tempfile.TemporaryDirectory() as place, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port, folder = free.getsockname()[1], Path(place)
        free.close()
        fork = multiprocessing.get_context("fork")
        started = [fork.Process(target=run_rank, args=(at, ranks, shard, port, folder)) for at in range(ranks)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        if any(process.exitcode for process in started):
            raise SystemExit(f"{ranks} rank(s), shard={shard}: a process failed")
        found = json.loads((folder / "found.json").read_text())
        newest = list_checkpoints(folder / "run" / "checkpoints")[-1].path
        files = {path.name: path.stat().st_size for path in sorted(newest.glob("*.safetensors"))}
    return {
        "ranks": ranks, "shard": shard, "model_parameters": found["parameters"], "loss": found["loss"],
        "mib_of_a_rank": round(max(sum(one.values()) for one in found["ranks"]) / 2**20, 1),
        "bytes": found["ranks"], "largest_file_mib": round(max(files.values()) / 2**20, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results/sharding.json"))
    out = parser.parse_args().out
    rows = [measure(*case) for case in CASES]
    whole = rows[0]["mib_of_a_rank"]
    for row in rows:
        row["share_of_whole"] = round(row["mib_of_a_rank"] / whole, 3)
        print(f"{row['ranks']} rank(s), {'shards' if row['shard'] else 'whole'}: {row['mib_of_a_rank']} MiB a rank")
    about = origin(Options(), command=f"python -m benchmarks sharding --out {out}")
    out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
