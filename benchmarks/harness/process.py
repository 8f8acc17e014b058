"""A command in a process of its own, and what it took of the machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence


def run_measured(command: Sequence[str]) -> dict[str, float]:
    """CPU seconds, seconds and the largest memory of a command; `CalledProcessError` where it fails."""
    begun = os.times().elapsed
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command))
    return {
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "seconds": os.times().elapsed - begun,
        "memory_mib": used.ru_maxrss / 1024,
    }
