"""Commands in processes of their own, forked from one that has imported everything: limits, time and memory of each.

python -m tests.hostile.forkserver      reads lines of JSON {"line", "folder"}, answers each with a line of JSON
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any, NoReturn

MOST_SECONDS, SPACE = 30.0, 24 << 30
"""Of a command: seconds of the processor, and addresses (torch alone maps several gigabytes that it never touches)."""
PATIENCE = 600.0
"""Seconds of the clock: a busy machine, and an end to what sleeps for ever."""


def main() -> None:
    import_all()
    for text in sys.stdin:
        asked = json.loads(text)
        sys.stdout.write(json.dumps(run_one(asked["line"], asked["folder"])) + "\n")
        sys.stdout.flush()


def import_all() -> None:
    """What commands import; no thread may be started, or a fork would not have it."""
    import accelerate  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import transformers

    import truebatch.cli.app
    import truebatch.hf.finetune.system
    import truebatch.scoring.scorer
    import truebatch.training.load_trained  # noqa: F401

    for name in (
        "AutoTokenizer",
        "AutoProcessor",
        "AutoModelForCausalLM",
        "LlamaForCausalLM",
        "PreTrainedTokenizerFast",
    ):
        getattr(transformers, name)


def run_one(line: list[str], folder: str) -> dict[str, Any]:
    """One command line: its exit code, its seconds, its bytes."""
    child = os.fork()
    if child == 0:
        _be_the_command(line, folder)
    deadline, pid = time.monotonic() + PATIENCE, 0
    while not pid:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if not pid and time.monotonic() > deadline:
            os.kill(child, 9)
            deadline += PATIENCE
        time.sleep(0.005)
    return {
        "exit_code": os.waitstatus_to_exitcode(status),
        "seconds": used.ru_utime + used.ru_stime,
        "max_bytes": used.ru_maxrss * 1024,
    }


def _be_the_command(line: list[str], folder: str) -> NoReturn:
    os.chdir(folder)
    os.environ["TRUEBATCH_CACHE"] = os.path.join(folder, "cache")
    said = os.open(".said", os.O_WRONLY | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, place in ((0, nothing), (1, said), (2, said)):
        os.dup2(place, number)
    resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE))
    resource.setrlimit(resource.RLIMIT_CPU, (int(2 * MOST_SECONDS), int(2 * MOST_SECONDS) + 5))
    from truebatch.cli.app import run

    code = run(line)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
