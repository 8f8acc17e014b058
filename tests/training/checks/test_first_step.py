"""Every run compares a few samples of its first step before the first update, says what it found and stops if it is broken."""

import json
import math
import random
from pathlib import Path

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
    image_samples,
    set_samples,
    text_samples,
)
from tests.training.checks import faults
from truebatch.cli.app import run as command
from truebatch.errors import LawError
from truebatch.training.checks import equality, first_step
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.logging.metrics_jsonl import read_metrics
from truebatch.training.trainer import train

SYSTEM = f"{Path(faults.__file__)}:system"
PADDED, PACKED = {"cells": 128}, {"cells": 128, "layout": "packed"}
BROKEN = [
    ("LeakyMean", "NextToken", PADDED),
    ("LeakyMean", "NextToken", PACKED),
    ("ShiftedAcross", "NextToken", PACKED),
    ("FirstRow", "NextToken", {"batch_size": 12}),
    ("BroadcastOver", "NextToken", {"batch_size": 12}),
    ("OwnStatistics", "NextToken", PADDED),
    ("TextModel", "MeanInSums", PADDED),
    ("TextModel", "MeanInSums", PACKED),
    ("TextModel", "RowsCounted", PACKED),
    ("TextModel", "CellsCounted", PADDED),
    ("TextModel", "Contrastive", PADDED),
    ("TextModel", "Contrastive", PACKED),
    ("TextModel", "TwoAtLeast", PADDED),
]


def settings(**more):
    return TrainConfig(**{"samples_per_step": 12, "epochs": 2, "learning_rate": 1e-2, **more})


def data(samples=faults.SAMPLES, fields=TEXT_FIELDS):
    return TrainData(samples=samples, fields=fields)


def trained(model="TextModel", loss="NextToken", lines=None, out=None, **more):
    made = faults.model_named(model) if isinstance(model, str) else model
    objective = getattr(faults, loss)()
    say = (lambda _line: None) if lines is None else lines.append
    return made, train(made, objective, data(), settings(**more), out=out, say=say)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --- what is broken -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "loss", "cut"), BROKEN, ids=lambda value: str(value))
def test_a_fault_stops_a_run_before_its_first_update(tmp_path, model, loss, cut):
    made, lines = faults.model_named(model), []
    before = weights(made)
    with pytest.raises(LawError, match="gives other results in a batch than alone") as caught:
        train(made, getattr(faults, loss)(), data(), settings(**cut), out=tmp_path / "run", say=lines.append)
    assert torch.equal(weights(made), before)
    assert "truebatch verify" in caught.value.do
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["exit_code"], status["step"], status["equality"]["verdict"]) == (1, 0, "broken")
    assert any(line.startswith("equality: checked on ") for line in lines) or loss == "TwoAtLeast"
    assert read_metrics(tmp_path / "run/metrics.jsonl") == []


def test_what_differs_is_named():
    with pytest.raises(LawError, match=r"count of 'nll' is \d+ as cut and \d+ alone"):
        trained(loss="CellsCounted", **PADDED)
    with pytest.raises(LawError, match=r"loss term 'match' differs by"):
        trained(loss="Contrastive", **PADDED)
    with pytest.raises(LawError, match=r"raises alone: AssertionError: needs two samples"):
        trained(loss="TwoAtLeast", **PADDED)


class ScaledGradient(faults.TextModel):
    """The loss is right, and its gradient is not: it is clipped for the micro-batch."""

    def forward(self, batch):
        out = super().forward(batch)
        out.register_hook(lambda grad: grad / grad.norm())
        return out


def test_a_gradient_that_is_changed_for_the_micro_batch_is_found_and_its_parameter_named():
    torch.manual_seed(0)
    with pytest.raises(LawError, match=r"the gradient differs by \S+ most in '[\w.]+'; the loss by"):
        trained(ScaledGradient(), **PACKED)


class MovedBeside(faults.TextModel):
    """A row that is not alone is a little off: in every precision, or in fp32 only, as a wrong kernel would be."""

    def __init__(self, *, is_in_fp32_only):
        super().__init__()
        self.is_in_fp32_only = is_in_fp32_only

    def forward(self, batch):
        out = super().forward(batch)
        is_off = batch.num_samples > 1 and not (self.is_in_fp32_only and out.dtype == torch.float64)
        return out * (1 + 3e-5 * torch.linspace(0, 1, out.shape[1])[None, :, None]) if is_off else out


