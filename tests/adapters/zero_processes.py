"""What each of two processes does in test_deepspeed: run as a script, started as torchrun starts it.

    python -m tests.adapters.zero_processes --measure docs/results/deepspeed.json

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
from tests.adapters.trainers import PlannedTrainer, arguments, build, one_by_one, relative
from truebatch.adapters.planned_batches import AdapterConfig
from truebatch.testing.failpoints import armed

STAGES = (1, 2)
CASES = ("causal_lm", "token_classification", "t5")
RATE = 64.0
"""So large that what is left of the weights does not round the update."""


def settings(stage, **more):
    return {
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        **more,
    }


def weights(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def train(folder, case, *, layout="padded", rate=RATE, **given):
    """The weights after training and before it, and what was logged."""
    model, samples = build(case)
    before = weights(model)
    args = arguments(folder, optim="sgd", learning_rate=rate, lr_scheduler_type="constant", **given)
    cut = AdapterConfig(layout=layout, cells=32)
    trainer = PlannedTrainer(model=model, args=args, train_dataset=samples, truebatch=cut)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "gradient": ((before - weights(model)) / rate).tolist(),
        "losses": losses,
        "eval_loss": trainer.evaluate(samples)["eval_loss"],
        "wrapped": type(trainer.model_wrapped).__name__,
    }


def run(folder, **given):
    """Two epochs of packed rows, every gradient clipped."""
    return train(folder, "causal_lm", layout="packed", rate=0.5, num_train_epochs=2, max_grad_norm=0.05, **given)


def steps_of(folder, case):
    """The samples of every step of the first epoch."""
    model, samples = build(case)
    shape = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = PlannedTrainer(model=model, args=arguments(folder, **shape), train_dataset=samples)
    trainer.get_train_dataloader()
    plan = trainer._planned.plan(0)
    return [plan.step_sample_ids(k).tolist() for k in range(plan.num_steps)]


def first_step(folder, case):
    """(gradient, loss) of the first step, every sample alone."""
    model, samples = build(case)
    return one_by_one(case, model, [samples[i] for i in steps_of(folder, case)[0]])


def error_of(found, expected):
    return relative(torch.tensor(found["gradient"], dtype=torch.float64), expected)


def main(folder):
    from torch import distributed

    shape = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    results = {}
    for stage in STAGES:
        given = shape | {"deepspeed": settings(stage)}
        for case in CASES:
            results[f"{case} {stage}"] = train(folder, case, max_steps=1, **given)
        results[f"run {stage}"] = run(folder, **given)
        with armed("step.backward:oom:2"):
            results[f"memory {stage}"] = train(folder, "causal_lm", max_steps=1, **given)
    rank = distributed.get_rank()
    distributed.destroy_process_group()
    (folder / f"rank{rank}.json").write_text(json.dumps(results))


def measure(out):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run_two("tests.adapters.zero_processes", folder)
        ranks = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]
        names = [(f"{case} {stage}", case, stage) for stage in STAGES for case in CASES]
        names += [(f"memory {stage}", "causal_lm", stage) for stage in STAGES]
        rows = []
        for name, case, stage in names:
            expected, _ = first_step(folder, case)
            errors = [error_of(found[name], expected) for found in ranks]
            is_split = name.startswith("memory")
            rows.append({"head": case, "stage": stage, "out_of_memory": is_split, "relative_error": max(errors)})
    result = {
        "rows": rows,
        "largest_error": max(row["relative_error"] for row in rows),
        "what": "update of DeepSpeed's engine on two processes against the gradient of one sample at a time, fp32",
        "command": f"python -m tests.adapters.zero_processes --measure {out}",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} CPU cores, gloo",
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")},
    }
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        measure(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
