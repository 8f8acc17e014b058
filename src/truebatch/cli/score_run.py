"""A scoring run on the command line: the progress line, the check, the figures at the end."""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from truebatch.language.console import one_line, say
from truebatch.language.translate import in_words
from truebatch.progress import Stage, opened

# Everything heavier is imported inside the functions, so that `truebatch --help` answers at once.
if TYPE_CHECKING:
    from collections.abc import Callable

    from truebatch.scoring.progress import OnProgress, Progress
    from truebatch.scoring.spec import ScoreCall
    from truebatch.scoring.store.export import Status

SOME_FAILED = 3
_SECONDS = 2.0
"""Between two lines of progress."""
_NAMED = 10
"""Damaged records that are named."""


def run_call(
    call: ScoreCall,
    folder: Path,
    *,
    shard: tuple[int, int],
    retry: list[str],
    checked: int,
    as_json: bool,
    window: int | None = None,
) -> int:
    """Run a call with progress display; returns the exit code. `checked` samples are first scored both ways."""
    from truebatch.scoring.batch_plan import Limits
    from truebatch.scoring.inputs.read_samples import check_data
    from truebatch.scoring.ray_engine import ray_engine
    from truebatch.scoring.runner import RunConfig
    from truebatch.scoring.scorer import Scorer
    from truebatch.scoring.spec import open_backends, save_call
    from truebatch.scoring.windows import window_size

    check_data(Path(call.data))
    gc.freeze()  # imported modules stay, so the garbage collector need not scan them again
    pool = ray_engine(call) if call.engine == "ray" else None
    judging = Stage("judging samples")
    on_progress = _progress_line(lambda: save_call(folder, call), judging)
    how = RunConfig(retry=tuple(retry), shard=shard, on_progress=on_progress, engine=pool)
    backends = open_backends(call) if pool is None else [pool.backend]
    scorer = Scorer(backends, limits=Limits(**call.limits))
    try:
        with opened(judging):
            done = scorer.score(
                Path(call.data), folder, check=checked > 0, checked=checked, how=how,
                window=window or window_size(folder),
            )  # fmt: skip
    finally:
        scorer.close()
    if done.report is not None and not as_json:
        say(f"check: {done.report}", file=sys.stderr)
    for line in done.slower:
        say(line, file=sys.stderr)
    return print_status(done.status, folder, as_json=as_json)


def print_status(status: Status, folder: Path, *, as_json: bool) -> int:
    """Print the figures of a run; 3 where some samples failed."""
    if as_json:
        names = status.__dataclass_fields__
        sys.stdout.write(json.dumps({name: getattr(status, name) for name in names}) + "\n")
    else:
        say("\n".join(_status_lines(status, folder)))
    return SOME_FAILED if status.failed and not status.pending else 0


def _status_lines(status: Status, folder: Path) -> list[str]:
    name, level = one_line(str(folder)), one_line(status.level)
    lines = [
        f"{name}: {status.samples:,} samples, {status.ok:,} done, {status.failed:,} failed, {status.pending:,} pending"
        f" (level {level})",
        f"  {status.tokens_done:,} of {status.tokens:,} tokens in {status.batches:,} batches, {status.seconds:.1f} s",
    ]
    lines += [f"  {status.duplicates:,} samples have the content of another"] if status.duplicates else []
    lines += [f"  failed: {number:,} {one_line(kind)}" for kind, number in status.kinds.items()]
    lines += [f"  {status.suspects:,} batches in which a worker died are judged next"] if status.suspects else []
    if status.damaged:
        lines.append(
            f"  {len(status.damaged):,} journal records were changed, and count as pending; the command"
            " of `truebatch score` scores them again"
        )
        lines += [f"    {one_line(name)}" for name in status.damaged[:_NAMED]]
    if status.unchecked:
        lines.append(
            f"  {status.unchecked:,} records of an earlier version have no checksum: whether they were changed is unknown"
        )
    if status.disagreements:
        lines.append(
            f"  {len(status.disagreements):,} samples have two different results: {one_line(status.disagreements[0])} ..."
        )
    return lines


def _progress_line(begun: Callable[[], None], judging: Stage) -> OnProgress:
    """The text of the stage on a terminal; elsewhere a line on stderr every few seconds. `begun` is called at the first."""
    shown = [0.0]
    is_terminal = sys.stderr.isatty()

    def show(progress: Progress) -> None:
        now, is_last = time.monotonic(), progress.done >= progress.samples
        if not shown[0]:
            begun()  # the configuration is accepted: from here on the run can be resumed
        judging.text = one_line(in_words(progress.line()))
        if not is_last and (is_terminal or now - shown[0] < _SECONDS):
            shown[0] = shown[0] or now
            return
        shown[0] = now
        say(progress.line(), file=sys.stderr)

    return show
