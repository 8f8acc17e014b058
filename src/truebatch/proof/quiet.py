"""Run a model without its own noise and without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from truebatch.proof.arrangements import Arrangement
from truebatch.proof.comparing import Runnable, Whole, floating_dtype, is_inexact, relative, run_whole, scale_of

Mode = Literal["train", "eval"]


@contextmanager
def quieted(model: nn.Module | None, mode: Mode) -> Iterator[None]:
    """The model in `mode` with its dropout modules off; modes, buffers and gradients are put back afterwards."""
    if model is None:
        yield
        return
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        model.train(mode == "train")
        for module in model.modules():
            if _is_noise(module):
                module.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and buffer.shape == buffers[name].shape:
                    buffer.copy_(buffers[name])


def _is_noise(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return True
    return not list(module.children()) and ("dropout" in name or "droppath" in name or "stochasticdepth" in name)


def steady_mode(subject: Runnable, alone: Arrangement) -> tuple[Mode | None, Whole | None]:
    """The first mode in which one by one gives the same twice, and what it gave; None if noise cannot be switched off.

    Training mode comes first: batch statistics only show there.
    """
    modes: tuple[Mode, ...] = ("train", "eval")
    few = Arrangement(alone.name, alone.layout, alone.pieces[:2])
    for mode in modes:
        with quieted(subject.model, mode):
            first = run_whole(subject, alone)
        with quieted(subject.model, mode):
            again = run_whole(subject, few)
        if _same(first, again, 100 * torch.finfo(floating_dtype(subject.model)).eps):
            return mode, first
    return None, None


def _same(first: Whole, again: Whole, limit: float) -> bool:
    """Rounding is allowed for; noise moves a result by far more."""
    pairs = [(first.outputs[n][i], t) for n, samples in again.outputs.items() for i, t in samples.items()]
    return all(a.shape == b.shape and _is_close(a, b, limit) for a, b in pairs)


def _is_close(a: Tensor, b: Tensor, limit: float) -> bool:
    if not is_inexact(a):
        return torch.equal(a, b)
    return relative(a.nan_to_num(), b.nan_to_num(), scale_of([a])) <= limit
