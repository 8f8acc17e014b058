"""What a run with `exactness: bits` needs around its steps: its atoms, what it was begun on, and digests of its parameters."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from truebatch.errors import ConfigError, RunError
from truebatch.io.atomic_files import corrupt_file_errors, read_json, storage_error, write_json
from truebatch.objective import CoupledObjective, Objective
from truebatch.training.config import TrainConfig
from truebatch.training.context import Job, Plans
from truebatch.training.distributed.collectives import is_sharded, rank
from truebatch.training.exactness.atoms import AtomBudget
from truebatch.training.exactness.digest import joint_digest, parameter_digests, write_digests
from truebatch.training.run_dir.run_dir import RunFolder
from truebatch.training.train_state import TrainState

EXACTNESS = "exactness.json"


def open_atoms(
    model: nn.Module, config: TrainConfig, *, width: int | None, say: Callable[[str], None]
) -> AtomBudget | None:  # fmt: skip
    """How atoms of this width are run; None for a run that is exact up to rounding."""
    if config.exactness != "bits":
        return None
    if is_sharded(model):
        raise ConfigError(
            "exactness: bits needs whole parameters on every rank",
            seen=f"{type(model).__name__} with parameters sharded over ranks",
            do="train without fully_shard, or with exactness: rounding",
        )
    others = {name: value for name in ("pairs", "patches") if (value := getattr(config, name)) is not None}
    if others:
        seen = ", ".join(f"{name}={value}" for name, value in others.items())
        raise ConfigError(
            "an atom has one limit, its cells",
            seen=f"exactness='bits', {seen}",
            do=f"leave {' and '.join(others)} out, and give atom_cells",
        )
    return AtomBudget(resident=max(1, (config.cells or 0) // (width or 1)), say=say)


def refuse_coupled_bits(objective: Objective, config: TrainConfig) -> None:
    """A loss of all samples together is no sum over atoms."""
    if config.exactness == "bits" and isinstance(objective, CoupledObjective):
        raise ConfigError(
            "exactness: bits is for a loss that is a sum over samples",
            seen=f"{type(objective).__name__}, which couples the samples of a step",
            do="train it with exactness: rounding: no cut changes its gradient by more than rounding",
        )


def keep_atoms(
    run: RunFolder, plans: Plans, config: TrainConfig, device: torch.device, *, say: Callable[[str], None]
) -> None:
    """Keep the width of the atoms, which must stay, and the machine, where another one may have other bits."""
    if config.exactness != "bits":
        return
    now = {"atom_cells": plans.config.cells, **_machine(device)}
    path = run.folder / EXACTNESS
    try:
        if not path.is_file():
            write_json(path, now)
            return
    except OSError as error:
        raise storage_error(RunError, error, what=EXACTNESS, folder=run.folder) from error
    with corrupt_file_errors(path, do="delete the file if the width of the atoms is the same"):
        then = dict(read_json(path, max_bytes=1 << 16))
        kept_cells = int(then["atom_cells"])
    if kept_cells != now["atom_cells"]:
        raise RunError(
            "the atoms of this run have another width",
            seen=f"{kept_cells:,} cells before, {now['atom_cells']:,} now, in {path}",
            do=f"give train.atom_cells={kept_cells}, or begin another run with --out",
        )
    changed = [
        f"{name}: {then.get(name)} before, {value} now" for name, value in now.items() if then.get(name) != value
    ]
    if changed:
        say(
            f"warning: this is not what the run began on, and its bits may be others from here on: {'; '.join(changed)}"
        )


def _machine(device: torch.device) -> dict[str, Any]:
    """What bits depend on beside the settings of a run."""
    is_gpu = device.type == "cuda"
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else cpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if is_gpu else None,
        "cudnn": torch.backends.cudnn.version() if is_gpu else None,  # type: ignore[no-untyped-call]
    }


def digest_record(job: Job, state: TrainState) -> dict[str, str]:
    """The digest of all parameters after this step, for its record, where one is due; each tensor's goes to a file."""
    every = job.config.digest_steps()
    if every is None or not (state.step % every == 0 or state.step >= job.num_steps):
        return {}
    digests = parameter_digests(job.engine.model)
    if job.run is not None and rank() == 0:
        write_digests(job.run.folder, state.step, digests)
    return {"digest": joint_digest(digests)}
