"""The check of equality as a run has it: before the first update, kept beside the run, repeated when something else runs.

first step -> a few samples both ways, on every rank -> one verdict for all -> printed, kept, or the run stops
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from truebatch import __version__
from truebatch.batch.fields import Field
from truebatch.batch.microbatch import MicroBatch
from truebatch.batch.split import leave_out
from truebatch.data.loader import LoadedStep
from truebatch.errors import LawError, TruebatchError
from truebatch.io.atomic_files import read_json, write_json
from truebatch.progress import stage
from truebatch.training.checkpoint.state_dict import copy_buffers, restore_buffers
from truebatch.training.checks.batch_coupling import Coupling, random_generators, refused_if_seen
from truebatch.training.checks.checked_samples import CheckedSamples
from truebatch.training.checks.comparable import comparable
from truebatch.training.checks.equality import (
    Equality,
    MeasuredGap,
    judge,
    undisturbed,
    without_noise,
)
from truebatch.training.checks.rounding import spacing_of
from truebatch.training.checks.two_ways import RaisedAloneError
from truebatch.training.context import Job
from truebatch.training.distributed.collectives import (
    all_gather_list,
    all_reduce_max,
    broadcast_from_rank0,
    is_sharded,
    num_ranks,
    rank,
)
from truebatch.training.memory.oom import forget_probes, is_out_of_memory
from truebatch.training.random_state import random_state, restore_random
from truebatch.training.run_dir.run_dir import ABOUT, CONFIG, EQUALITY, RunFolder
from truebatch.training.step import StepEngine
from truebatch.training.train_state import TrainState

DEFAULT_SAMPLES = 8
ANY_COUPLING = ("dropout", "buffers")
"""What running may show; for loops of the user's own, where nothing is refused for it."""
_checked: WeakSet[nn.Module] = WeakSet()
"""Models whose first step in a loop of the user's own was checked."""
_WORST = ("equal", "in_distribution", "not_checked", "broken")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FirstStep:
    """What is checked, and how."""

    engine: StepEngine
    batches: Sequence[MicroBatch]
    fields: Sequence[Field]
    epoch: int
    number: int = DEFAULT_SAMPLES
    """CheckedSamples to check, over all ranks."""
    allow: Sequence[str] = ()
    couplings: Sequence[Coupling] = ()
    """Those that are known already: what is compared then has dropout switched off and batch statistics frozen."""


@stage("checking that a few samples give alone what they give in batches")
def check_equality(first: FirstStep) -> Equality:
    """Run a few samples alone and as they were cut, on every rank; all ranks return the same.

    Weights, gradients, buffers, modes and random generators are afterwards what they were. Memory that runs out is no
    error: nothing was checked then. `LawError` for couplings that running shows and `allow` does not name.
    """
    mine = _check_here(first)
    return _agreed(all_gather_list([mine]))


def _check_here(first: FirstStep) -> Equality:
    engine = first.engine
    samples = CheckedSamples.of(_without_quarantined(first), first.fields, _number_here(first))
    passes = all_reduce_max(max(len(samples.cut), len(samples.alone)), engine.device) if is_sharded(engine.model) else 0
    number, seen = len(samples.alone), list(first.couplings)
    if not number and not passes:
        return Equality(verdict="equal")
    generators, buffers = random_state(), copy_buffers(engine.model)
    try:
        with undisturbed(engine):
            found = comparable(engine, _without_quarantined(first), epoch=first.epoch)
            judged, is_drawn = _judged(replace(first, engine=found), samples, seen, passes)
    except RaisedAloneError as error:
        return Equality(verdict="broken", samples=number, why=f"a sample that runs beside others raises alone: {error}")
    except Exception as error:
        if not is_out_of_memory(error) or is_sharded(engine.model):  # of sharded weights the other ranks wait
            raise
        return Equality(verdict="not_checked", why="memory ran out beside the step")
    finally:
        forget_probes(engine.device)
        restore_buffers(buffers)
        restore_random(generators)
    return _verdict(judged, number, sorted({c.name for c in seen}), is_drawn=is_drawn)


