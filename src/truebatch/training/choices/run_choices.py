"""The choices of a run: made once, by rank 0 for all, said in a line each, kept in the run's folder and repeated when the
run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from truebatch.batch.torch_compile import fall_back_to_eager
from truebatch.config.yaml_files import read_yaml
from truebatch.errors import RunError
from truebatch.io.atomic_files import corrupt_file_errors, read_json, storage_error, write_json
from truebatch.objective import Objective
from truebatch.training.choices.choose import choose_precision, choose_settings
from truebatch.training.choices.device_facts import device_facts
from truebatch.training.choices.setting_choice import SettingChoice, shown
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData, first_samples, measure_by_reading
from truebatch.training.distributed.collectives import broadcast_from_rank0, rank
from truebatch.training.distributed.device import find_device
from truebatch.training.memory.oom import forget_probes
from truebatch.training.optim.param_groups import Group
from truebatch.training.run_dir.run_dir import CONFIG, RunFolder
from truebatch.training.stream import is_stream
from truebatch.training.system import Task

CHOICES = "choices.json"
Say = Callable[[str], None]


def recall_choices(config: TrainConfig, folder: Path | None, *, say: Say) -> TrainConfig:
    """With what the run in this folder began with in place of what is left open; unchanged where there is no run.

    Every rank calls it.
    """
    values = broadcast_from_rank0(_kept_values(config, folder) if rank() == 0 else {})
    if not values:
        return config
    if values.get("compile") and "compile" in config.choose:
        fall_back_to_eager()
    for name in config.choose:
        say(f"{name}: {shown(values[name])}, as the run began")
    return replace(config, **values, choose=())


def _kept_values(config: TrainConfig, folder: Path | None) -> dict[str, Any]:
    if folder is None or not config.choose or not (folder / CONFIG).is_file():
        return {}
    kept = read_yaml(folder / CONFIG).values
    train = kept.get("train", kept)
    names = [*config.choose]
    if (folder / CHOICES).is_file():
        with corrupt_file_errors(folder / CHOICES, do=f"delete the file: the choices are in {CONFIG} too"):
            names += [name for one in read_json(folder / CHOICES, max_bytes=1 << 20) for name in one["also"]]
    default = TrainConfig()
    return {name: train.get(name, getattr(default, name)) for name in names} if isinstance(train, dict) else {}


def settle_precision(config: TrainConfig, *, say: Say) -> tuple[TrainConfig, list[SettingChoice]]:
    """The precision, if it is left open: models are built by it. Every rank calls it."""
    if "precision" not in config.choose:
        return config, []
    device = find_device(replace(config, choose=(), compile=False)).device
    choice = broadcast_from_rank0(choose_precision(device_facts(device)))
    say(choice.line)
    left = tuple(name for name in config.choose if name != "precision")
    return replace(config, precision=choice.value, choose=left), [choice]


def settle_choices(
    task: Task, model: nn.Module, data: TrainData, config: TrainConfig, *, say: Say
) -> tuple[TrainConfig, list[SettingChoice]]:
    """Everything that is still open, chosen by rank 0 for all. Every rank calls it."""
    if not config.choose:
        return config, []
    found = choose_settings(task, model, data, config, say=say) if rank() == 0 else None
    forget_probes(find_device(replace(config, choose=(), compile=False)).device)
    settled = broadcast_from_rank0(found)
    assert settled is not None
    for choice in settled[1]:
        say(choice.line)
    if any(choice.setting == "compile" and choice.value for choice in settled[1]):
        fall_back_to_eager()
    return settled


def settle_open(
    model: nn.Module, objective: Objective, data: TrainData, config: TrainConfig, *,
    groups: Sequence[Group] | None, out: str | Path | RunFolder | None, say: Say,
) -> tuple[TrainConfig, list[SettingChoice]]:  # fmt: skip
    """What `train` is given open: as the run in `out` began, else chosen. Nothing to do for a run of a system."""
    if not config.choose:
        return config, []
    find_device(replace(config, choose=(), compile=False))
    say = say if rank() == 0 else (lambda _line: None)
    folder = out.folder if isinstance(out, RunFolder) else None if out is None else Path(out)
    config, first = settle_precision(recall_choices(config, folder, say=say), say=say)
    if not config.choose:
        return config, first
    data = data if is_stream(data.samples) else first_samples(data, config.limit)
    is_open_ended = is_stream(data.samples)
    measured = None if is_open_ended else data.measured or measure_by_reading(data.samples, data.fields)
    own = None if groups is None else (lambda _model: groups)
    task = Task(data=data, build_model=lambda: model, objective=objective, groups=own)
    config, more = settle_choices(task, model, replace(data, measured=measured), config, say=say)
    return config, [*first, *more]


def keep_choices(folder: Path, choices: Sequence[SettingChoice]) -> None:
    """Write what was chosen, and why, into the run's folder."""
    if not choices or rank() != 0:
        return
    values = [
        {"setting": one.setting, "value": one.value, "why": one.why, "also": dict(one.also or {})} for one in choices
    ]
    try:
        write_json(folder / CHOICES, values)
    except OSError as error:
        raise storage_error(RunError, error, what=CHOICES, folder=folder) from error


def foresee_choices(config: TrainConfig, folder: Path | None) -> tuple[TrainConfig, list[str]]:
    """What can be said of the choices before a model is there: those of the run in the folder, or the precision.

    What is left is still open in the configuration.
    """
    lines: list[str] = []
    config = recall_choices(config, folder, say=lines.append)
    config, _ = settle_precision(config, say=lines.append)
    measured = [name for name in config.choose if name != "layout"]
    if measured and config.true_batch != "off":
        lines.append(
            f"{', '.join(measured)}: chosen when the run begins, by what is measured then; the result is the same"
        )
    return config, lines
