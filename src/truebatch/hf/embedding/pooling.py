"""From hidden states to one embedding for each text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

Pooling = Literal["mean", "cls", "last"]


def pool(tokens: Tensor, lengths: Sequence[int], how: Pooling) -> Tensor:
    """[n, D] states of the tokens of all texts, end to end -> [texts, D], in fp32 at least."""
    wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    if how == "mean":
        sizes = torch.tensor(lengths, dtype=torch.int64).to(tokens.device, non_blocking=True)
        return torch.segment_reduce(wide, "mean", lengths=sizes, axis=0, unsafe=True)
    ends = list(accumulate(lengths))
    at = [end - 1 for end in ends] if how == "last" else [0, *ends[:-1]]
    return wide[torch.tensor(at).to(tokens.device, non_blocking=True)]
