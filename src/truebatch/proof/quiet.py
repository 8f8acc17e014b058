"""Run a model without its own noise and without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from truebatch.proof.arrangements import Arrangement
from truebatch.proof.comparing import Runnable, Whole, run_whole

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
    for mode in modes:
        with quieted(subject.model, mode):
            first = run_whole(subject, alone)
        with quieted(subject.model, mode):
            second = run_whole(subject, alone, gradient=False)
        if _same(first, second):
            return mode, first
    return None, None


def _same(a: Whole, b: Whole) -> bool:
    pairs = [(a.outputs[n][i], b.outputs[n][i]) for n in a.outputs for i in a.outputs[n]]
    return all(x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs) and _close(a, b)


def _close(a: Whole, b: Whole) -> bool:
    return all(abs(a.loss[k] - b.loss[k]) <= 1e-6 * abs(a.loss[k]) or a.loss[k] != a.loss[k] for k in a.loss)
