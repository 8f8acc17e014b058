"""Where a run happens: device, precision, processes. Accelerate finds them; truebatch only decides the step."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from accelerate import PartialState
from torch import nn

from truebatch.errors import ConfigError
from truebatch.training.config import TrainConfig
from truebatch.training.distributed.collectives import is_sharded, num_ranks
from truebatch.training.distributed.fsdp import shard_model

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class DeviceContext:
    """The device of this process and how forward passes are run on it."""

    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]]
    scaler: torch.amp.GradScaler | None


def find_device(config: TrainConfig) -> DeviceContext:
    """The device Accelerate gives this process; the number of processes must be the one asked for."""
    _refuse_foreign_engines()
    state = PartialState()
    if config.devices != num_ranks():
        raise ConfigError(
            "another number of processes runs than was asked for",
            seen=f"devices={config.devices}, {num_ranks()} process(es)",
            do=f"start it with `torchrun --nproc_per_node {config.devices}`, or set devices={num_ranks()}",
        )
    device = with_index(torch.device(state.device))
    dtype = _DTYPES.get(config.precision)
    if dtype is None:
        return DeviceContext(device, nullcontext, None)
    scaler = torch.amp.GradScaler(device.type) if config.precision == "fp16" else None
    return DeviceContext(device, lambda: torch.autocast(device.type, dtype=dtype), scaler)


def find_own_device(config: TrainConfig) -> DeviceContext:
    """The device of a command that uses a trained model in the processes there are, however many have trained it."""
    return find_device(replace(config, devices=num_ranks(), shard=False, compile=False, choose=()))


def usable_gpus() -> int:
    """GPUs that a run on this machine uses; none where Accelerate is set to use the CPU."""
    is_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y", "t")
    return 0 if is_cpu else torch.cuda.device_count()


def with_index(device: torch.device) -> torch.device:
    """The same device with the number of its GPU: alone, Accelerate says only `cuda`, and some questions to torch, such as
    the share of memory a process may take, want the number."""
    is_numbered = str(device) != "cuda"
    return device if is_numbered else torch.device("cuda", torch.cuda.current_device())


def _refuse_foreign_engines() -> None:
    for variable, name, do in (
        (
            "ACCELERATE_USE_DEEPSPEED",
            "DeepSpeed",
            "its engine owns backward and clipping: use truebatch's Trainer adapter",
        ),
        ("ACCELERATE_USE_FSDP", "FSDP of Accelerate", "apply torch's fully_shard to the model before train()"),
    ):
        if os.environ.get(variable, "").lower() in ("1", "true", "yes"):
            raise ConfigError(f"{name} cannot run under truebatch's own step", seen=f"{variable} is set", do=do)


def move_model(model: nn.Module, context: DeviceContext, config: TrainConfig) -> None:
    """Put the model in its place, the same on every rank, with gradient checkpointing if asked for."""
    if config.shard and not is_sharded(model):
        shard_model(model, context.device)
    if not is_sharded(model):
        model.to(context.device)
    if config.gradient_checkpointing:
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if enable is None:
            raise ConfigError(
                "this model cannot compute activations again",
                seen=f"{type(model).__name__} has no gradient_checkpointing_enable()",
                do="call torch.utils.checkpoint in its forward, or leave gradient_checkpointing off",
            )
        enable()
    if num_ranks() > 1 and not is_sharded(model):
        for tensor in [*model.parameters(), *model.buffers()]:
            torch.distributed.broadcast(tensor.data, 0)
