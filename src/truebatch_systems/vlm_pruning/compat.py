"""The original script's own names: `preprocess_batch`, `train_step` and `train_step_batch`, `_resize_image`, and their helpers.

Intervals of vision tokens exist only here, for code that expects them; everything else keeps places per row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from truebatch.attention.causal_mask import causal_mask_4d
from truebatch.batch.collate import collate
from truebatch.batch.keyed_random import name_purposes, noise_for
from truebatch.batch.microbatch import MicroBatch
from truebatch.config.load import check_config
from truebatch.config.yaml_files import Document
from truebatch.errors import BatchError, ConfigError
from truebatch.planning.rows import padded_rows
from truebatch_systems.vlm_pruning.backbones.load import encoder_of, load_backbone
from truebatch_systems.vlm_pruning.config import PruningConfig
from truebatch_systems.vlm_pruning.data.encode import encoded_fields
from truebatch_systems.vlm_pruning.data.image_size import resize_image, shrink_image
from truebatch_systems.vlm_pruning.model.decoder_layers import Stream, decoder_layers, with_key_bias
from truebatch_systems.vlm_pruning.model.masks import DEAD, keep_of, log_keep
from truebatch_systems.vlm_pruning.model.model import Pass, PrunedVLM
from truebatch_systems.vlm_pruning.train.objective import (
    ADVERSARIAL,
    DISCRIMINATOR,
    DISTILLATION,
    TASK,
    PruningObjective,
    watched_terms,
)
from truebatch_systems.vlm_pruning.train.schedules import moment_at, progress_of

NOT_ALIGNED = "Vision token positions not aligned across batch"
LONGEST_SIDE = 1100
"""Pixels of an image that is scaled in proportion, where image_max_size is not set."""
NOT_ENABLED = "preprocess_batch requires enable_true_batch=True"
StepFunction = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], dict[str, dict[str, Any]]]
_OWN = ("backbone_settings", "method_settings", "dataset_settings", "evaluation_settings")


class Backbone:
    """The backbone of the original script: a model from its settings, with batches in the form it returns."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = read_sections(config)
        self.encoder = encoder_of(self.config.backbone_settings, self.config.method_settings)
        self.model = PrunedVLM(
            load_backbone(self.config.backbone_settings), self.encoder.family, self.config.method_settings
        )
        name_purposes(self.model)

    def _resize_image(self, image: Image.Image) -> Image.Image:
        """One size for all images with enable_true_batch; else scaled in proportion, its longest side image_max_size."""
        mllm = self.config.backbone_settings.mllm_settings
        if not mllm.enable_true_batch:
            return shrink_image(image, mllm.image_max_size or LONGEST_SIDE)
        return resize_image(image, mllm, self.encoder.family.sizes(self.encoder.images))

    @torch.no_grad()
    def preprocess_batch(
        self, images: Sequence[Any], questions: Sequence[str], answers: Sequence[Any] | None = None
    ) -> dict[str, Tensor]:
        """Embeddings, attention_mask, vision_token_positions (closed intervals), raw_vision_features of a batch."""
        if not self.config.backbone_settings.mllm_settings.enable_true_batch:
            raise ConfigError(
                NOT_ENABLED,
                seen="backbone_settings.mllm_settings.enable_true_batch=False",
                do="set enable_true_batch: true, or call train_step, which runs one sample at a time",
            )
        answered = [None] * len(questions) if answers is None else answers
        samples = [
            {"id": str(at), "image": image, "question": question, "answer": answer}
            for at, (image, question, answer) in enumerate(zip(images, questions, answered, strict=True))
        ]
        batch = self.batch_of(samples, with_answer=answers is not None)
        vision = self.encoder.family.look(self.model.backbone, batch)
        stream = self.model.look(batch)
        positions = vision_intervals(batch["is_vision"])
        found = {
            "embeddings": stream.embeds,
            "attention_mask": batch.is_real.long(),
            "vision_token_positions": positions,
            "vision_positions": positions,
            "raw_vision_features": vision.features.view(len(samples), -1, vision.features.shape[-1]),
        }
        if answers is not None:
            found["answer_token_positions"] = _intervals(batch["is_answer"]) - batch["is_answer"].shape[1]
        return found

    def batch_of(self, samples: Sequence[Mapping[str, Any]], *, with_answer: bool = True) -> MicroBatch:
        """Samples as one micro-batch on the model's device; noise belongs to the samples' ids."""
        encoded = [self.encoder.encode(sample, with_answer=with_answer) for sample in samples]
        ids = np.array([_number_of(sample) for sample in samples], dtype=np.int64)
        rows = padded_rows(ids, max(len(one["input_ids"]) for one in encoded))
        device = next(self.model.parameters()).device
        return collate(encoded, rows, encoded_fields(self.encoder.family)).to(device)