def _without_quarantined(first: FirstStep) -> list[MicroBatch]:
    """Samples that an earlier start has found too large are not tried again."""
    guard = first.engine.guard
    ids = frozenset(guard.quarantined) if guard is not None else frozenset()
    return [part for batch in first.batches for part in leave_out(batch, first.fields, ids=ids)]


def _number_here(first: FirstStep) -> int:
    """This rank's share; fewer in half precision, where each runs four times: at most two steps' work in all."""
    here = sum(batch.num_samples for batch in first.batches)
    share = max(2, math.ceil(first.number / num_ranks()))
    return min(share, max(2, here // 2)) if spacing_of(first.engine) is not None else share


def _judged(
    first: FirstStep, samples: CheckedSamples, seen: list[Coupling], passes: int
) -> tuple[MeasuredGap | None, bool]:
    """What was measured, with what cannot be equal switched off; and whether even then something is drawn at random."""
    engine, judged = first.engine, None
    if not seen:
        with refused_if_seen(engine.model, first.allow, seen):
            judged = judge(engine, samples, epoch=first.epoch, passes=passes)
    if not seen:
        return judged, False
    with without_noise(engine.model):
        before = random_generators(engine.model)
        judged = judge(engine, samples, epoch=first.epoch, passes=passes)
        after = random_generators(engine.model)
    return judged, any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _verdict(judged: MeasuredGap | None, number: int, names: Sequence[str], *, is_drawn: bool) -> Equality:
    if is_drawn or judged is None:
        why = f"{', '.join(names)} cannot be switched off, so nothing was compared"
        return Equality(verdict="in_distribution", why=why)
    if judged.gap is None and judged.broken:
        return Equality(verdict="broken", samples=number, why=judged.broken)
    if judged.gap is None:
        return Equality(verdict="not_checked", why="loss or gradient is not finite, alone and as cut")
    if judged.unsure:
        return Equality(verdict="not_checked", samples=number, why=judged.unsure)
    found = Equality(
        verdict="equal",
        samples=number,
        loss=judged.gap.loss,
        gradient=judged.gap.gradient,
        rounding=judged.rounding,
        compared=judged.gap.compared,
    )
    if judged.broken:
        return replace(found, verdict="broken", why=judged.broken)
    if names:
        return replace(found, verdict="in_distribution", why=f"compared with {', '.join(names)} switched off")
    return found


def _agreed(found: Sequence[Equality]) -> Equality:
    """The worst verdict of all ranks, the largest differences, and all samples; a rank without samples says nothing."""
    told = [one for one in found if one.samples or one.why] or list(found[:1])
    worst = max(told, key=lambda one: _WORST.index(one.verdict))
    if not told[0].samples and not told[0].why:
        return Equality(verdict="not_checked", why="the step has no samples")
    losses, gradients, roundings = (
        [value for one in told if (value := getattr(one, name)) is not None]
        for name in ("loss", "gradient", "rounding")
    )
    return replace(
        worst, samples=sum(one.samples for one in told), loss=max(losses, default=None),
        gradient=max(gradients, default=None), rounding=max(roundings, default=None),
    )  # fmt: skip


def refuse_broken(found: Equality, *, command: str) -> None:
    """Raise `LawError` if the samples as cut are not what they are alone; `command` names the cause."""
    if found.verdict == "broken":
        samples = "1 sample" if found.samples == 1 else f"{found.samples} samples"
        raise LawError(
            "this model gives other results in a batch than alone",
            seen=f"{found.why} ({samples} of the first step, before any update)",
            do=f"run `{command}`: it names the module and the cause; or train with true_batch: off",
        )


def fingerprint(engine: StepEngine) -> dict[str, str]:
    """What an earlier check holds for: the code of model and loss, truebatch, torch and the device."""
    kinds = [type(engine.model), type(engine.objective)]
    device = engine.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "model": ", ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds),
        "code": ", ".join(_code_hash(kind) for kind in kinds),
        "truebatch": __version__,
        "torch": torch.__version__,
        "device": name,
    }


def _code_hash(kind: type) -> str:
    """Of the file a class stands in; empty for one that has none (a notebook, a prompt)."""
    try:
        file = inspect.getsourcefile(kind)
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else ""
    except (TypeError, OSError):
        return ""


def keep_equality(run: RunFolder | None, found: Equality, engine: StepEngine) -> None:
    """Leave the result beside the run, for `status.json` and for another start."""
    if run is not None and rank() == 0:
        result = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.record().items()}
        write_json(run.folder / EQUALITY, {"result": result, "checked": fingerprint(engine)})


