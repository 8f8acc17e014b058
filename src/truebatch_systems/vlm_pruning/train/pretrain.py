"""A tiny backbone that can see: made shapes and words get a common space, then the whole model learns to answer.

tiny random weights -> tower and projector learn to name patches -> the model learns to answer -> a backbone folder
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from truebatch.hf.forward_inputs import inner_model
from truebatch.hf.pretrained import without_chatter
from truebatch.testing.toy_images import SHAPES
from truebatch.training.load_trained import open_trained
from truebatch.training.train_system import MODEL, Start, train_system
from truebatch_systems.vlm_pruning.backbones.llava import CLIP_MEAN, CLIP_STD, tower_features
from truebatch_systems.vlm_pruning.backbones.tiny import tiny_model, tiny_tokenizer
from truebatch_systems.vlm_pruning.config import (
    BackboneSettings,
    DatasetSettings,
    MethodSettings,
    MllmSettings,
    PruningConfig,
    PruningTrain,
)
from truebatch_systems.vlm_pruning.data.encode import EncodedSamples
from truebatch_systems.vlm_pruning.data.image_size import RESAMPLE
from truebatch_systems.vlm_pruning.data.toy_shapes import COLOURS, EDGES, Scene, draw_scene, edge_of, make_scene
from truebatch_systems.vlm_pruning.eval.evaluate import evaluate_modes
from truebatch_systems.vlm_pruning.model.model import PrunedVLM
from truebatch_systems.vlm_pruning.system import VLM_PRUNING

PROMPT = "{images} {question}"
"""The prompt of the tiny backbone: what is asked for stands last, so that few steps are enough to learn it."""
_NOTHING = -1
_BATCH = 48
_NEXT_WEIGHTS = 1000
"""Between the seeds of the weights of two beginnings."""


@dataclass(frozen=True, slots=True)
class View:
    """Pictures as a vision tower gets them."""

    grid: int = 4
    """Cells of a side of a picture."""
    cell: int = 14
    """Pixels of a side of a cell, as drawn."""
    side: int = 56
    """Pixels of a side of the picture, as resized."""


COMMON = View()
"""Pictures of made shapes as they are: a cell is a patch."""


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """Images with what each patch shows. Shapes: I images, P patches of an image."""

    pixels: Tensor
    """[I, 3, H, W] as the tower takes them."""
    things: tuple[Tensor, Tensor]
    """[I, P] shape and colour by number; -1 where a patch is empty."""
    edges: Tensor
    """[P] the edge each patch lies at, by number; -1 in corners and inside."""


def make_patches(images: int, *, seed: int = 0, view: View = COMMON, patch: int = 14) -> Patches:
    """The first training images with the contents of the cell in the middle of each patch."""
    scenes = [make_scene(number, seed=seed, grid=view.grid) for number in range(images)]
    drawn = [draw_scene(scene, grid=view.grid, cell=view.cell, seed=seed) for scene in scenes]
    sized = [one if one.width == view.side else one.resize((view.side, view.side), RESAMPLE) for one in drawn]
    pixels = np.stack([np.asarray(one, dtype=np.float32) for one in sized])
    mean, spread = (torch.tensor(values).view(3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))
    number = view.side // patch
    at = np.arange(number) * 2 + 1  # twice the middle of a patch, in patches
    row = at * view.grid // (2 * number)
    cells = (row[:, None] * view.grid + row[None, :]).flatten()
    things = torch.from_numpy(np.stack([_contents(scene, view.grid)[:, cells] for scene in scenes]))  # [I, 2, P]
    edges = [edge_of(*divmod(int(cell), view.grid), grid=view.grid) for cell in cells]
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


def align_tower(
    backbone: nn.Module, *, images: int = 1600, steps: int = 600, seed: int = 0, views: Sequence[View] = (COMMON,)
) -> float:
    """Teach tower and projector of a tiny LLaVA to bring a patch near the words for what it shows and where it lies.

    A real LLaVA begins with a tower and a projector that were trained in such a way. Views take turns. Gives the share
    of patches named rightly in every respect at the end.
    """
    inner: Any = inner_model(backbone)
    seen, words = [make_patches(images, seed=seed, view=view) for view in views], _word_vectors(backbone)
    learned = [*inner.vision_tower.parameters(), *inner.multi_modal_projector.parameters()]
    optimiser = torch.optim.AdamW(learned, lr=3e-3)
    draw = torch.Generator().manual_seed(seed)
    right = 0.0
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * _cosine(step / steps)
        patches = seen[step % len(seen)]
        chosen = torch.randint(0, images, (_BATCH,), generator=draw)
        features = inner.multi_modal_projector(tower_features(backbone, patches.pixels[chosen]))  # [I, P, d]
        loss, right = _naming_loss(features, patches, chosen, words)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return right


def _cosine(done: float) -> float:
    return 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * done))


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


def make_tiny_backbone(folder: Path, *, seed: int = 0, steps: int = 600, views: Sequence[View] = (COMMON,)) -> Path:
    """A tiny LLaVA whose tower sees shapes, as a folder transformers loads; the same seed gives the same weights."""
    model: Any = tiny_model("tiny-llava", seed=seed)
    align_tower(model, steps=steps, seed=seed, views=views)
    folder.mkdir(parents=True, exist_ok=True)
    with without_chatter():
        model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Lessons:
    """What a tiny backbone learns from."""

    samples: int = 19200
    epochs: int = 8
    steps: int = 600
    """In which its tower learns to see first."""
    dataset: str = "shapes"
    mllm: MllmSettings = field(default_factory=MllmSettings)
    views: tuple[View, ...] = (COMMON,)
    learning_rate: float = 2e-3
    start: Path | None = None
    """A backbone to go on with; None begins with a new one, whose tower learns to see first."""
    least_accuracy: float = 0.9
    """Of the answers to validation questions. One beginning in seven never learns to look for what is asked: its tower
    unlearns the shapes before the decoder uses them."""
    attempts: int = 3
    """Beginnings with other weights, until one has learned; with a backbone to go on with there is one."""


LESSONS = Lessons()


def pretrain_tiny(
    folder: Path, *, seed: int = 0, lessons: Lessons = LESSONS, say: Callable[[str], None] = lambda _line: None
) -> Path:
    """A tiny LLaVA that answers questions about made shapes: the folder to give as `backbone_settings.name`.

    The same call goes on where an earlier one was stopped. Use it with `backbone_settings.prompt` = PROMPT.
    """
    reached: dict[Path, float] = {}
    for attempt in range(1 if lessons.start else max(lessons.attempts, 1)):
        run = _learn(folder if attempt == 0 else folder / f"again-{attempt}", seed, attempt, lessons, say)
        reached[run] = _accuracy(run)
        if reached[run] >= lessons.least_accuracy:
            return run / MODEL
        say(f"it answers {reached[run]:.0%} of the validation questions, below {lessons.least_accuracy:.0%}")
        if attempt + 1 < lessons.attempts and not lessons.start:
            say("it begins again with other weights")
    return max(reached, key=lambda one: reached[one]) / MODEL


def _learn(folder: Path, seed: int, attempt: int, lessons: Lessons, say: Callable[[str], None]) -> Path:
    """One beginning: the run it was trained in."""
    aligned = lessons.start or folder / "aligned"
    if not (aligned / "config.json").exists():
        say("tower and projector learn to name what patches show")
        make_tiny_backbone(aligned, seed=seed + _NEXT_WEIGHTS * attempt, steps=lessons.steps, views=lessons.views)
    config = PruningConfig(
        backbone_settings=BackboneSettings(name=str(aligned), prompt=PROMPT, mllm_settings=lessons.mllm),
        method_settings=MethodSettings(stage="backbone"),
        dataset_settings=DatasetSettings(
            name=lessons.dataset, train=lessons.samples, validation=192, test=480, seed=seed
        ),
        train=PruningTrain(
            samples_per_step=32, epochs=lessons.epochs, learning_rate=lessons.learning_rate, min_learning_rate=2e-5,
            warmup_steps=50,
            validate_every=250, save_every=250, seed=seed,
        ),
    )  # fmt: skip
    if train_system(VLM_PRUNING, config, Start(out=folder / "run", say=say)).is_interrupted:
        raise KeyboardInterrupt  # a backbone that is half trained is no backbone; the same call goes on
    return folder / "run"


def _accuracy(run: Path) -> float:
    """Of the answers to the validation questions."""
    trained = open_trained(run)
    dataset, model = trained.task.data.validation, trained.model
    assert isinstance(dataset, EncodedSamples)
    assert isinstance(model, PrunedVLM)
    figures, _ = evaluate_modes(model, dataset.encoder, dataset.samples, ("origin",))
    return float(figures["origin"]["accuracy"])
