"""Donors -> one stitched model: cut, joined, started, frozen.

open_donor x 2 -> check_cut, vocabularies -> StitchedForCausalLM over the donors' weights -> start of the adapter
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from truebatch.errors import ConfigError
from truebatch_systems.stitched_llm.data.retokenize import Spelling
from truebatch_systems.stitched_llm.data.vocab_map import NOBODY, head_in_vocabulary, refuse_other_vocabulary
from truebatch_systems.stitched_llm.model.adapter import (
    AdapterShape,
    Kind,
    StitchAdapter,
    start_identity,
    start_linear,
    start_random,
)
from truebatch_systems.stitched_llm.model.donors import (
    Donor,
    check_cut,
    keep_bottom,
    keep_top,
    open_donor,
    weights_hash,
)
from truebatch_systems.stitched_llm.model.hf_config import join_configs
from truebatch_systems.stitched_llm.model.model import StitchedForCausalLM
from truebatch_systems.stitched_llm.model.respell import Respelling
from truebatch_systems.stitched_llm.train.lstsq_init import NormalEquations, Solution

Start = Literal["lstsq", "random", "identity"]
Rows = tuple[Tensor, Tensor]
"""[B, L] ids and the tokenizer's mask: 1 where a cell is real."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Where donors are cut and what joins them."""

    bottom: int
    """Layers kept from the bottom donor."""
    top: int
    """The first layer used of the top donor."""
    adapter: Kind = "linear"
    rank: int = 64
    inner: int = 256
    norm: bool = False


def stitch(
    bottom: Any,
    top: Any,
    cut: Cut,
    *,
    vocabulary: Tensor | None = None,
    spelling: Spelling | None = None,
    with_hashes: bool = True,
) -> StitchedForCausalLM:
    """A causal language model over the weights of two donors, which stay as they are; only its adapter is trainable.

    Args:
        bottom, top: a folder, a `Donor`, or a model in memory.
        vocabulary: [V of bottom] int64: the id of the same token in the top donor, -1 for none; by default the two
            vocabularies must be one.
        spelling: each donor reads its own tokens: ids are the top donor's, and this says how the bottom one spells them.
        with_hashes: hash the used weights, so that an adapter is never loaded onto others.
    """
    below = bottom if isinstance(bottom, Donor) else open_donor(bottom, what="the bottom donor")
    above = top if isinstance(top, Donor) else open_donor(top, what="the top donor")
    check_cut(below, above, cut.bottom, cut.top)
    if vocabulary is None and spelling is None:
        refuse_other_vocabulary(below, above)
    shape = AdapterShape(
        kind=cut.adapter, width_in=below.width, width_out=above.width, rank=cut.rank, inner=cut.inner, norm=cut.norm
    )
    base, (upper, head) = keep_bottom(below.model, cut.bottom), keep_top(above.model, cut.top)
    head = head if vocabulary is None else head_in_vocabulary(head, vocabulary)
    origin = {
        "bottom": below.name,
        "top": above.name,
        "cut_bottom": cut.bottom,
        "cut_top": cut.top,
        "head_bias": head.bias is not None,
        "bottom_hash": weights_hash(base) if with_hashes else "",
        "top_hash": weights_hash(upper, head) if with_hashes else "",
    }
    if spelling is not None:
        respelling = Respelling.of(spelling).to(head.weight.device)
        origin["respelling"] = respelling.sizes
    model = _join(base, upper, head, shape, origin)
    model.vocabulary = vocabulary
    if spelling is not None:
        model.respelling = respelling
    return model


def _join(base: Any, upper: Any, head: nn.Linear, shape: AdapterShape, origin: dict[str, Any]) -> StitchedForCausalLM:
    attention = [part.config._attn_implementation for part in (base, upper)]
    config = join_configs(base.config, upper.config, shape, vocab_size=head.out_features, origin=origin)
    with torch.device("meta"):
        model = StitchedForCausalLM(config)
    model.bottom, model.top, model.lm_head = base, upper, head
    model.config.bottom, model.config.top = base.config, upper.config
    for part, own in zip((base, upper), attention, strict=True):
        part.config._attn_implementation = own  # some versions give the choice of the whole to its parts
    model.adapter = StitchAdapter(shape).to(head.weight.device)
    start_random(model.adapter, seed=0)
    model.requires_grad_(False)
    model.adapter.requires_grad_(True)
    model.eval()
    return model


@torch.no_grad()
def fit_start(model: StitchedForCausalLM, top: Any, cut: Cut, rows: Iterable[Rows]) -> Solution:
    """Set the adapter to the least-squares map between the streams of both donors on the same real tokens.

    `top` is the whole top donor: what its layers below the cut make of the tokens is what the adapter learns to give.
    """
    if model.adapter.shape.kind == "identity":
        raise ConfigError("an identity adapter has nothing to fit", seen="adapter=identity", do="use start=identity")
    below = keep_bottom(top, cut.top)
    shape = model.adapter.shape
    sums = NormalEquations.empty(shape.width_in, shape.width_out, model.device)
    for ids, is_real in rows:
        ids, is_real = ids.to(model.device), is_real.to(model.device)
        other, kept = ids_above(ids, is_real.bool(), model.vocabulary)
        x = model.stream_below(ids, is_real)
        y = below(input_ids=other, attention_mask=is_real, use_cache=False).last_hidden_state
        sums.add(model.adapter.features(x)[kept], y[kept])
    found = sums.solve()
    start_linear(model.adapter, found.weight, found.bias, directions=found.directions, centre=found.centre)
    return found


def ids_above(ids: Tensor, is_real: Tensor, vocabulary: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same tokens as the top donor numbers them, and which cells count: those after a token it lacks do not."""
    if vocabulary is None:
        return ids, is_real
    mapped = vocabulary.to(ids.device)[ids]
    is_known = ((mapped != NOBODY) | ~is_real).long().cumprod(-1).bool()
    return mapped.clamp(min=0), is_real & is_known


def start_adapter(model: StitchedForCausalLM, start: Start, *, seed: int = 0) -> None:
    """The starts that need no text; `fit_start` is the one that does."""
    if start == "random":
        start_random(model.adapter, seed=seed)
    elif start == "identity":
        start_identity(model.adapter)
    else:
        raise ConfigError("this start needs text", seen=f"start={start!r}", do="call fit_start with rows of ids")
