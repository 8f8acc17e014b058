"""Memory estimated from shapes against memory really taken: tiny models of three kinds, both layouts, on a CPU.

python -m benchmarks estimate --out docs/results/estimate.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.model_shapes import SHAPES, build_model
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.training.data import TrainData
from truebatch.training.memory.fake_tensor_estimate import estimate_added
from truebatch.training.memory.fit import constant_bytes, make_batch, run_batch, untouched
from truebatch.training.memory.measure import added_bytes
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine

LENGTHS = np.random.default_rng(0).integers(5, 200, 20)
NUMBERS = (1, 4, 20)


def rows_of(name: str) -> list[dict[str, Any]]:
    """Every layout and number of samples of one model."""
    model = build_model(SHAPES[name], longest=256, device="cpu", dtype=torch.float32)
    head = head_of(model)
    groups = make_groups([Group(optimiser=torch.optim.AdamW(model.parameters()))], model)
    engine = StepEngine(model=model, objective=HeadObjective(head=head), groups=groups)
    chance = np.random.default_rng(1)
    tokens = [chance.integers(0, SHAPES[name].sizes["vocab_size"], n) for n in LENGTHS]
    data = TrainData(samples=[{"input_ids": ids, "labels": ids} for ids in tokens], fields=head.fields)
    found = []
    for layout in ("packed", "padded"):
        batches = [make_batch(data, np.arange(number), layout)[0] for number in NUMBERS]
        estimates = estimate_added(engine, batches)
        for number, batch, estimate in zip(NUMBERS, batches, estimates, strict=True):
            with untouched(engine):
                real = added_bytes(lambda batch=batch: run_batch(engine, batch), device=engine.device)
            constant = sum(constant_bytes(engine))
            found.append({
                "model": name, "layout": layout, "samples": number, "estimated": constant + estimate,
                "real": constant + real, "error": (constant + estimate) / (constant + real) - 1,
                "error of what is added": estimate / real - 1,
            })  # fmt: skip
    return found


def main() -> int:
    """Print and write all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = [row for name in ("llama-tiny", "qwen2-tiny", "bert-tiny") for row in rows_of(name)]
    report = {
        "command": " ".join(["python", *sys.argv]), "date": datetime.now(UTC).date().isoformat(),
        "hardware": platform.machine(), "torch": torch.__version__,
        "largest error": max(abs(row["error"]) for row in rows), "rows": rows,
    }  # fmt: skip
    for row in rows:
        print(
            f"{row['model']:12}{row['layout']:8}{row['samples']:4}{row['estimated']:14,}{row['real']:14,}{row['error']:+9.3%}"
        )
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
