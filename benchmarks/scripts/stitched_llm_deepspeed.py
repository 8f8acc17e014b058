"""A stitched model under DeepSpeed ZeRO in two processes, against one by one; needs deepspeed.

python -m benchmarks stitched_llm_deepspeed --json docs/results/stitched_llm_deepspeed.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.systems.stitched_llm.zero_processes import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results/stitched_llm_deepspeed.json"))
    measure(parser.parse_args().out)


if __name__ == "__main__":
    main()
