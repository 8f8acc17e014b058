"""A system as a run: its settings and those of training in one file, its data, its model, and the folder it goes to."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from torch import nn

from truebatch.errors import RunError
from truebatch.io.atomic_files import apply_umask, atomic_folder, read_json, storage_error, write_json
from truebatch.progress import stage
from truebatch.testing.failpoints import failpoint
from truebatch.training.callbacks import Logger
from truebatch.training.checkpoint.retention import best_step, list_checkpoints
from truebatch.training.checkpoint.store import load_checkpoint
from truebatch.training.choices.run_choices import keep_choices, recall_choices, settle_choices, settle_precision
from truebatch.training.config import ROWS, TrainConfig
from truebatch.training.context import TrainResult
from truebatch.training.distributed.collectives import is_sharded, num_ranks, rank
from truebatch.training.distributed.device import find_device
from truebatch.training.distributed.fsdp import shard_model
from truebatch.training.memory.fit import stale_fit_warnings
from truebatch.training.memory.oom import free_memory
from truebatch.training.random_state import seed_random
from truebatch.training.registry import lasting_target
from truebatch.training.run_dir.resume_checks import opened_run
from truebatch.training.run_dir.run_dir import ABOUT, RunFolder
from truebatch.training.system import ConfigT, System, Task, settings_type, settled, train_settings, with_train
from truebatch.training.trainer import train

__all__ = ["ABOUT", "Start", "settings_type", "settled", "train_system"]

EXPORTED = "exported.json"
MODEL = "model"
"""The folder of a run that holds the trained model, for use without truebatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How a run is started, beside its settings."""

    out: Path
    target: str = ""
    """What finds the system again (`find_system`), for `evaluate` and `generate`; by default its name."""
    fresh: bool = False
    """Move an earlier run in `out` aside and start again."""
    say: Callable[[str], None] = lambda _line: None
    loggers: Sequence[Logger] = ()


def train_system(system: System[ConfigT], config: ConfigT, start: Start) -> TrainResult:
    """Train a system into a run folder, from wherever the run is; export its model when it is done.

    `config` is an instance of `settings_type(system)`. Every rank calls this with the same arguments.
    """
    config = settled(system, config)
    settings = train_settings(config)
    seed_random(settings.seed)  # the same on every rank, for what builds data and model
    find_device(replace(settings, choose=(), compile=False))
    say = start.say if rank() == 0 else (lambda _line: None)
    settings = recall_choices(settings, None if start.fresh else start.out, say=say)
    settings, choices = settle_precision(settings, say=say)
    config = with_train(config, settings)
    with stage("preparing the data"):
        task = system.prepare(config)
        data = task.measured_data(settings.limit)
    with stage("building the model"):
        model = task.build_model()
    for line in task.commands.describe() if task.commands.describe is not None else ():
        say(line)
    settings, more = settle_choices(task, model, data, settings, say=say)
    config, device_context = with_train(config, settings), find_device(settings)
    if settings.shard:
        shard_model(model, device_context.device)  # before the optimisers, which hold the parameters they are made with
        say(f"parameters, gradients and optimiser state are sharded over {num_ranks()} processes (FSDP2)")
    groups = task.groups(model) if task.groups is not None else None
    with opened_run(start.out, config, fresh=start.fresh) as run:
        assert run is not None
        if rank() == 0:
            write_json(run.folder / ABOUT, {"system": lasting_target(start.target or system.name)})
        keep_choices(run.folder, [*choices, *more])
        _say_where(run, settings, say)
        for line in stale_fit_warnings(run.folder, model, settings, device=device_context.device, fields=data.fields):
            say(line)
        result = train(
            model,
            task.objective,
            data,
            settings,
            groups=groups,
            out=run,
            say=say,
            loggers=start.loggers,
            callbacks=task.callbacks(model, run.folder) if task.callbacks is not None else (),
            device_context=device_context,
        )
        was_sharded = is_sharded(model)
        if not result.is_interrupted and rank() == 0:
            model.zero_grad(set_to_none=True)
            free_memory(device_context.device)  # an export holds the weights twice
            if was_sharded:
                model = task.build_model()  # whole, on the host; its weights are read from the checkpoint
            if result.best_loss is not None and best_step(run.checkpoints) is None:
                say("warning: the checkpoint of the best validation is gone; the model of the last step is exported")
            _export(task, model, run, step=result.step, was_sharded=was_sharded)
        if num_ranks() > 1:
            dist.barrier()
    return result


def _say_where(run: RunFolder, config: TrainConfig, say: Callable[[str], None]) -> None:
    if run.previous is not None:
        say(f"the earlier run is now {run.previous}")
    way = "one by one" if config.true_batch == "off" else ROWS[config.layout]
    say(f"run: {run.folder} ({way}, seed {config.seed})")


@stage("writing the trained model")
def _export(task: Task, model: nn.Module, run: RunFolder, *, step: int, was_sharded: bool) -> None:
    """Write the model of the best validation, or of the last step, in one move: a reader never sees half of it.

    A model that was sharded is given as it was built: its trained weights are in the checkpoints alone.
    """
    target = run.folder / MODEL
    best = best_step(run.checkpoints)
    # Written last: a kill between the end of the run and this leaves an older model, which is then replaced.
    about, mark = {"step": step, "best": best}, run.plan / EXPORTED
    if task.save is None or (target.exists() and mark.exists() and read_json(mark, max_bytes=1 << 16) == about):
        return
    is_trained = not was_sharded
    for saved in list_checkpoints(run.checkpoints):
        is_wanted = saved.step == (step if best is None else best)
        if is_wanted and saved.is_good and not (is_trained and saved.step == step):  # those of the last step are in it
            model.load_state_dict(load_checkpoint(saved.path).parts["model"], strict=False)
    try:
        failpoint("export.before_write")
        shutil.rmtree(run.folder / f"{MODEL}.part", ignore_errors=True)  # what a kill left of an earlier version
        with atomic_folder(target) as draft:
            task.save(model, draft)
            apply_umask(draft)
        write_json(mark, about)
        failpoint("export.done")
    except OSError as error:
        raise storage_error(RunError, error, what="the trained model", folder=run.folder) from error
