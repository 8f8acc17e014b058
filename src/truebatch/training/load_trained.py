"""A run that has trained something: its system, its settings, and the model with its best weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic

from torch import Tensor, nn

from truebatch.config.load import apply_override, check_config
from truebatch.config.yaml_files import read_yaml
from truebatch.errors import CheckpointError, RunError
from truebatch.io.atomic_files import corrupt_file_errors, read_json
from truebatch.plugins import systems
from truebatch.progress import stage
from truebatch.training.checkpoint.retention import best_step, list_checkpoints
from truebatch.training.checkpoint.store import Checkpoint, load_checkpoint, load_newest
from truebatch.training.registry import find_system, lasting_target
from truebatch.training.run_dir.run_dir import CONFIG
from truebatch.training.system import ConfigT, System, Task, settings_type
from truebatch.training.train_system import ABOUT

_MOST_BYTES = 1 << 16


@dataclass(frozen=True, eq=False)
class Trained(Generic[ConfigT]):
    """What a run folder holds, ready to be used."""

    folder: Path
    system: System[ConfigT]
    """A folder says which one, so that its settings have no type before it is read."""
    config: ConfigT
    """An instance of `settings_type(system)`."""
    model: nn.Module
    """In eval mode."""
    step: int
    """After which the weights were saved."""
    prepared: Task | None = None
    """What was read to build the model, if anything had to be."""

    @cached_property
    def task(self) -> Task:
        """Data, model and loss of the settings; the data is read when this is first asked for, and once."""
        return self.system.prepare(self.config) if self.prepared is None else self.prepared


def open_trained(folder: Path, overrides: Sequence[str] = (), *, named: str | None = None) -> Trained[Any]:
    """The model of a run with the weights of its best validation, or of its last good checkpoint.

    `overrides` (`a.b=value`) change settings for this use only; the run is not changed. Nothing is written, and no code
    is run that the folder names: a system of the user's own is `named` by the caller (`file.py:name`).
    """
    system, config = open_settings(folder, overrides, named=named)
    saved = _weights(folder)
    weights, restore = saved.parts["model"], system.restore_model
    task: Task | None = None
    with stage(f"opening the run {folder}"):
        if restore is not None:
            model = restore(config, weights)
        else:
            task = system.prepare(config)
            model = task.build_model()
        _load_weights(model, weights)
    return Trained(folder, system, config, model.eval(), saved.step, task)


def open_settings(folder: Path, overrides: Sequence[str] = (), *, named: str | None = None) -> tuple[System[Any], Any]:
    """The system and the settings of a run, without its weights."""
    if not (folder / CONFIG).is_file():
        raise RunError(
            f"{folder} is not a run", seen=f"no {CONFIG} in it", do="give the folder that `truebatch train` has named"
        )
    if not (folder / ABOUT).is_file():
        raise RunError(
            f"the run {folder} does not say which system made it",
            seen=f"no {ABOUT} in it: it was made by train() in Python",
            do="use your own code to load it, or train it with `truebatch train`",
        )
    system = find_system(_builtin_of(folder) if named is None else named)
    document = read_yaml(folder / CONFIG)
    for override in overrides:
        apply_override(document, override)
    return system, check_config(settings_type(system), document)


def recorded_system(folder: Path) -> str:
    """What a run says its system is. It is only shown and compared: it is as trustworthy as the folder."""
    with corrupt_file_errors(folder / ABOUT):
        return str(read_json(folder / ABOUT, max_bytes=_MOST_BYTES)["system"])


def differing_system(folder: Path, named: str) -> str | None:
    """What a run says its system is, if that is another one than the caller has named."""
    recorded = recorded_system(folder)
    return None if recorded in (named, lasting_target(named)) else recorded


def _builtin_of(folder: Path) -> str:
    """The system a run names, if it is one of ours: a folder may come from anybody, so its word runs no code."""
    target = recorded_system(folder)
    if target not in systems():
        raise RunError(
            f"the run {folder} was made by a system that does not come with truebatch",
            seen=f"{folder / ABOUT} names {target!r}; code that a folder names is not run",
            do="if you know and trust that code, name it yourself: --system file.py:NAME or --system module:NAME",
        )
    return target


def _weights(folder: Path) -> Checkpoint:
    """The checkpoint of the best validation if every byte of it is right, else the newest that is."""
    checkpoints = folder / "checkpoints"
    best = best_step(checkpoints)
    for saved in list_checkpoints(checkpoints):
        if saved.step == best and saved.is_good:
            try:
                return load_checkpoint(saved.path)
            except CheckpointError:
                break  # A corrupt best checkpoint is skipped like any other; `load_newest` finds the next.
    newest = load_newest(checkpoints)
    if newest is None:
        raise RunError(
            f"the run {folder} has no checkpoint yet",
            seen=f"nothing saved in {checkpoints}",
            do="resume its training: the same `truebatch train` command",
        )
    return newest.checkpoint


def _load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """All weights of a checkpoint into a model; only parameters that are never trained may be absent from it."""
    try:
        missing, unknown = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # Shapes that differ; the message of torch names them.
        raise _foreign_weights(str(error)) from error
    lost = [name for name in missing if _is_trained(model, name)]
    if lost or unknown:
        raise _foreign_weights(f"without weights: {lost[:3]}; without a place: {list(unknown)[:3]}")


def _foreign_weights(seen: str) -> RunError:
    return RunError(
        "the weights of this run do not belong to the model its settings make",
        seen=seen,
        do="use the version of the code that made the run, or take back settings given with --set",
    )


def _is_trained(model: nn.Module, name: str) -> bool:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return name in parameters and parameters[name].requires_grad
