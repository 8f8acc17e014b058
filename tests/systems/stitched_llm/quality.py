"""What a trained adapter gives, measured: for the slow tests, and as a command that keeps the figures.

    python -m tests.systems.stitched_llm.quality docs/results/stitched_llm_quality.json tiny real pair

tiny: the embedded donors under one adapter, stored in fp32, bf16 and int8 (that with torchao on the path).
real: SmolLM2-135M cut in two, some layers left out in between.
pair: stories15M below SmolLM2-135M, whose tokenizers differ, on English fortunes (`make real` fetches all three).
The file is written again after every figure; a part that is not asked for keeps its own.
"""

import importlib
import inspect
import json
import os
import platform
import random
import sys
import tempfile
import time
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from tests.real.archives import open_deb
from tests.real.stories15m import save_stories15m
from tests.real.weights import save_smollm2, smollm2
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.load_trained import open_trained
from truebatch.training.train_system import Start, settings_type, train_system
from truebatch.training.trainer import train
from truebatch_systems.stitched_llm.config import StitchConfig, StitchTrain
from truebatch_systems.stitched_llm.data.dataset import load_test, pad_right, prepare_texts
from truebatch_systems.stitched_llm.eval.evaluate import compare_donors, perplexity, without_adapter
from truebatch_systems.stitched_llm.model.build import build, open_donors
from truebatch_systems.stitched_llm.model.mask_check import refuse_wrong_masks
from truebatch_systems.stitched_llm.model.stitch import Cut, fit_start, stitch
from truebatch_systems.stitched_llm.system import STITCHED_LLM
from truebatch_systems.stitched_llm.train.trainable_parts import stored_bytes

TINY = (("fp32", 500), ("bf16", 100), ("int8", 100), ("fp32", 100))
"""How the embedded donors are stored, and steps of the adapter over them."""
GAPS = (2, 4, 6)
BRIEF = 8
"""Steps of the adapter over real weights."""
KEPT = 12
"""Layers of SmolLM2 below the gap."""
LONGEST, HELD_OUT, FITTED, LEARNED = 40, 16, 64, 64
"""Of the real text: tokens of a sample, and how many samples each use has."""
PAIR = ("retokenize", "by_text")
"""How the two vocabularies meet."""
PAIR_STEPS, PAIR_ROWS, PAIR_TOKENS = 20, 8, 30_000
"""Steps of the adapter, samples of each, and tokens of its least-squares start."""
MODULES = (
    "argparse asyncio collections datetime decimal email.message functools json logging pathlib random socket "
    "statistics string subprocess tarfile threading typing unittest.mock zipfile"
)


def tiny(stored, steps, out):
    """Perplexities on held-out text after training the adapter over donors stored so, and what their weights take."""
    kind = settings_type(STITCHED_LLM)
    config = kind(
        stored=stored, train=StitchTrain(epochs=4, max_steps=steps, layout="packed", stuck_seconds=None)
    )  # fmt: skip
    built = build(config)
    started = perplexity(built.model, load_test(config))
    result = train_system(STITCHED_LLM, config, Start(out=out))
    bottom, top = open_donors(config)
    model = open_trained(out).model
    found = compare_donors(model, bottom, top, prepare_texts(config).samples, load_test(config), precision="fp32")
    worse = max(found["bottom_donor"], found["top_donor"])
    return {
        "stored": stored,
        "steps": result.step,
        "over_worse_donor": found["stitched"] / worse,
        "perplexity": {"least_squares_start": started, **found},
        "residual": built.solution.residual,
        "weights_bytes": stored_bytes(built.model),
    }


@cache
def english():
    """Sentences people wrote: what the standard library says about its own classes and functions."""
    _, tokenizer = smollm2()
    texts = []
    for name in MODULES.split():
        for _, thing in sorted(vars(importlib.import_module(name)).items()):
            said = inspect.getdoc(thing) if inspect.isclass(thing) or inspect.isfunction(thing) else None
            texts += [said] if said and len(said) > 200 else []
    ids = [torch.tensor(tokenizer(text)["input_ids"][:LONGEST]) for text in dict.fromkeys(texts)]
    samples = [{"input_ids": one, "labels": one} for one in ids if len(one) == LONGEST]
    return samples[::5][:HELD_OUT], [s for i, s in enumerate(samples) if i % 5][:LEARNED]


@cache
def whole():
    """Perplexity of SmolLM2 as it is."""
    return perplexity(smollm2()[0], english()[0], cells=1024)