def earlier_check(run: RunFolder | None, engine: StepEngine) -> Mapping[str, Any] | None:
    """What an earlier start of this run found, if it still holds; the same on every rank."""
    found = None
    if run is not None and rank() == 0 and (run.folder / EQUALITY).exists():
        try:
            kept = read_json(run.folder / EQUALITY, max_bytes=1 << 16)
        except TruebatchError:  # a damaged file holds nothing: it is checked again
            kept = None
        if isinstance(kept, dict) and kept.get("checked") == fingerprint(engine):
            result = kept.get("result")
            is_sound = isinstance(result, dict) and result.get("verdict") in ("equal", "bits", "in_distribution")
            found = result if is_sound else None
    return broadcast_from_rank0(found)


def check_first_step(job: Job, progress: TrainState, loaded: LoadedStep) -> None:
    """Once a process, before its first update: `check_run` with the settings of the run."""
    if job.equality or job.records:
        return
    first = FirstStep(
        engine=job.engine, batches=loaded.batches, fields=job.data.fields, epoch=progress.epoch,
        number=job.config.check_samples, allow=job.config.allow, couplings=tuple(job.couplings),
    )  # fmt: skip
    if job.config.true_batch == "off":
        plain = Equality(verdict="not_checked", why="true_batch: off runs one sample at a time")
        job.say(f"equality: {plain}")
        keep_equality(job.run, plain, job.engine)
        found: Equality | None = plain
    else:
        command = verify_command(job.run)
        found = check_run(first, run=job.run, is_resumed=progress.step > 0, command=command, say=job.say)
    job.equality.append(found)


def equality_record(job: Job) -> dict[str, Any]:
    """What a record says of it: the first one all that was found, later ones only what holds in distribution."""
    found = next(iter(job.equality), None)
    if found is not None and not job.records:
        return {"equality": found.record()}
    return {"equality": "in_distribution"} if job.couplings else {}


def verify_command(run: RunFolder | None) -> str:
    """What names the cause: of a system's run with its own settings, else as a call."""
    try:
        about = read_json(run.folder / ABOUT, max_bytes=1 << 16) if run is not None else {}
        system = about["system"]
    except (TruebatchError, KeyError, TypeError):  # a run without a system of its own
        return "truebatch verify FILE.py:FUNCTION"
    assert run is not None
    return f"truebatch verify {system} --config {run.folder / CONFIG}"


def check_loop(first: FirstStep, *, say: Callable[[str], None]) -> None:
    """Once for a model in a loop that is not ours, before its first update: said, and `LawError` if it is broken."""
    model = first.engine.model
    if model in _checked:
        return
    _checked.add(model)
    if not first.number:
        found = Equality(verdict="not_checked", why="check_samples is 0")
    elif not first.fields:
        found = Equality(verdict="not_checked", why="the step does not say how it holds a sample (LoadedStep.fields)")
    else:
        found = check_equality(first)
    if rank() == 0:
        say(f"equality: {found}")
    refuse_broken(found, command=verify_command(None))


def check_run(
    first: FirstStep, *, run: RunFolder | None, is_resumed: bool, command: str, say: Callable[[str], None]
) -> Equality | None:
    """The check of a run before its first update: said, kept, and `LawError` if it is broken.

    None where an earlier start of the run has made it with the same code, model class, torch and device.
    """
    kept = earlier_check(run, first.engine) if is_resumed else None
    if kept is not None:
        samples = "1 sample" if kept["samples"] == 1 else f"{kept['samples']} samples"
        say(f"equality: {kept['verdict']} when this run was checked on {samples}; nothing has changed since")
        return None
    if not first.number and is_resumed:
        return None  # said by the first start
    found = check_equality(first) if first.number else Equality(verdict="not_checked", why="check_samples is 0")
    say(f"equality: {found}")
    keep_equality(run, found, first.engine)
    refuse_broken(found, command=command)
    return found
