"""`python -m benchmarks NAME`: run a benchmark."""

import sys

from benchmarks.cli import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
