"""Out of memory changes the cut of a step and nothing else, wherever it strikes and however often."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.tiny import TEXT_FIELDS, NextToken, TextModel, packed, padded, text_samples
from tests.training.test_step import CASES, relative
from truebatch.batch.split import cells_of
from truebatch.errors import MemoryLimitError, RestartError, exit_code_of
from truebatch.objective import add_counts
from truebatch.planning.config import PlanConfig
from truebatch.planning.plan import build_plan
from truebatch.testing.failpoints import armed, recorded
from truebatch.training import step
from truebatch.training.data import measure_by_reading
from truebatch.training.memory import oom_retry
from truebatch.training.memory.oom_retry import (
    OomGuard,
    SampleTooLarge,
    load_steps_with_oom_retry,
    most_tries,
    read_budget,
)
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.step import StepEngine, apply_update, take_gradients
from truebatch.training.validation import evaluate_loss

PLACES = ("step.transfer", "step.forward", "step.backward", "step.accumulated")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _small_heap():
    """What was imported is not looked through again in every recovery: that is all that takes time here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Limited:
    """An objective on a device with room for so many cells: more, and memory runs out in forward or in backward."""

    def __init__(self, inner, limit, *, where="forward"):
        self.inner, self.limit, self.where, self.ran = inner, limit, where, []

    def counts(self, batch):
        return self.inner.counts(batch)

    def sums(self, model, batch):
        self.ran.append(batch.sample_ids)
        is_over = cells_of(batch) > self.limit
        if is_over and self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        sums = self.inner.sums(model, batch)
        return {k: RunsOut.apply(v) if is_over else v for k, v in sums.items()}


class RunsOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def engine_of(model, objective, fields, *, when_too_large="raise", optimiser=None, **more):
    optimiser = optimiser or torch.optim.SGD(model.parameters(), 0.1)
    groups = make_groups([Group(optimiser=optimiser)], model)
    guard = OomGuard(fields=fields, when_too_large=when_too_large)
    return StepEngine(model=model, objective=objective, groups=groups, guard=guard, seed=3, **more)


def text_engine(lengths, *, limit=None, **more):
    torch.manual_seed(0)
    objective = NextToken() if limit is None else Limited(NextToken(), limit)
    return engine_of(TextModel(), objective, TEXT_FIELDS, **more), text_samples(lengths)


def gradient(engine, batches):
    counts = add_counts(engine.objective.counts(b) for b in batches)
    outcome = take_gradients(engine, batches, counts, epoch=1)
    return outcome, flat_gradient(engine)


