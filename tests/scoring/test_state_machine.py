"""Whatever happens to a run in whatever order, its export is that of a run to which nothing happened."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from truebatch.errors import RunError
from truebatch.scoring import bisect
from truebatch.scoring.backends.scripted import ScriptedBackend
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.runner import RunConfig, run_samples
from truebatch.scoring.store.export import read_rows
from truebatch.scoring.store.input_index import list_samples
from truebatch.scoring.store.journal import read_journals
from truebatch.testing.failpoints import armed

KINDS = {"raise": "raised", "nan": "nonfinite", "memory": "out_of_memory"}


def sample(number):
    way = [None, None, None, "raise", None, None, "nan", None, None, "memory"][number % 10]
    return {"id": f"s{number}", "user": f"{number} " + "x" * (number % 13), "options": {"fail": way} if way else {}}


class RunMachine(RuleBasedStateMachine):
    """A run folder, and the data as they are now."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.data, self.judged = [sample(0)], set()

    def score(self, **more):
        how = RunConfig(threads=1, ahead=1, **more)
        run_samples(list_samples(self.data), [ScriptedBackend()], self.folder, Limits(cells=60), how)
        self.judged |= {one["id"] for one in self.data}

    @rule(number=st.integers(1, 12))
    def grow(self, number):
        self.data = self.data + [sample(n) for n in range(len(self.data), len(self.data) + number)]

    @rule(draw=st.randoms(use_true_random=False))
    def shuffle(self, draw):
        self.data = draw.sample(self.data, len(self.data))

    @rule()
    def go_on(self):
        self.score()

    @rule(kind=st.sampled_from(sorted(KINDS.values())))
    def retry(self, kind):
        self.score(retry={kind})

    @rule(shard=st.integers(0, 1))
    def one_shard(self, shard):
        how = RunConfig(threads=1, ahead=1, shard=(shard, 2))
        run_samples(list_samples(self.data), [ScriptedBackend()], self.folder, Limits(cells=60), how)

    @rule(
        point=st.sampled_from(["journal.before_commit", "journal.in_commit", "write.half_written"]),
        at=st.integers(1, 3),
    )
    def fail(self, point, at):
        with armed(f"{point}:enospc:{at}"):
            try:
                self.score()
            except (OSError, RunError):
                return

    @invariant()
    def no_score_is_lost_invented_or_another_s(self):
        told = read_journals(self.folder)
        assert told.disagreements == ()
        if not (self.folder / "input.jsonl").is_file() or not (self.folder / "manifest.json").is_file():
            return
        known = {one["id"]: one for one in self.data}
        for row in read_rows(self.folder):
            one = known[row["id"]]
            if row["status"] == "pending":
                assert row["id"] not in self.judged
            elif row["status"] == "failed":
                assert row["kind"] == KINDS[one["options"]["fail"]]
            else:
                assert row["score"] == len(one["user"])

    def teardown(self):
        shutil.rmtree(self.folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_order_of_growing_shuffling_failing_sharing_and_retrying_keeps_every_score(monkeypatch):
    monkeypatch.setattr(bisect, "free_memory", lambda _device, **_said: None)
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        RunMachine,
        settings=settings(max_examples=40, stateful_step_count=15, deadline=None, suppress_health_check=checks),
    )
