"""Settings of the whole test run."""

import os

# Two test processes share two cores: threads of one would wait for threads of the other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Lines of what takes long come by the clock: a test that compares what a command says must not wait for them.
os.environ.setdefault("TRUEBATCH_PROGRESS", "off")