def read_sections(config: Mapping[str, Any]) -> PruningConfig:
    """The sections of the original script's YAML that describe the task; keys they do not know are refused by name."""
    chosen = {name: config[name] for name in _OWN if name in config}
    return check_config(PruningConfig, Document(_plain(chosen)))


def _plain(value: Any) -> Any:
    return {str(k): _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _number_of(sample: Mapping[str, Any]) -> int:
    word = hashlib.blake2b(str(sample.get("id", "")).encode(), digest_size=8).digest()
    return int.from_bytes(word, "little") >> 1


def vision_intervals(is_vision: Tensor) -> Tensor:
    """[B, 2] first and last vision token of every row; rows whose intervals differ raise the original script's error."""
    found = _intervals(is_vision)
    whole = (found[:, 1] - found[:, 0] + 1).eq(is_vision.sum(1))
    if not bool(found.eq(found[0]).all()) or not bool(whole.all()):
        raise BatchError(
            NOT_ALIGNED,
            seen=f"intervals {found.tolist()[:8]}",
            do="use train_step_batch or PrunedVLM, which keep places per row and need no alignment",
        )
    return found


def _intervals(is_of: Tensor) -> Tensor:
    at = torch.arange(is_of.shape[1], device=is_of.device)
    first = torch.where(is_of, at, is_of.shape[1]).amin(1)
    return torch.stack([first, torch.where(is_of, at, -1).amax(1)], dim=1)


def replace_vision_tokens_in_embeddings_batch(
    embeddings: Tensor, vision_positions: Tensor, features: Tensor, attention_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Put features [B, M, d] where the vision interval was: embeddings, the new intervals, and the new mask."""
    first, last = (int(n) for n in vision_positions[0])
    if not bool(vision_positions.eq(vision_positions[0]).all()):
        raise BatchError(
            NOT_ALIGNED, seen=f"intervals {vision_positions.tolist()[:8]}", do="align them, or use PrunedVLM"
        )
    new = torch.cat([embeddings[:, :first], features.to(embeddings.dtype), embeddings[:, last + 1 :]], dim=1)
    ones = attention_mask.new_ones(features.shape[:2])
    mask = torch.cat([attention_mask[:, :first], ones, attention_mask[:, last + 1 :]], dim=1)
    positions = vision_positions.new_tensor([first, first + features.shape[1] - 1]).expand_as(vision_positions)
    return new, positions, mask


@contextmanager
def register_multi_layer_hooks_batch(
    model: PrunedVLM,
    vision_positions: Tensor,
    question_embeddings: Tensor,
    is_question: Tensor,
    attention_mask: Tensor,
    *,
    temperature: float = 1.0,
) -> Iterator[dict[int, Tensor]]:
    """While open, the backbone's own forward is pruned softly: masks bias the keys of later layers.

    Yields the masks [B, V] by layer, filled by the forward; they carry gradients.
    """
    first, last = (int(n) for n in vision_positions[0])
    masks: dict[int, Tensor] = {}
    biases: list[Tensor] = []

    def bias_keys(_layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return (args, {**kwargs, "attention_mask": biases[-1]}) if biases else None

    def prune(at: int) -> Any:
        def after(_layer: nn.Module, _args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            may_look = is_question[:, None, :].expand(-1, last - first + 1, -1)
            logits = model.pruners[str(at)](hidden[:, first : last + 1], question_embeddings, may_look)
            log_mask = log_keep(logits, None, temperature)
            masks[at] = keep_of(log_mask)
            key = nn.functional.pad(log_mask, (first, hidden.shape[1] - last - 1))
            base = biases[-1] if biases else _base(attention_mask, hidden.dtype)
            biases.append(with_key_bias(base, key))

        return after

    layers = decoder_layers(model.backbone)
    handles = [layer.register_forward_pre_hook(bias_keys, with_kwargs=True) for layer in layers]
    handles += [layers[at].register_forward_hook(prune(at)) for at in model.method.pruning_layers]
    try:
        yield masks
    finally:
        for handle in handles:
            handle.remove()


def _base(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    may_attend = causal_mask_4d(attention_mask.bool())
    return torch.zeros(may_attend.shape, dtype=dtype, device=attention_mask.device).masked_fill(~may_attend, DEAD)


def train_step_batch(batch: Sequence[Mapping[str, Any]], info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """All samples in one forward of each way: weighted losses by optimiser, and metrics.

    `info` holds backbone (a `Backbone`), global_batch_index (from 1), total_planned_batches, and optionally seed.
    """
    return _step([list(batch)], info)


def train_step(batch: Sequence[Mapping[str, Any]], info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The same losses, one sample at a time: the way back."""
    return _step([[sample] for sample in batch], info)


def train_step_fn(config: Mapping[str, Any]) -> StepFunction:
    """The step a configuration asks for: `trainer_settings.train_step_fn`, else by `enable_true_batch`."""
    named = config.get("trainer_settings", {}).get("train_step_fn")
    if named is not None:
        chosen: StepFunction = named
        return chosen
    is_on = config.get("backbone_settings", {}).get("mllm_settings", {}).get("enable_true_batch", False)
    return train_step_batch if is_on else train_step


def _step(parts: Sequence[Sequence[Mapping[str, Any]]], info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Per-sample values of every part, divided once by all samples."""
    backbone: Backbone = info["backbone"]
    model = backbone.model
    objective = PruningObjective(
        method=model.method, progress=progress_of(info["global_batch_index"] - 1, info["total_planned_batches"])
    )
    moment = moment_at(model.method, objective.progress)
    values: dict[str, list[Tensor]] = {term: [] for term in objective.terms}
    watched: list[dict[str, Tensor]] = []
    for part in parts:
        batch = backbone.batch_of(part)
        with noise_for(batch, seed=int(info.get("seed", 0))):
            found, passed, stream = watched_terms(model, batch, temperature=moment.temperature, terms=objective.terms)
        values = {term: [*values[term], found[term]] for term in values}
        watched.append(_watch(model, passed, stream))
    raw = {term: torch.cat(each).mean() for term, each in values.items()}
    weights = objective.weights(moment, is_training=True)
    weighted = {term: weights[term] * value for term, value in raw.items()}
    merged = (TASK, ADVERSARIAL, DISTILLATION)
    return {
        "discriminator": {t: v for t, v in weighted.items() if t == DISCRIMINATOR},
        "token_merger": {t: v for t, v in weighted.items() if t in merged} if model.merger is not None else {},
        "layer_pruners": {t: v for t, v in weighted.items() if t != DISCRIMINATOR},
        "metrics": {**_metrics(watched), **{f"raw_{t}": float(v.detach()) for t, v in raw.items()}},
    }


def _watch(model: PrunedVLM, found: Pass, stream: Stream) -> dict[str, Tensor]:
    """[N] each: the share every pruning layer keeps, and the vision tokens."""
    places = stream.vision
    kept = {
        f"L{layer}_kept": places.means(keep_of(mask.detach()))
        for layer, mask in zip(model.method.pruning_layers, found.soft, strict=True)
    }
    return {**kept, "vision_tokens": places.lengths.float()}


def _metrics(watched: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    joined = {name: torch.cat([one[name] for one in watched]) for name in watched[0]}
    tokens = joined.pop("vision_tokens")
    means = {name: float(values.mean()) for name, values in joined.items()}
    return {
        **means,
        "cumulative_kept_ratio": float(np.prod(list(means.values()))),
        "vision_tokens_mean": float(tokens.mean()),
        "vision_tokens_max": float(tokens.max()),
        "vision_tokens_min": float(tokens.min()),
    }
