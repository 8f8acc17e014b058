"""Run a model without its own noise and without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from truebatch.progress import stage
from truebatch.verification.arrangements import Arrangement
from truebatch.verification.compare import Runnable, Whole, floating_dtype, is_inexact, relative, run_whole, scale_of

Mode = Literal["train", "muted", "eval"]
"""`muted` is training mode with functional dropout switched off, too."""


@contextmanager
def quieted(model: nn.Module | None, mode: Mode) -> Iterator[None]:
    """The model in `mode` with its dropout modules off; modes, buffers and gradients are put back afterwards."""
    if model is None:
        with _muted(mode):
            yield
        return
    modes = {module: module.training for module in model.modules()}
    rates = {module: module.dropout for module in model.modules() if isinstance(module, _WITH_RATE)}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        _set_mode(model, mode)
        with _muted(mode):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        for module, rate in rates.items():
            module.dropout = rate
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and buffer.shape == buffers[name].shape:
                    buffer.copy_(buffers[name])


_WITH_RATE = (nn.RNNBase, nn.MultiheadAttention)
"""Modules of torch that draw dropout themselves, at a rate they hold."""


def _set_mode(model: nn.Module, mode: Mode) -> None:
    model.train(mode != "eval")
    for module in model.modules():
        if _is_noise(module):
            module.eval()
        if isinstance(module, _WITH_RATE):
            module.dropout = 0.0


def _is_noise(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return True
    return not list(module.children()) and ("dropout" in name or "droppath" in name or "stochasticdepth" in name)


def _muted(mode: Mode) -> Any:
    return _WithoutDropout() if mode == "muted" else nullcontext()


_DROPOUTS = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
}


class _WithoutDropout(TorchFunctionMode):
    """torch's own dropout functions give back what they are given."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, or not."""
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else given["input"]
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            given = {**given, "dropout_p": 0.0} if "dropout_p" in given else given
        return func(*args, **given)


@stage("running every sample alone")
def steady_mode(subject: Runnable, alone: Arrangement) -> tuple[Mode | None, Whole | None]:
    """The first mode in which one by one gives the same twice, and what it gave; None if noise cannot be switched off.

    Training mode comes first: batch statistics only show there.
    """
    modes: tuple[Mode, ...] = ("train", "muted", "eval")
    for mode in modes:
        found = steady_whole(subject, alone, mode)
        if found is not None:
            return mode, found
    return None, None


def steady_whole(subject: Runnable, alone: Arrangement, mode: Mode, *, gradient: bool = True) -> Whole | None:
    """What one by one gives in a mode, if it gives the same twice."""
    few = Arrangement(alone.name, alone.layout, alone.pieces[:2])
    with quieted(subject.model, mode):
        first = run_whole(subject, alone, gradient=gradient)
    with quieted(subject.model, mode):
        again = run_whole(subject, few, gradient=gradient)
    is_steady = _same(first, again, 100 * torch.finfo(floating_dtype(subject.model)).eps)
    return first if is_steady else None


def _same(first: Whole, again: Whole, limit: float) -> bool:
    """Rounding is allowed for; noise moves a result by far more."""
    pairs = [(first.outputs[n][i], t) for n, samples in again.outputs.items() for i, t in samples.items()]
    return all(a.shape == b.shape and _is_close(a, b, limit) for a, b in pairs)


def _is_close(a: Tensor, b: Tensor, limit: float) -> bool:
    if not is_inexact(a):
        return torch.equal(a, b)
    return relative(a.nan_to_num(), b.nan_to_num(), scale_of([a])) <= limit
