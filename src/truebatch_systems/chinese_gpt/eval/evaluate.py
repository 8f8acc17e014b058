"""Figures of a trained model on texts it never saw: perplexity beside n-grams, and answers that are right.

test samples -> loss (statements, dialogues) -> perplexity;  questions -> greedy answers -> equal to what was written?
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import nn

from truebatch.generation.config import Generation
from truebatch.io.atomic_files import write_text
from truebatch.planning.config import PlanConfig
from truebatch.planning.lengths.measured_values import Measured
from truebatch.training.step import StepEngine
from truebatch.training.system import SizedDataset
from truebatch.training.validation import evaluate_loss
from truebatch_systems.chinese_gpt.config import ChineseGPTConfig
from truebatch_systems.chinese_gpt.data.characters import normalise
from truebatch_systems.chinese_gpt.data.dialogues import is_dialogue, question_and_answer
from truebatch_systems.chinese_gpt.data.prepare import PreparedTexts
from truebatch_systems.chinese_gpt.data.samples import FIELDS, EncodedTexts, encode_texts
from truebatch_systems.chinese_gpt.eval.ngrams import NGrams, count_ngrams, ngram_perplexities
from truebatch_systems.chinese_gpt.model.generate import continue_texts
from truebatch_systems.chinese_gpt.model.model import ChineseGPT
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import Vocab
from truebatch_systems.chinese_gpt.train.objective import TERM, NextToken

ANSWERS = "answers.jsonl"
EVALUATION_CELLS = 4096


def evaluate(
    config: ChineseGPTConfig, ready: PreparedTexts, model: nn.Module, samples: SizedDataset, out: Path
) -> dict[str, Any]:
    """Perplexity of statements and dialogues beside unigram and bigram models, and the share of right answers.

    Every answer is written to `out`/answers.jsonl with what was asked and what was expected.
    """
    gpt = cast(ChineseGPT, model).eval()
    held, train = (_in_words_of(gpt, config, ready.vocab, cast(EncodedTexts, part)) for part in (samples, ready.train))
    ngrams = count_ngrams(train, len(gpt.vocab))
    told = _part(held, [not is_dialogue(text.text) for text in held.texts])
    asked = _part(held, [is_dialogue(text.text) for text in held.texts])
    tokens = int(held.lengths.sum())
    figures: dict[str, Any] = {"samples": len(held), "unknown_rate": held.num_unknown / max(tokens, 1)}
    figures |= _perplexities(gpt, held, ngrams)
    figures |= {
        name: {"samples": len(part), **_perplexities(gpt, part, ngrams)}
        for name, part in (("statements", told), ("dialogues", asked))
        if len(part)
    }
    return figures | (score_answers(gpt, _whole_texts(asked), out / ANSWERS) if len(asked) else {})


def _in_words_of(model: ChineseGPT, config: ChineseGPTConfig, vocab: Vocab, samples: EncodedTexts) -> EncodedTexts:
    """The samples with the ids of the model's own vocabulary: the corpus may have grown, or be another one by now."""
    if vocab.hash == model.vocab.hash:
        return samples
    most = model.shape.max_seq_len
    return encode_texts(
        samples.texts, model.vocab, max_seq_len=most, overlong=config.overlong, mask_prompt=config.mask_prompt
    )


def _whole_texts(samples: EncodedTexts) -> list[str]:
    """Every text once, also where it was split into several samples."""
    return list({(text.file, text.number): text.text for text in samples.texts}.values())


def _part(samples: EncodedTexts, is_kept: Sequence[bool]) -> EncodedTexts:
    kept = [i for i, keep in enumerate(is_kept) if keep]
    return replace(
        samples,
        texts=tuple(samples.texts[i] for i in kept),
        input_ids=tuple(samples.input_ids[i] for i in kept),
        labels=tuple(samples.labels[i] for i in kept),
    )


def _perplexities(model: ChineseGPT, samples: EncodedTexts, ngrams: NGrams) -> dict[str, float]:
    perplexity = measure_perplexity(model, samples)
    unigram, bigram = ngram_perplexities(ngrams, samples)
    return {
        "perplexity": perplexity,
        "unigram_perplexity": unigram,
        "bigram_perplexity": bigram,
        "times_better_than_unigram": unigram / perplexity,
        "times_better_than_bigram": bigram / perplexity,
    }


def measure_perplexity(model: ChineseGPT, samples: EncodedTexts) -> float:
    """exp of the mean loss over all tokens that are learned, however they are cut into forward passes."""
    engine = StepEngine(model=model, objective=NextToken(), groups=(), device=model.tokens.weight.device)
    cells = max(EVALUATION_CELLS, int(samples.lengths.max(initial=0)))
    measured = Measured(lengths=np.asarray(samples.lengths, dtype=np.int64))
    loss = evaluate_loss(engine, samples, measured, FIELDS, PlanConfig(cells=cells))
    return math.exp(loss[TERM])


def score_answers(model: ChineseGPT, dialogues: Sequence[str], file: Path) -> dict[str, Any]:
    """The likeliest answer to every question, and whether it is word for word the one that was written."""
    pairs = [question_and_answer(text) for text in dialogues]
    settings = Generation(max_new_tokens=model.shape.max_seq_len, temperature=0.0)
    answers = continue_texts(model, [question for question, _ in pairs], settings)
    is_right = [normalise(mine) == normalise(theirs) for mine, (_, theirs) in zip(answers, pairs, strict=True)]
    lines = [
        json.dumps({"question": q, "expected": a, "answer": mine, "is_right": right}, ensure_ascii=False)
        for (q, a), mine, right in zip(pairs, answers, is_right, strict=True)
    ]
    write_text(file, "\n".join(lines) + "\n")
    right = sum(is_right)
    return {"answers_asked": len(pairs), "answers_right": right, "answers_right_share": right / max(len(pairs), 1)}