@pytest.mark.parametrize("is_in_fp32_only", [False, True])
def test_a_small_fault_is_told_from_rounding_by_fp64(is_in_fp32_only):
    torch.manual_seed(0)
    with pytest.raises(LawError, match="gives other results in a batch than alone"):
        trained(MovedBeside(is_in_fp32_only=is_in_fp32_only), **PACKED)


class Refuses(MovedBeside):
    """Has no fp64."""

    def forward(self, batch):
        if self.head.weight.dtype == torch.float64:
            raise AssertionError("fp32 only")
        return super().forward(batch)


def test_a_difference_that_fp64_cannot_judge_is_not_said_to_be_equal():
    torch.manual_seed(0)
    lines = []
    _, result = trained(Refuses(is_in_fp32_only=False), lines=lines, **PACKED)
    assert result.records[0]["equality"]["verdict"] == "not_checked"
    assert any(
        "not checked: " in line and "may be rounding, and in fp64 it raises AssertionError" in line for line in lines
    )


class Cancels(faults.TextModel):
    """Rounds by chance, by a few 1e-5 of its numbers: an amount that is cancelled stands beside what counts."""

    def forward(self, batch):
        out = super().forward(batch)
        large = 300 * out.mean(-1, keepdim=True)
        width = out.shape[1]  # what is added in another order is rounded otherwise
        return (out + large * width) - large * width


def test_rounding_that_is_large_alone_is_no_fault():
    torch.manual_seed(0)
    lines = []
    _, result = trained(Cancels(), lines=lines, **PACKED)
    found = result.records[0]["equality"]
    assert found["verdict"] == "equal"
    assert max(found["gradient"], found["loss"]) > equality.TOLERANCE
    assert found["rounding"] > 0
    assert any("(rounding alone: " in line for line in lines)


class NoRoomInFp64:
    """Memory runs out in fp64, where samples are together."""

    def forward(self, batch):
        if self.head.weight.dtype == torch.float64 and batch.num_samples > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(batch)


class CancelsWithoutRoom(NoRoomInFp64, Cancels):
    pass


class MovedWithoutRoom(NoRoomInFp64, MovedBeside):
    pass


def test_without_memory_for_fp64_a_difference_may_be_what_rounding_alone_is():
    torch.manual_seed(0)
    _, result = trained(CancelsWithoutRoom(), **PACKED)
    found = result.records[0]["equality"]
    assert found["verdict"] == "equal"
    assert max(found["gradient"], found["loss"]) > equality.TOLERANCE
    assert found["rounding"] > 0


def test_without_memory_for_fp64_more_than_rounding_is_not_said_to_be_equal():
    torch.manual_seed(0)
    lines = []
    _, result = trained(MovedWithoutRoom(is_in_fp32_only=False), lines=lines, **PACKED)
    assert result.records[0]["equality"]["verdict"] == "not_checked"
    assert any("memory ran out in fp64, and rounding alone is" in line for line in lines)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("model", "loss", "cut"), BROKEN, ids=lambda value: str(value))
def test_half_precision_hides_no_fault(model, loss, cut, precision):
    with pytest.raises(LawError, match="gives other results in a batch than alone"):
        trained(model, loss, precision=precision, **cut)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(*more):
    return command(["train", SYSTEM, "--set", "train.samples_per_step=12", "--out", "run", *more])


@pytest.mark.parametrize(("model", "loss", "cut"), BROKEN, ids=lambda value: str(value))
def test_the_command_exits_with_1(folder, capsys, model, loss, cut):
    settings = [f"train.{name}={value}" for name, value in cut.items()] + [f"model={model}", f"loss={loss}"]
    assert run(*(word for one in settings for word in ("--set", one))) == 1
    assert "gives other results in a batch than alone" in capsys.readouterr().err
    assert json.loads(Path("run/status.json").read_text())["equality"]["verdict"] == "broken"


def test_the_verify_command_that_is_named_runs_and_names_the_cause(folder, capsys):
    assert run("--set", "model=LeakyMean", "--set", "train.cells=128", "--set", "train.layout=packed") == 1
    (said,) = [part for part in capsys.readouterr().err.split("`") if part.startswith("truebatch verify ")]
    assert command(said.split()[1:]) == 1
    assert "NOT" in capsys.readouterr().out.upper()


# --- what is right ------------------------------------------------------------------------------------------------------

