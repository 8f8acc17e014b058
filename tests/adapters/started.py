"""Two processes, started as torchrun starts them."""

import os
import socket
import subprocess
import sys


def run_two(module, folder, *, seconds=600):
    """Run `python -m module folder` as two ranks; what they print is shown if one of them fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, str(folder)],
            env={**common, "RANK": str(r), "LOCAL_RANK": str(r), "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(2)
    ]
    said = [process.communicate(timeout=seconds)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(said)
