"""Which parts of a vision-language model are trained: its tower frozen or trained, adapters in its language model."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from truebatch.hf.attention.vision_tower import TOWERS
from truebatch.hf.forward_inputs import inner_model, language_model

_JOINING = ("merger", "projector", "connector", "aligner", "downsample")
"""Parts inside a tower that join it to the language model."""
_NUMBER = re.compile(r"\\\.[0-9]+\\\.")
"""Of a layer, in a name that is escaped."""


def freeze_tower(model: nn.Module) -> int:
    """Freeze what reads pixels, in place; the number of parameters that are frozen now."""
    frozen = 0
    for name, weight in _tower_parameters(model):
        if not any(word in name for word in _JOINING):
            weight.requires_grad_(False)
            frozen += weight.numel()
    return frozen


def adapter_targets(model: nn.Module, *, with_tower: bool) -> str:
    """A pattern of the linear layers that get an adapter: of the language model, and of the tower if asked for."""
    parts = [language_model(model), *(towers(model) if with_tower else [])]
    names = [name for name, module in model.named_modules() if any(module is part for part in parts)]
    layers = [
        name for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(name.startswith(f"{part}.") for part in names)
    ]  # fmt: skip
    return "|".join(sorted({_NUMBER.sub(r"\\.[0-9]+\\.", re.escape(name)) for name in layers}))


def towers(model: nn.Module) -> list[nn.Module]:
    """The parts that read pixels."""
    found = [getattr(inner_model(model), name, None) for name in TOWERS]
    return [tower for tower in found if isinstance(tower, nn.Module)]


def _tower_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for tower in towers(model):
        yield from tower.named_parameters()
