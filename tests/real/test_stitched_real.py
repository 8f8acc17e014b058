"""Real weights: SmolLM2 stitched to itself over a gap; what a least-squares start and a short training give back."""

import importlib
import inspect

import pytest
import torch

from tests.real.weights import smollm2
from truebatch.hf.heads import head_of
from truebatch.hf.objectives import HeadObjective
from truebatch.systems.stitched_llm.data import pad_right
from truebatch.systems.stitched_llm.evaluating import perplexity, without_adapter
from truebatch.systems.stitched_llm.selftest import refuse_wrong_masks
from truebatch.systems.stitched_llm.stitching import Cut, fit_start, stitch
from truebatch.training.loop import train
from truebatch.training.settings import TrainConfig
from truebatch.training.task import TrainData

MODULES = (
    "argparse asyncio collections datetime decimal email.message functools json logging pathlib random socket "
    "statistics string subprocess tarfile threading typing unittest.mock zipfile"
)
KEPT = 12
"""Layers below the gap."""


def english(tokenizer, *, longest):
    """Sentences people wrote: what the standard library says about its own classes and functions."""
    texts = []
    for name in MODULES.split():
        for _, thing in sorted(vars(importlib.import_module(name)).items()):
            said = inspect.getdoc(thing) if inspect.isclass(thing) or inspect.isfunction(thing) else None
            texts += [said] if said and len(said) > 200 else []
    ids = [torch.tensor(tokenizer(text)["input_ids"][:longest]) for text in dict.fromkeys(texts)]
    return [{"input_ids": one, "labels": one} for one in ids]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("gap", [2, 4, 6])
def test_an_adapter_bridges_a_gap_in_real_weights(gap, capsys):
    donor, tokenizer = smollm2()
    samples = english(tokenizer, longest=64)
    held_out, learned = samples[::8], [s for i, s in enumerate(samples) if i % 8]
    cut = Cut(bottom=KEPT, top=KEPT + gap)
    model = stitch(donor, donor, cut)
    rows = [pad_right([s["input_ids"] for s in learned[i : i + 16]]) for i in range(0, len(learned), 16)]
    found = fit_start(model, donor, cut, rows)
    refuse_wrong_masks(model)
    started = perplexity(model, held_out, cells=2048)
    head = head_of(model)
    settings = TrainConfig(
        samples_per_step=8, max_steps=24, epochs=10, layout="packed", cells=1024, learning_rate=3e-4,
        schedule="cosine", stuck_seconds=None,
    )  # fmt: skip
    train(model, HeadObjective(head=head), TrainData(samples=learned, fields=head.fields), settings)
    with without_adapter(model) as bare:
        cut_alone = perplexity(bare, held_out, cells=2048)
    whole, trained = perplexity(donor, held_out, cells=2048), perplexity(model, held_out, cells=2048)
    with capsys.disabled():
        print(
            f"\ngap {gap}: donor {whole:.2f}, cut without adapter {cut_alone:.2f}, least-squares start {started:.2f} "
            f"(residual {found.residual:.3f}, {found.count:,} tokens), trained {trained:.2f}"
        )
    assert whole < trained < cut_alone
    assert trained < started
