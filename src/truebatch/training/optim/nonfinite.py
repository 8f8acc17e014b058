"""A step that is NaN or infinite: found before the update, its samples named, and then what the policy says."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from truebatch.data.loader import LoadedStep
from truebatch.errors import NonFiniteError
from truebatch.training.checkpoint.save_resume import resume_run
from truebatch.training.context import Job
from truebatch.training.distributed.collectives import all_reduce_max
from truebatch.training.logging.metrics_jsonl import MetricsLog
from truebatch.training.step import StepEngine, StepOutcome
from truebatch.training.train_state import TrainState


def is_bad(engine: StepEngine, outcome: StepOutcome) -> bool:
    """With loss scaling an overflowing gradient is ordinary: the scaler skips the update and lowers the scale.

    Below a scale of 1 it is not the scale that makes it overflow, and no lower one would help.
    """
    bad = outcome.nonfinite
    if engine.scaler is None or not bad:
        return bool(bad)
    return any(name.startswith("loss") for name in bad) or engine.scaler.get_scale() < 1.0


def handle_nonfinite(
    job: Job, state: TrainState, loaded: LoadedStep, outcome: StepOutcome, log: MetricsLog | None
) -> bool:
    """Do what the policy says about a step that is not finite; True if the run was rolled back to an earlier one.

    The parameters have not been touched.
    """
    ids = [i for batch in loaded.batches for i in batch.sample_ids]
    what = f"step {state.step} is not finite ({', '.join(outcome.nonfinite)}); samples {ids[:16]}"
    job.say(what)
    if (scaler := job.engine.scaler) is not None:
        scaler.update(scaler.get_scale())  # The scale stays; gradients may be taken again, as after an update.
    state.nonfinite_in_row += 1
    policy, limit = job.config.nonfinite, job.config.nonfinite_limit
    if policy == "roll_back" and state.rollbacks < limit:
        _roll_back(job, state, log)
        return True
    if policy == "skip" or (policy == "skip_then_raise" and state.nonfinite_in_row < limit):
        return False
    raise NonFiniteError(
        f"step {state.step} is not finite; the model was not updated",
        seen=f"{', '.join(outcome.nonfinite)} from samples {ids[:16]}{' ...' if len(ids) > 16 else ''}",
        do="look at these samples and at the learning rate; nonfinite='skip' or 'roll_back' would continue without them",
    )


def check_parameters(job: Job, state: TrainState) -> None:
    """At the end of a run: an update may write NaN from finite gradients, and no step comes after the last to notice."""
    bad = _nonfinite_names(job.engine.model)
    if all_reduce_max(int(bool(bad)), job.engine.device):
        raise NonFiniteError(
            f"the model is not finite after step {state.step}",
            seen=f"NaN or infinity in {', '.join(bad[:4]) or 'a part on another rank'}{' ...' if len(bad) > 4 else ''}",
            do="lower the learning rate, or look at the optimiser; the newest good checkpoint is from before this",
        )


def _nonfinite_names(model: nn.Module) -> list[str]:
    """Trained parameters with NaN or infinity in them, and buffers with NaN, on this rank; one wait for the device."""
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    checks = {n: torch.isfinite(_here(p)).all() for n, p in trained.items()}
    checks |= {n: ~torch.isnan(_here(b)).any() for n, b in model.named_buffers() if b.is_floating_point()}
    if not checks:
        return []
    is_good = torch.stack([good.to(next(iter(checks.values())).device) for good in checks.values()]).tolist()
    return [name for name, good in zip(checks, is_good, strict=True) if not good]


def _here(value: Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return value.to_local() if hasattr(value, "to_local") else value


def _roll_back(job: Job, state: TrainState, log: MetricsLog | None) -> None:
    """The last good checkpoint once more, without the step whose samples are not finite."""
    found = resume_run(job.run.checkpoints, job.engine) if job.run is not None else None
    if found is None:
        raise NonFiniteError(
            f"step {state.step} is not finite, and there is no checkpoint to roll back to",
            seen="no good checkpoint",
            do="give `out` and a smaller save_every, or use nonfinite='skip'",
        )
    if log is not None:
        log.cut_after(found[0].step)
    job.say(f"rolled back to step {found[0].step}; step {state.step} will be skipped")
    state.roll_back_to(found[0])
