"""What the workers of the census do in these tests; other processes import it by name."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.verification.census.reference import LENGTHS
from truebatch.verification.census.worker import examine

EQUAL = {"verdict": "equal", "why": "", "chosen": "packed", "seconds": 0.0}


def notes_of(pid: int) -> Path:
    """Found by its process: a server of workers that is running already does not see what the environment became."""
    return Path(tempfile.gettempdir()) / f"census-notes-{pid}"


def noted(task):
    """A row at once, and a line in the notes of the process that asked for every time it was made."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    with notes_of(parent.pid).open("a") as file:
        file.write(task.model_type + "\n")
    return {"model_type": task.model_type, "head": task.head, **EQUAL}


def sleepy(task):
    """An architecture that never ends."""
    if task.model_type == "qwen2":
        time.sleep(600)
    return {"model_type": task.model_type, "head": task.head, **EQUAL}


def planted(task):
    """The census of a model that is wrong only where the samples of `verify` do not reach."""
    return examine(task, build=with_fault)


def with_fault(model_type, head):
    """The last layer of a row as long as only the second check makes one adds its mean to each of its cells."""
    model = tiny_model(model_type, head)
    model.model.layers[-1].mlp.register_forward_hook(_mix_rows_of_the_second_check)
    return model


def _mix_rows_of_the_second_check(_module: nn.Module, _args: object, out: torch.Tensor) -> torch.Tensor:
    return out + out.mean(dim=1, keepdim=True) if out.shape[1] == sum(LENGTHS) else out
