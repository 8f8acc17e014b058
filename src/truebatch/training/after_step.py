"""What follows a step: validation, the end, a request to stop, and the checkpoint of all that."""

from __future__ import annotations

from truebatch.progress import stage
from truebatch.training.callbacks import CallbackAction, EndCheck, join_actions
from truebatch.training.checkpoint.save_resume import save_run
from truebatch.training.context import Job
from truebatch.training.distributed.collectives import all_reduce_max, broadcast_from_rank0
from truebatch.training.logging.metrics_jsonl import MetricsLog
from truebatch.training.memory.quarantine import refuse_nothing_done
from truebatch.training.optim.nonfinite import check_parameters
from truebatch.training.train_state import EndReason, TrainState
from truebatch.training.validation import validate


def finish_step(job: Job, state: TrainState, log: MetricsLog | None) -> None:
    """Validation, the end, a request to stop, and the checkpoint of all that."""
    is_end_of_epoch = state.step_in_epoch == 0
    is_last = state.step >= job.num_steps
    is_due = is_last or _is_due(job.config.validate_every, state, is_end_of_epoch)
    is_best = _validate(job, state, log) if is_due else False
    wants_stop = _agree(job, job.stop.requested is not None)
    is_end = is_last or state.is_done
    action = _ask_callbacks(job, state.step, is_end=is_end)
    if action.say:
        job.say(f"step {state.step}: {action.say}")
    if action.stop:
        how = "failed a check at the end" if is_end else "stopped by a check"
        state.finish(EndReason.CHECK_FAILED, f"{how}: {action.stop}")
        job.say(f"step {state.step}: {state.why}")
    elif is_last:
        state.finish(EndReason.ALL_STEPS_DONE, "all steps are done")
    elif wants_stop and not state.is_done:
        state.finish(EndReason.INTERRUPTED, str(job.stop.requested or "asked to stop on another rank"))
    if state.end is EndReason.ALL_STEPS_DONE:
        refuse_nothing_done(job.engine.guard, steps=state.step)
    is_time = _is_due(job.config.save_every, state, is_end_of_epoch) and not _is_in_doubt(job)
    must_save = is_best or action.keep or state.is_done
    if job.run is not None and (must_save or (is_time and _is_worth_saving(job))):
        if log is not None:
            log.sync()
        with job.save_pace.timed(), stage("saving a checkpoint"):
            problem = save_run(
                job.run.checkpoints, job.engine, state, fingerprint=job.run.fingerprint, keep=job.config.keep,
                best=is_best, kept=action.keep,
            )  # fmt: skip
        if problem:
            job.say(f"step {state.step}: {problem}")
    if state.is_done:
        check_parameters(job, state)


def _is_worth_saving(job: Job) -> bool:
    """Always where `save_every` asks for it; at the end of an epoch by the time it takes, the same on every rank."""
    if job.config.save_every is not None:
        return True
    is_worth_it = broadcast_from_rank0(job.save_pace.is_worth_it())
    if not is_worth_it and (words := job.save_pace.once()):
        job.say(words)
    return is_worth_it


def _is_in_doubt(job: Job) -> bool:
    """The last samples were left out, and may be in again: a checkpoint would skip them."""
    return job.engine.guard is not None and job.engine.guard.left_in_row > 0


def _ask_callbacks(job: Job, step: int, *, is_end: bool) -> CallbackAction:
    """What the callbacks ask for, the same on every rank."""
    if not job.engine.callbacks:
        return CallbackAction()
    asked = job.engine.callbacks
    actions = [one.at_end(step) if is_end and isinstance(one, EndCheck) else one.after_step(step) for one in asked]
    return broadcast_from_rank0(join_actions(actions))


def _is_due(every: int | None, state: TrainState, is_end_of_epoch: bool) -> bool:
    return is_end_of_epoch if every is None else state.step % every == 0


def _agree(job: Job, mine: bool) -> bool:
    """True if any rank was asked to stop: all stop after the same step."""
    return all_reduce_max(int(mine), job.engine.device) > 0


def _validate(job: Job, state: TrainState, log: MetricsLog | None) -> bool:
    """The loss of the validation samples; True if it is the best so far."""
    if job.validation is None:
        return False
    terms = validate(job.engine, job.validation, watchdog=job.watchdog)
    total = sum(terms.values())
    is_best = state.improve(total, min_delta=job.config.min_delta)
    named = {f"validation/{name}": value for name, value in terms.items()}
    job.log_record(log, {"step": state.step, "validation_loss": total, **named})
    job.say(f"step {state.step}: validation loss {total:.4f}" + (", the best so far" if is_best else ""))
    patience = job.config.patience
    if patience is not None and state.validations_without_improvement >= patience:
        state.finish(EndReason.NO_IMPROVEMENT, f"validation has not improved {patience} times")
    return is_best
