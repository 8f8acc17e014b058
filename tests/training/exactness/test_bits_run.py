"""A run with `exactness: bits`: the same parameters whatever the budget, the order, memory that runs out, or restarts."""

import json

import pytest
import torch
from torch import nn

from tests.tiny import SETS_FIELDS, TEXT_FIELDS, NextToken, SetRisk, SetsModel, TextModel, set_samples, text_samples
from truebatch.errors import ConfigError, LawError, MemoryLimitError, PlanError, RunError
from truebatch.testing.failpoints import armed
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.exactness.atoms import ORDER
from truebatch.training.exactness.digest import parameter_digests, read_digests
from truebatch.training.logging.metrics_jsonl import read_metrics
from truebatch.training.trainer import train

TEXTS = text_samples([3, 31, 8, 17, 4, 29, 12, 5, 9, 22, 2] * 3)
SETS = set_samples([[2, 5, 1], [1], [7, 3, 9, 2], [4, 4], [25, 1], [3], [2, 2]] * 2)
CASES = {"text": (TextModel, NextToken, TEXT_FIELDS, TEXTS), "sets": (SetsModel, SetRisk, SETS_FIELDS, SETS)}


def trained(case="text", *, out=None, say=None, model=None, **settings):
    """Digests of the parameters and losses after two epochs."""
    kind, objective, fields, samples = CASES[case]
    torch.manual_seed(0)
    model = model or kind()
    data = TrainData(samples=samples, fields=fields, validation=samples[:5])
    asked = {"exactness": "bits", "samples_per_step": 16, "epochs": 2, "layout": "padded", **settings}
    result = train(model, objective(), data, TrainConfig(**asked), out=out, say=say)
    return parameter_digests(model), [r["loss"] for r in result.records]


@pytest.mark.parametrize(("case", "layout"), [("text", "padded"), ("text", "packed"), ("sets", "padded")])
def test_budget_and_order_change_no_bit(case, layout, monkeypatch):
    expected = trained(case, layout=layout)
    assert trained(case, layout=layout, cells=4 * 64) == expected
    monkeypatch.setenv(ORDER, "shuffled:3")
    assert trained(case, layout=layout, cells=16 * 64) == expected


def test_rounding_does_not_keep_bits_so_the_test_above_says_something():
    one = trained(exactness="rounding", layout="packed", cells=64)
    assert one[0] != trained(exactness="rounding", layout="packed", cells=256)[0]


@pytest.mark.parametrize("place", ["step.transfer", "step.forward", "step.backward", "step.accumulated"])
@pytest.mark.parametrize("nth", [1, 4, 9])
def test_memory_that_runs_out_anywhere_changes_no_bit(place, nth):
    said = []
    expected = trained(layout="packed", check_samples=0)
    with armed(f"{place}:oom:{nth + 4}"):  # the first four visits are the check of the first step
        assert trained(layout="packed", say=said.append, check_samples=0) == expected
    assert any("ran out of memory" in line for line in said)


@pytest.mark.parametrize("nth", [1, 3])
def test_memory_that_runs_out_in_the_check_of_the_first_step_changes_nothing(nth):
    with armed(f"step.backward:oom:{nth}"):
        assert trained(check_samples=0) == trained(check_samples=0)


def test_an_atom_of_the_first_step_that_does_not_fit_is_named():
    class Hungry(TextModel):
        def forward(self, batch):
            raise MemoryError("no room")

    with pytest.raises(
        MemoryLimitError, match=r"an atom of the first step does not fit[\s\S]*samples [\s\S]*atom_cells"
    ):
        trained(model=Hungry(), check_samples=0)


def test_less_and_less_is_on_the_device_until_a_step_fits():
    class Crowded(TextModel):
        trouble = 0

        def forward(self, batch):
            if self.training and self.trouble > 0 and 4 in batch.sample_ids:
                self.trouble -= 1
                raise MemoryError("no room")
            return super().forward(batch)

    torch.manual_seed(0)
    model, said = Crowded(), []

    def say(line):
        said.append(line)
        model.trouble = 3 if line.startswith("equality: bits") else model.trouble

    assert trained(model=model, say=say) == trained()
    again = [line.rsplit(" with ", 1)[1] for line in said if "ran out of memory" in line]
    assert again == ["one atom on the device", *["one atom on the device, and waiting sums on the host"] * 2]


def test_an_atom_that_never_fits_is_named():
    class Hungry(TextModel):
        def forward(self, batch):
            if 1 in batch.sample_ids and self.training and self.is_armed:
                raise MemoryError("no room")
            return super().forward(batch)

    model = Hungry()
    model.is_armed = False
    seen = []

    def say(line):
        seen.append(line)
        model.is_armed = model.is_armed or line.startswith("equality: bits")

    with pytest.raises(MemoryLimitError, match=r"atom \d+ of a step does not fit[\s\S]*samples [\s\S]*atom_cells"):
        trained(model=model, say=say)


