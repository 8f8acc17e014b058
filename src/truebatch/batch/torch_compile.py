"""Compile the repeated layers of a model: one compilation serves all of them for each row shape."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from truebatch.errors import ConfigError
from truebatch.planning.lengths.measured_values import cache_folder

COMPILED_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
TORCHS_OWN = "torchinductor_"
"""What the folder is called that torch makes among temporary files, with the user's name behind it."""
BACKEND = "inductor"
"""The default torch.compile backend."""


def compile_layers(model: nn.Module, *, backend: str | None = None) -> int:
    """Compile the model's repeated layers in place for fixed shapes; returns their number.

    Identical layers share one compilation, so it takes a fraction of the time of a whole model. The rest (embeddings,
    masks, the output layer) stays eager. What is compiled is kept for the next run: see `keep_compilations`.
    """
    keep_compilations()
    choose_kernels_without_timing()
    layers = list(repeated_layers(model))
    if not layers:
        raise ConfigError(
            "there is no list of layers to compile",
            seen=f"{type(model).__name__} without a module list of two or more layers",
            do="leave compile out, or call torch.compile on the model yourself",
        )
    for layer in layers:
        layer.compile(dynamic=False, backend=backend or BACKEND)
    return len(layers)


def keep_compilations() -> None:
    """Let torch keep what it compiles in the cache folder of truebatch, not in a folder for temporary files.

    A folder that somebody names in TORCHINDUCTOR_CACHE_DIR stays; torch names its own there as it is imported.
    """
    named = Path(os.environ.get(COMPILED_FOLDER) or TORCHS_OWN)
    if named.name.startswith(TORCHS_OWN):
        os.environ[COMPILED_FOLDER] = str((cache_folder() / "compiled").absolute())


def choose_kernels_without_timing() -> None:
    """Let the compiler take its kernels by rules, not by what was fastest just then: another process would take others, that
    add in another order, and the same command would not give the same losses twice."""
    config: Any = importlib.import_module("torch._inductor.config")  # loaded only where something is compiled
    config.deterministic = True


def fall_back_to_eager() -> None:
    """From now on a layer that the compiler cannot do runs in eager mode: nobody asked for it to be compiled."""
    config = importlib.import_module("torch._dynamo").config  # loaded only where something is compiled
    config.suppress_errors = True


def uncompile_layers(model: nn.Module) -> None:
    """Undo `compile_layers`: run the layers in eager mode."""
    for layer in repeated_layers(model):
        layer._compiled_call_impl = None


@contextmanager
def force_eager() -> Iterator[None]:
    """Context in which compiled layers run in eager mode, for rows of shapes they were not compiled for."""
    with torch.compiler.set_stance("force_eager"):
        yield


def has_compiled_layers(model: nn.Module) -> bool:
    """True once `compile_layers` was called."""
    return any(layer._compiled_call_impl is not None for layer in repeated_layers(model))


def repeated_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost module lists that hold two or more modules of one class."""
    seen = set()
    for child in model._modules.values():  # not `children`: this runs for every micro-batch
        if child is None or id(child) in seen:
            continue
        seen.add(id(child))
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(layer) for layer in child}) == 1:
            yield from child
        else:
            yield from repeated_layers(child)
