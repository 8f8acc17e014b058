"""Settings of the whole test run."""

import os

# Two test processes share two cores: threads of one would wait for threads of the other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
