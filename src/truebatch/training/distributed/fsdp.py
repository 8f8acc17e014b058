"""Parameters in shards over ranks (FSDP2, `fully_shard`): dealt out before training, and taken apart for a checkpoint.

whole model on every host -> layer after layer: rank 0's values to all, a part kept by each -> parts -> files -> parts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from truebatch.batch.torch_compile import repeated_layers
from truebatch.errors import ConfigError
from truebatch.training.distributed.collectives import num_ranks, rank

T = TypeVar("T")
_CALL = "truebatch_call"
"""A method of a model that `shard_model` has sharded: what runs in it finds the parameters of no layer whole."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalRows:
    """The rows that this rank has of a tensor whose rows are dealt out over all ranks."""

    rows: Tensor
    shape: tuple[int, ...]
    """Of the whole."""


class StoredTensor(Protocol):
    """A whole tensor that was saved in parts, read when it is asked for."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""

    @property
    def dtype(self) -> torch.dtype:
        """As it was saved."""

    def read(self, start: int, stop: int) -> Tensor:
        """These rows of it."""


def shard_model(model: nn.Module, device: torch.device) -> None:
    """Deal the parameters out over all ranks, in place: each repeated layer by itself, and everything else together.

    Every rank calls it with the same model on its host; the values are those of rank 0. One layer at a time is whole on the
    device.
    """
    _refuse_unshardable(model)
    mesh = init_device_mesh(device.type, (num_ranks(),))
    for layer in repeated_layers(model):
        if any(True for _ in layer.parameters()):
            _take_from_rank0(layer, device)
            fully_shard(layer, mesh=mesh)
    _take_from_rank0(model, device)
    fully_shard(model, mesh=mesh)
    setattr(model, _CALL, _call)
    register_fsdp_forward_method(model, _CALL)


def _call(work: Callable[[], T]) -> T:
    return work()


def call_whole(model: nn.Module, work: Callable[[], T]) -> T:
    """Run `work`, which calls the model or parts of it; parameters outside the repeated layers are whole meanwhile."""
    call: Callable[[Callable[[], T]], T] | None = getattr(model, _CALL, None)
    return work() if call is None else call(work)


def _refuse_unshardable(model: nn.Module) -> None:
    if num_ranks() == 1:
        raise ConfigError(
            "one process has nothing to share its parameters with",
            seen="1 process",
            do="give devices=2 or more, or leave shard out: checkpoints in shards load whole, too",
        )
    without_axes = [name for name, p in model.named_parameters() if not p.ndim]
    if without_axes:
        raise ConfigError(
            "a parameter without axes cannot be sharded",
            seen=f"{without_axes[0]!r} of {type(model).__name__}, and {len(without_axes) - 1} more",
            do="train without shard, or give the parameter one axis: nn.Parameter(torch.zeros(1))",
        )
    packed = [name for name, p in model.named_parameters() if not (p.is_floating_point() or p.is_complex())]
    if packed:
        raise ConfigError(
            "quantised weights cannot be sharded",
            seen=f"{packed[0]!r} of {dict(model.named_parameters())[packed[0]].dtype}, and {len(packed) - 1} more",
            do="train without load_in_4bit, or without shard: four bits are small enough for one device more often",
        )


@torch.no_grad()
def _take_from_rank0(module: nn.Module, device: torch.device) -> None:
    """The values of rank 0 for every tensor that is still whole, on the device."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)
            dist.broadcast(tensor.data, 0)


def split_rows(value: Any) -> Any:
    """A nested value with `LocalRows` instead of tensors whose rows are dealt out over all ranks.

    All ranks call it, with the same names in the same order: what is sharded in another way is gathered whole.
    """
    if isinstance(value, DTensor):
        if _is_by_rows(value):
            return LocalRows(value.to_local().detach(), tuple(value.shape))
        return value.full_tensor().detach()
    if type(value) is dict:
        return {key: split_rows(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(split_rows(one) for one in value)
    return value


def _is_by_rows(value: DTensor) -> bool:
    mesh, placements = value.device_mesh, value.placements
    is_over_all = mesh.ndim == 1 and mesh.size() == num_ranks() and mesh.get_local_rank() == rank()
    return is_over_all and value.ndim > 0 and type(placements[0]) is Shard and placements[0].dim == 0


def deal_out(whole: Tensor | StoredTensor, like: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, laid out like `like`; the tensor itself where `like` is not sharded.

    Every rank reads what it needs, so nothing is sent. What has another shape than `like` (factored optimiser state) is
    held whole by every rank; a single number stays a plain one.
    """
    rows = _own_rows(whole, like)
    if rows is not None:
        return rows
    whole = whole if isinstance(whole, Tensor) else whole.read(0, whole.shape[0])
    if not isinstance(like, DTensor) or whole.ndim == 0:
        return whole
    placements = like.placements if whole.shape == like.shape else [Replicate()] * like.device_mesh.ndim
    on_device = whole.to(like.device)
    return distribute_tensor(on_device, like.device_mesh, placements, src_data_rank=None)


def _own_rows(stored: Tensor | StoredTensor, like: Tensor) -> Tensor | None:
    """Only the rows of this rank, where they can be told: torch deals them out in chunks of the same size."""
    if isinstance(stored, Tensor) or not isinstance(like, DTensor) or stored.shape != like.shape:
        return None
    if not _is_by_rows(like):
        return None
    number, each = like.shape[0], -(-like.shape[0] // num_ranks())
    start, stop = min(each * rank(), number), min(each * (rank() + 1), number)
    if stop - start != like.to_local().shape[0]:
        return None
    mine = stored.read(start, stop).to(like.device)
    return DTensor.from_local(
        mine, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole_sum(value: Tensor) -> Tensor:
    """A sum that is known on every rank, also where the tensor it was taken from is sharded."""
    return value.full_tensor() if isinstance(value, DTensor) else value