def real(gap):
    """SmolLM2 stitched to itself over a gap: perplexity of the donor, the cut alone, the start, the trained adapter."""
    donor, _ = smollm2()
    held_out, learned = english()
    cut = Cut(bottom=KEPT, top=KEPT + gap)
    model = stitch(donor, donor, cut, with_hashes=False)
    rows = [pad_right([s["input_ids"] for s in learned[i : i + 16]]) for i in range(0, FITTED, 16)]
    found = fit_start(model, donor, cut, rows)
    refuse_wrong_masks(model)
    started = perplexity(model, held_out, cells=1024)
    head = head_of(model)
    settings = TrainConfig(
        samples_per_step=8, max_steps=BRIEF, epochs=10, layout="packed", cells=1024, learning_rate=3e-4,
        schedule="cosine", stuck_seconds=None,
    )  # fmt: skip
    train(model, HeadObjective(head=head), TrainData(samples=learned, fields=head.fields), settings)
    with without_adapter(model) as bare:
        alone = perplexity(bare, held_out, cells=1024)
    return {
        "gap": gap,
        "perplexity": {
            "donor": whole(),
            "cut_without_adapter": alone,
            "least_squares_start": started,
            "trained": perplexity(model, held_out, cells=1024),
        },
        "residual": found.residual,
        "fitted_tokens": found.count,
        "held_out_tokens": sum(len(s["input_ids"]) for s in held_out),
        "steps": BRIEF,
    }


def fortunes(folder):
    """train.jsonl and test.jsonl: Debian's English fortunes of 60 to 1,000 characters, in an order of their own."""
    texts = []
    with open_deb("fortunes_1.99.1-7.3_all.deb") as files:
        for member in sorted(files.getmembers(), key=lambda member: member.name):
            name = Path(member.name)
            if member.isfile() and name.parent.name == "fortunes" and not name.suffix:
                texts += files.extractfile(member).read().decode(errors="replace").split("\n%\n")
    kept = [text.strip().replace("\t", " ") for text in texts if "\b" not in text]
    kept = list(dict.fromkeys(text for text in kept if 60 <= len(text) <= 1000))
    random.Random(0).shuffle(kept)
    for name, part in (("test", kept[:64]), ("train", kept[64:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))


def pair_settings(vocabulary, home):
    """stories15M below SmolLM2: both cut near the embeddings, where their streams are most alike."""
    train = StitchTrain(
        batch_size=PAIR_ROWS, gradient_accumulation_steps=1, max_steps=PAIR_STEPS, warmup_steps=4, layout="packed",
        precision="fp32", stuck_seconds=None,
    )  # fmt: skip
    files = {"data": home / "train.jsonl", "test": home / "test.jsonl"}
    return StitchConfig(
        bottom=home / "stories15m", top=home / "smollm2", vocabulary=vocabulary, cut_bottom=2, cut_top=2, adapter="mlp",
        inner=512, start_tokens=PAIR_TOKENS, max_length=128, overlong="cut", train=train, **files,
    )  # fmt: skip


def pair(vocabulary):
    """Perplexities of the pair before and after training, beside both donors and word counts."""
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        fortunes(home)
        save_stories15m(home / "stories15m")
        save_smollm2(home / "smollm2")
        config = pair_settings(vocabulary, home)
        built = build(config)
        started = perplexity(built.model, load_test(config), cells=2048)
        result = train_system(STITCHED_LLM, config, Start(out=home / "run", say=print))
        model = open_trained(home / "run").model
        bottom, top = open_donors(config)
        ready = prepare_texts(config)
        found = compare_donors(model, bottom, top, ready.samples, load_test(config), precision="fp32")
    return {
        "vocabulary": vocabulary,
        "steps": result.step,
        "samples_per_step": PAIR_ROWS,
        "perplexity": {"least_squares_start": started, **found},
        "residual": built.solution.residual,
        "fitted_tokens": built.solution.count,
        "notes": [note.partition(": ")[2] for note in ready.train.notes],
    }


def about():
    return {
        "command": "python -m tests.systems.stitched_llm.quality docs/results/stitched_llm_quality.json tiny real pair",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} thread",
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def keep(out, part, row):
    """Add one row to a part of the file."""
    known = json.loads(out.read_text()) if out.exists() else {}
    known.setdefault(part, []).append(row)
    out.write_text(json.dumps({**known, **about()}, indent=1) + "\n")
    print(part, json.dumps(row), flush=True)


def measure(out, parts):
    known = json.loads(out.read_text()) if out.exists() else {}
    out.write_text(json.dumps({name: value for name, value in known.items() if name not in parts}) + "\n")
    forms = [form for form in TINY if form[0] != "int8" or find_spec("torchao") is not None]
    ways = {"tiny": (forms, tiny_alone), "real": (GAPS, real), "pair": (PAIR, pair)}
    for part in parts:
        for what in ways[part][0]:
            measure_row(out, part, ways[part][1], what)


def measure_row(out, part, way, what):
    began = time.process_time()
    keep(out, part, way(what) | {"cpu_seconds": time.process_time() - began})


def tiny_alone(form):
    with tempfile.TemporaryDirectory() as place:
        return tiny(*form, Path(place) / "run")


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure(Path(sys.argv[1]), sys.argv[2:] or ["tiny", "real", "pair"])
