"""Why gradients differ although outputs and loss are right: a hook, a cut, or the backward of some function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from truebatch.training.memory.oom import is_out_of_memory
from truebatch.verification.compare import Reference, run_whole
from truebatch.verification.report import ArrangementResult, Cause
from truebatch.verification.subjects.subject import Subject

FAR = 1e-4
"""A parameter whose gradient is this far off, relative to its own norm, is wrong."""


def gradient_cause(subject: Subject, results: Sequence[ArrangementResult], reference: Reference) -> Cause | None:
    """The cause of gradients that differ where outputs and loss are right; None if nothing of the kind is seen."""
    wrong = next(
        (r for r in results if r.is_over("gradient") and not (r.is_over("outputs") or r.is_over("loss"))), None
    )
    if wrong is None or subject.model is None or not reference.whole.gradient:
        return None
    try:
        given = run_whole(subject, wrong.arrangement).gradient
    except Exception as error:  # what raises here has been reported by its arrangement
        if is_out_of_memory(error):
            raise
        return None
    return _cause(subject.model, given, reference.whole.gradient)


def _cause(model: nn.Module, given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Cause:
    spoiled = [n for n, g in given.items() if not g.isfinite().all() and n in expected and expected[n].isfinite().all()]
    if spoiled:
        return Cause(
            "NaN in micro-batches only",
            f"outputs and loss are right, but the gradients of {_listed(spoiled)} are NaN or infinite: cells that are left out "
            "(padding) are NaN or infinite in the forward pass (a softmax over cells that are all hidden, a division by 0, the "
            "root or logarithm of 0), and 0 times that is NaN in backward",
            "keep padding finite before it is left out: let every cell attend to itself at least, clamp(min=...) what is "
            "divided by, and mask inputs, not results",
        )
    far = [n for n, g in expected.items() if _is_far(given.get(n), g)]
    hooked = hooks_on(model)
    if hooked:
        return Cause(
            "a gradient hook runs per micro-batch",
            f"outputs and loss are right; the gradient is not, and a hook changes it in every micro-batch: on "
            f"{', '.join(hooked[:3])}",
            "do it once per step, on the sum of all micro-batches (train.max_grad_norm, or in the optimizer)",
        )
    cut = [n for n in far if n not in given or not given[n].any()]
    if cut:
        return Cause(
            "gradients are cut off",
            f"outputs and loss are right, but no gradient reaches {_listed(cut)} in a micro-batch of several samples: a "
            "detach(), .data, no_grad() or a conversion to NumPy stands between them and the loss",
            "let gradients through whatever the number of samples is",
        )
    return Cause(
        "only gradients differ",
        f"outputs and loss are right, but the gradients of {_listed(far) or 'the model'} are not: what runs after "
        f"{_listed(far[-1:]) or 'it'} changes gradients per micro-batch",
        "look at the backward of custom autograd functions there, and at norms or clips of gradients in forward code",
    )


def _is_far(given: Tensor | None, expected: Tensor) -> bool:
    norm = float(expected.double().norm())
    return norm > 0 and (given is None or float((given.double() - expected.double()).norm()) > FAR * norm)


def _listed(names: Sequence[str]) -> str:
    shown = names if len(names) <= 4 else [*names[:2], "...", *names[-2:]]
    return ", ".join(shown)


def hooks_on(model: nn.Module) -> list[str]:
    """Parameters and modules with hooks on their gradients."""
    found = [
        name for name, p in model.named_parameters()
        if getattr(p, "_backward_hooks", None) or getattr(p, "_post_accumulate_grad_hooks", None)
    ]  # fmt: skip
    return found + [
        name or "the model" for name, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks
    ]
