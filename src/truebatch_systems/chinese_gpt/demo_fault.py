"""The first part of the demo: a model that changes its results in batches without a word, found, named and mended.

the model with one layer that forgets where samples end -> verify -> the module by its name -> the model as it is -> verify
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from truebatch.batch.segments import Segments
from truebatch.language.console import say
from truebatch.verification.api import verify
from truebatch.verification.config import VerifyConfig
from truebatch.verification.report import VerifyReport
from truebatch_systems.chinese_gpt.data.samples import FIELDS
from truebatch_systems.chinese_gpt.model.model import Block, ChineseGPT
from truebatch_systems.chinese_gpt.train.objective import NextToken

SAMPLES = 6
LAYER = 1
"""The layer that is made to forget."""


class LeakyBlock(Block):
    """A layer as it is often written: causal over the whole row, whoever else lies in it."""

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """[B, T, D] -> [B, T, D]; in packed rows a sample sees those before it."""
        query, key, value = self._mixed(x)
        return self._rest(x, functional.scaled_dot_product_attention(query, key, value, is_causal=True))


def show_fault(samples: Sequence[Any], model: ChineseGPT) -> list[str]:
    """Print that a silent fault is found and named, and that the model without it is proven; what went otherwise."""
    say("\n2. One layer of this model forgets where a sample ends. Nothing fails, and the loss falls; verify says:")
    broken, mended = find_planted_fault(model, samples)
    for line in told_lines(broken, mended):
        say(line)
    return ["a planted fault was not found"] * broken.ok + ["the model as it is was called broken"] * (not mended.ok)


def find_planted_fault(model: ChineseGPT, samples: Sequence[Any]) -> tuple[VerifyReport, VerifyReport]:
    """What `verify` says of the model with one leaky layer, and of the model as it is."""
    asked, config = list(samples[:SAMPLES]), VerifyConfig(layout="packed", quick=True)
    layer = model.blocks[LAYER]
    own = type(layer)
    layer.__class__ = LeakyBlock
    try:
        broken = verify(model, NextToken(), asked, FIELDS, config=config)
    finally:
        layer.__class__ = own
    return broken, verify(model, NextToken(), asked, FIELDS, config=config)


def told_lines(broken: VerifyReport, mended: VerifyReport) -> list[str]:
    """The verdicts, the module and the cause, in the words of `verify`."""
    wanted = ("BROKEN", "first difference", "likely cause", "  do:")
    found = [line for line in str(broken).splitlines() if line.startswith(wanted)]
    return [*(f"   {line}" for line in found), f"   mended: {str(mended).splitlines()[0]}"]