def test_a_run_that_is_stopped_and_resumed_with_another_budget_has_the_same_bits(tmp_path):
    expected = trained(digest_every=1, out=tmp_path / "whole", save_every=1)
    trained(digest_every=1, out=tmp_path / "parts", save_every=1, max_steps=2)
    said = []
    digests, _ = trained(digest_every=1, out=tmp_path / "parts", save_every=1, max_steps=6, cells=256, say=said.append)
    assert digests == expected[0]
    assert "resuming after step 2" in said
    whole, parts = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    assert [r["digest"] for r in whole if "digest" in r] == [r["digest"] for r in parts if "digest" in r]
    assert read_digests(tmp_path / "parts", 5) == read_digests(tmp_path / "whole", 5)


def test_another_width_of_atoms_is_another_run(tmp_path):
    trained(out=tmp_path / "run", max_steps=1)
    with pytest.raises(RunError, match="atom_cells"):
        trained(out=tmp_path / "run", max_steps=2, atom_cells=128)
    kept = json.loads((tmp_path / "run" / "exactness.json").read_text())
    (tmp_path / "run" / "exactness.json").write_text(json.dumps({**kept, "atom_cells": 32}))
    with pytest.raises(RunError, match=r"another width[\s\S]*32 cells before, 64 now"):
        trained(out=tmp_path / "run", max_steps=2)


def test_another_machine_is_said_when_a_run_resumes(tmp_path):
    trained(out=tmp_path / "run", max_steps=1)
    path = tmp_path / "run" / "exactness.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch": "1.0"}))
    said = []
    trained(out=tmp_path / "run", max_steps=2, say=said.append)
    assert any("torch: 1.0 before" in line for line in said)


def test_a_run_says_bits_and_keeps_it(tmp_path):
    said = []
    trained(out=tmp_path / "run", say=said.append, max_steps=1)
    assert any(line.startswith("equality: bits, 2 atom(s) with") for line in said)
    assert any(line.startswith("exactness: bits; atoms of 64 cells") for line in said)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0]["equality"]["verdict"] == "bits"


def test_an_operation_that_does_not_repeat_itself_is_named():
    class Restless(TextModel):
        calls = 0

        def forward(self, batch):
            self.calls += 1
            return super().forward(batch) * (1 + self.calls * 1e-7)

    with pytest.raises(LawError, match="does not give the same bits"):
        trained(model=Restless())


def test_an_operation_without_a_deterministic_kernel_is_named():
    class Forbidden(TextModel):
        def forward(self, batch):
            if torch.are_deterministic_algorithms_enabled():
                raise RuntimeError(
                    "put_ does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'"
                )
            return super().forward(batch)

    with pytest.raises(ConfigError, match="put_ has no kernel that gives the same bits twice"):
        trained(model=Forbidden())
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_sample_longer_than_the_atom_is_named():
    with pytest.raises(PlanError, match="sample 1 has 31 tokens; atoms of 16 cells"):
        trained(atom_cells=16)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"true_batch": "off"}, "true_batch='off'"),
        ({"oom": "quarantine"}, "oom='quarantine'"),
        ({"allow": ("dropout",)}, "allow"),
        ({"exactness": "rounding", "atom_cells": 64}, "atom_cells"),
        ({"exactness": "exact"}, "exactness"),
        ({"atom_cells": 0}, "atom_cells"),
    ],
)
def test_settings_that_cannot_hold_are_refused(settings, named):
    with pytest.raises(ConfigError, match=named):
        TrainConfig(**{"exactness": "bits", **settings})


@pytest.mark.parametrize("name", ["pairs", "patches"])
def test_a_limit_beside_the_cells_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=100"):
        trained(**{name: 100})


def test_a_parameter_without_a_gradient_keeps_none():
    class Idle(TextModel):
        def __init__(self):
            super().__init__()
            self.idle = nn.Linear(2, 2)

    torch.manual_seed(0)
    model = Idle()
    before = parameter_digests(model)
    trained(model=model)
    assert parameter_digests(model)["idle.weight"] == before["idle.weight"]
    assert model.idle.weight.grad is None


def test_compiled_layers_are_left_out_unless_asked_for():
    config = TrainConfig.auto(exactness="bits", samples_per_step=16)
    said = []
    torch.manual_seed(0)
    train(TextModel(), NextToken(), TrainData(samples=TEXTS, fields=TEXT_FIELDS), config, say=said.append)
    assert any(line.startswith("compile: false, for compiled kernels have other bits") for line in said)
    assert any(line.startswith("cells: null, one atom is on the device at a time") for line in said)
