"""What stitched models reach: 500 steps over tiny donors, and SmolLM2-135M stitched to itself, which must be there.

truebatch bench stitched_llm_quality --json docs/results/stitched_llm_quality.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tests.systems.stitched_llm.quality import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results/stitched_llm_quality.json"))
    parser.add_argument("--parts", nargs="+", default=["tiny", "real"], choices=("tiny", "real"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure(args.out, args.parts)


if __name__ == "__main__":
    main()
