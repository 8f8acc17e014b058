"""What stitched models reach: 500 steps over tiny donors, and SmolLM2-135M stitched to itself, which must be there.

python -m benchmarks stitched_llm_quality --json docs/results/stitched_llm_quality.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tests.systems.stitched_llm.quality import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results/stitched_llm_quality.json"))
    parser.add_argument("--parts", nargs="+", default=["tiny", "real"], choices=("tiny", "real", "pair"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure(args.out, args.parts)


if __name__ == "__main__":
    main()
