"""Settings -> a stitched model ready to be trained: donors, cut, start, what is trained, self-test."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from truebatch_systems.stitched_llm.config import StitchConfig
from truebatch_systems.stitched_llm.data.dataset import first_rows, prepare_texts, sources_of, vocabulary_of
from truebatch_systems.stitched_llm.data.toy_donors import are_trained, ensure_donors, new_donor
from truebatch_systems.stitched_llm.data.vocab_map import NOBODY
from truebatch_systems.stitched_llm.model.donors import Donor, open_donor, spelling_between
from truebatch_systems.stitched_llm.model.mask_check import SelfTest, refuse_wrong_masks
from truebatch_systems.stitched_llm.model.model import StitchedForCausalLM
from truebatch_systems.stitched_llm.model.stitch import Cut, fit_start, start_adapter, stitch
from truebatch_systems.stitched_llm.train.lstsq_init import Solution
from truebatch_systems.stitched_llm.train.trainable_parts import (
    add_top_lora,
    also_train,
    autocast_of,
    describe_parts,
    store_donors,
)

_TOKENS_PER_DIMENSION, _LEAST_TOKENS = 16, 8192
_FEWEST_PER_DIMENSION = 4
"""With fewer tokens a least-squares map follows their noise."""


@dataclass(slots=True, eq=False)
class Built:
    """A stitched model and what is known about it."""

    model: StitchedForCausalLM
    cut: Cut
    selftest: SelfTest
    solution: Solution | None = None
    lines: list[str] = field(default_factory=list)
    """For the start of a run."""


def open_donors(config: StitchConfig) -> tuple[Donor, Donor]:
    """Both donors of the settings, with tokenizers; the embedded ones are trained if they are not there yet."""
    if config.is_embedded:
        home = sources_of(config).bottom.parent
        ensure_donors(home, steps=config.donor_steps, seed=config.made_up_seed)
    places = sources_of(config)
    return open_donor(places.bottom, what="bottom"), open_donor(places.top, what="top")


def cut_of(config: StitchConfig, bottom: Donor, top: Donor) -> Cut:
    """Where the donors are cut: as given, or half of the bottom's layers and the same share of the top's depth."""
    below = config.cut_bottom if config.cut_bottom is not None else max(bottom.depth // 2, 1)
    share = below / bottom.depth
    above = config.cut_top if config.cut_top is not None else min(round(share * top.depth), top.depth - 1)
    return Cut(
        bottom=below, top=above, adapter=config.adapter, rank=config.rank, inner=config.inner, norm=config.norm
    )  # fmt: skip


def build(config: StitchConfig) -> Built:
    """The model of the settings, its adapter started; refused if it is not causal."""
    bottom, top = open_donors(config)
    cut = cut_of(config, bottom, top)
    vocabulary = vocabulary_of(config)
    spelling = spelling_between(bottom, top) if config.vocabulary == "retokenize" else None
    model = stitch(bottom, top, cut, vocabulary=vocabulary, spelling=spelling)
    lines = [
        f"bottom: {bottom.name}, layers 0 to {cut.bottom - 1} of {bottom.depth}, width {bottom.width}",
        f"top: {top.name}, layers {cut.top} to {top.depth - 1} of {top.depth}, width {top.width}",
        store_donors(model, config.stored, config.train.precision),
        f"attention: {model.config.bottom._attn_implementation} below, {model.config.top._attn_implementation} above",
    ]
    if torch.cuda.is_available():
        model.to("cuda")
    if vocabulary is not None:
        known = int((vocabulary != NOBODY).sum())
        lines.append(
            f"vocabulary: {known:,} of {len(vocabulary):,} ids of the bottom donor have a partner in the top one"
        )
    if spelling is not None:
        lines.append(
            f"vocabulary: {len(spelling.counts):,} tokens of the top donor, each read by the bottom one in "
            f"{float(spelling.counts.float().mean()):.2f} of its own on average; unknown to it: {spelling.num_unknown:,}"
        )
    solution = _start(config, model, top, cut)
    if solution is not None:
        lines.append(_describe_start(solution, bottom.width))
    _unfreeze(config, model)
    selftest = _tested(config, model)
    return Built(model, cut, selftest, solution, [*lines, describe_parts(model), str(selftest)])


def sketch(config: StitchConfig) -> StitchedForCausalLM:
    """A model of the same shapes for estimates: embedded donors that are not there yet are not trained for it."""
    if not config.is_embedded or are_trained(sources_of(config).bottom.parent):
        return build(config).model
    bottom, top = (Donor(new_donor(role, seed=0), role) for role in ("bottom", "top"))
    model = stitch(bottom, top, cut_of(config, bottom, top), with_hashes=False)
    store_donors(model, config.stored, config.train.precision)
    if torch.cuda.is_available():
        model.to("cuda")
    _unfreeze(config, model)
    return model


def _unfreeze(config: StitchConfig, model: StitchedForCausalLM) -> None:
    also_train(model, config.also_train, first_layers=config.first_layers)
    if config.lora:
        add_top_lora(model, rank=config.lora_rank, alpha=config.lora_alpha)


def _describe_start(found: Solution, width: int) -> str:
    words = f"lstsq start: residual {found.residual:.3f} on {found.count:,} tokens"
    least = _FEWEST_PER_DIMENSION * width
    return (
        words if found.count >= least else f"{words}, which are few: it fits {width} dimensions, give {least:,} or more"
    )


def _start(config: StitchConfig, model: StitchedForCausalLM, top: Donor, cut: Cut) -> Solution | None:
    if config.start != "lstsq":
        start_adapter(model, config.start, seed=config.train.seed)
        return None
    wanted = config.start_tokens or max(_TOKENS_PER_DIMENSION * model.adapter.shape.width_in, _LEAST_TOKENS)
    whole = top.model.to(model.device)
    return fit_start(model, whole, cut, first_rows(prepare_texts(config).samples, tokens=wanted))


def _tested(config: StitchConfig, model: StitchedForCausalLM) -> SelfTest:
    """Under the precision of training: fp32 norms over half-precision layers only run there."""
    with autocast_of(model.device, config.train.precision):
        return refuse_wrong_masks(model)
