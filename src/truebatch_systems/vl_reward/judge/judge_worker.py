"""The other end of a judge in a process of its own: opens the judge of a call and serves it until stdin ends."""

from __future__ import annotations

import sys

from truebatch.scoring.backends.subprocess_main import serve
from truebatch_systems.vl_reward.judge.judges import open_called

if __name__ == "__main__":
    sys.exit(serve(open_called))
