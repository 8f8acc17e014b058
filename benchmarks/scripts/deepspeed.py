"""The gradient of a step under DeepSpeed ZeRO 1 and 2 in two processes, against one by one; needs deepspeed.

python -m benchmarks deepspeed --json docs/results/deepspeed.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.adapters.zero_processes import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results/deepspeed.json"))
    measure(parser.parse_args().out)


if __name__ == "__main__":
    main()
