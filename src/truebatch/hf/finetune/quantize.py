"""Four bits for the frozen base of an adapter, through bitsandbytes: NF4, with quantised constants, as QLoRA has it."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import transformers
from torch import nn

from truebatch.errors import ConfigError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def nf4_config(precision: str) -> Any:
    """The quantization_config of transformers; `ConfigError` with the command to install bitsandbytes if it is missing."""
    try:
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigError(
            "load_in_4bit needs the package bitsandbytes", seen=str(error), do="pip install 'truebatch[qlora]'"
        ) from error
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=_DTYPES[precision],
    )


def without_inference_kernels(model: nn.Module) -> None:
    """Keep bitsandbytes from its CPU kernel for eval mode: it rounds to bf16, passes no gradient on, and rewrites weights.

    The model is checked in eval mode, gradients and all, and what it says there must be what it was trained to say.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
