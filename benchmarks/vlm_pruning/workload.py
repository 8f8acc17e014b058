"""What the benchmark of vlm_pruning runs: a LLaVA-1.5 shape with random weights, pictures, questions, and batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from truebatch.batch.keyed_random import name_purposes
from truebatch.data.loader import LoadedStep, LoaderConfig, load_steps
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.training.optim.param_groups import make_groups
from truebatch.training.step import StepEngine, apply_update, step_counts, take_gradients
from truebatch_systems.vlm_pruning.backbones.full_size import clip_processor, llava_7b, random_llava
from truebatch_systems.vlm_pruning.backbones.interface import ImageReader
from truebatch_systems.vlm_pruning.backbones.load import open_encoder
from truebatch_systems.vlm_pruning.backbones.tiny import IMAGE, tiny_config
from truebatch_systems.vlm_pruning.config import BackboneSettings, MethodSettings, MllmSettings, PruningTrain
from truebatch_systems.vlm_pruning.data.encode import EncodedSamples, SampleEncoder, encoded_fields, measure_tokens
from truebatch_systems.vlm_pruning.model.decoder_layers import Stream
from truebatch_systems.vlm_pruning.model.model import Pass, PrunedVLM
from truebatch_systems.vlm_pruning.train.objective import PruningObjective
from truebatch_systems.vlm_pruning.train.param_groups import pruning_groups

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TINY_METHOD = MethodSettings(
    pruning_layers=(1, 3),
    pruner_d_internal=16,
    pruner_num_heads=2,
    disc_d_d=16,
    disc_target_layers=(-1, -2, -3),
    use_token_num_target=False,
    target_sparsity=0.6,
)
LARGE_METHOD = MethodSettings(use_token_num_target=False, target_sparsity=0.7)
Before = Callable[[Any], None]
"""What is done to the samples of a micro-batch inside a step, before the model sees it."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A model with its optimisers, and samples."""

    model: PrunedVLM
    engine: StepEngine
    encoder: SampleEncoder
    samples: list[dict[str, Any]]
    lengths: Any


def make_work(device: torch.device, *, is_large: bool, number: int) -> Work:
    """Build the model in bf16 on a GPU (fp32 on a CPU)."""
    config = llava_7b() if is_large else tiny_config("tiny-llava")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backbone = random_llava(config, device, dtype)
    encoder = encoder_for(config)
    model = PrunedVLM(backbone, encoder.family, LARGE_METHOD if is_large else TINY_METHOD).to(device)
    samples = make_samples(number)
    return Work(model, engine_of(model, device), encoder, samples, measure_tokens(encoder, samples))


def encoder_for(config: PretrainedConfig) -> SampleEncoder:
    """The tiny tokenizer in front of any LLaVA-1.5 shape: its ids are ids of the larger vocabulary too."""
    tiny = open_encoder(BackboneSettings(name="tiny-llava"))
    return SampleEncoder(
        family=tiny.family, images=ImageReader(config, None, MllmSettings()), tokenizer=tiny.tokenizer,
        image_id=IMAGE, end_id=tiny.end_id, prompt=tiny.prompt,
    )  # fmt: skip


def engine_of(model: PrunedVLM, device: torch.device) -> StepEngine:
    """The training room's own step: two optimisers, bf16 autocast on a GPU."""
    name_purposes(model)
    model.train()
    is_card = device.type == "cuda"
    return StepEngine(
        model=model,
        objective=PruningObjective(method=model.method),
        groups=make_groups(pruning_groups(model, PruningTrain()), model),
        device=device,
        autocast=lambda: torch.autocast(device.type, torch.bfloat16, enabled=is_card),
    )


def run_steps(engine: StepEngine, steps: Any, before: Before | None = None) -> None:
    """The training room's own step: gradients of all micro-batches, then the updates."""
    for step in steps:
        if before is not None:
            for batch in step.batches:
                before(batch)
        counts = step_counts(step.batches, engine.objective, step.counts, device=engine.device)
        apply_update(engine, take_gradients(engine, step.batches, counts, epoch=0))


class TwoWholeForwards(PrunedVLM):
    """As the note does it: the unpruned way begins at the first layer again."""

    def unpruned(self, stream: Stream, *, wanted: Sequence[int] = (), start: Pass | None = None) -> Pass:
        """All layers, whatever has run already."""
        return super().unpruned(stream, wanted=wanted)


@dataclass(frozen=True, slots=True, eq=False)
class NoteImages:
    """What the note's step does to images: all of them through transformers' processor, then one by one again.

    The second time is for the place of the answer, which it finds by preprocessing each sample once more.
    """

    work: Work
    processor: Any

    def __call__(self, batch: Any) -> None:
        images = [self.work.samples[int(at)]["image"] for at in batch.sample_ids]
        pixels = self.processor(images, return_tensors="pt")["pixel_values"]
        pixels.to(self.work.engine.device)
        for image in images:
            self.processor([image], return_tensors="pt")


def note_images(work: Work) -> NoteImages:
    """The note's preprocessing for the samples of some work."""
    return NoteImages(work, clip_processor(work.encoder.images.config.vision_config.image_size))


def make_samples(number: int, *, even: int | None = None) -> list[dict[str, Any]]:
    """Photographs' sizes of noise, and questions of log-normal lengths around thirty words, or of `even` words each."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (480, 640, 3), dtype=np.uint8)
    words = np.clip(draw.lognormal(3.2, 0.6, number).round(), 3, 120).astype(int)
    made = []
    for at in range(number):
        image = Image.fromarray(np.roll(pixels, int(at * 37), axis=1))
        count = int(words[at]) if even is None else even
        question = " ".join(["what"] * count) + "?"
        made.append({"id": f"s{at}", "image": image, "question": question, "answer": "red circle"})
    return made


def repeated(work: Work, number: int) -> Work:
    """The same samples again and again until there are so many."""
    samples = [work.samples[at % len(work.samples)] for at in range(number)]
    return replace(work, samples=samples, lengths=np.resize(work.lengths, number))


def planned_steps(work: Work, *, samples: int | None, cells: int | None, per_step: int, workers: int) -> Any:
    """The steps of one epoch through the loader, pixels and all; micro-batches of so many samples or cells."""
    config = PlanConfig(samples=samples, cells=cells, samples_per_step=per_step)
    plan = build_plan(work.lengths, config)
    dataset = EncodedSamples(work.samples, work.encoder)
    loading = LoaderConfig(workers=workers, pin_memory=work.engine.device.type == "cuda")
    return load_steps(plan, dataset, encoded_fields(work.encoder.family), config=loading)


def widest_and_narrowest(steps: Sequence[LoadedStep]) -> list[LoadedStep]:
    """The micro-batches with most and fewest cells, each as a step: run once before anything is timed."""
    batches = sorted((b for step in steps for b in step.batches), key=lambda b: b.segments.num_cells)
    return [LoadedStep(0, (batch,), {}) for batch in (batches[-1], batches[0])]


def preprocessing_seconds(work: Work, number: int) -> dict[str, float]:
    """CPU seconds a sample: ours to bytes, and transformers' own image processor to floats."""
    ours = _seconds(work.encoder.encode, work.samples[:number])
    made = note_images(work).processor
    theirs = _seconds(lambda sample: made([sample["image"]], return_tensors="np"), work.samples[:number])
    return {"ours": ours, "transformers": theirs}


def _seconds(call: Any, samples: Sequence[Any]) -> float:
    call(samples[0])
    began = time.process_time()
    for sample in samples:
        call(sample)
    return (time.process_time() - began) / len(samples)
