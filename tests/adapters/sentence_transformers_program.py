"""What a user of sentence-transformers does with packed rows, beside its own: run as a script, with the package installed."""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

from tests.hf.finetune.folders import model_folder, write_lines
from truebatch.adapters.sentence_transformers import PackedEncoder, PackedRankingLoss
from truebatch.cli.app import run

WORDS = [
    "what",
    "is",
    "the",
    "colour",
    "of",
    "the",
    "grass",
    "and",
    "the",
    "sky",
    "green",
    "blue",
    "red",
    "white",
    "hello",
]
TEXTS = [[" ".join(WORDS[(i + c) % 9 :][: 1 + (3 * i + c) % 5]) for i in range(16)] for c in range(3)]


def gradient(model, loss):
    model.eval()
    model.zero_grad()
    found = loss([dict(model.preprocess(column)) for column in TEXTS], None)
    found.backward()
    return float(found.detach()), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main(folder: Path) -> None:
    model_folder(folder / "model", "bert")
    lines = [{"anchor": a, "positive": b, "negative": c} for a, b, c in zip(*TEXTS, strict=True)]
    write_lines(folder / "pairs.jsonl", lines)
    exported = [
        "train", "hf", "--model", str(folder / "model"), "--data", str(folder / "pairs.jsonl"), "--task", "embedding",
        "--out", str(folder / "run"), "--set", "train.samples_per_step=8", "--set", "train.epochs=1",
    ]  # fmt: skip
    assert run(exported) == 0
    model = SentenceTransformer(str(folder / "run" / "model"), device="cpu")
    own = PackedEncoder(model, cells=40).encode(TEXTS[0])
    results = {"encode": float((model.encode(TEXTS[0], convert_to_tensor=True) - own).abs().max())}
    theirs, ours = (
        gradient(model, loss)
        for loss in (CachedMultipleNegativesRankingLoss(model, mini_batch_size=4), PackedRankingLoss(model, cells=40))
    )
    results["loss"] = abs(theirs[0] - ours[0]) / theirs[0]
    results["gradient"] = float((theirs[1] - ours[1]).norm() / theirs[1].norm())
    args = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "out"), per_device_train_batch_size=16, max_steps=2, use_cpu=True, report_to=[],
        save_strategy="no",
    )  # fmt: skip
    data = Dataset.from_list(lines)
    trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=PackedRankingLoss(model))
    results["trained"] = trainer.train().training_loss
    model.save(str(folder / "saved"))
    again = SentenceTransformer(str(folder / "saved"), device="cpu")
    results["exported"] = float((again.encode(TEXTS[1]) - model.encode(TEXTS[1])).max())
    print("RESULT" + json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
