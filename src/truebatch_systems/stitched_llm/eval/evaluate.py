"""How good a stitched model is: its perplexity beside those of both donors, of the cut alone, and of word counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.losses import IGNORE
from truebatch.hf.heads.objective import HeadObjective
from truebatch.io.atomic_files import write_text
from truebatch.planning.config import PlanConfig
from truebatch.reports.plots import bars
from truebatch.training.data import measure_by_reading
from truebatch.training.step import StepEngine
from truebatch.training.validation import evaluate_loss
from truebatch_systems.stitched_llm.model.adapter import start_identity
from truebatch_systems.stitched_llm.model.donors import Donor
from truebatch_systems.stitched_llm.model.model import StitchedForCausalLM
from truebatch_systems.stitched_llm.train.trainable_parts import autocast_of

PICTURE = "perplexity.svg"


def perplexity(model: nn.Module, samples: Any, *, cells: int = 16384, precision: str = "fp32") -> float:
    """exp(sum of nll / number of labels) over all samples, in padded micro-batches of at most so many cells."""
    head = head_of(model)
    device = next(model.parameters()).device
    engine = StepEngine(
        model=model,
        objective=HeadObjective(head=head),
        groups=(),
        device=device,
        autocast=lambda: autocast_of(device, precision),
        scaler=None,
        seed=0,
    )
    measured = measure_by_reading(samples, head.fields)
    limit = max(cells, int(measured.lengths.max()))
    plan = PlanConfig(cells=limit, samples_per_step=min(len(samples), 512))
    return math.exp(evaluate_loss(engine, samples, measured, head.fields, plan)["nll"])


def unigram_perplexity(train: Any, held_out: Any, vocabulary: int) -> float:
    """Of a model that knows only how often each token comes in the training text, every count raised by one."""
    counts = np.ones(vocabulary)
    for number in range(len(train)):
        np.add.at(counts, _labels(train[number]), 1)
    log_p = np.log(counts / counts.sum())
    found = np.concatenate([log_p[_labels(held_out[number])] for number in range(len(held_out))])
    return float(np.exp(-found.mean()))


def _labels(sample: Any) -> Any:
    labels = np.asarray(sample["labels"])[1:]  # the first token is predicted from nothing
    return labels[labels != IGNORE]


@contextmanager
def without_adapter(model: StitchedForCausalLM) -> Iterator[StitchedForCausalLM]:
    """While open, the adapter only copies dimensions: what stitching without one would be."""
    own = model.adapter
    model.adapter = deepcopy(own)
    start_identity(model.adapter)
    try:
        yield model
    finally:
        model.adapter = own


def compare_donors(
    model: StitchedForCausalLM, bottom: Donor, top: Donor, train: Any, held_out: Any, *, precision: str
) -> dict[str, float]:
    """Perplexities on held-out text: stitched, cut without adapter, either donor whole, word counts.

    All are of the same labels. A donor of another vocabulary is left out, but for a bottom donor that reads the text in
    its own tokens: what it makes of the whole text is divided by the labels of the others.
    """
    found = {"stitched": perplexity(model, held_out, precision=precision)}
    if model.adapter.shape.kind != "identity":
        with without_adapter(model) as bare:
            found["cut_without_adapter"] = perplexity(bare, held_out, precision=precision)
    below = bottom.model.to(model.device)
    if model.respelling is None:
        found["bottom_donor"] = perplexity(below, held_out)
    else:
        found["bottom_donor"] = perplexity_in_own_tokens(below, bottom.tokenizer, top.tokenizer, held_out)
    if model.vocabulary is None:
        found["top_donor"] = perplexity(top.model.to(model.device), held_out)
    return found | {"unigram": unigram_perplexity(train, held_out, model.config.vocab_size)}


def perplexity_in_own_tokens(model: nn.Module, own: Any, other: Any, held_out: Any) -> float:
    """exp(nll of the texts in tokens of the tokenizer `own` / number of labels they have in those of `other`)."""
    samples, labels, learned = [], 0, 0
    for number in range(len(held_out)):
        sample = held_out[number]
        labels += len(_labels(sample))
        ids = [int(i) for i in sample["input_ids"]]
        is_ended = ids[-1] == other.eos_token_id
        text = other.decode(ids[:-1] if is_ended else ids, clean_up_tokenization_spaces=False)
        end = [own.eos_token_id] if is_ended and own.eos_token_id is not None else []
        mine = torch.tensor([*own(text)["input_ids"], *end])
        samples.append({"input_ids": mine, "labels": mine})
        learned += len(mine) - 1
    return math.exp(math.log(perplexity(model, samples)) * learned / labels)


def draw_perplexities(found: Mapping[str, float], out: Path) -> None:
    """The same numbers as a picture."""
    write_text(out / PICTURE, bars(found, title="held-out text", y="perplexity"))
