"""What of a stitched model is trained beside its adapter, and how its frozen donors are stored."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from truebatch.errors import ConfigError
from truebatch.hf.finetune.lora import check_peft
from truebatch.training.config import Precision
from truebatch_systems.stitched_llm.config import Part, Stored
from truebatch_systems.stitched_llm.model.model import StitchedForCausalLM

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def store_donors(model: StitchedForCausalLM, stored: Stored, precision: Precision) -> str:
    """Keep the frozen donors in this form, the adapter stays fp32; how it came out, in words.

    `auto` is the precision of training. `int8` quantises the linear layers of both donors, not the embedding and the
    output layer.
    """
    dtype = _DTYPES[precision if stored in ("auto", "int8") else stored]
    for part in (model.bottom, model.top, model.lm_head):
        _cast(part, dtype)
    if stored != "int8":
        return f"donors are stored in {str(dtype).removeprefix('torch.')}"
    number = _quantise(model)
    return f"{number} linear layers of the donors are stored in int8, the rest in {str(dtype).removeprefix('torch.')}"


def _cast(part: nn.Module, dtype: torch.dtype) -> None:
    """Weights, and buffers that are stored with them. Others are computed, like the frequencies of rotary positions:
    rounded to half precision those move a token of a long text by whole places."""
    for module in part.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(dtype)


def _quantise(model: StitchedForCausalLM) -> int:
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ConfigError(
            "int8 donors need the package torchao", seen=str(error), do="pip install 'truebatch[quant]'"
        ) from error
    number = 0
    for donor in (model.bottom, model.top):
        quantize_(donor, Int8WeightOnlyConfig())
        for name, module in list(donor.named_modules()):
            if type(module) is nn.Linear:
                owner, _, last = name.rpartition(".")
                setattr(donor.get_submodule(owner), last, Int8Linear(module))
                number += 1
    return number


class Int8Linear(nn.Module):
    """A frozen linear layer over a quantised weight, which is moved with the layer and is no parameter of it.

    A quantised tensor cannot be summed, compared or broadcast like others, and need not be: it is made again from the
    donor, whose hash is checked.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._held = [linear.weight.detach()]  # a list hides it from nn.Module
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias; the gradient goes on to x."""
        return functional.linear(x, self._held[0], self.bias)

    @property
    def num_bytes(self) -> int:
        """What the quantised weight takes."""
        weight: Any = self._held[0]
        return sum(getattr(weight, name).nbytes for name in weight.__tensor_flatten__()[0])

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._held = [fn(self._held[0])]
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


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
    model.lora = (rank, alpha)
    for name, value in model.top.named_parameters():
        if "lora_" in name:
            value.data = value.data.float()


def autocast_of(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """The precision a model was trained in; parts in fp32 over half-precision donors run only there."""
    dtype = _DTYPES[precision]
    return nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype=dtype)


def stored_bytes(model: StitchedForCausalLM) -> int:
    """What all weights of a model take."""
    quantised = sum(module.num_bytes for module in model.modules() if isinstance(module, Int8Linear))
    return sum(int(p.nbytes) for p in model.parameters()) + quantised


def describe_parts(model: StitchedForCausalLM) -> str:
    """How many parameters are trained, of how many."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    quantised = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, Int8Linear))
    total = sum(p.numel() for p in model.parameters()) + quantised
    return f"trained: {trained:,} of {total:,} parameters"
