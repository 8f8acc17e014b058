"""A tiny backbone that can see: made shapes and words get a common space, then the whole model learns to answer.

tiny random weights -> tower and projector learn to name patches -> the model learns to answer -> a backbone folder
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from truebatch.hf.finetuning.models import without_chatter
from truebatch.hf.inputs import inner_model
from truebatch.systems.vlm_pruning.optimisers import PruningTrain
from truebatch.systems.vlm_pruning.patches import CLIP_MEAN, CLIP_STD
from truebatch.systems.vlm_pruning.settings import BackboneSettings, DatasetSettings, MethodSettings
from truebatch.systems.vlm_pruning.shapes import COLOURS, EDGES, SHAPES, Scene, draw_scene, edge_of, make_scene
from truebatch.systems.vlm_pruning.system import VLM_PRUNING
from truebatch.systems.vlm_pruning.tiny import tiny_model, tiny_tokenizer
from truebatch.training.starting import MODEL, Start, settings_type, train_system

PROMPT = "{images} {question}"
"""The prompt of the tiny backbone: what is asked for stands last, so that few steps are enough to learn it."""
_NOTHING = -1
_BATCH = 48


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """Images with what each patch shows. Shapes: I images, P patches of an image."""

    pixels: Tensor
    """[I, 3, H, W] as the tower takes them."""
    things: tuple[Tensor, Tensor]
    """[I, P] shape and colour by number; -1 where a patch is empty."""
    edges: Tensor
    """[P] the edge each patch lies at, by number; -1 in corners and inside."""


def make_patches(images: int, *, seed: int = 0, grid: int = 4) -> Patches:
    """The first training images with the contents of their cells."""
    scenes = [make_scene(number, seed=seed, grid=grid) for number in range(images)]
    pixels = np.stack([np.asarray(draw_scene(scene, grid=grid, seed=seed), dtype=np.float32) for scene in scenes])
    mean, spread = (torch.tensor(values).view(3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))
    things = torch.from_numpy(np.stack([_contents(scene, grid) for scene in scenes]))  # [I, 2, P]
    edges = [edge_of(*divmod(cell, grid), grid=grid) for cell in range(grid * grid)]
    return Patches(
        pixels=(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - mean) / spread,
        things=(things[:, 0], things[:, 1]),
        edges=torch.tensor([_NOTHING if edge is None else EDGES.index(edge) for edge in edges]),
    )


def _contents(scene: Scene, grid: int) -> Any:
    found = np.full((2, grid * grid), _NOTHING, dtype=np.int64)
    for thing in scene.things:
        found[:, thing.row * grid + thing.column] = SHAPES.index(thing.shape), tuple(COLOURS).index(thing.colour)
    return found


def align_tower(backbone: nn.Module, *, images: int = 1600, steps: int = 600, seed: int = 0) -> float:
    """Teach tower and projector of a tiny LLaVA to bring a patch near the words for what it shows and where it lies.

    A real LLaVA begins with a tower and a projector that were trained in such a way. Gives the share of patches named
    rightly in every respect at the end.
    """
    inner: Any = inner_model(backbone)
    patches, words = make_patches(images, seed=seed), _word_vectors(backbone)
    learned = [*inner.vision_tower.parameters(), *inner.multi_modal_projector.parameters()]
    optimiser = torch.optim.AdamW(learned, lr=3e-3)
    draw = torch.Generator().manual_seed(seed)
    right = 0.0
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * _cosine(step / steps)
        chosen = torch.randint(0, images, (_BATCH,), generator=draw)
        loss, right = _naming_loss(_features(inner, patches.pixels[chosen]), patches, chosen, words)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return right


def _cosine(done: float) -> float:
    return 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * done))


def _features(inner: Any, pixels: Tensor) -> Tensor:
    """[I, P, d] projected patches, the way the model itself takes them."""
    layer = inner.config.vision_feature_layer
    states = inner.vision_tower(pixels, output_hidden_states=True).hidden_states[layer][:, 1:]
    projected: Tensor = inner.multi_modal_projector(states)
    return projected


def _word_vectors(backbone: nn.Module) -> list[Tensor]:
    """Embeddings [n, d] of the words for shapes, colours and edges; they stay as they are."""
    tokenizer, embedding = tiny_tokenizer(), backbone.get_input_embeddings().weight.detach()  # type: ignore[operator]
    kinds: list[Sequence[str]] = [SHAPES, tuple(COLOURS), EDGES]
    ids = [[tokenizer(f" {word}", add_special_tokens=False)["input_ids"][0] for word in words] for words in kinds]
    return [embedding[one].clone() for one in ids]


def _naming_loss(features: Tensor, patches: Patches, chosen: Tensor, words: list[Tensor]) -> tuple[Tensor, float]:
    """How badly projected patches name what they show; where there is nothing to name, no word is near."""
    flat = features.flatten(0, 1)
    targets = [*(part[chosen].flatten() for part in patches.things), patches.edges.repeat(len(chosen))]
    loss = 1e-3 * flat.pow(2).sum(-1).mean()
    is_right = torch.ones(len(flat), dtype=torch.bool)
    for near, target in zip((flat @ one.T for one in words), targets, strict=True):
        loss = loss + nn.functional.cross_entropy(near, target, ignore_index=_NOTHING)
        loss = loss + 0.3 * near[target == _NOTHING].pow(2).sum() / max(near.numel(), 1)
        is_right &= (near.argmax(-1) == target) | (target == _NOTHING)
    return loss, float(is_right.float().mean())


def make_tiny_backbone(folder: Path, *, seed: int = 0, steps: int = 600) -> Path:
    """A tiny LLaVA whose tower sees shapes, as a folder transformers loads; the same seed gives the same weights."""
    model: Any = tiny_model("tiny-llava", seed=seed)
    align_tower(model, steps=steps, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    with without_chatter():
        model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def pretrain_tiny(
    folder: Path,
    *,
    seed: int = 0,
    samples: int = 9600,
    epochs: int = 6,
    steps: int = 600,
    say: Callable[[str], None] = lambda _line: None,
) -> Path:
    """A tiny LLaVA that answers questions about made shapes: the folder to give as `backbone_settings.name`.

    The same call goes on where an earlier one was stopped. Use it with `backbone_settings.prompt` = PROMPT.
    """
    aligned = folder / "aligned"
    if not (aligned / "config.json").exists():
        say("tower and projector learn to name what patches show")
        make_tiny_backbone(aligned, seed=seed, steps=steps)
    config = settings_type(VLM_PRUNING)(
        backbone_settings=BackboneSettings(name=str(aligned), prompt=PROMPT),
        method_settings=MethodSettings(stage="backbone"),
        dataset_settings=DatasetSettings(train=samples, validation=192, test=480, seed=seed),
        train=PruningTrain(
            samples_per_step=32, epochs=epochs, learning_rate=2e-3, min_learning_rate=2e-5, warmup_steps=50,
            validate_every=250, save_every=250, seed=seed,
        ),
    )  # fmt: skip
    train_system(VLM_PRUNING, config, Start(out=folder / "run", say=say))
    return folder / "run" / MODEL
