"""`verify` with `exactness: bits`: loss and gradient of a step under many cuts of whole atoms, compared bit for bit.

samples -> atoms -> in order -> again, shuffled, several resident, dealt to ranks, after lost memory -> digests -> report
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from truebatch.data.loader import load_steps
from truebatch.errors import ConfigError, TruebatchError
from truebatch.objective import CoupledObjective, Objective
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.planning.rows import Layout
from truebatch.training.checks.batch_coupling import refuse_couplings
from truebatch.training.checks.equality import undisturbed
from truebatch.training.exactness.atoms import AtomBudget
from truebatch.training.exactness.digest import mixed_bits
from truebatch.training.exactness.gradient_sum import GradientSum
from truebatch.training.exactness.kernels import deterministic_kernels, no_deterministic_kernel
from truebatch.training.memory.oom import is_out_of_memory
from truebatch.training.optim.param_groups import Group
from truebatch.training.step import StepEngine, step_counts
from truebatch.verification.arrangements import Arrangement
from truebatch.verification.bits.atom_step import CUTS, AtomStep
from truebatch.verification.compare import Difference
from truebatch.verification.config import VerifyConfig
from truebatch.verification.report import ArrangementResult, Coverage, VerifyReport
from truebatch.verification.subjects.function_subject import ListSubject
from truebatch.verification.subjects.subject import Subject

ATOMS = 8
"""A step has about as many: samples are repeated until it does."""
LAYOUT: Mapping[str, Layout] = {"right": "padded", "packed": "packed"}
NOT_COVERED = (
    "of this machine and these versions: another kind of GPU, or another torch, may have other bits",
    "whether a batch equals one by one is another question: verify without exactness: bits answers it",
)


def prove_bits(subject: Subject | ListSubject, config: VerifyConfig) -> VerifyReport:
    """Run the step of the subject's samples under every cut, and compare the bits of its loss and gradients."""
    model, objective = _model_of(subject)
    assert isinstance(subject, Subject)
    results: list[ArrangementResult] = []
    notes, most_rows = list[str](), 0
    with _training(model, objective), deterministic_kernels(subject.device):
        for used in config.used:
            try:
                step = _atoms_of(subject, model, objective, LAYOUT[used])
                found = list(_compared(step, used))
            except Exception as error:  # a model may raise anything
                if is_out_of_memory(error):
                    raise
                results.append(_raised(used, error))
                continue
            results += found
            most_rows = max(most_rows, *(1 if used == "packed" else atom.num_samples for atom in step.atoms))
            notes.append(f"{used}: a step of {len(step.atoms)} atoms of {step.width:,} cells at most")
    covered = Coverage(
        modes=("train",), longest=max(subject.lengths), shortest=min(subject.lengths), rows=most_rows, gradient=True
    )
    return VerifyReport(
        results, notes=[*notes, *NOT_COVERED], mode="train", limits={"loss": 0.0, "gradient": 0.0}, used=config.used,
        coverage=covered, exactness="bits", unproven="" if notes else "no layout could be run",
    )  # fmt: skip


def _model_of(subject: Subject | ListSubject) -> tuple[nn.Module, Objective]:
    objective = subject.objective if isinstance(subject, Subject) else None
    model = subject.model
    if model is None or objective is None:
        raise ConfigError(
            "bits are compared of a model's gradients, and this is a function",
            seen=f"exactness='bits' with a subject of type {type(subject).__name__} that has no objective",
            do="give a Hugging Face model, a system, or verify(model, objective, samples, fields)",
        )
    if isinstance(objective, CoupledObjective):
        raise ConfigError(
            "exactness: bits is for a loss that is a sum over samples",
            seen=f"{type(objective).__name__}, which couples the samples of a step",
            do="verify it with exactness='rounding'",
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(
            "no parameter of this model is trained, so there is no gradient to compare",
            seen=f"{type(model).__name__}, requires_grad=False everywhere",
            do="let some of them train, or verify it with exactness='rounding'",
        )
    return model, objective


@contextmanager
def _training(model: nn.Module, objective: Objective) -> Iterator[None]:
    """As `train` runs the model: in training mode, and refused where training would refuse it."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        refuse_couplings(model.train(), (), taken=getattr(objective, "couplings", ()))
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _atoms_of(subject: Subject, model: nn.Module, objective: Objective, layout: Layout) -> AtomStep:
    """The samples, often enough for several atoms, in the atoms of one step."""
    longest, tokens = max(subject.lengths), sum(subject.lengths)
    samples = list(subject.samples) * max(1, -(-ATOMS * longest // tokens))
    lengths = subject.lengths * (len(samples) // len(subject.samples))
    plan = build_plan(lengths, PlanConfig(layout=layout, cells=longest, atoms=True, samples_per_step=len(samples)))
    (step,) = load_steps(plan, samples, subject.fields)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = StepEngine(
        model=model, objective=objective, groups=(Group(optimiser=torch.optim.SGD(trained, 0.0)),),
        device=subject.device,
    )  # fmt: skip
    counts = step_counts(step.batches, objective, {}, device=subject.device)
    return AtomStep(engine, step.batches, counts, longest)


def _compared(step: AtomStep, used: str) -> Iterator[ArrangementResult]:
    with undisturbed(step.engine):
        names = [name for name, p in step.engine.model.named_parameters() if p.requires_grad]
        first = _bits(step.sums(AtomBudget()))
        for name, cut in CUTS.items():
            found = _bits(cut(step))
            at = next((i for i, (a, b) in enumerate(zip(first, found, strict=True)) if a != b), None)
            is_loss_equal = first[-1] == found[-1]
            gradient = "" if at is None or at == len(names) else names[at]
            differences = (
                Difference("loss", 0.0 if is_loss_equal else float("inf"), 0.0, "" if is_loss_equal else "the step"),
                Difference("gradient", float("inf") if gradient else 0.0, 0.0, gradient),
            )
            shown = f"packed, {name}" if used == "packed" else name
            is_equal = not any(one.is_over for one in differences)
            yield ArrangementResult(Arrangement(shown, used, ()), "equal" if is_equal else "different", differences)


def _bits(found: GradientSum) -> list[int | None]:
    numbers = [None if one is None else mixed_bits(one) for one in found]
    known = torch.stack([one.cpu() for one in numbers if isinstance(one, Tensor)]).tolist()
    return [None if one is None else known.pop(0) for one in numbers]


def _raised(used: str, error: Exception) -> ArrangementResult:
    said = no_deterministic_kernel(error) or error
    words = said.wrong if isinstance(said, TruebatchError) else f"{type(said).__name__}: {said}"
    name = "packed, atoms" if used == "packed" else "atoms"
    return ArrangementResult(Arrangement(name, used, ()), "raised", error=words)
