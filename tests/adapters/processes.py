"""What each of two processes does in test_processes: run as a script, started as torchrun starts it."""

import json
import sys
from pathlib import Path

from tests.adapters.trainers import HEADS, gradients
from truebatch.adapters.planned_batches import AdapterConfig

CASES = [*((case, "padded") for case in HEADS), ("causal_lm", "packed")]


def updates(folder, case, layout, **given):
    found, _, trainer = gradients(
        folder, case, num_train_epochs=1, truebatch=AdapterConfig(layout=layout, cells=32), **given
    )
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "gradients": [g.tolist() for g in found],
        "losses": losses,
        "train_loss": trainer.state.log_history[-1]["train_loss"],
        "eval_loss": trainer.evaluate(trainer.train_dataset)["eval_loss"],
        "wrapped": type(trainer.model_wrapped).__name__,
    }


if __name__ == "__main__":
    from torch import distributed

    folder = Path(sys.argv[1])
    results = {
        f"{case} {layout}": updates(folder, case, layout, per_device_train_batch_size=2, gradient_accumulation_steps=2)
        for case, layout in CASES
    }
    (folder / f"rank{distributed.get_rank()}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()
