"""The budget of a CPU: the fastest that was tried, kept for later runs, and eight samples a batch where nothing is known."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from truebatch.scoring.backends import fastest_budget
from truebatch.scoring.backends.fastest_budget import FEW_ROWS, fastest_cells
from truebatch.scoring.backends.interface import Cost
from truebatch.scoring.batch_plan import DEFAULT_CELLS


@dataclass(frozen=True)
class Prompt:
    ids: tuple[int, ...]
    max_new_tokens: int | None = None
    """None: as many as the readout says."""


@dataclass
class Judge:
    """A judge of prompts of 20 tokens, whose clock is what the test says a batch takes."""

    seconds_of: dict[int, float]
    name: str = "judge"
    new_tokens: int = 1
    clock: float = 0.0
    sizes: list[int] = field(default_factory=list)
    model = torch.nn.Linear(1, 1)

    def describe(self):
        return {"name": self.name}

    def cost(self, sample):
        return Cost(tokens=sample, new_tokens=self.new_tokens)

    def prepare(self, sample):
        return Prompt((1,) * sample)

    def judge(self, prepared):
        most = {one.max_new_tokens for one in prepared}
        assert most == {fastest_budget.SHORT_ANSWER if self.new_tokens > fastest_budget.SHORT_ANSWER else None}
        self.sizes.append(len(prepared))
        self.clock += self.seconds_of[len(prepared)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path))


def settle(judge, monkeypatch, samples, rows=256):
    monkeypatch.setattr(fastest_budget.time, "perf_counter", lambda: judge.clock)
    return fastest_cells(judge, samples, rows=rows)


SAMPLES = [20] * 1536
RISING = {8: 0.8, 32: 3.9, 64: 9.0}  # ten a second, eight a second, seven a second
FALLING = {8: 0.8, 32: 2.4, 64: 6.0}


def test_a_budget_that_is_slower_than_eight_samples_a_batch_is_not_taken(monkeypatch):
    judge = Judge(RISING)
    assert settle(judge, monkeypatch, SAMPLES) == FEW_ROWS * 21
    assert set(judge.sizes) == {8, 32, 64}


def test_the_fastest_budget_is_taken_and_kept_for_samples_of_such_lengths(monkeypatch):
    judge = Judge(FALLING)
    assert settle(judge, monkeypatch, SAMPLES) == 32 * 21
    again = Judge(RISING)
    assert settle(again, monkeypatch, [25] * 16) == 32 * 21
    assert not again.sizes
    assert settle(again, monkeypatch, [40] * 1536) == FEW_ROWS * 41  # far longer ones are measured
    other = Judge(RISING, name="another judge")
    assert settle(other, monkeypatch, SAMPLES) == FEW_ROWS * 21


def test_few_samples_are_judged_eight_at_a_time_without_measuring(monkeypatch):
    judge = Judge({})
    assert settle(judge, monkeypatch, [5] * 300 + [30]) == FEW_ROWS * 31
    assert settle(judge, monkeypatch, [5000] * 3) == DEFAULT_CELLS
    assert settle(judge, monkeypatch, []) is None
    assert settle(judge, monkeypatch, SAMPLES, rows=8) is None  # `--rows 8` leaves nothing to choose
    assert not judge.sizes


def test_a_damaged_file_is_measured_again(monkeypatch, tmp_path):
    settle(Judge(FALLING), monkeypatch, SAMPLES)
    next((tmp_path / "score_budgets").iterdir()).write_text("{")
    assert settle(Judge(RISING), monkeypatch, SAMPLES) == FEW_ROWS * 21


def test_long_answers_are_cut_short_while_measuring(monkeypatch):
    judge = Judge(dict.fromkeys(range(1, 65), 1.0), new_tokens=200)
    assert settle(judge, monkeypatch, SAMPLES) == 32 * 220  # as few calls as with more


class Stumbling(Judge):
    """Raises for every batch, as a model does for one sample that it cannot take."""

    def judge(self, prepared):
        raise RuntimeError("index out of range")


class Unreadable(Judge):
    def prepare(self, sample):
        raise ValueError("no such template")


@pytest.mark.parametrize("kind", [Stumbling, Unreadable])
def test_a_sample_that_cannot_be_judged_ends_no_run_while_measuring(kind, monkeypatch, tmp_path):
    assert settle(kind(RISING), monkeypatch, SAMPLES) == FEW_ROWS * 21
    assert not list(tmp_path.rglob("*.json")), "nothing was measured, so nothing is kept"