RIGHT = {
    "text": (lambda: faults.model_named("Keyed"), NextToken, TEXT_FIELDS, faults.SAMPLES),
    "sets": (
        SetsModel, SetRisk, SETS_FIELDS,
        set_samples([[2, 5, 1], [1], [7, 3, 9, 2], [4, 4], [25, 1], [3], [2, 2], [6], [1, 1, 1], [8, 2]]),
    ),
    "images": (
        ImageModel, Choice, IMAGE_FIELDS,
        image_samples([(5, 9), (12, 0), (3, 30), (9, 4), (1, 1), (20, 7), (2, 2), (8, 3), (4, 0), (6, 6)]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", RIGHT)
def test_right_models_are_not_alarmed(kind, layout, precision):
    build, objective, fields, samples = RIGHT[kind]
    torch.manual_seed(0)
    result = train(
        build(), objective(), data(samples, fields),
        TrainConfig(samples_per_step=10, max_steps=1, layout=layout, precision=precision),
    )  # fmt: skip
    found = result.records[0]["equality"]
    assert (found["verdict"], found["samples"]) == ("equal", 8 if precision == "fp32" else 5)
    if precision == "fp32":
        assert max(found["loss"], found["gradient"]) <= 1e-6
    else:
        assert found["rounding"] > 0


def test_a_run_says_it_and_keeps_it_in_its_status_and_its_first_record(tmp_path):
    lines = []
    _, result = trained(lines=lines, out=tmp_path / "run", **PACKED)
    (said,) = [line for line in lines if line.startswith("equality: ")]
    assert said.startswith("equality: checked on 8 samples, loss ")
    records, status = (
        read_metrics(tmp_path / "run/metrics.jsonl"),
        json.loads((tmp_path / "run/status.json").read_text()),
    )
    assert set(records[0]["equality"]) == {"samples", "loss", "gradient", "verdict"}
    assert records[0]["equality"] == status["equality"] == result.records[0]["equality"]
    assert "equality" not in records[1]
    assert not any("exact" in line for line in lines)


def test_none_is_checked_where_that_is_asked_for_and_it_is_said(tmp_path):
    lines = []
    _, result = trained("LeakyMean", lines=lines, out=tmp_path / "run", check_samples=0, **PACKED)
    assert "equality: not checked: check_samples is 0" in lines
    assert result.records[0]["equality"]["verdict"] == "not_checked"
    lines.clear()
    trained("LeakyMean", lines=lines, true_batch="off")
    assert "equality: not checked: true_batch: off runs one sample at a time" in lines


# --- in distribution ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allow", [("dropout",), ("dropout", "buffers")])
def test_dropout_that_is_not_keyed_is_equal_in_distribution_and_the_rest_is_compared(allow):
    lines = []
    _, result = trained("Noisy", lines=lines, allow=allow, **PACKED)
    found = result.records[0]["equality"]
    assert found["verdict"] == "in_distribution"
    assert found["gradient"] <= 1e-6
    assert any("in distribution; compared with dropout switched off" in line for line in lines)
    with pytest.raises(LawError, match="gives other results in a batch"):
        trained("NoisyAndLeaky", allow=allow, **PACKED)


def test_dropout_that_is_not_allowed_is_refused_by_its_name():
    with pytest.raises(LawError, match="depend on how steps are cut: dropout"):
        trained("Noisy", **PACKED)


def test_noise_that_no_mode_switches_off_is_not_said_to_be_compared():
    _, result = trained("NoisyAlways", allow=("dropout",), **PACKED)
    found = result.records[0]["equality"]
    assert (found["verdict"], found["samples"], found["loss"]) == ("in_distribution", 0, None)
    assert "nothing was compared" in found["why"]


def test_batch_statistics_that_are_allowed_are_compared_frozen():
    model = faults.model_named("TextModel")
    model.head = nn.Sequential(model.head, Flat(50))
    _, result = trained(model, allow=("batch statistics", "buffers"), **PACKED)
    assert result.records[0]["equality"]["verdict"] == "in_distribution"


class Flat(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(x.flatten(0, 1)).view_as(x)


# --- nothing is disturbed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["Keyed", "Noisy"])
def test_a_checked_run_is_the_same_run(model):
    made = [trained(model, allow=("dropout",), check_samples=n, epochs=3)[0] for n in (0, 8)]
    assert torch.equal(weights(made[0]), weights(made[1]))


def test_generators_buffers_modes_and_gradients_are_what_they_were():
    model = faults.model_named("TextModel")
    model.head = nn.Sequential(model.head, Flat(50), nn.Dropout(0.1).eval())
    seen = {}

    whole = first_step.check_equality

    def watched(first):
        def look():
            states = [torch.get_rng_state(), torch.from_numpy(np.random.get_state()[1].astype(np.int64))]
            modes = [m.training for m in model.modules()]
            return (
                states,
                random.getstate(),
                [b.clone() for b in model.buffers()],
                modes,
                [p.grad for p in model.parameters()],
            )

        seen["before"] = look()
        found = whole(first)
        seen["after"] = look()
        return found

    first_step.check_equality = watched
    try:
        trained(model, allow=("batch statistics", "buffers", "dropout"), max_steps=1, **PACKED)
    finally:
        first_step.check_equality = whole
    before, after = seen["before"], seen["after"]
    assert all(torch.equal(a, b) for a, b in zip(before[0] + before[2], after[0] + after[2], strict=True))
    assert (before[1], before[3], before[4]) == (after[1], after[3], after[4])


class OutOfMemory(faults.TextModel):
    """Memory runs out in the first forward passes."""

    def __init__(self, times):
        super().__init__()
        self.left = times

    def forward(self, batch):
        self.left -= 1
        if self.left >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(batch)


def test_memory_that_runs_out_in_the_check_ends_no_run():
    lines = []
    _, result = trained(OutOfMemory(times=2), lines=lines)
    assert result.step == 2
    assert result.records[0]["equality"]["verdict"] == "not_checked"
    assert "equality: not checked: memory ran out beside the step" in lines


class NoRoomInFp32(faults.TextModel):
    """As with rows that just fit in bf16: in fp32 memory runs out where there are cells of samples that are not checked."""

    seen = 0

    def forward(self, batch):
        if not torch.is_autocast_enabled("cpu") and not batch.rows().is_real.all() and batch.num_samples > 1:
            self.seen += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(batch)


class LeakyWithoutRoom(NoRoomInFp32, faults.LeakyMean):
    pass


def test_rows_too_wide_for_fp32_are_compared_there_without_their_empty_cells():
    model, result = trained(NoRoomInFp32(), check_samples=6, precision="bf16", **PACKED)
    assert model.seen
    assert result.records[0]["equality"]["verdict"] == "equal"
    assert result.records[0]["equality"]["samples"] == 6


def test_a_fault_is_found_without_the_empty_cells():
    with pytest.raises(LawError, match="gives other results in a batch than alone"):
        trained(LeakyWithoutRoom(), precision="bf16", **PACKED)


class Poisoned(NextToken):
    def sums(self, model, batch):
        return {"nll": super().sums(model, batch)["nll"] * (math.nan if 1 in batch.sample_ids else 1.0)}


def test_a_loss_that_is_not_finite_either_way_is_left_to_the_policy_for_it():
    lines = []
    config = settings(nonfinite="skip", batch_size=1)
    result = train(faults.model_named("TextModel"), Poisoned(), data(), config, say=lines.append)
    assert result.records[0]["equality"]["verdict"] == "not_checked"


# --- going on -----------------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_is_checked_again_when_something_else_runs(tmp_path, monkeypatch):
    def lines_of(**more):
        lines = []
        trained(lines=lines, out=tmp_path / "run", samples_per_step=4, save_every=1, epochs=1, **more)
        return [line for line in lines if line.startswith("equality: ")]

    assert lines_of(max_steps=1)[0].startswith("equality: checked on ")
    assert "nothing has changed since" in lines_of(max_steps=2)[0]
    kept = json.loads((tmp_path / "run/equality.json").read_text())
    for name in ("code", "torch", "device", "model", "truebatch"):
        assert kept["checked"][name]
        (tmp_path / "run/equality.json").write_text(json.dumps({**kept, "checked": {**kept["checked"], name: "other"}}))
        monkeypatch.undo()
        number = 3 if name == "code" else None
        if number is not None:
            assert lines_of(max_steps=number)[0].startswith("equality: checked on ")
    (tmp_path / "run/equality.json").write_text("{")
    assert read_metrics(tmp_path / "run/metrics.jsonl")[2]["equality"]["verdict"] == "equal"


def test_samples_that_share_rows_are_among_those_checked():
    many = text_samples([2] * 30 + [40, 1, 9])
    seen = []
    whole = first_step.judge

    def watched(engine, samples, **more):
        seen.append(samples)
        return whole(engine, samples, **more)

    first_step.judge = watched
    try:
        train(
            faults.model_named("TextModel"), NextToken(), data(many),
            settings(samples_per_step=33, max_steps=1, cells=64, layout="packed"),
        )  # fmt: skip
    finally:
        first_step.judge = whole
    (samples,) = seen
    ids = [i for batch in samples.cut for i in batch.sample_ids]
    assert len(ids) == 8
    assert {30, 31} <= set(ids)
    assert max(len(batch.sample_ids) for batch in samples.cut) > 2
    assert sorted(ids) == sorted(i for batch in samples.alone for i in batch.sample_ids)