def flat_gradient(engine):
    return torch.cat([p.grad.flatten() for p in engine.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("layout", [padded, packed], ids=["padded", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_that_ran_out_of_memory_anywhere_has_the_same_gradient(case, layout):
    build, objective, fields, samples = CASES[case]
    batches = [layout(samples, [0, 1, 2], fields), layout(samples, [3, 4, 5, 6, 7], fields)]
    torch.manual_seed(0)
    engine = engine_of(build(), objective(), fields)
    with recorded() as visits:
        whole, expected = gradient(engine, batches)
    for place in PLACES:
        for nth in range(1, visits[place] + 1):
            engine.guard.cells = None
            with armed(f"{place}:oom:{nth}"):
                outcome, got = gradient(engine, batches)
            assert relative(got, expected) <= 1e-6, (place, nth)
            assert outcome.counts == whole.counts
            assert outcome.loss == pytest.approx(whole.loss, rel=1e-6)
    assert engine.guard.recoveries == sum(visits[place] for place in PLACES) == 8


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=12),
    spare=st.integers(0, 200),
    layout=st.sampled_from([padded, packed]),
    where=st.sampled_from(["forward", "backward"]),
)
def test_any_memory_that_holds_the_largest_sample_suffices(lengths, spare, layout, where):
    engine, samples = text_engine(lengths)
    middle = len(lengths) // 2
    cuts = [list(range(middle)), list(range(middle, len(lengths)))]
    batches = [layout(samples, ids, TEXT_FIELDS) for ids in cuts if ids]
    _, expected = gradient(engine, batches)
    limited = Limited(NextToken(), max(lengths) + spare, where=where)
    engine = engine_of(engine.model, limited, TEXT_FIELDS)
    _, got = gradient(engine, batches)
    assert relative(got, expected) <= 1e-6
    assert engine.guard.recoveries + 1 <= most_tries(batches)
    last_try = limited.ran[-len(engine.guard.cut(batches)) :]
    if engine.guard.recoveries + 1 < most_tries(batches):
        assert sum(last_try, ()) == tuple(range(len(lengths)))


@pytest.mark.parametrize("samples", [1, 2, 3, 8, 9, 64, 200])
def test_tries_are_bounded_by_the_logarithm_of_the_samples(samples):
    engine, data = text_engine([3] * samples)
    batches = [padded(data, list(range(samples)), TEXT_FIELDS)]
    limited = Limited(NextToken(), 0)
    engine = engine_of(engine.model, limited, TEXT_FIELDS)
    with pytest.raises(SampleTooLarge):
        gradient(engine, batches)
    assert len(limited.ran) == engine.guard.recoveries <= max(2, math.ceil(math.log2(samples)) + 1)
    assert len(limited.ran[-1]) == 1


def test_the_same_cut_gives_the_same_bits():
    engine, samples = text_engine([3, 31, 8, 17, 4, 29, 12, 5])
    batches = [padded(samples, list(range(8)), TEXT_FIELDS)]
    with armed("step.backward:oom:1"):
        _, survived = gradient(engine, batches)
    parts = engine.guard.cut(batches)
    assert [p.num_samples for p in parts] != [8]
    engine.guard.cells = None
    _, direct = gradient(engine, parts)
    assert torch.equal(survived, direct)
    singles = [padded(samples, [i], TEXT_FIELDS) for i in range(8)]
    _, quiet = gradient(engine, singles)
    with armed("step.forward:oom:5"):
        _, again = gradient(engine, singles)
    assert torch.equal(again, quiet)
    assert engine.guard.cells is None, "a single sample that failed once says nothing about larger micro-batches"


def test_foreign_randomness_begins_again_where_the_step_began():
    engine, samples = text_engine([3, 31, 8, 17])
    engine.model.head = nn.Sequential(nn.Dropout(0.5), engine.model.head)
    singles = [padded(samples, [i], TEXT_FIELDS) for i in range(4)]
    torch.manual_seed(5)
    _, quiet = gradient(engine, singles)
    after = torch.rand(3)
    torch.manual_seed(5)
    with armed("step.backward:oom:3"):
        _, again = gradient(engine, singles)
    assert torch.equal(again, quiet)
    assert torch.equal(torch.rand(3), after)


def test_a_sample_that_does_not_fit_alone_is_named_and_leaves_no_gradient():
    engine, samples = text_engine([3, 31, 8, 17], limit=30)
    with pytest.raises(SampleTooLarge, match="sample 1 does not fit") as caught:
        gradient(engine, [padded(samples, [0, 1, 2, 3], TEXT_FIELDS)])
    assert caught.value.sample_id == 1
    assert "quarantine" in caught.value.do
    assert exit_code_of(caught.value) == 2
    assert all(p.grad is None for p in engine.model.parameters())
    assert caught.value.__context__ is None, "the traceback of the error would keep its tensors alive"


def test_another_error_goes_through_untouched():
    engine, samples = text_engine([3, 5])
    engine.objective.sums = lambda model, batch: model(None)
    with pytest.raises((TypeError, AttributeError)):
        gradient(engine, [padded(samples, [0, 1], TEXT_FIELDS)])
    assert engine.guard.recoveries == 0


def test_the_lowered_budget_is_remembered_and_grows_back_in_time():
    engine, samples = text_engine([8] * 16, limit=40)
    batches = [padded(samples, list(range(16)), TEXT_FIELDS)]
    gradient(engine, batches)
    learnt = engine.guard.recoveries
    assert learnt >= 2
    for _ in range(10):
        gradient(engine, batches)
    assert engine.guard.recoveries == learnt, "the same shape does not run out of memory twice"
    engine.objective.limit = 10**9
    cuts = []
    for _ in range(6 * engine.guard.patience):
        gradient(engine, batches)
        cuts.append(len(engine.guard.cut(batches)))
    assert cuts == sorted(cuts, reverse=True)
    assert cuts[-1] == 1
    assert engine.guard.cells is None


def test_a_budget_that_grew_too_far_grows_more_slowly_the_next_time():
    guard = OomGuard(fields=TEXT_FIELDS)
    batch = padded(text_samples([8] * 16), list(range(16)), TEXT_FIELDS)
    waits = []
    for _ in range(4):
        guard.lower(batch)
        guard.note_step(is_clean=False)
        waits.append(0)
        while guard.cells is not None:
            guard.note_step(is_clean=True)
            waits[-1] += 1
    assert waits == sorted(set(waits))


def test_validation_survives_and_gives_the_same_loss():
    engine, samples = text_engine([3, 31, 8, 17, 4, 29, 12, 5])
    measured, config = measure_by_reading(samples, TEXT_FIELDS), PlanConfig(samples=4, samples_per_step=8)
    with recorded() as visits:
        quiet = evaluate_loss(engine, samples, measured, TEXT_FIELDS, config)
    for nth in range(1, visits["step.validation"] + 1):
        engine.guard.cells = None
        with armed(f"step.validation:oom:{nth}"):
            assert evaluate_loss(engine, samples, measured, TEXT_FIELDS, config) == pytest.approx(quiet, rel=1e-6)
    assert engine.guard.recoveries == visits["step.validation"] == 2
    limited = engine_of(engine.model, Limited(NextToken(), 30), TEXT_FIELDS)
    with pytest.raises(SampleTooLarge, match="validation sample 1 does not fit"):
        evaluate_loss(limited, samples, measured, TEXT_FIELDS, config)


def test_a_step_that_cannot_be_loaded_is_loaded_once_more():
    samples = text_samples([3, 31, 8, 17, 4, 29])
    plan = build_plan(measure_by_reading(samples, TEXT_FIELDS).lengths, PlanConfig(samples_per_step=2))

    def numbers():
        steps = load_steps_with_oom_retry(plan, samples, TEXT_FIELDS, device=CPU)
        return [(s.number, [b.sample_ids for b in s]) for s in steps]

    quiet = numbers()
    for nth in (1, 2, 3):
        with armed(f"step.loading:oom:{nth}"):
            assert numbers() == quiet
    broken = [samples[0], *[Unloadable()] * 5]
    steps = load_steps_with_oom_retry(plan, broken, TEXT_FIELDS, device=CPU)
    with pytest.raises(MemoryError):
        list(steps)
    assert Unloadable.tried == 2


class Unloadable(dict):
    tried = 0

    def __contains__(self, key):
        Unloadable.tried += 1
        raise MemoryError


def test_sharded_parameters_save_the_budget_and_stop_to_be_started_again(tmp_path, monkeypatch):
    engine, samples = text_engine([3, 31, 8, 17], limit=40)
    guard, lines = engine.guard, []
    guard.folder = tmp_path
    batches = [padded(samples, [0, 1, 2, 3], TEXT_FIELDS)]
    monkeypatch.setattr(step, "is_sharded", lambda model: True)
    engine = replace(engine)
    engine.model.set_requires_gradient_sync = lambda is_last: None
    with pytest.raises(RestartError, match="sharded") as caught:
        gradient(engine, batches)
    assert exit_code_of(caught.value) == 75
    again = OomGuard(fields=TEXT_FIELDS, folder=tmp_path, say=lines.append)
    read_budget(again)
    assert again.cells == 62
    assert "62 cells" in lines[0]
    assert len(again.cut(batches)) == 2
    guard.folder = None
    with pytest.raises(RestartError, match="give `out`"):
        gradient(engine, batches)


# The optimiser


def adam_engine(**more):
    torch.manual_seed(0)
    model = TextModel()
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2, **more)
    return engine_of(model, NextToken(), TEXT_FIELDS, optimiser=optimiser)


def updated(engine, steps=2):
    batches = [padded(text_samples([3, 31, 8, 17]), [0, 1, 2, 3], TEXT_FIELDS)]
    for _ in range(steps):
        apply_update(engine, gradient(engine, batches)[0])
    return torch.cat([p.detach().flatten() for p in engine.model.parameters()])


def test_an_update_that_ran_out_of_memory_is_done_once():
    expected = updated(adam_engine())
    for nth in (1, 2):
        with armed(f"step.optimiser:oom:{nth}"):
            assert torch.equal(updated(adam_engine()), expected)


def test_state_that_was_half_made_is_made_again(monkeypatch):
    expected = updated(adam_engine())
    real, calls = torch.zeros_like, []

    def zeros_like(*args, **kwargs):
        calls.append(1)
        if len(calls) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros_like", zeros_like)
    assert torch.equal(updated(adam_engine()), expected)
    assert len(calls) > 6


def test_an_update_that_was_refused_leaves_no_half_made_state(monkeypatch):
    """Whoever makes room and updates again must not meet moments that are half there."""
    expected, engine = updated(adam_engine(), steps=1), adam_engine()
    real, calls = torch.zeros_like, []

    def zeros_like(*args, **kwargs):
        calls.append(1)
        if len(calls) % 6 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", zeros_like)
        with pytest.raises(MemoryLimitError, match="tried twice"):
            updated(engine, steps=1)
    assert not engine.groups[0].optimiser.state
    assert torch.equal(updated(engine, steps=1), expected)


class Tallying(TextModel):
    """Counts its samples, which is allowed only by name."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch):
        if self.replaces:
            self.seen = self.seen + batch.num_samples
        else:
            self.seen += batch.num_samples
        return super().forward(batch)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("place", ["step.transfer:oom:3", "step.backward:oom:1", "step.accumulated:oom:2"])
def test_a_broken_try_leaves_no_buffer_changed(place, replaces):
    engine = engine_of(Tallying(), NextToken(), TEXT_FIELDS, changes_buffers=True)
    engine.model.replaces = replaces
    samples = text_samples([5, 9, 3, 4, 8, 2])
    with armed(place):
        gradient(engine, [padded(samples, [i, i + 1], TEXT_FIELDS) for i in (0, 2, 4)])
    assert engine.guard.recoveries == 1
    assert int(engine.model.seen) == len(samples)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_refused_update_is_not_applied_again_to_what_it_has_clipped_or_moved(monkeypatch, failing):
    torch.manual_seed(0)
    model = TextModel()
    parts = ([*model.tok.parameters()], [p for name, p in model.named_parameters() if not name.startswith("tok.")])
    groups = [
        Group(name=str(at), optimiser=torch.optim.SGD(part, 0.1), max_grad_norm=0.01) for at, part in enumerate(parts)
    ]
    engine = StepEngine(model=model, objective=NextToken(), groups=make_groups(groups, model))
    batches = [padded(text_samples([5, 9, 3]), [0, 1, 2], TEXT_FIELDS)]
    outcome = gradient(engine, batches)[0]

    def step():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    before = [p.detach().clone() for p in parts[failing]]
    monkeypatch.setattr(groups[failing].optimiser, "step", step)
    words = "tried twice" if failing == 0 else "another optimiser was run before it"
    with pytest.raises(MemoryLimitError, match=words):
        apply_update(engine, outcome)
    assert all(p.grad is None for p in model.parameters())
    assert not apply_update(engine, outcome)
    assert all(torch.equal(p, old) for p, old in zip(parts[failing], before, strict=True))


def test_half_an_update_is_never_repeated(monkeypatch):
    engine = adam_engine(foreach=False)
    updated(engine, steps=1)
    real, calls = torch.Tensor.addcdiv_, []

    def addcdiv_(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "addcdiv_", addcdiv_)
    with pytest.raises(MemoryLimitError, match="half done"):
        updated(engine, steps=1)


class OldFashioned(torch.optim.SGD):
    """Writes through `.data`, which no counter sees, and runs out of memory in between."""

    @torch.no_grad()
    def step(self, closure=None):
        for at, p in enumerate(q for part in self.param_groups for q in part["params"] if q.grad is not None):
            if at == 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            p.data.add_(p.grad, alpha=-0.1)


def test_an_optimiser_that_torch_cannot_watch_is_not_tried_again():
    torch.manual_seed(0)
    model = TextModel()
    engine = engine_of(model, NextToken(), TEXT_FIELDS, optimiser=OldFashioned(model.parameters(), 0.1))
    with pytest.raises(MemoryLimitError, match="may be half done"):
        updated(engine, steps=1)


def test_an_update_that_never_fits_is_explained(monkeypatch):
    def step(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB.")

    engine = adam_engine()
    monkeypatch.setattr(engine.groups[0].optimiser, "step", step)
    with pytest.raises(MemoryLimitError, match=r"80\.00 GiB") as caught:
        updated(engine)
    assert "AdamW" in caught.value.wrong
    assert "SGD" in caught.value.do


# Storms


class Bag(nn.Module):
    """As small as a model of text can be."""

    def __init__(self, width=8):
        super().__init__()
        self.tok, self.head = nn.Embedding(50, width), nn.Linear(width, 50)

    def forward(self, batch):
        return self.head(self.tok(batch["input_ids"]).tanh())


def storm(rng, engine, quiet, steps, *, num_errors):
    """Steps with errors at random places; every one is compared with the quiet engine's and done by both."""
    samples = text_samples(rng.integers(2, 20, 48).tolist())
    worst, most, rss = 0.0, 0, 0
    strike = set(rng.permutation(steps)[:num_errors].tolist())
    for number in range(steps):
        ids = rng.permutation(48)[:8].tolist()
        layout = padded if number % 2 else packed
        batches = [layout(samples, ids[:5], TEXT_FIELDS), layout(samples, ids[5:], TEXT_FIELDS)]
        outcome, expected = gradient(quiet, batches)
        before = engine.guard.recoveries
        place = PLACES[int(rng.integers(len(PLACES)))]
        with armed(f"{place}:oom:{int(rng.integers(1, 3)) if number in strike else 10**9}"):
            survived, got = gradient(engine, batches)
        worst = max(worst, relative(got, expected))
        most = max(most, engine.guard.recoveries - before + 1)
        assert survived.counts == outcome.counts
        if number == steps // 10:
            rss = psutil.Process().memory_info().rss
    return worst, most, psutil.Process().memory_info().rss - rss


@pytest.mark.parametrize(("num_errors", "steps"), [(100, 200), pytest.param(1000, 2000, marks=pytest.mark.slow)])
def test_errors_in_every_second_step_change_nothing(num_errors, steps):
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    model = Bag()
    engine = engine_of(model, NextToken(), TEXT_FIELDS)
    quiet = StepEngine(model=model, objective=NextToken(), groups=engine.groups, seed=3)
    worst, most, grown = storm(rng, engine, quiet, steps, num_errors=num_errors)
    assert engine.guard.recoveries == num_errors
    assert worst <= 1e-6
    assert most <= math.ceil(math.log2(8)) + 1
    assert grown <= 50 << 20


class Held:
    """What the graph of a try keeps for its backward pass."""

    def __init__(self, tensor):
        self.tensor = tensor


def tensors_held(engine, batches, errors: int) -> int:
    """How many of the tensors kept for backward passes are still alive after so many broken tries."""
    every = []

    def keep(tensor):
        held = Held(tensor.detach())  # A result kept with its history would hold its own graph.
        every.append(weakref.ref(held))
        return held

    for _ in range(errors):
        engine.guard.cells = None
        with armed("step.backward:oom:1"), torch.autograd.graph.saved_tensors_hooks(keep, lambda held: held.tensor):
            gradient(engine, batches)
    assert len(every) > errors
    gc.collect()
    return sum(held() is not None for held in every)


def test_memory_is_really_given_back():
    """Each broken try holds its tensors in the frames of its error, until the error is left."""
    engine = engine_of(Bag(), NextToken(), TEXT_FIELDS)
    batches = [padded(text_samples([16] * 4), [0, 1, 2, 3], TEXT_FIELDS)]
    assert tensors_held(engine, batches, errors=20) == 0


def test_without_leaving_the_error_memory_would_be_held(monkeypatch):
    """The test above can fail: keep the errors, and their tensors stay."""
    kept = []
    real = oom_retry.is_out_of_memory
    monkeypatch.setattr(oom_retry, "is_out_of_memory", lambda error: kept.append(error) or real(error))
    engine = engine_of(Bag(), NextToken(), TEXT_FIELDS)
    batches = [padded(text_samples([16] * 4), [0, 1, 2, 3], TEXT_FIELDS)]
    assert tensors_held(engine, batches, errors=20) >= 20
