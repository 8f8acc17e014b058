"""What a run once said wrongly, or not at all."""

import math

import numpy as np
import pytest
import torch

from tests.tiny import TEXT_FIELDS, NextToken, TextModel, text_samples
from truebatch.errors import CheckpointError, ConfigError, DataError, LawError, NonFiniteError, RunError, TruebatchError
from truebatch.training.checkpoint.retention import best_step
from truebatch.training.checks.compare_one_by_one import compare_with_one_by_one
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData, single_sample_batch_fn
from truebatch.training.logging.metrics_jsonl import read_metrics
from truebatch.training.optim.param_groups import Group, make_groups
from truebatch.training.run_dir.run_dir import read_status
from truebatch.training.step import StepEngine, step_counts
from truebatch.training.trainer import train

LENGTHS = [3, 31, 8, 17, 4, 29, 12, 5, 9, 22, 2, 14]
SAMPLES = text_samples(LENGTHS)


def model_of(kind=TextModel):
    torch.manual_seed(0)
    return kind()


def data(**more):
    return TrainData(**{"samples": SAMPLES, "fields": TEXT_FIELDS, **more})


def settings(**more):
    return TrainConfig(**{"epochs": 2, "samples_per_step": 4, "learning_rate": 1e-2, **more})


# --- compare ----------------------------------------------------------------------------------------------------------


class Overflowing(NextToken):
    """As with fp16: gradients above its largest number are infinite."""

    def sums(self, model, batch):
        sums = super().sums(model, batch)
        return {"nll": Half.apply(sums["nll"])}


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return (100 * grad).half().float() / 100


class Alone(Overflowing):
    """Wrong in micro-batches: twice the loss."""

    def sums(self, model, batch):
        sums = super().sums(model, batch)
        return {"nll": sums["nll"] * (2 if batch.num_samples > 1 else 1)}


def compared(objective, *, scale):
    model = model_of()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    groups = make_groups([Group(optimiser=torch.optim.SGD(model.parameters(), 0.1))], model)
    engine = StepEngine(model=model, objective=objective, groups=groups, scaler=scaler)
    alone = single_sample_batch_fn(data(), epoch=0)
    from truebatch.batch.collate import collate
    from truebatch.planning.rows import padded_rows

    batch = collate([SAMPLES[i] for i in range(4)], padded_rows(np.arange(4), 31), TEXT_FIELDS)
    counts = step_counts([batch], objective, {}, device=engine.device)
    found = compare_with_one_by_one(engine, [batch], counts, alone, epoch=0, precision="fp16")
    assert engine.scaler is scaler
    assert scaler.get_scale() == scale
    return found


def test_a_loss_scale_that_overflows_is_no_broken_law():
    assert compared(Overflowing(), scale=2.0**20) < 1e-2
    with pytest.raises(LawError, match="one sample at a time"):
        compared(Alone(), scale=2.0**20)


def test_a_step_that_is_not_finite_either_way_is_left_to_the_policy():
    class Nan(NextToken):
        def sums(self, model, batch):
            return {"nll": super().sums(model, batch)["nll"] * math.nan}

    assert compared(Nan(), scale=2.0**16) is None
    said = []
    with pytest.raises(NonFiniteError, match="step 0 is not finite"):
        train(model_of(), Nan(), data(), settings(true_batch="compare"), say=said.append)
    assert any("not finite" in line and "not compared" in line for line in said)


# --- roll back --------------------------------------------------------------------------------------------------------


class BadLoss(NextToken):
    def sums(self, model, batch):
        sums = super().sums(model, batch)
        return {"nll": sums["nll"] + (math.inf if 6 in batch.sample_ids else 0.0)}


def test_a_step_that_is_passed_over_stands_in_the_log_with_its_samples(tmp_path):
    config = settings(nonfinite="roll_back", nonfinite_limit=5, save_every=1)
    train(model_of(), BadLoss(), data(), config, out=tmp_path / "run")
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "validation_loss" not in line]
    assert [line["step"] for line in lines] == list(range(1, 7))
    over = [line for line in lines if line.get("passed_over")]
    assert len(over) == 2  # sample 6 once in each of two epochs
    for line in over:
        assert 6 in line["samples"]
        assert len(line["samples"]) == 4
        assert line["updated"] is False
        assert "loss" not in line


# --- the last update --------------------------------------------------------------------------------------------------


class LastIsBad(torch.optim.SGD):
    """Writes NaN at its sixth update, the last of the run."""

    number = 0

    def step(self, closure=None):
        super().step(closure)
        self.number += 1
        if self.number == 6:
            self.param_groups[0]["params"][0].data[0] = math.nan


@pytest.mark.parametrize("policy", ["raise", "skip", "skip_then_raise"])
@pytest.mark.parametrize("has_run", [True, False])
def test_nan_from_the_last_update_is_an_error(tmp_path, policy, has_run):
    model = model_of()
    out = tmp_path / "run" if has_run else None
    group = Group(optimiser=LastIsBad(model.parameters(), 0.1))
    with pytest.raises(NonFiniteError, match=r"after step 6[\s\S]*tok|after step 6[\s\S]*embed|after step 6"):
        train(model, NextToken(), data(), settings(nonfinite=policy), groups=[group], out=out)
    if has_run:
        status = read_status(tmp_path / "run")
        assert (status["state"], status["exit_code"]) == ("failed", 1)


# --- going on ---------------------------------------------------------------------------------------------------------


def optimiser_run(folder, max_steps, *, rate=0.1, schedule=None, **options):
    model = model_of()
    group = Group(optimiser=torch.optim.AdamW(model.parameters(), rate, **options))
    return train(model, NextToken(), data(), settings(max_steps=max_steps), groups=[group], out=folder)


