"""What of a stitched model is trained beside its adapter, and how its frozen donors are stored."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import torch
from torch import nn

from truebatch.errors import ConfigError
from truebatch.hf.finetuning.adapters import check_peft
from truebatch.systems.stitched_llm.model import StitchedForCausalLM
from truebatch.systems.stitched_llm.settings import Part, Stored
from truebatch.training.reducing import num_ranks
from truebatch.training.settings import Precision

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def store_donors(model: StitchedForCausalLM, stored: Stored, precision: Precision) -> str:
    """Keep the frozen donors in this form, the adapter stays fp32; how it came out, in words.

    `auto` is the precision of training. `int8` quantises the linear layers of both donors, not the embedding and the
    output layer.
    """
    dtype = _DTYPES[precision if stored in ("auto", "int8") else stored]
    for part in (model.bottom, model.top, model.lm_head):
        part.to(dtype)
    if stored != "int8":
        return f"donors are stored in {str(dtype).removeprefix('torch.')}"
    number = _quantise(model)
    return f"{number} linear layers of the donors are stored in int8, the rest in {str(dtype).removeprefix('torch.')}"


def _quantise(model: StitchedForCausalLM) -> int:
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ConfigError(
            "int8 donors need the package torchao", seen=str(error), do="pip install 'truebatch[quant]'"
        ) from error
    if num_ranks() > 1:
        raise ConfigError(
            "int8 donors are trained by one process", seen=f"{num_ranks()} processes", do="--set train.devices=1"
        )
    linears = [m for donor in (model.bottom, model.top) for m in donor.modules() if type(m) is nn.Linear]
    for part in (model.bottom, model.top):
        quantize_(part, Int8WeightOnlyConfig())
    for linear in linears:
        # A buffer that is not saved: checkpoints hold what is trained, and a quantised tensor has no sum to check.
        weight = linear.weight
        del linear.weight
        linear.register_buffer("weight", weight.detach(), persistent=False)
    return len(linears)


def also_train(model: StitchedForCausalLM, parts: Iterable[str], *, first_layers: int) -> None:
    """Unfreeze parts of the top donor, as fp32 copies of their own: the donor's weights stay what they are."""
    for part in parts:
        for module in _modules_of(model, part, first_layers):
            for name, value in list(module.named_parameters(recurse=False)):
                own = nn.Parameter(value.detach().float().clone())
                setattr(module, name, own)


def _modules_of(model: StitchedForCausalLM, part: str, first_layers: int) -> list[nn.Module]:
    if part == "head":
        return [model.lm_head]
    if part == "norms":
        return [m for name, m in model.top.named_modules() if name.rpartition(".")[2].endswith("norm")]
    if part == "first_layers":
        return [m for layer in list(model.top.layers)[:first_layers] for m in layer.modules()]
    raise ConfigError("this part is not known", seen=f"{part!r}", do=f"use one of: {', '.join(get_args(Part))}")


def add_top_lora(model: StitchedForCausalLM, *, rank: int, alpha: float) -> None:
    """LoRA matrices beside all linear layers of the top donor; they are trained with the adapter."""
    peft = check_peft()
    settings = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules="all-linear")
    top: Any = model.top
    top.add_adapter(settings)
    for name, value in model.top.named_parameters():
        if "lora_" in name:
            value.data = value.data.float()


def autocast_of(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """The precision a model was trained in; parts in fp32 over half-precision donors run only there."""
    dtype = _DTYPES[precision]
    return nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype=dtype)


def describe_parts(model: StitchedForCausalLM) -> str:
    """How many parameters are trained, of how many."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    buffers = sum(b.numel() for name, b in model.named_buffers() if name.endswith("weight"))
    total = sum(p.numel() for p in model.parameters()) + buffers
    return f"trained: {trained:,} of {total:,} parameters"
