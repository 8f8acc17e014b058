"""A step is a set of samples: its gradient does not depend on how it is cut."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.tiny import (
    IMAGE_FIELDS,
    SETS_FIELDS,
    TEXT_FIELDS,
    Choice,
    ImageModel,
    NextToken,
    SetRisk,
    SetsModel,
    TextModel,
    image_samples,
    packed,
    padded,
    set_samples,
    text_samples,
)
from truebatch.batch.keyed_random import KeyedDropout, name_purposes
from truebatch.errors import BatchError, ConfigError
from truebatch.objective import add_counts
from truebatch.training.optim.lr_schedules import Schedule
from truebatch.training.optim.param_groups import Group, check_terms, make_groups
from truebatch.training.step import StepEngine, apply_update, step_counts, take_gradients

CASES = {
    "text": (TextModel, NextToken, TEXT_FIELDS, text_samples([3, 31, 8, 17, 4, 29, 12, 5])),
    "sets": (
        SetsModel,
        SetRisk,
        SETS_FIELDS,
        set_samples([[2, 5, 1], [1], [7, 3, 9, 2], [4, 4], [25, 1], [3], [2, 2], [6]]),
    ),
    "images": (
        ImageModel,
        Choice,
        IMAGE_FIELDS,
        image_samples([(5, 9), (12, 0), (3, 30), (9, 4), (1, 1), (20, 7), (2, 2), (8, 3)]),
    ),
}
CUTS = {
    "1x8": lambda s, f: [padded(s, list(range(8)), f)],
    "2x4": lambda s, f: [padded(s, [0, 1, 2, 3], f), padded(s, [4, 5, 6, 7], f)],
    "4x2": lambda s, f: [padded(s, [i, i + 4], f, side="left") for i in range(4)],
    "8x1": lambda s, f: [padded(s, [i], f) for i in range(8)],
    "packed": lambda s, f: [packed(s, list(range(8)), f)],
    "packed in three": lambda s, f: [packed(s, [7, 0, 3], f), packed(s, [1], f), packed(s, [2, 6, 5, 4], f)],
}


def engine_of(model, objective, **groups):
    found = [Group(name=n, **g) for n, g in groups.items()] or [
        Group(optimiser=torch.optim.AdamW(model.parameters(), 1e-2))
    ]
    return StepEngine(model=model, objective=objective, groups=make_groups(found, model), seed=3)


def gradient(engine, batches):
    counts = add_counts(engine.objective.counts(b) for b in batches)
    outcome = take_gradients(engine, batches, counts, epoch=1)
    return outcome, torch.cat([p.grad.flatten() for p in engine.model.parameters() if p.grad is not None])


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cut", CUTS)
def test_the_gradient_of_a_step_does_not_depend_on_its_cut(case, cut):
    build, objective, fields, samples = CASES[case]
    torch.manual_seed(0)
    engine = engine_of(build(), objective())
    whole, expected = gradient(engine, CUTS["1x8"](samples, fields))
    outcome, got = gradient(engine, CUTS[cut](samples, fields))
    assert relative(got, expected) <= 1e-6
    assert outcome.counts == whole.counts
    assert outcome.loss == pytest.approx(whole.loss, rel=1e-6)
    assert outcome.grad_norm == pytest.approx(whole.grad_norm, rel=1e-6)


@pytest.mark.parametrize("cut", CUTS)
def test_keyed_dropout_does_not_depend_on_the_cut(cut):
    torch.manual_seed(0)
    model = TextModel()
    model.head = nn.Sequential(KeyedDropout(0.3), model.head)
    name_purposes(model)
    engine = engine_of(model.train(), NextToken())
    samples = CASES["text"][3]
    _, expected = gradient(engine, CUTS["1x8"](samples, TEXT_FIELDS))
    _, got = gradient(engine, CUTS[cut](samples, TEXT_FIELDS))
    assert relative(got, expected) <= 1e-6
    model.eval()
    assert relative(gradient(engine, CUTS[cut](samples, TEXT_FIELDS))[1], expected) > 1e-2


def test_a_step_equals_the_slow_obvious_way():
    """Mean over all labelled tokens of the step, in one padded forward pass written by hand."""
    torch.manual_seed(0)
    samples = CASES["text"][3]
    engine = engine_of(TextModel(), NextToken())
    outcome, got = gradient(engine, CUTS["packed in three"](samples, TEXT_FIELDS))
    losses = []
    for sample in samples:
        batch = padded([sample], [0], TEXT_FIELDS)
        ids = torch.as_tensor(sample["input_ids"])
        losses += list(nn.functional.cross_entropy(engine.model(batch)[0, :-1], ids[1:], reduction="none"))
    engine.model.zero_grad()
    mean = torch.stack(losses).mean()
    mean.backward()
    assert outcome.loss["nll"] == pytest.approx(float(mean.detach()), rel=1e-6)
    assert relative(got, torch.cat([p.grad.flatten() for p in engine.model.parameters()])) <= 1e-6


class Game:
    """Two players: each follows its own term, both at the parameters before the step."""

    def counts(self, batch):
        return {"generator": batch.num_samples, "discriminator": int(batch.is_real.sum())}

    def sums(self, model, batch):
        made = model.generator(batch["input_ids"][..., None].float() / 50)
        judged = model.discriminator(made) * batch.is_real[..., None]
        return {"generator": -(judged.sum()), "discriminator": (judged.square().sum())}


def players():
    torch.manual_seed(0)
    model = nn.Module()
    model.generator, model.discriminator = nn.Linear(1, 4), nn.Linear(4, 1)
    return model


def test_two_optimisers_take_their_gradients_before_either_updates():
    model = players()
    engine = engine_of(
        model, Game(),
        generator={"optimiser": torch.optim.SGD(model.generator.parameters(), 0.1), "terms": ("generator",)},
        discriminator={"optimiser": torch.optim.SGD(model.discriminator.parameters(), 0.1), "terms": ("discriminator",)},
    )  # fmt: skip
    samples = CASES["text"][3]
    batch = padded(samples, list(range(8)), TEXT_FIELDS)
    counts = Game().counts(batch)
    by_hand = players()
    sums = Game().sums(by_hand, batch)
    want_g = torch.autograd.grad(sums["generator"] / counts["generator"], by_hand.generator.weight, retain_graph=True)[
        0
    ]
    want_d = torch.autograd.grad(sums["discriminator"] / counts["discriminator"], by_hand.discriminator.weight)[0]
    for cut in CUTS.values():
        take_gradients(engine, cut(samples, TEXT_FIELDS), counts, epoch=0)
        assert relative(model.generator.weight.grad, want_g) <= 1e-6
        assert relative(model.discriminator.weight.grad, want_d) <= 1e-6


def test_clipping_is_over_all_parameters_of_an_optimiser():
    model = players()
    makers, judges = (torch.optim.SGD(m.parameters(), 0.0) for m in (model.generator, model.discriminator))
    engine = engine_of(
        model,
        Game(),
        generator={"optimiser": makers, "terms": ("generator",), "max_grad_norm": 1e-3},
        discriminator={"optimiser": judges, "terms": ("discriminator",), "max_grad_norm": None},
    )
    batch = [padded(CASES["text"][3], list(range(8)), TEXT_FIELDS)]
    outcome, _ = gradient(engine, batch)
    apply_update(engine, outcome)
    norm = torch.cat([p.grad.flatten() for p in model.generator.parameters()]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-4)
    rest = torch.cat([p.grad.flatten() for p in model.discriminator.parameters()]).norm()
    assert float(rest) == pytest.approx(outcome.grad_norm["discriminator"], rel=1e-5)


def test_a_term_nobody_counts_in_a_step_adds_nothing():
    samples = text_samples([1, 1, 1])  # a single token has no next one
    engine = engine_of(TextModel(), NextToken())
    batch = padded(samples, [0, 1, 2], TEXT_FIELDS)
    outcome = take_gradients(engine, [batch], NextToken().counts(batch), epoch=0)
    assert outcome.loss == {"nll": 0.0}
    assert not outcome.nonfinite


def test_declared_counts_are_checked_against_real_ones():
    from dataclasses import replace

    batch = replace(padded(CASES["text"][3], [0, 1], TEXT_FIELDS), counts={"nll": 5})
    with pytest.raises(
        BatchError, match=r"count of 'nll' is not what was declared[\s\S]*32 in the micro-batch[\s\S]*5 in the plan"
    ):
        step_counts([batch], NextToken(), {"nll": 5}, device=torch.device("cpu"))


def test_nonfinite_parts_are_named():
    engine = engine_of(TextModel(), NextToken())
    with torch.no_grad():
        engine.model.head.weight[0, 0] = math.nan
    outcome, _ = gradient(engine, CUTS["1x8"](CASES["text"][3], TEXT_FIELDS))
    assert outcome.nonfinite == ["loss nll", "gradient of main"]


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (lambda m: [Group(optimiser=torch.optim.SGD(m.generator.parameters(), 1))], "belong to no optimiser"),
        (lambda m: [Group(name=n, optimiser=torch.optim.SGD(m.parameters(), 1)) for n in "ab"], "updated twice"),
        (lambda m: [Group(optimiser=torch.optim.SGD(nn.Linear(1, 1).parameters(), 1))], "the model does not have"),
    ],
)
def test_parameters_belong_to_exactly_one_optimiser(groups, words):
    model = players()
    with pytest.raises(ConfigError, match=words):
        make_groups(groups(model), model)


def test_terms_must_exist_and_move_something():
    model = players()
    groups = [Group(optimiser=torch.optim.SGD(model.parameters(), 1), terms=("generator",))]
    with pytest.raises(ConfigError, match="move no parameters"):
        check_terms(groups, ["generator", "discriminator"])
    with pytest.raises(ConfigError, match="does not give"):
        check_terms(groups, ["discriminator"])


# --- schedules: closed forms ------------------------------------------------------------------------------------------


def test_warm_up_is_a_line_and_the_last_step_has_the_floor():
    for shape in ("linear", "cosine", "cosine_restarts"):
        schedule = Schedule(shape=shape, warmup_steps=4, floor=0.1, restarts=3)
        rates = [schedule.factor(s, 100) for s in range(100)]
        assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
        assert rates[-1] == pytest.approx(0.1)
        assert min(rates[4:]) >= 0.1 - 1e-12


@pytest.mark.parametrize(("steps", "restarts"), [(10, 1), (10, 3), (7, 2), (100, 7), (5, 5), (3, 8), (1, 1)])
def test_restarts_match_the_closed_form(steps, restarts):
    schedule = Schedule(shape="cosine_restarts", restarts=restarts)
    expected = []
    for part in np.array_split(np.arange(steps), min(restarts, steps)):
        n = max(len(part) - 1, 1)
        expected += [(1 + math.cos(math.pi * k / n)) / 2 if len(part) > 1 else 1.0 for k in range(len(part))]
    assert [schedule.factor(s, steps) for s in range(steps)] == pytest.approx(expected)


def test_steps_beyond_the_end_keep_the_floor():
    assert Schedule(shape="cosine", floor=0.2).factor(500, 100) == pytest.approx(0.2)
    assert Schedule().factor(500, 100) == 1.0