@pytest.mark.parametrize(
    ("changed", "name"),
    [({"rate": 0.2}, "lr"), ({"betas": (0.5, 0.9)}, "betas"), ({"weight_decay": 0.3}, "weight_decay"), ({"eps": 1e-3}, "eps")],
)  # fmt: skip
def test_another_setting_of_an_optimiser_is_refused_by_name(tmp_path, changed, name):
    optimiser_run(tmp_path / "run", 2)
    with pytest.raises(CheckpointError, match=name):
        optimiser_run(tmp_path / "run", 4, **changed)
    assert optimiser_run(tmp_path / "run", 4).step == 4


def test_other_clipping_of_a_group_is_refused_by_name(tmp_path):
    def run(steps, clip):
        model = model_of()
        group = Group(optimiser=torch.optim.SGD(model.parameters(), 0.1), max_grad_norm=clip)
        return train(model, NextToken(), data(), settings(max_steps=steps), groups=[group], out=tmp_path / "run")

    run(2, 1.0)
    with pytest.raises(CheckpointError, match="max_grad_norm"):
        run(4, 2.0)


def test_other_data_of_the_same_lengths_is_noticed(tmp_path):
    train(model_of(), NextToken(), data(), settings(max_steps=2), out=tmp_path / "run")
    other = [{"input_ids": (np.asarray(s["input_ids"]) + 1) % 40} for s in SAMPLES]
    with pytest.raises(RunError, match="not what this run began with"):
        train(model_of(), NextToken(), data(samples=other), settings(), out=tmp_path / "run")
    one = [dict(s) for s in SAMPLES]
    one[7] = {"input_ids": np.asarray(one[7]["input_ids"])[::-1].copy()}
    with pytest.raises(RunError, match="not what this run began with"):
        train(model_of(), NextToken(), data(samples=one), settings(), out=tmp_path / "run")
    assert train(model_of(), NextToken(), data(), settings(), out=tmp_path / "run").step == 6


def test_samples_that_are_drawn_anew_whenever_they_are_read_do_not_stop_a_run(tmp_path):
    class Drawn:
        def __len__(self):
            return len(SAMPLES)

        def __getitem__(self, at):
            return {"input_ids": np.random.default_rng().integers(1, 40, LENGTHS[at])}

    for steps in (2, 4):
        assert train(
            model_of(), NextToken(), data(samples=Drawn()), settings(max_steps=steps), out=tmp_path / "run"
        ).step


def test_a_term_that_moves_no_parameters_is_refused_whenever_it_first_appears():
    class Late(NextToken):
        def counts(self, batch):
            more = {"late": 1} if 6 in batch.sample_ids else {}
            return {**super().counts(batch), **more}

        def sums(self, model, batch):
            sums = super().sums(model, batch)
            return {**sums, "late": sums["nll"] * 0} if 6 in batch.sample_ids else sums

    model = model_of()
    group = Group(optimiser=torch.optim.SGD(model.parameters(), 0.1), terms=("nll",))
    with pytest.raises(ConfigError, match=r"move no parameters[\s\S]*late"):
        train(model, Late(), data(), settings(), groups=[group])


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [None, 3])
def test_a_run_that_ends_within_an_epoch_is_validated_at_its_end(tmp_path, every):
    config = settings(max_steps=5, validate_every=every)
    result = train(model_of(), NextToken(), data(validation=SAMPLES[:4]), config, out=tmp_path / "run")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "validation_loss" in line] == [3, 5]
    assert result.best_loss is not None
    assert best_step(tmp_path / "run" / "checkpoints") in (3, 5)


# --- objectives and models that do not keep to the law ----------------------------------------------------------------


class Detached(NextToken):
    def sums(self, model, batch):
        return {"nll": super().sums(model, batch)["nll"].detach()}


class Vector(NextToken):
    def sums(self, model, batch):
        return {"nll": super().sums(model, batch)["nll"].expand(2)}


class Number(NextToken):
    def sums(self, model, batch):
        return {"nll": super().sums(model, batch)["nll"].item()}


class Nameless(NextToken):
    def sums(self, model, batch):
        return super().sums(model, batch)["nll"]


class Uncounted(NextToken):
    def counts(self, batch):
        return {"nll": 0}


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (Detached, "no parameter got a gradient"),
        (Vector, r"tensor of no axes[\s\S]*\(2,\)"),
        (Number, r"tensor of no axes[\s\S]*float"),
        (Nameless, "must name its terms"),
        (Uncounted, "has a sum and counts nothing"),
    ],
)
def test_an_objective_that_would_train_nothing_or_wrongly_is_refused(objective, message):
    with pytest.raises(TruebatchError, match=message):
        train(model_of(), objective(), data(), settings())


class FunctionalDropout(TextModel):
    def forward(self, batch):
        return torch.nn.functional.dropout(super().forward(batch), 0.3, self.training)


class Counting(TextModel):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch):
        self.seen += 1
        return super().forward(batch)


@pytest.mark.parametrize(("kind", "name"), [(FunctionalDropout, "dropout"), (Counting, "buffers")])
def test_a_coupling_that_only_running_shows_is_refused_unless_allowed_by_name(kind, name):
    with pytest.raises(LawError, match=f"depend on how steps are cut: {name}"):
        train(model_of(kind), NextToken(), data(), settings())
    result = train(model_of(kind), NextToken(), data(), settings(allow=(name,)))
    assert result.records[0]["equality"]["verdict"] == "in_distribution"
    assert {record["equality"] for record in result.records[1:]} == {"in_distribution"}


def test_a_sample_without_its_field_is_named():
    with pytest.raises(DataError, match=r"sample 12 has no list 'input_ids'[\s\S]*\['ids'\]"):
        train(model_of(), NextToken(), data(samples=[*SAMPLES, {"ids": [1]}]), settings())
