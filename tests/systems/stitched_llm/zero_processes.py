"""What each of two processes does in test_deepspeed: the stitched model under DeepSpeed ZeRO-2, started as torchrun does.

    python -m tests.systems.stitched_llm.zero_processes --measure docs/results/stitched_llm_deepspeed.json

starts the two processes itself and keeps how far the update of DeepSpeed's engine is from the gradient one by one.
"""

import json
import os
import platform
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from tests.adapters.started import run_two
from tests.adapters.trainers import arguments, relative
from tests.adapters.zero_processes import RATE, settings
from tests.systems.stitched_llm.tiny_donors import llama, make_ids, qwen2
from truebatch.adapters.planned_batches import AdapterConfig
from truebatch_systems.stitched_llm.model.donors import weights_hash
from truebatch_systems.stitched_llm.model.save_load import load_stitched
from truebatch_systems.stitched_llm.model.stitch import Cut, stitch
from truebatch_systems.stitched_llm.train.hf_trainer import StitchedTrainer

STAGE = 2
LENGTHS = (5, 60, 12, 33, 7, 20, 48, 9)
LAYOUTS = ("padded", "packed")


def build():
    bottom, top = llama(layers=2), qwen2(layers=2)
    return bottom, top, stitch(bottom, top, Cut(bottom=1, top=1))


def samples():
    return [{"input_ids": ids, "labels": ids} for ids in make_ids(LENGTHS)]


def adapter_of(model):
    return torch.cat([p.detach().double().flatten() for p in model.adapter.parameters()])


def single(given):
    return {name: value[None] for name, value in given[0].items()}


def one_by_one():
    """The gradient of one step of all samples: each alone, sums over all labels."""
    *_, model = build()
    labels = sum(n - 1 for n in LENGTHS)
    for sample in samples():
        ids = sample["input_ids"][None]
        model(input_ids=ids, labels=ids, num_items_in_batch=labels).loss.backward()
    return torch.cat([p.grad.double().flatten() for p in model.adapter.parameters()])


def train(folder, layout, **given):
    """One trained model, and what happened to it."""
    bottom, top, model = build()
    donors, before = weights_hash(bottom, top), adapter_of(model)
    args = arguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, optim="sgd",
        lr_scheduler_type="constant", deepspeed=settings(STAGE), **given,
    )  # fmt: skip
    trainer = StitchedTrainer(
        model=model, args=args, train_dataset=samples(), data_collator=single,
        truebatch=AdapterConfig(layout=layout, cells=64),
    )  # fmt: skip
    trainer.train()
    return model, {
        "gradient": ((before - adapter_of(model)) / args.learning_rate).tolist(),
        "engine": type(trainer.model_wrapped).__name__,
        "donors_are_untouched": weights_hash(bottom, top) == donors,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


def saved_is_trained(folder, model):
    """True if the newest checkpoint of a run holds the adapter that the run ended with, and no donor."""
    bottom, top, _ = build()
    kept = load_stitched(folder / "checkpoint-4", bottom=bottom, top=top)
    return bool(torch.equal(adapter_of(kept), adapter_of(model)))


def main(folder):
    from torch import distributed

    results = {layout: train(folder, layout, learning_rate=RATE, max_steps=1)[1] for layout in LAYOUTS}
    model, results["run"] = train(
        folder / "run", "packed", learning_rate=0.5, num_train_epochs=4, max_grad_norm=0.05, save_strategy="steps",
        save_steps=4,
    )  # fmt: skip
    distributed.barrier()
    results["run"]["saved_is_trained"] = saved_is_trained(folder / "run", model)
    rank = distributed.get_rank()
    distributed.destroy_process_group()
    (folder / f"rank{rank}.json").write_text(json.dumps(results))


def run_ranks(folder, *, seconds=600):
    """What both ranks found."""
    run_two("tests.systems.stitched_llm.zero_processes", folder, seconds=seconds)
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]


def error_of(found):
    return relative(torch.tensor(found["gradient"], dtype=torch.float64), one_by_one())


def measure(out):
    with tempfile.TemporaryDirectory() as place:
        ranks = run_ranks(Path(place), seconds=600)
    result = {
        "rows": [
            {"layout": layout, "stage": STAGE, "relative_error": max(error_of(found[layout]) for found in ranks)}
            for layout in LAYOUTS
        ],
        "run": {
            name: ranks[0]["run"][name] for name in ("engine", "losses", "donors_are_untouched", "saved_is_trained")
        },
        "what": "update of the adapter of a stitched model by DeepSpeed's engine on two processes against the gradient "
        "of one sample at a time, fp32; then a run of four steps with a checkpoint",
        "command": f"python -m tests.systems.stitched_llm.zero_processes --measure {out}",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} CPU cores, gloo",
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")},
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        measure(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
