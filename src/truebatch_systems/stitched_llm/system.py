"""Layers of two donors joined by a trained adapter as one `System`: `truebatch train stitched_llm`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import generate_tokens
from truebatch.generation.interface import Prompt, key_prompts
from truebatch.generation.text_stream import stream_texts
from truebatch.hf.finetune.system import HeadSamples, PreparedRun, measure
from truebatch.hf.generate.decoder import hf_decoder
from truebatch.hf.heads.objective import HeadObjective
from truebatch.hf.pretrained import load_tokenizer
from truebatch.planning.rows import Layout
from truebatch.training.data import TrainData
from truebatch.training.system import SizedDataset, System, Task, TaskCommands
from truebatch.verification.choose_layout import choose_layout
from truebatch_systems.stitched_llm.config import StitchConfig
from truebatch_systems.stitched_llm.data import dataset
from truebatch_systems.stitched_llm.eval.evaluate import compare_donors, draw_perplexities
from truebatch_systems.stitched_llm.model.build import build, open_donors, sketch
from truebatch_systems.stitched_llm.model.mask_check import probe_masks
from truebatch_systems.stitched_llm.model.model import StitchedForCausalLM
from truebatch_systems.stitched_llm.model.save_load import save_adapter
from truebatch_systems.stitched_llm.train.trainable_parts import autocast_of

SELFTEST, EVALUATION = "mask_selftest.json", "eval.json"


def _build_model(config: StitchConfig, news: list[str]) -> nn.Module:
    """What the build found goes into `news`, for the lines at the start of a run."""
    built = build(config)
    news[:] = built.lines
    return built.model


def _describe(config: StitchConfig, ready: PreparedRun, news: Sequence[str]) -> list[str]:
    held = ready.validation.notes if ready.validation is not None else ()
    lines = [*ready.train.notes, *held, *news]
    train = config.train
    if train.batch_size is not None and train.samples_per_step is None:
        parts = f"{train.batch_size} x {train.gradient_accumulation_steps} x {train.devices}"
        tokens = measure(ready, ready.samples).lengths.mean() * train.num_samples_per_step()
        lines.append(
            f"effective batch: {parts} (forward pass x accumulation x devices) = {train.num_samples_per_step()} samples, "
            f"about {tokens:,.0f} tokens a step"
        )
    return lines


def _choose_layout(model: nn.Module) -> tuple[Layout, str]:
    """Packed where it is proven right on this very model, else padded."""
    choice = choose_layout(model)
    layout: Layout = "packed" if choice.layout == "packed" else "padded"
    reasons = "; ".join(f"not {name}: {why}" for name, why in choice.reasons.items())
    return layout, f"layout: {layout}, proven equal to one by one" + (f" ({reasons})" if reasons else "")


def _evaluate(
    config: StitchConfig, train: HeadSamples, model: nn.Module, samples: SizedDataset, out: Path
) -> Mapping[str, Any]:
    assert isinstance(model, StitchedForCausalLM)
    bottom, top = open_donors(config)
    found = compare_donors(model, bottom, top, train, samples, precision=config.train.precision)
    (out / EVALUATION).write_text(json.dumps({"perplexity": found}, indent=1), encoding="utf-8")
    draw_perplexities(found, out)
    worse = max(found["bottom_donor"], found.get("top_donor", 0.0))
    return {"perplexity": found, "stitched_over_worse_donor": found["stitched"] / worse}


def _generate(
    config: StitchConfig, model: nn.Module, prompts: Sequence[str], settings: Generation
) -> Iterator[tuple[int, str]]:
    assert isinstance(model, StitchedForCausalLM)
    tokenizer = load_tokenizer(dataset.sources_of(config).tokenizer, None)
    ids = [tuple(tokenizer(text)["input_ids"]) for text in prompts]
    keyed = [Prompt(ids=one, key=key) for one, key in zip(ids, key_prompts(settings.seed, ids), strict=True)]

    def read(tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    decoder = hf_decoder(model, end_ids=[tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else None)
    with autocast_of(model.device, config.train.precision):
        pieces = generate_tokens(decoder, keyed, settings, read=read)
        yield from stream_texts(pieces, read, settings.stop)


def _save(config: StitchConfig, model: nn.Module, folder: Path) -> None:
    """The adapter and what it belongs to, the tokenizer, and what the masks were found to be."""
    assert isinstance(model, StitchedForCausalLM)
    save_adapter(model, folder)
    load_tokenizer(dataset.sources_of(config).tokenizer, None).save_pretrained(folder)
    with autocast_of(model.device, config.train.precision):
        tested = probe_masks(model)
    (folder / SELFTEST).write_text(json.dumps(tested.as_dict(), indent=1), encoding="utf-8")


def prepare_task(config: StitchConfig) -> Task:
    """The texts of a configuration, encoded, with the model they are learned by and its loss."""
    ready = dataset.prepare_texts(config)
    news: list[str] = []
    return Task(
        data=TrainData(samples=ready.samples, fields=ready.head.fields, validation=ready.held_out),
        measure=partial(measure, ready),
        test=partial(dataset.load_test, config),
        build_model=partial(_build_model, config, news),
        objective=HeadObjective(head=ready.head),
        save=partial(_save, config),
        commands=TaskCommands(
            describe=partial(_describe, config, ready, news),
            choose_layout=_choose_layout,
            sketch=partial(sketch, config),
            evaluate=partial(_evaluate, config, ready.samples),
        ),
    )


STITCHED_LLM = System(
    name="stitched_llm",
    config_type=StitchConfig,
    prepare=prepare_task,
    restore_model=lambda config, weights: build(config).model,
    generate=_generate,
)
