"""Parameters that lie in shards over ranks (FSDP2, `fully_shard`), taken together for a checkpoint and dealt out again.

shards on every rank -> whole tensors on rank 0 -> file -> whole tensors on any number of ranks -> the shard of each
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


def gather_whole(value: Any, *, is_kept: bool) -> Any:
    """A nested value with whole tensors instead of shards. All ranks call it, with the same names in the same order.

    One tensor is gathered at a time; ranks that do not keep it get an empty stand-in, so that only one host needs the
    memory for all of them.
    """
    if isinstance(value, DTensor):
        whole = value.full_tensor().detach()
        return whole.cpu() if is_kept else whole.new_empty(0, device="cpu")
    if type(value) is dict:
        return {key: gather_whole(one, is_kept=is_kept) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(gather_whole(one, is_kept=is_kept) for one in value)
    return value


def deal_out(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, laid out like `like`; the tensor itself where `like` is not sharded.

    Every rank has read the whole tensor, so nothing is sent. What has another shape than `like` (factored optimiser
    state) is held whole by every rank; a single number stays a plain one.
    """
    if not isinstance(like, DTensor) or whole.ndim == 0:
        return whole
    placements = like.placements if whole.shape == like.shape else [Replicate()] * like.device_mesh.ndim
    on_device = whole.to(like.device)
    return distribute_tensor(on_device, like.device_mesh, placements, src_data_rank=None)


def whole_sum(value: Tensor) -> Tensor:
    """A sum that is known on every rank, also where the tensor it was taken from is sharded."""
    return value.full_tensor() if isinstance(value, DTensor) else value
