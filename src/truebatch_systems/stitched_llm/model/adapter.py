"""What lies between the donors: a small trained map from the width of one to the width of the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from truebatch.errors import ConfigError

Kind = Literal["linear", "low_rank", "mlp", "identity"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterShape:
    """What an adapter is built from; goes into `stitch_config.json`."""

    kind: Kind
    width_in: int
    width_out: int
    rank: int = 64
    """low_rank: the width between its two matrices."""
    inner: int = 256
    """mlp: the width of its hidden layer."""
    norm: bool = False
    """An RMSNorm in front."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(
                "the adapter is not known", seen=f"adapter={self.kind!r}", do=f"use one of {', '.join(get_args(Kind))}"
            )
        if self.kind == "identity" and (self.width_in != self.width_out or self.norm):
            raise ConfigError(
                "an identity adapter changes nothing, so both donors need the same width, and no norm stands in front",
                seen=f"{self.width_in} below, {self.width_out} above, norm={self.norm}",
                do="use adapter=linear",
            )
        if self.rank < 1 or self.inner < 1:
            raise ConfigError(
                "widths of an adapter are at least 1", seen=f"rank={self.rank}, inner={self.inner}", do="raise them"
            )


class StitchAdapter(nn.Module):
    """[..., width_in] -> [..., width_out], in fp32 whatever the donors are stored in."""

    def __init__(self, shape: AdapterShape) -> None:
        super().__init__()
        wide, out = shape.width_in, shape.width_out
        self.shape = shape
        self.norm = nn.RMSNorm(wide) if shape.norm else None
        self.linear = nn.Linear(wide, out) if shape.kind in ("linear", "mlp") else None
        self.down = nn.Linear(wide, shape.rank, bias=False) if shape.kind == "low_rank" else None
        self.up = nn.Linear(shape.rank, out) if shape.kind == "low_rank" else None
        is_mlp = shape.kind == "mlp"
        self.bend = (
            nn.Sequential(nn.Linear(wide, shape.inner), nn.GELU(), nn.Linear(shape.inner, out)) if is_mlp else None
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map the residual stream of the bottom donor to where the top one begins."""
        if self.shape.kind == "identity":
            return hidden
        x = hidden.float() if self.norm is None else self.norm(hidden.float())
        if self.down is not None and self.up is not None:
            return self.up(self.down(x))  # type: ignore[no-any-return]
        assert self.linear is not None
        straight: Tensor = self.linear(x)
        return straight if self.bend is None else straight + self.bend(x)

    def features(self, hidden: Tensor) -> Tensor:
        """What the linear part of the adapter is given: what a least-squares start is fitted on."""
        return hidden.float() if self.norm is None else self.norm(hidden.float())


@torch.no_grad()
def start_random(adapter: StitchAdapter, *, seed: int) -> None:
    """Xavier for matrices, 0 for biases; the bent part of an mlp begins at 0."""
    generator = torch.Generator().manual_seed(seed)
    for module in adapter.modules():
        if isinstance(module, nn.Linear):
            drawn = torch.empty(module.weight.shape)
            nn.init.xavier_uniform_(drawn, generator=generator)
            module.weight.copy_(drawn)
            if module.bias is not None:
                module.bias.zero_()
    _flatten_bend(adapter)


@torch.no_grad()
def start_identity(adapter: StitchAdapter) -> None:
    """Dimensions that both donors have are copied, others begin at 0: the cut as if there were no adapter."""
    if adapter.shape.kind == "identity":
        return
    eye = torch.eye(adapter.shape.width_in, adapter.shape.width_out)
    start_linear(adapter, eye, torch.zeros(adapter.shape.width_out))


@torch.no_grad()
def start_linear(
    adapter: StitchAdapter,
    weight: Tensor,
    bias: Tensor,
    *,
    directions: Tensor | None = None,
    centre: Tensor | None = None,
) -> None:
    """Set the linear part to x @ weight + bias, weight [width_in, width_out].

    A low_rank adapter keeps what varies along the first `directions` [width_out, width_out] (orthonormal columns, by
    default those of the largest singular values); the rest stands still at what it is for x = `centre` (default 0).
    """
    if adapter.linear is not None:
        adapter.linear.weight.copy_(weight.T)
        adapter.linear.bias.copy_(bias)
    elif adapter.down is not None and adapter.up is not None:
        wide = weight.double()
        found = torch.linalg.svd(wide)[2].T if directions is None else directions
        kept = found[:, : adapter.shape.rank].double()
        middle = wide.new_zeros(len(wide)) if centre is None else centre.double()
        adapter.down.weight.zero_()
        adapter.up.weight.zero_()
        adapter.down.weight[: kept.shape[1]] = (wide @ kept).T.to(adapter.down.weight)
        adapter.up.weight[:, : kept.shape[1]] = kept.to(adapter.up.weight)
        adapter.up.bias.copy_(bias + middle @ (wide - wide @ kept @ kept.T))
    _flatten_bend(adapter)


def _flatten_bend(adapter: StitchAdapter) -> None:
    if adapter.bend is not None:
        last = adapter.bend[2]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
