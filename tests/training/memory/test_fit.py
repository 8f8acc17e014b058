"""What the fit says about memory, against what really happens."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from tests.tiny import TEXT_FIELDS, Attention, NextToken, TextModel, text_samples
from truebatch.batch.fields import Field
from truebatch.errors import DataError, MemoryLimitError
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.planning.config import PlanConfig
from truebatch.planning.lengths.measured_values import Measured
from truebatch.planning.plan import build_plan
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData, measure_by_reading
from truebatch.training.memory import fit as fitting
from truebatch.training.memory.batch_size_table import HERE, cells_by_limit
from truebatch.training.memory.cost_model import (
    MemoryFit,
    Point,
    Sizes,
    fit_points,
    largest_cells,
    load_fit,
    save_fit,
    solve_nonnegative,
)
from truebatch.training.memory.fit import (
    choose_probes,
    fit_facts,
    fit_memory,
    make_batch,
    run_batch,
    sizes_of,
    stale_fit_warnings,
    untouched,
)
from truebatch.training.memory.measure import added_bytes
from truebatch.training.optim.param_groups import Group, default_group, make_groups
from truebatch.training.step import StepEngine

CPU = torch.device("cpu")
LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 0.8, 200).astype(int), 2, 120).tolist()
DATA = TrainData(samples=text_samples(LENGTHS), fields=TEXT_FIELDS)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(dim, causal=True), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, axis):
        x = self.attention(x, axis)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Transformer(TextModel):
    """As TextModel, with layers."""

    def __init__(self, dim: int = 16, depth: int = 3) -> None:
        super().__init__(dim=dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))

    def forward(self, batch):
        x = self.tok(batch["input_ids"]) + self.pos(batch.positions)
        for block in self.blocks:
            x = block(x, batch.rows())
        return self.head(self.attention(x, batch.rows()))


def engine_of(model: nn.Module, config: TrainConfig) -> StepEngine:
    return StepEngine(model=model, objective=NextToken(), groups=make_groups([default_group(model, config)], model))


def line(*prices: float, resident: int = 1000, state: int = 500) -> MemoryFit:
    """A fit of points that lie on a line exactly."""
    shapes = [(n * rows, n * n * rows, rows) for n in (5, 20, 40, 80) for rows in (1, 3, 9, 27)]
    points = [Point(c, p, s, round(prices[0] + prices[1] * c + prices[2] * p + prices[3] * s)) for c, p, s in shapes]
    return fit_points(points, resident_bytes=resident, optimiser_bytes=state, facts={"precision": "fp32"})


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_shapes_nobody_probed_are_predicted_within_five_percent(layout):
    torch.manual_seed(0)
    config = TrainConfig(layout=layout)
    engine = engine_of(Transformer(), config)
    fit = fit_memory(engine, DATA, config)
    rng = np.random.default_rng(1)
    errors = []
    with untouched(engine):
        for number in (1, 5, 12, 20, 48):
            batch, shape = make_batch(DATA, rng.choice(len(LENGTHS), number, replace=False), layout)
            real = added_bytes(lambda batch=batch: run_batch(engine, batch), device=CPU) + fit.constant_bytes
            errors.append(fit.predict(*shape) / real - 1)
            assert shape not in [p.shape for p in fit.points]
            assert real <= fit.predict_safely(*shape)
    assert max(map(abs, errors)) < 0.05, errors


def test_a_fit_leaves_nothing_behind():
    torch.manual_seed(0)
    model = TextModel()
    model.register_buffer("seen", torch.zeros(3))
    config = TrainConfig()
    engine = engine_of(model, config)
    model.tok.weight.grad = torch.full_like(model.tok.weight, 2.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    small = replace(DATA, samples=text_samples(LENGTHS[:6]))
    fit_memory(engine, small, config)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert (model.tok.weight.grad == 2.0).all()
    assert model.head.weight.grad is None
    assert not engine.groups[0].optimiser.state
    assert torch.equal(generator, torch.get_rng_state())


def test_the_state_of_an_optimiser_is_known_before_it_is_made():
    data = replace(DATA, samples=text_samples([3, 5]))
    config = TrainConfig()
    for make, tensors in (
        (torch.optim.AdamW, 2),
        (lambda ps: torch.optim.AdamW(ps, amsgrad=True), 3),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), 1),
        (lambda ps: torch.optim.SGD(ps, lr=0.1), 0),
    ):
        model = TextModel()
        num_bytes = sum(p.nbytes for p in model.parameters())
        groups = make_groups([Group(optimiser=make(model.parameters()))], model)
        fit = fit_memory(StepEngine(model=model, objective=NextToken(), groups=groups), data, config)
        assert fit.optimiser_bytes == tensors * num_bytes
        assert fit.resident_bytes == 2 * num_bytes


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(*[st.floats(-3, 3)] * 4), min_size=4, max_size=9), st.integers(0, 1000))
def test_no_other_nonnegative_solution_is_better(rows, seed):
    columns, wanted = np.array(rows)[:, :3], np.array(rows)[:, 3]
    found = solve_nonnegative(columns, wanted)
    assert (found >= 0).all()
    error = np.square(columns @ found - wanted).sum()
    others = np.random.default_rng(seed).exponential(size=(200, 3)) * np.random.default_rng(seed).choice(2, (200, 3))
    near = np.maximum(found + np.random.default_rng(seed).normal(size=(200, 3)) * 0.05, 0)
    for x in (*others, *near):
        assert error <= np.square(columns @ x - wanted).sum() + 1e-6


def test_prices_that_are_there_are_found():
    fit = line(4000, 300, 7, 50)
    assert [fit.per_cell, fit.per_pair, fit.per_sample] == pytest.approx([300, 7, 50], rel=0.02)
    assert fit.predict(100, 2000, 4) == pytest.approx(1500 + 4000 + 30_000 + 14_000 + 200, rel=1e-3)
    assert fit.uncertainty == 0.01


@example((6699, 2, 18, 3), 1, 2, 20_089, "padded", 244)  # cells next to free beside what is fixed
@example((0, 1, 2, 1), 1, 2, 10_000, "padded", 0)  # rows whose padding makes more cells than all tokens are
@settings(deadline=None, max_examples=40)
@given(
    st.tuples(st.integers(0, 9000), st.integers(1, 900), st.integers(0, 20), st.integers(0, 5000)),
    st.integers(1, 30),
    st.integers(0, 60),
    st.integers(10_000, 10_000_000),
    st.sampled_from(["padded", "packed"]),
    st.integers(0, 2**32),
)
def test_no_micro_batch_of_a_plan_under_the_largest_budget_needs_more_than_the_limit(
    prices, shortest, more, limit, layout, seed
):
    lengths = np.random.default_rng(seed).integers(shortest, shortest + more + 1, 150)
    fit = line(*prices)
    cells = largest_cells(fit, Sizes(lengths), layout=layout, limit_bytes=limit)
    if cells < lengths.max():
        return
    for samples_per_step in (30, 150):
        plan = build_plan(lengths, PlanConfig(layout=layout, cells=cells, samples_per_step=samples_per_step))
        for rows in (rows for at in range(plan.num_steps) for rows in plan.step(at)[0]):
            assert fit.predict_safely(*Sizes(lengths[rows.ids]).shape(layout)) <= limit


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("prices", [(4000, 300, 7, 50), (4000, 300, 0, 5000)])
def test_the_largest_budget_is_not_far_below_what_fits(layout, prices):
    """Samples of one token among many longer ones once made a budget of a quarter of what fitted."""
    lengths = np.concatenate([[1, 2], np.random.default_rng(0).integers(20, 64, 4000)])
    fit, limit = line(*prices), 20_000_000
    cells = largest_cells(fit, Sizes(lengths), layout=layout, limit_bytes=limit)
    plan = build_plan(lengths, PlanConfig(layout=layout, cells=cells, samples_per_step=len(lengths)))
    most = max(fit.predict_safely(*Sizes(lengths[rows.ids]).shape(layout)) for rows in plan.step(0)[0])
    assert (0.85 if layout == "packed" else 0.8) * limit < most <= limit


def test_nothing_fits_where_the_model_alone_is_too_large():
    fit = line(4000, 300, 7, 50, resident=10**9)
    assert largest_cells(fit, Sizes(np.array([4, 64])), layout="packed", limit_bytes=10**9) == 0


def test_points_off_the_line_make_the_fit_less_sure():
    sure = line(4000, 300, 7, 50)
    bent = [replace(p, num_bytes=int(p.num_bytes * 1.3)) if at == 10 else p for at, p in enumerate(sure.points)]
    fit = fit_points(bent, resident_bytes=0, optimiser_bytes=0, facts={})
    assert fit.uncertainty > 0.1


@pytest.mark.parametrize("bend", [150, 400, 1000, 2000, 3000])
def test_a_price_that_ends_where_a_chunk_is_full_is_not_carried_on_to_the_budget(bend, monkeypatch):
    """The logits of a small model with many words: half of what a cell takes, until a chunk of them is full."""
    lengths = np.tile(LENGTHS, 5)
    data = TrainData(samples=text_samples(lengths.tolist()), fields=TEXT_FIELDS)

    def take(cells):
        return 60_000 + 200 * cells + 200 * min(cells, bend)

    monkeypatch.setattr(fitting, "_probe", lambda _, batch: take(sum(batch.rows().lengths)))
    config = TrainConfig(layout="packed")
    engine, limit = replace(engine_of(TextModel(), config), device=torch.device("cuda")), 1_600_000  # nothing is sent
    fit = fit_memory(engine, data, config, limit_bytes=limit)
    cells = largest_cells(fit, Sizes(lengths), layout="packed", limit_bytes=limit)
    assert 0.85 * limit < fit.constant_bytes + take(cells) <= limit
    if bend < 3000:  # nearer to the limit there is too little behind the bend to be sure of, and the fit says so
        assert fit.predict(cells, 40 * cells, cells // 20) == pytest.approx(fit.constant_bytes + take(cells), rel=0.05)
    else:
        assert fit.uncertainty > 0.05


@pytest.mark.parametrize("wall", [500, 1500, 3000])
def test_a_budget_stays_below_a_probe_that_did_not_fit(wall, monkeypatch):
    lengths = np.tile(LENGTHS, 5)
    data = TrainData(samples=text_samples(lengths.tolist()), fields=TEXT_FIELDS)

    def take(_, batch):
        cells = sum(batch.rows().lengths)
        return None if cells > wall else 60_000 + 200 * cells

    monkeypatch.setattr(fitting, "_probe", take)
    config = TrainConfig(layout="packed")
    engine, limit = replace(engine_of(TextModel(), config), device=torch.device("cuda")), 1_600_000  # nothing is sent
    fit = fit_memory(engine, data, config, limit_bytes=limit)
    assert fit.most_cells is not None
    cells = largest_cells(fit, Sizes(lengths), layout="packed", limit_bytes=limit)
    assert max(point.cells for point in fit.points) * 0.9 <= cells
    assert cells == fit.most_cells
    assert MemoryFit(**{f: getattr(fit, f) for f in MemoryFit.__dataclass_fields__}) == fit


def test_what_did_not_fit_here_says_nothing_of_a_larger_card():
    fit = replace(line(4000, 300, 7, 50), most_cells=500)
    limits = {HERE: 1_000_000, "smaller": 900_000, "larger": 20_000_000}
    cells = cells_by_limit(fit, Sizes(np.array(LENGTHS)), "packed", limits)
    assert cells[HERE] == cells["smaller"] == 500
    assert cells["larger"] > 10 * 500


def test_memory_in_stairs_gives_no_budget_beyond_what_was_seen():
    points = [Point(cells, 40 * cells, cells // 20, 500_000) for cells in (100, 200, 300, 400, 500, 600, 700)]
    fit = fit_points(points, resident_bytes=0, optimiser_bytes=0, facts={})
    assert largest_cells(fit, Sizes(np.array(LENGTHS)), layout="packed", limit_bytes=10**12) == 700


def test_probes_come_from_the_samples_and_reach_the_longest():
    lengths = np.array(LENGTHS)
    probes = choose_probes(Sizes(lengths))
    widths = [int(lengths[ids].max()) for ids in probes]
    assert max(widths) == lengths.max()
    sizes = [len(ids) * width for ids, width in zip(probes, widths, strict=True)]
    assert sizes == sorted(sizes)
    assert all(len(ids) * width <= 16 * lengths.max() for ids, width in zip(probes, widths, strict=True))
    for few in (1, 2, 3):
        assert all(set(ids) <= set(range(few)) for ids in choose_probes(Sizes(lengths[:few])))


def test_running_out_of_memory_ends_the_probes_and_the_first_one_ends_the_fit(caplog):
    class Greedy(NextToken):
        most = 300

        def sums(self, model, batch):
            if batch["input_ids"].numel() > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().sums(model, batch)

    config = TrainConfig()
    engine = replace(engine_of(TextModel(), config), objective=Greedy())
    with caplog.at_level("INFO", logger="truebatch.training.memory.fit"):
        fit = fit_memory(engine, DATA, config)
    assert 100 < max(point.cells for point in fit.points) <= 300
    assert "cells does not fit: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB" in caplog.text
    Greedy.most = 1
    with pytest.raises(MemoryLimitError, match="not even the shortest samples"):
        fit_memory(engine, DATA, config)


def test_a_probe_is_made_as_if_every_cell_had_a_label():
    fields = (Field(name="ids"), Field(name="labels", pad=-100, blank=-100))
    data = TrainData(samples=[{"ids": [1, 2], "labels": [-100, 3]}], fields=fields)
    batch, _ = fitting.make_batch(data, np.array([0]), "packed")
    assert batch.filled_cells("labels") is None


def test_nothing_is_left_of_one_probe_in_the_memory_of_the_next(monkeypatch):
    noted = []
    monkeypatch.setattr(fitting, "free_memory", lambda _device: noted.append("freed"))
    monkeypatch.setattr(fitting, "added_bytes", lambda _work, **_: noted.append("probed") or 100)
    fit_memory(replace(engine_of(TextModel(), TrainConfig()), device=torch.device("cuda")), DATA, TrainConfig())
    assert len(noted) > 4
    assert noted == ["freed", "probed"] * (len(noted) // 2)


def test_a_fit_comes_back_from_its_file_and_damage_is_named(tmp_path):
    fit = line(4000, 300, 7, 50)
    save_fit(fit, tmp_path / "run")
    again = load_fit(tmp_path / "run")
    assert again == fit
    assert again.fingerprint == fit.fingerprint
    assert load_fit(tmp_path) is None
    (tmp_path / "fit.json").write_text("{}")
    with pytest.raises(DataError, match=r"fit\.json is not a memory fit"):
        load_fit(tmp_path)


def test_a_run_with_another_model_or_precision_than_the_fit_is_told(tmp_path):
    model, config = TextModel(), TrainConfig(cells=100)
    facts = fit_facts(model, config, device=CPU)
    save_fit(replace(line(4000, 300, 7, 50), facts=facts), tmp_path)
    assert stale_fit_warnings(tmp_path, model, config, device=CPU) == []
    (said,) = stale_fit_warnings(tmp_path, model, replace(config, precision="bf16"), device=CPU)
    assert "precision was 'fp32', is 'bf16'" in said
    (said,) = stale_fit_warnings(tmp_path, TextModel(dim=32), config, device=CPU)
    assert "parameters was" in said
    assert stale_fit_warnings(tmp_path, TextModel(dim=32), TrainConfig(), device=CPU) == []


def test_every_choice_of_columns_is_tried_by_hand():
    columns, wanted = np.array([[1.0, 2, 0], [0, 1, 1], [1, 0, 3], [2, 1, 0]]), np.array([3.0, -1, 2, 1])
    grid = np.arange(0, 3.01, 0.05)
    best = min(np.square(columns @ np.array(x) - wanted).sum() for x in itertools.product(grid, repeat=3))
    found = np.square(columns @ solve_nonnegative(columns, wanted) - wanted).sum()
    assert found <= best <= found + 0.02


def test_lengths_are_read_where_none_were_measured():
    config = TrainConfig()
    small = replace(DATA, samples=text_samples(LENGTHS[:5]))
    engine = engine_of(TextModel(), config)
    measured = replace(small, measured=measure_by_reading(small.samples, small.fields))
    assert fit_memory(engine, small, config) == fit_memory(engine, measured, config)


def make_translator():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=60, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).train()
    head = head_of(model)
    random = np.random.default_rng(0)
    samples = [
        {
            "input_ids": random.integers(1, 60, int(n)).tolist(),
            "labels": random.integers(1, 60, 90 if i % 20 == 0 else 2),
        }
        for i, n in enumerate(random.integers(8, 13, 200))
    ]
    train = TrainConfig(layout="padded")
    groups = make_groups([default_group(model, train)], model)
    engine = StepEngine(model=model, objective=HeadObjective(head=head), groups=groups)
    data = TrainData(samples=[head.prepare(sample) for sample in samples], fields=head.fields)
    return engine, replace(data, measured=measure_by_reading(data.samples, data.fields)), train


def test_targets_of_an_encoder_decoder_are_counted():
    """One sample of twenty with a long target: by its sources alone a budget was several times too large."""
    engine, data, config = make_translator()
    fit = fit_memory(engine, data, config)
    sizes, limit = sizes_of(data), fit.constant_bytes + 20_000_000
    assert fit.uncertainty < 0.2
    cells = largest_cells(fit, sizes, layout="padded", limit_bytes=limit)
    plan = build_plan(sizes.lengths, PlanConfig(layout="padded", cells=cells, samples_per_step=len(sizes)))
    rows = [rows for at in range(plan.num_steps) for rows in plan.step(at)[0]]
    batch, shape = make_batch(data, max(rows, key=lambda r: sizes.take(r.ids).shape("padded").others).ids, "padded")
    with untouched(engine):
        real = fit.constant_bytes + added_bytes(lambda: run_batch(engine, batch), device=CPU)
    assert shape.others > 3 * shape.cells
    assert fit.predict(*shape) == pytest.approx(real, rel=0.05)
    assert 0.6 * limit < real <= limit
    blind = fit_points(
        [Point(p.cells, p.pairs, p.samples, p.num_bytes) for p in fit.points],
        resident_bytes=0,
        optimiser_bytes=0,
        facts={},
    )
    assert blind.uncertainty > 0.3  # what such a budget was made of


def test_lengths_along_another_axis_come_from_the_samples_after_their_transform(monkeypatch):
    fields = (Field(name="ids"), Field(name="words", axis="targets"), Field(name="marks", axis="targets"))
    samples = [{"ids": [1] * n, "words": [2], "marks": [3]} for n in (4, 2, 7, 5)]

    def grow(sample, sample_id, epoch):
        return {**sample, "words": [2] * sample_id, "marks": [3] * sample_id}

    data = TrainData(samples=samples, fields=fields, transform=grow)
    sizes = sizes_of(data)
    assert [part.tolist() for part in (sizes.lengths, *sizes.others)] == [[4, 2, 7, 5], [0, 1, 2, 3]]
    assert sizes_of(data, np.array([3, 1])).shape("padded") == (10, 50, 2, 6, 18, 30)
    assert sizes_of(data, np.array([3, 1])).shape("packed") == (7, 29, 2, 4, 10, 17)
    batch, shape = make_batch(data, np.array([3, 1]), "padded")
    assert shape.others == batch["words"].numel()
    assert shape.cells == batch["ids"].numel()
    monkeypatch.setattr(fitting, "MOST_READ", 2)
    drawn = sizes_of(data)
    assert drawn.ids.tolist()[-1] == 2
    assert len(drawn) == 2
    for ids in choose_probes(drawn):
        assert set(ids) <= set(drawn.ids)


def test_a_fit_without_other_axes_has_no_price_for_them():
    fit = line(4000, 300, 7, 50)
    assert fit.per_other == 0.0
    assert fit.added(10, 100, 1, 1000, 10_000, 10_000) == fit.added(10, 100, 1)


PAIRED = (Field(name="ids"), Field(name="words", axis="targets"))


def paired(number=40, *, longest=3):
    return [{"ids": [1] * (4 + i % 3), "words": [2] * (1 + i % longest)} for i in range(number)]


class Sums:
    """Of what the model makes of both axes."""

    def counts(self, batch):
        return {"sum": batch.num_samples}

    def sums(self, model, batch):
        return {"sum": model(batch["ids"]).sum() + model(batch["words"]).square().sum()}


def paired_engine():
    model = nn.Embedding(5, 8)
    groups = make_groups([default_group(model, TrainConfig())], model)
    return StepEngine(model=model, objective=Sums(), groups=groups)


def test_a_sample_without_its_target_is_named():
    samples = paired()
    del samples[33]["words"]
    lengths = Measured(lengths=np.array([len(s["ids"]) for s in samples]))
    with pytest.raises(DataError, match="sample 33 has no list 'words'"):
        sizes_of(TrainData(samples=samples, fields=PAIRED, measured=lengths))


@pytest.mark.parametrize("is_estimate", [False, True])
def test_a_transform_that_draws_leaves_the_generators_as_they_were(is_estimate):
    def draw(sample, sample_id, epoch):
        torch.rand(1)
        np.random.random()
        return sample

    engine = paired_engine()
    before, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()
    data = TrainData(samples=paired(), fields=PAIRED, transform=draw)
    fit_memory(engine, data, TrainConfig(), is_estimate=is_estimate)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpys).all()


@pytest.mark.parametrize(
    "fields",
    [
        (Field(name="ids", axis="source"), Field(name="words", axis="targets")),
        (Field(name="ids", kind="nested", inner="members"), Field(name="words", axis="targets")),
        PAIRED,
    ],
)
def test_every_axis_in_rows_beside_the_planned_one_is_counted(fields):
    ids = [[[1], [2, 3]]] if fields[0].kind == "nested" else [[1, 2]]
    data = TrainData(samples=[{"ids": ids[0], "words": [1, 2, 3]}], fields=fields)
    (other,) = sizes_of(data).others
    assert other.tolist() == [3]


def test_a_fit_from_before_other_axes_were_counted_no_longer_holds(tmp_path):
    engine, config = paired_engine(), TrainConfig(cells=100)
    data = TrainData(samples=paired(), fields=PAIRED)
    fit = fit_memory(engine, data, config)
    save_fit(fit, tmp_path)
    assert stale_fit_warnings(tmp_path, engine.model, config, device=CPU, fields=PAIRED) == []
    facts = {name: fact for name, fact in fit.facts.items() if name != "other_axes"}
    save_fit(replace(fit, facts=facts), tmp_path)
    (said,) = stale_fit_warnings(tmp_path, engine.model, config, device=CPU, fields=PAIRED)
    assert "other_axes was None, is ['targets']" in said
    assert stale_fit_warnings(tmp_path, engine.model, config, device=CPU, fields=PAIRED[:1]) == []


def test_long_targets_that_do_not_fit_do_not_make_the_longest_source_too_long(monkeypatch):
    samples = [
        {"ids": [1] * (400 if i % 10 == 0 else 8), "words": [2] * (900 if i % 10 == 5 else 3)} for i in range(60)
    ]
    data = TrainData(samples=samples, fields=PAIRED)
    monkeypatch.setattr(
        fitting, "_probe",
        lambda _, batch: None if batch["words"].numel() > 5000 else 1000 + 8 * (batch["ids"].numel() + batch["words"].numel()),
    )  # fmt: skip
    fit = fit_memory(paired_engine(), data, TrainConfig())
    assert fit.most_cells == 400
    monkeypatch.setattr(
        fitting, "_probe", lambda _, batch: None if batch["ids"].numel() > 300 else 1000 + batch["ids"].numel()
    )
    assert fit_memory(paired_engine(), data, TrainConfig()).most_cells == 360  # that one does not fit, alone as it is


@pytest.mark.parametrize(
    "damage",
    [{"per_other": None}, {"per_cell": "x"}, {"floor": True}, {"facts": []}, {"points": []}, {"uncertainty": []}],
)
def test_a_fit_with_something_else_than_numbers_is_damaged(tmp_path, damage):
    save_fit(line(4000, 300, 7, 50), tmp_path)
    file = tmp_path / "fit.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))
    with pytest.raises(DataError, match="is not a memory fit"):
        load_fit(tmp_path)
