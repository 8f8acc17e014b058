"""Evaluation: the same samples through every mode, judged one by one, with what each decoder layer had to look at.

samples -> prompts -> greedy answers (origin | merge_only | soft | hard) -> judge -> figures, predictions
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch.generation.interface import Prompt
from truebatch.io.atomic_files import write_text
from truebatch.reports.tables import Table
from truebatch.training.system import SizedDataset
from truebatch_systems.vlm_pruning.config import EvalMode, PruningConfig
from truebatch_systems.vlm_pruning.data.encode import EncodedSamples, Sample, SampleEncoder
from truebatch_systems.vlm_pruning.eval.baselines import WAYS, UntrainedPruning, Way
from truebatch_systems.vlm_pruning.eval.generate import PrunedDecoder, PrunedSession, open_decoder, sample_prompts
from truebatch_systems.vlm_pruning.eval.metrics import Answered, lost_points, mode_figures, search_score
from truebatch_systems.vlm_pruning.eval.scorers import Judged, judge_of
from truebatch_systems.vlm_pruning.model.model import PrunedVLM

ROWS = 32
"""Samples answered in one forward pass."""
LEARNED = "learned"


class _Accounting:
    """A decoder that remembers how many vision tokens each layer saw of each prompt."""

    def __init__(self, decoder: PrunedDecoder) -> None:
        self.inner = decoder
        self.end_ids, self.max_length = decoder.end_ids, decoder.max_length
        self.seen: dict[int, tuple[int, ...]] = {}
        """By the identity of the prompt."""

    def start(self, prompts: Sequence[Prompt], /) -> tuple[torch.Tensor, PrunedSession]:
        logits, session = self.inner.start(prompts)
        layers = torch.stack(session.vision_tokens).T.tolist()
        for prompt, row in zip(prompts, layers, strict=True):
            self.seen[id(prompt)] = tuple(int(n) for n in row)
        return logits, session


def answer_samples(
    model: PrunedVLM,
    encoder: SampleEncoder,
    samples: Sequence[Sample],
    *,
    mode: EvalMode = "hard",
    max_new_tokens: int = 20,
    rows: int = ROWS,
) -> list[Answered]:
    """What the model says, greedily, about every sample. Neither `rows` nor other samples change an answer."""
    settings = Generation(max_new_tokens=max_new_tokens, temperature=0.0)
    encoder = encoder.unmerged() if mode == "origin" else encoder  # the backbone as it is
    decoder = _Accounting(open_decoder(model, encoder, mode=mode))
    found: list[Answered] = []
    remaining = iter(samples)
    while part := list(islice(remaining, rows)):
        # Prompts hold pixels: only those of one forward pass are in memory.
        prompts = sample_prompts(encoder, part)
        said = collect(generate_tokens(decoder, prompts, settings, rows=rows), len(prompts))
        texts = [encoder.tokenizer.decode(one.tokens, skip_special_tokens=True).strip() for one in said]
        found += [Answered(text, decoder.seen[id(p)]) for text, p in zip(texts, prompts, strict=True)]
        decoder.seen.clear()
    return found


def evaluate_modes(
    model: PrunedVLM,
    encoder: SampleEncoder,
    samples: Sequence[Sample],
    modes: Sequence[EvalMode],
    *,
    max_new_tokens: int = 20,
) -> tuple[dict[str, Any], dict[str, list[tuple[Judged, Answered]]]]:
    """Figures of every mode, and every prediction with its score."""
    judge = judge_of(samples)
    figures: dict[str, Any] = {}
    predictions: dict[str, list[tuple[Judged, Answered]]] = {}
    for mode in modes:
        answered = answer_samples(model, encoder, samples, mode=mode, max_new_tokens=max_new_tokens)
        judged = [Judged(s, a.text, judge(a.text, s)) for s, a in zip(samples, answered, strict=True)]
        figures[mode] = mode_figures(judge, judged, answered)
        predictions[mode] = list(zip(judged, answered, strict=True))
    return figures, predictions


def evaluate(config: PruningConfig, model: nn.Module, dataset: SizedDataset, out: Path) -> Mapping[str, Any]:
    """Every mode of `eval_mode` on the same samples; predictions go to `out`/predictions-MODE.jsonl."""
    pruned, held = cast(PrunedVLM, model), cast(EncodedSamples, dataset)
    settings = config.evaluation_settings
    samples = chosen_samples(held, settings.eval_max_samples)
    modes: Sequence[EvalMode] = settings.eval_mode if pruned.method.stage == "pruning" else ("origin",)
    figures, predictions = evaluate_modes(pruned, held.encoder, samples, modes, max_new_tokens=settings.max_new_tokens)
    for mode, ones in predictions.items():
        write_text(out / f"predictions-{mode}.jsonl", "".join(_line(*one) for one in ones))
    lost = lost_points(figures)
    if not lost:
        return figures
    scored = {"search_score": search_score(figures)} if "hard" in figures else {}
    return {**figures, "points_lost": lost, **scored}


def chosen_samples(dataset: EncodedSamples, most: int | None) -> list[Sample]:
    """The first so many samples, always the same ones."""
    number = len(dataset) if most is None else min(most, len(dataset))
    return [dataset.samples[at] for at in range(number)]


def _line(judged: Judged, answered: Answered) -> str:
    sample = judged.sample
    kept = {
        "id": sample.get("id"),
        "question": sample.get("question"),
        "answer": sample.get("answer"),
        "prediction": judged.prediction,
        "score": judged.score,
        "category": sample.get("category"),
        **({"extra": sample["extra"]} if sample.get("extra") else {}),
        "tokens_per_layer": answered.layer_tokens,
    }
    return json.dumps(kept, ensure_ascii=False) + "\n"


def budget_curve(
    model: PrunedVLM,
    encoder: SampleEncoder,
    samples: Sequence[Sample],
    budgets: Sequence[float],
    *,
    max_new_tokens: int = 20,
) -> dict[str, list[tuple[float, float]]]:
    """Way to prune -> (average share of tokens a layer really saw, accuracy), at every budget that can be met.

    The trained heads and the untrained ways keep the same number of tokens at the same layers.
    """
    judge = judge_of(samples)
    found: dict[str, list[tuple[float, float]]] = {}
    for way in (LEARNED, *WAYS):
        for budget in budgets:
            if budget < (model.method.pruning_layers[0] + 1) / model.num_layers:
                continue
            answered = answer_samples(at_budget(model, budget, way), encoder, samples, max_new_tokens=max_new_tokens)
            scores = [judge(a.text, s) for s, a in zip(samples, answered, strict=True)]
            seen = sum(sum(a.layer_tokens) for a in answered)
            whole = sum(a.layer_tokens[0] * len(a.layer_tokens) for a in answered)
            found.setdefault(way, []).append((seen / max(whole, 1), sum(scores) / max(len(scores), 1)))
    return found


def at_budget(model: PrunedVLM, budget: float, way: str = LEARNED) -> PrunedVLM:
    """The model with another budget that it meets exactly, choosing by its own heads or in an untrained way."""
    method = replace(model.method, choice="top_k", budget_of="sample")
    method = replace(method, use_token_num_target=False, target_token_num=None, target_sparsity=1 - budget)
    if way != LEARNED:
        return UntrainedPruning(model, cast(Way, way), method=method)
    same = PrunedVLM(model.backbone, model.family, replace(method, teacher="none"))
    same.pruners, same.merger = model.pruners, model.merger
    return same.eval()


def category_table(figures: Mapping[str, Any]) -> Table:
    """Accuracy of every mode, by category."""
    modes = [name for name, found in figures.items() if isinstance(found, Mapping) and "by_category" in found]
    names = sorted({name for mode in modes for name in figures[mode]["by_category"]})
    rows = [(name, *(f"{figures[mode]['by_category'].get(name, 0.0):.3f}" for mode in modes)) for name in names]
    total = ("all", *(f"{figures[mode]['accuracy']:.3f}" for mode in modes))
    return Table(("category", *modes), (*rows, total), "Accuracy by category")
