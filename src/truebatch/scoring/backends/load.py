"""A model folder as a backend: weights, tokenizer or processor, a device. Nothing is downloaded, and no code from the
folder is run."""

from __future__ import annotations

from pathlib import Path

import torch

from truebatch.errors import ConfigError
from truebatch.hf.load import load_model, without_chatter
from truebatch.hf.processors import load_processor
from truebatch.scoring.backends.transformers import ModelBackend, model_backend
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.readouts import Readout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_backend(
    folder: str | Path, readout: Readout, limits: Limits, *, dtype: str = "auto", device: str = "auto",
    reuse_prefix: bool = True, reuse_images: bool = True, compiled: bool = False,
) -> ModelBackend:  # fmt: skip
    """The backend of a folder written by `save_pretrained`, the processor beside the weights."""
    path = Path(folder)
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError("an unknown dtype", seen=f"dtype={dtype!r}", do=f"use auto or one of {', '.join(DTYPES)}")
    with without_chatter():
        model, processor = load_model(path), load_processor(path)
    model = model.to(choose_device(device), None if dtype == "auto" else DTYPES[dtype])
    return model_backend(
        model, processor, readout, limits, name=path.name, reuse_prefix=reuse_prefix, reuse_images=reuse_images,
        compiled=compiled,
    )  # fmt: skip


def choose_device(device: str) -> torch.device:
    """`auto` is the first CUDA device if there is one; a missing device is rejected."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        gpu = "use one that `nvidia-smi` shows" if torch.cuda.is_available() else "a GPU needs a torch built for CUDA"
        raise ConfigError(
            "this device does not exist", seen=f"device={device!r}: {str(error)[:100]}", do=f"use auto or cpu; {gpu}"
        ) from error
    return found
