"""Weights from one model into another: all of them or an error that says which; never silently some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from truebatch.errors import CheckpointError
from truebatch.training.checkpoint.retention import best_step, list_checkpoints
from truebatch.training.checkpoint.store import load_checkpoint, load_newest
from truebatch.training.checkpoint.tensor_files import read_tensors

HEAD = ("head.", "votes.")
"""What judges a stay."""
ENCODER_PARTS = ("events.", "encoder.")
"""What a set alone needs: the names of these tensors are the same in every model here."""
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What came of every tensor."""

    loaded: tuple[str, ...]
    new: tuple[str, ...]
    """Of the model, and not in the file: as they were."""
    unused: tuple[str, ...]
    """In the file, and not of the model."""

    def lines(self) -> list[str]:
        """For the start of a run."""
        found = [f"weights: {len(self.loaded)} tensors loaded"]
        found += [f"weights: new: {', '.join(self.new)}"] if self.new else []
        return found + ([f"weights: not used: {', '.join(self.unused)}"] if self.unused else [])


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a run folder (its best checkpoint, else its newest), of an exported folder, or of a file."""
    if path.is_file():
        return read_tensors(path)
    if (path / WEIGHTS).is_file():
        return read_tensors(path / WEIGHTS)
    folder = path / "checkpoints"
    best = best_step(folder)
    for saved in list_checkpoints(folder):
        if saved.step == best and saved.is_good:
            return dict(load_checkpoint(saved.path).parts["model"])
    newest = load_newest(folder) if folder.is_dir() else None
    if newest is None:
        raise CheckpointError(
            f"{path} holds no weights",
            seen="neither a file, nor a folder with model.safetensors, nor a run with a good checkpoint",
            do="give init_from the folder of a finished run, its model/ folder, or a .safetensors file",
        )
    return dict(newest.checkpoint.parts["model"])


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], *, parts: tuple[str, ...] = ("",)) -> LoadReport:
    """Copy every tensor of these parts (prefixes; all by default) into the model, or raise with a full account.

    Only the head may stay new, and only as a whole: where the weights have none that fits it.
    """
    here = model.state_dict()
    wanted = [name for name in here if name.startswith(parts)]
    wrong = {n: tuple(weights[n].shape) for n in wanted if n in weights and weights[n].shape != here[n].shape}
    head = [name for name in wanted if name.startswith(HEAD)]
    is_head_new = any(name not in weights or name in wrong for name in head)
    needed = [name for name in wanted if not (is_head_new and name.startswith(HEAD))]
    missing = [name for name in needed if name not in weights]
    misshapen = [f"{n} {wrong[n]} for {tuple(here[n].shape)}" for n in needed if n in wrong]
    unused = tuple(n for n in weights if n not in needed and not (is_head_new and n.startswith(HEAD)))
    # Whole sets of weights must fit as a whole; a part of a model may come from a file that holds more.
    foreign = [n for n in unused if parts == ("",) and n not in here]
    if missing or misshapen or foreign:
        raise CheckpointError(
            "these weights do not belong to this model; none were loaded",
            seen=f"{len(needed) - len(missing) - len(misshapen)} of {len(needed)} tensors fit; "
            f"missing {_some(missing)}, of another shape {_some(misshapen)}, unknown {_some(foreign)}",
            do="use the settings (model sizes, variables) the weights were made with; names must match from the first part",
        )
    model.load_state_dict({**here, **{name: weights[name] for name in needed}})
    return LoadReport(tuple(needed), tuple(n for n in here if n not in needed), unused)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return f"[{shown}{f' and {len(names) - 4} more' if len(names) > 4 else ''}]"
