"""How long `verify` takes for tiny models of every head, after import.

python -m benchmarks verify --out docs/results/verify.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path

from truebatch.environment import describe_environment
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.verification.api import verify
from truebatch.verification.subjects.hf_subject import random_samples

MODELS = (
    ("llama", "causal_lm"),
    ("gpt2", "causal_lm"),
    ("bert", "masked_lm"),
    ("bert", "token_classification"),
    ("llama", "sequence_classification"),
    ("t5", "seq2seq"),
    ("llava", "vision_language"),
)
REPEATS = 3


def main() -> None:
    """Verify every model a few times and keep the median."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = [measure(name, head) for name, head in MODELS]
    for row in rows:
        print(
            f"{row['seconds']:6.2f} s  {row['verdict']:<8} {row['arrangements']} arrangements  {row['model']} {row['head']}"
        )
    if asked.out is not None:
        about = {
            "command": f"python -m benchmarks verify --out {asked.out}",
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": describe_environment(),
            "target": "under 5 s a tiny model, after import, on 2 cores",
        }
        asked.out.write_text(json.dumps({**about, "rows": rows}, indent=2, ensure_ascii=False) + "\n")


def measure(name: str, head: str) -> dict[str, object]:
    """The median time of verifying one model with made-up samples: outputs, loss and gradients in every arrangement."""
    model = tiny_model(name, head)
    samples = random_samples(model)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        report = verify(model, samples)
        times.append(time.perf_counter() - began)
    seconds = round(statistics.median(times), 3)
    return {
        "model": name,
        "head": head,
        "seconds": seconds,
        "verdict": report.verdict,
        "arrangements": len(report.results),
    }


if __name__ == "__main__":
    main()
