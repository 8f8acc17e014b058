"""DeepSpeed (ZeRO 1 and 2) under planned steps: its engine gets one backward per step, with a gradient computed
beforehand.

leaves without its hooks -> gradient of the whole step, cut to fit memory -> passed to the engine -> its all-reduce and
update

So ranks may cut their parts freely: the engine communicates once per step on each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Refusal = tuple[str, str, str]
"""What is wrong, what was seen, what to do."""
ENGINE = "DeepSpeedEngine"
MOST_STAGE = 2
"""From stage 3 on, parameters are gathered by hooks inside forward and backward."""


@contextmanager
def plain_leaves(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Context in which a model's parameters are leaves of the same storage without hooks; yields the trainable ones.

    DeepSpeed sums gradients over ranks in hooks of the parameters, in every backward.
    """
    places = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    leaves = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in model.parameters()}
    for module, name, p in places:
        module._parameters[name] = leaves[id(p)]
    try:
        yield [p for p in leaves.values() if p.requires_grad]
    finally:
        for module, name, p in places:
            module._parameters[name] = p


def deepspeed_refusals(settings: dict[str, Any]) -> Iterator[Refusal]:
    """The DeepSpeed settings that planned steps could not honour, as (wrong, seen, do)."""
    stage = settings.get("zero_optimization", {}).get("stage", 0)
    if stage > MOST_STAGE:
        yield (
            "parameters that DeepSpeed shards are gathered by hooks, which this adapter does not drive",
            f"zero_optimization.stage={stage}",
            f"use stage {MOST_STAGE}, or truebatch.train with fully_shard",
        )
    if settings.get("fp16", {}).get("enabled") is True:
        yield (
            "the gradient of a step is taken before DeepSpeed scales the loss, so fp16 would lose small values",
            "fp16.enabled=true",
            "use bf16 or fp32",
        )
    if settings.get("tensor_parallel", {}).get("autotp_size", 1) > 1:
        yield "ranks that share samples are not supported", "tensor_parallel.autotp_size > 1", "leave it out"
