"""The frozen backbone with what is trained beside it, and its two ways through the decoder: unpruned and pruned.

images -> tower, once -> (merger) -> projector -> layers up to the first pruner, once -> unpruned and pruned rest
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from truebatch.batch.keyed_random import keyed_uniform
from truebatch.batch.microbatch import MicroBatch
from truebatch.errors import ConfigError
from truebatch.hf.forward_inputs import inner_model, language_model
from truebatch_systems.vlm_pruning.backbones.families import Family
from truebatch_systems.vlm_pruning.backbones.interface import Vision
from truebatch_systems.vlm_pruning.config import MethodSettings
from truebatch_systems.vlm_pruning.data.encode import IMAGE_TOKENS, QUESTION, VISION
from truebatch_systems.vlm_pruning.model.decoder_layers import (
    LayerInputs,
    Stream,
    causal_bias,
    decoder_layers,
    final_norm,
    make_stream,
    run_layer,
)
from truebatch_systems.vlm_pruning.model.key_bias import Masking, begin_masking
from truebatch_systems.vlm_pruning.model.masks import (
    DEAD,
    choose_hard,
    hard_mask,
    log_keep,
    logistic_noise,
    stage_counts,
    target_tokens,
)
from truebatch_systems.vlm_pruning.model.mergers import MERGERS, Merged
from truebatch_systems.vlm_pruning.model.pruner import Discriminator, PrunerHead
from truebatch_systems.vlm_pruning.model.token_index import Places, find_places

if TYPE_CHECKING:
    from transformers import PretrainedConfig

How = Literal["train", "soft", "hard"]
"""train: as the settings choose, with noise; soft: keep probabilities without noise; hard: 0 or 1, as in use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choosing:
    """How logits become masks in one pass."""

    how: How = "hard"
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One way through the decoder."""

    final: Tensor
    """[B, T, d] normed."""
    states: dict[int, Tensor] = field(default_factory=dict)
    """Hidden states that were asked for, by their index (0: embeddings, last: normed)."""
    soft: list[Tensor] = field(default_factory=list)
    """[B, V] a pruning layer: log of the keep probability."""
    used: list[Tensor] = field(default_factory=list)
    """[B, V] a pruning layer: log of the mask that acted."""
    logits: list[Tensor] = field(default_factory=list)


class PrunedVLM(nn.Module):
    """A vision-language model whose decoder drops vision tokens on the way."""

    def __init__(self, backbone: nn.Module, family: Family, method: MethodSettings) -> None:
        super().__init__()
        config: PretrainedConfig = backbone.config
        self.width = int(config.get_text_config().hidden_size)
        self.num_layers = len(decoder_layers(backbone))
        method = method.for_depth(self.num_layers)
        self.backbone, self.family, self.method = backbone, family, method
        self.recomputes = False
        is_pruning = method.stage == "pruning"
        layers = method.pruning_layers if is_pruning else ()
        self.pruners = nn.ModuleDict({str(layer): PrunerHead(self.width, method) for layer in layers})
        self.merger = self._make_merger(config) if method.enable_token_merger else None
        has_judge = is_pruning and method.teacher == "adversarial"
        self.discriminator = Discriminator(self.width, method) if has_judge else None
        is_priced = is_pruning and method.budget_of == "average"
        self.log_price = nn.Parameter(torch.tensor(math.log(method.sparsity_weight))) if is_priced else None
        """Of a vision token; one number for all samples."""
        self.judges_optimiser: torch.optim.Optimizer | None = None
        """Set with the optimisers of a run: whoever begins the discriminator anew clears its moments too."""
        if has_judge:
            self.wanted_states  # noqa: B018 (refuses layers the backbone does not have, before anything runs)
        backbone.requires_grad_(not is_pruning).eval()

    def _make_merger(self, config: PretrainedConfig) -> nn.Module:
        family = self.family
        make = MERGERS[self.method.merger_type]
        made: nn.Module = make(family.merged_width(config), self.width, self.method, family.common_tokens(config))
        return made

    @property
    def wanted_states(self) -> tuple[int, ...]:
        """Indices, from 0, of the hidden states the discriminator sees."""
        found = tuple(i + self.num_layers + 1 if i < 0 else i for i in self.method.disc_target_layers)
        if not all(0 <= i <= self.num_layers for i in found):
            raise ConfigError(
                "the discriminator looks at hidden states that the backbone does not have",
                seen=f"disc_target_layers={self.method.disc_target_layers}, {self.num_layers} layers",
                do=f"use indices from {-self.num_layers} to -1",
            )
        return found

    def train(self, mode: bool = True) -> PrunedVLM:
        """Only what is trained changes its mode; a frozen backbone stays as it is used."""
        super().train(mode)
        if self.method.stage == "pruning":
            self.backbone.eval()
        return self

    def gradient_checkpointing_enable(self) -> None:
        """Compute the activations of decoder layers again in backward."""
        self.recomputes = True

    # ---- into the decoder

    def look(self, batch: MicroBatch, *, merges: bool = True) -> Stream:
        """The micro-batch as the decoder takes it: one call of the vision tower, then merger and projector."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.method.stage == "backbone"):
            vision = self.family.look(self.backbone, batch)
        if self.merger is not None and merges:
            vision = self._merge(batch, vision)
        if not vision.is_projected:
            projector: Any = inner_model(self.backbone).multi_modal_projector
            dtype = next(projector.parameters()).dtype
            vision = replace(vision, features=projector(vision.features.to(dtype)))
        return make_stream(self.backbone, batch, vision, self.family.places(self.backbone, batch))

    def _merge(self, batch: MicroBatch, vision: Vision) -> Vision:
        """Fewer features, image after image; images with equally many before and after are merged together."""
        assert self.merger is not None
        question, is_asked = self._question_of_images(batch)
        parts = torch.split(vision.features.float(), list(vision.lengths))
        kept = [int(n) for n in batch[IMAGE_TOKENS].tolist()]
        merged: dict[int, Tensor] = {}
        weights: dict[int, Tensor] = {}
        sizes = list(zip(vision.lengths, kept, strict=True))
        for size in dict.fromkeys(sizes):
            chosen = [at for at, one in enumerate(sizes) if one == size]
            together = torch.stack([parts[at] for at in chosen])
            found: Merged = self.merger(together, question[chosen], is_asked[chosen], size[1])
            merged |= dict(zip(chosen, found.features, strict=True))
            weights |= dict(zip(chosen, found.weights, strict=True))
        if not sizes:
            return vision
        levels = [torch.split(level, list(vision.lengths)) for level in vision.deepstack]
        deep = [torch.cat([weights[at].to(x.dtype) @ x for at, x in enumerate(level)]) for level in levels]
        return replace(
            vision, features=torch.cat([merged[at] for at in range(len(sizes))]), lengths=tuple(kept),
            deepstack=tuple(deep),
        )  # fmt: skip

    def _question_of_images(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """[I, Q, d] embeddings of the question asked about each image, and which of them are tokens [I, Q]."""
        places = find_places(batch, QUESTION)
        text: Any = language_model(self.backbone)
        words = text.embed_tokens(batch["input_ids"]).float()
        most = int(max(places.axis.lengths, default=1))
        owner, at = places.owner, torch.arange(len(places.owner), device=places.owner.device)
        at = at - (torch.cumsum(places.lengths, 0) - places.lengths)[owner]
        asked = words.new_zeros(batch.num_samples, most, words.shape[-1])
        asked = asked.index_put((owner, at), places.take_flat(words))
        is_asked = torch.arange(most, device=at.device) < places.lengths[:, None]
        image_owner = batch.flat("images").owner
        return asked[image_owner], is_asked[image_owner]

    # ---- through the decoder

    def unpruned(self, stream: Stream, *, wanted: Sequence[int] = (), start: Pass | None = None) -> Pass:
        """All layers with all tokens; from `start` (see `prefix`) on if the first layers have run already."""
        bias = None if stream.is_plainly_causal else causal_bias(stream.rows, stream.embeds.dtype)
        hidden, states = _beginning(stream, wanted, start)
        for at in range(self._first(start), self.num_layers):
            hidden = self._layer(at, stream, hidden, bias)
            _keep(states, at + 1, hidden, wanted)
        return self._ended(hidden, states, wanted)

    def prefix(self, stream: Stream, *, wanted: Sequence[int] = ()) -> Pass:
        """The layers up to the first pruner, which are the same either way; `final` is not normed here."""
        bias = None if stream.is_plainly_causal else causal_bias(stream.rows, stream.embeds.dtype)
        hidden, states = _beginning(stream, wanted, None)
        for at in range(self._first_pruned):
            hidden = self._layer(at, stream, hidden, bias)
            _keep(states, at + 1, hidden, wanted)
        return Pass(hidden, states)

    def pruned(
        self,
        stream: Stream,
        choosing: Choosing,
        *,
        wanted: Sequence[int] = (),
        start: Pass | None = None,
        given: Sequence[Tensor] | None = None,
    ) -> Pass:
        """Vision tokens lose weight as keys, or all of it, after every pruning layer; masks compound.

        `given` are log masks [B, V] to use instead of those of the pruner heads.
        """
        start = self.prefix(stream, wanted=wanted) if start is None else start
        hidden, states = start.final, dict(start.states)
        soft: list[Tensor] = []
        used: list[Tensor] = []
        logits: list[Tensor] = []
        masks = begin_masking(stream)
        for at in range(self._first_pruned - 1, self.num_layers):
            if at >= self._first_pruned:
                hidden = masks.run(partial(self._layer, at, stream), hidden)
            if at in self.method.pruning_layers:
                if given is None:
                    z = self.token_scores(at, hidden, replace(stream, is_alive=masks.is_alive))
                    keep, mask = self.choose(len(used), z, masks.so_far, stream.vision, choosing)
                    logits.append(z)
                else:
                    keep = mask = given[len(used)]
                hidden, masks = self._act(hidden, masks, keep, mask, choosing)
                soft.append(keep)
                used.append(mask)
            _keep(states, at + 1, hidden, wanted)
        ended = self._ended(hidden, states, wanted)
        return Pass(ended.final, ended.states, soft, used, logits)

    def _act(
        self, hidden: Tensor, masks: Masking, keep: Tensor, mask: Tensor, choosing: Choosing
    ) -> tuple[Tensor, Masking]:
        """What a mask does to the layers behind it."""
        if self.scales(choosing.how):
            return masks.scaled(hidden, mask), masks
        is_drawn = choosing.how == "train" and keep is not mask and keep.requires_grad
        return hidden, masks.biased(mask, keep if is_drawn else None)

    def scales(self, how: How) -> bool:
        """Whether masks scale the residual stream, as the original script's did; what is removed is removed either way."""
        return self.method.residual_scale and how != "hard"

    @property
    def _first_pruned(self) -> int:
        """The first layer that pruning can change."""
        return self.method.pruning_layers[0] + 1

    def _first(self, start: Pass | None) -> int:
        return 0 if start is None else self._first_pruned

    def _layer(self, at: int, stream: Stream, hidden: Tensor, bias: Tensor | None) -> Tensor:
        deep = stream.deepstack[at] if at < len(stream.deepstack) else None
        given = LayerInputs(rotary=stream.rotary, bias=bias, deepstack=deep)
        return run_layer(decoder_layers(self.backbone)[at], hidden, given, recompute=self.recomputes)

    def _ended(self, hidden: Tensor, states: dict[int, Tensor], wanted: Sequence[int]) -> Pass:
        final = final_norm(self.backbone, hidden)
        if self.num_layers in wanted:
            states = {**states, self.num_layers: final}
        return Pass(final, states)

    # ---- what to drop

    def token_scores(self, at: int, hidden: Tensor, stream: Stream) -> Tensor:
        """[B, V] after layer `at`: the logit of keeping each vision token. Baselines score in their own way."""
        vision, question = stream.vision.take(hidden), stream.question.take(stream.embeds)
        prior = question_attention(hidden, stream) if self.method.use_attn_residual else None
        logits: Tensor = self.pruners[str(at)](vision, question, stream.vision.looks_at(stream.question), prior)
        return logits

    def choose(
        self, stage: int, logits: Tensor, so_far: Tensor, places: Places, choosing: Choosing
    ) -> tuple[Tensor, Tensor]:
        """[B, V] log keep probability, and the log mask that acts."""
        method, how = self.method, choosing.how
        noise = None
        if how == "train" and method.use_gumbel:
            noise = logistic_noise(keyed_uniform((), f"vlm_pruning/gumbel/{stage}", axis=VISION))
        soft = log_keep(logits, noise, choosing.temperature)
        if how == "soft" or (how == "train" and method.choice == "soft"):
            return soft, soft
        scores = logits if noise is None else logits + noise
        is_wanted = keep_is_wanted(scores, method.hard_pruning_threshold, choosing.temperature)
        counts = self._counts(stage, places) if method.choice == "top_k" else None
        is_kept = choose_hard(scores, is_wanted, so_far > DEAD / 2, places, counts)
        return soft, hard_mask(is_kept)

    def _counts(self, stage: int, places: Places) -> Tensor:
        method = self.method
        found = [
            stage_counts(n, layers=method.pruning_layers, num_layers=self.num_layers, target=target_tokens(method, n))[
                stage
            ]
            for n in places.axis.lengths
        ]
        return torch.tensor(found).to(places.cells.device, non_blocking=True)


def keep_is_wanted(scores: Tensor, threshold: float, temperature: float) -> Tensor:
    """Whether the keep probability is above the threshold; at one half this does not depend on the temperature."""
    return torch.sigmoid(scores.detach() / temperature) > threshold


def question_attention(hidden: Tensor, stream: Stream) -> Tensor:
    """[B, V]: how much the question looks at each vision token that is left, from plain products of hidden states."""
    vision, question = stream.vision.take(hidden).float(), stream.question.take(hidden).float()
    is_left = stream.vision.is_real if stream.is_alive is None else stream.vision.is_real & stream.is_alive
    may_look = stream.vision.looks_at(stream.question) & is_left[:, :, None]
    scores = vision @ question.transpose(1, 2) / hidden.shape[-1] ** 0.5  # [B, V, Q]
    weights = torch.where(may_look, scores.masked_fill(~may_look, DEAD).softmax(dim=1), 0.0)
    return weights.sum(2) / may_look.sum(2).clamp(min=1)


def _beginning(stream: Stream, wanted: Sequence[int], start: Pass | None) -> tuple[Tensor, dict[int, Tensor]]:
    if start is not None:
        return start.final, dict(start.states)
    return stream.embeds, {0: stream.embeds} if 0 in wanted else {}


def _keep(states: dict[int, Tensor], index: int, hidden: Tensor, wanted: Sequence[int]) -> None:
    if index in wanted:
        states[index] = hidden
