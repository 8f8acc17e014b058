"""A training step of TRL that runs out of memory is run again, in smaller packed rows, until it fits or cannot be cut.

inputs of the step, made once -> generators, figures and gradients as they were -> half of the cells of a row -> again
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from truebatch.adapters.shared_backbone import SharedBackbone
from truebatch.errors import MemoryLimitError
from truebatch.training.memory.oom import first_line, free_memory, is_out_of_memory
from truebatch.training.random_state import random_state, restore_random

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class StepInputs:
    """What a step begins with, once its inputs are made: answers are generated and scored once, however often it is run."""

    inputs: Any
    generators: dict[str, Any]
    metrics: dict[str, dict[str, list[Any]]]
    num_tokens: int


def step_inputs(trainer: Any, inputs: Any) -> StepInputs:
    """These inputs, with the trainer as it is now."""
    metrics = {mode: {name: list(values) for name, values in of.items()} for mode, of in _metrics(trainer).items()}
    return StepInputs(inputs, random_state(), metrics, getattr(trainer, "_total_train_tokens", 0))


def run_again_in_smaller_rows(
    trainer: Any, backbones: Sequence[SharedBackbone], run: Callable[[], Tensor], begun: Callable[[], StepInputs | None]
) -> Tensor:
    """The loss of `run`, its gradient added to `.grad`. `begun` gives the inputs of the step, None before they are made.

    Rows stay as small as they had to become. With several processes the error goes through: the others are in the middle
    of a backward pass that this one cannot join again.
    """
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    is_alone = trainer.args.world_size == 1
    held = [p.grad for p in parameters] if is_alone else []
    while True:
        for p, _ in zip(parameters, held, strict=False):
            p.grad = None
        try:
            loss = run()
            break
        except Exception as error:  # memory runs out in errors of many classes
            if not is_out_of_memory(error) or not is_alone or begun() is None:
                raise
            said = first_line(error)  # only text leaves this block: the traceback holds the tensors of the try
        _put_back(trainer, begun())
        for p, grad in zip(parameters, held, strict=True):
            p.grad = grad
        free_memory(trainer.args.device, said=said)
        _make_smaller(backbones, said)
    for p, grad in zip(parameters, held, strict=False):
        if grad is not None:
            p.grad = grad if p.grad is None else grad.add_(p.grad)
    return loss


def _make_smaller(backbones: Sequence[SharedBackbone], said: str) -> None:
    """Half of the widest row that was tried, no row narrower than the longest of the rows that came padded."""
    widest, longest = (max((getattr(one, name) for one in backbones), default=0) for name in ("widest", "longest"))
    cells = max(longest, widest // 2)
    if cells >= widest:
        raise MemoryLimitError(
            "a step does not fit into memory, however small its packed rows are",
            seen=f"rows of at most {widest:,} cells, the longest of one answer with its prompt {longest:,}; {said}",
            do="lower per_device_train_batch_size (hidden states and logits of all its rows are held), set "
            "gradient_checkpointing, or use a machine with more memory",
        )
    for one in backbones:
        one.config = replace(one.config, cells=cells)
    _log.warning("truebatch: out of memory (%s); the step runs again, in rows of at most %s cells", said, f"{cells:,}")


def _put_back(trainer: Any, begun: StepInputs | None) -> None:
    """Generators and logged figures as they were before the try."""
    assert begun is not None
    restore_random(begun.generators)
    for mode, of in _metrics(trainer).items():
        of.clear()
        of.update({name: list(values) for name, values in begun.metrics.get(mode, {}).items()})
    if hasattr(trainer, "_total_train_tokens"):
        trainer._total_train_tokens = begun.num_tokens


def _metrics(trainer: Any) -> dict[str, Any]:
    found = getattr(trainer, "_metrics", None)
    return found if isinstance(found, dict) else {}
