"""What was measured once, and is kept, is within what is promised: one test, a line for every promise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.systems.nafld import LOGISTIC, MEAN, OURS
from benchmarks.training.preference import find_problems as find_slow_or_wrong
from tests.adapters import zero_processes as trainer_processes
from tests.systems.seqset_vae.test_learning import check_clusters, check_dealt, check_planted
from tests.systems.stitched_llm import zero_processes as stitched_processes
from tests.systems.stitched_llm.quality import GAPS, TINY
from tests.systems.stitched_llm.test_quality import check as check_stitched
from truebatch.training.memory.fake_tensor_estimate import ESTIMATE_ERROR

RESULTS = Path(__file__).parents[2] / "docs/results"
Kept = dict[str, Any]
PROMISES: dict[str, tuple[str, Callable[[Kept], None]]] = {}
"""What is promised, the result that shows it, and how it is looked up there."""


def promise(result: str):
    def keep(check: Callable[[Kept], None]) -> Callable[[Kept], None]:
        PROMISES[check.__name__] = (result, check)
        return check

    return keep


@promise("estimate")
def the_error_that_fit_states_is_the_one_that_was_measured(kept):
    assert len(kept["rows"]) >= 18
    assert max(abs(row["estimated"] / row["real"] - 1) for row in kept["rows"]) <= ESTIMATE_ERROR


@promise("preference_cpu")
def groups_of_answers_share_their_prompt_as_fast_as_promised(kept):
    assert find_slow_or_wrong(kept) == []
    assert len(kept["ratios"]) == 4


@promise("packed_training")
def models_that_few_can_pack_train_as_one_by_one(kept):
    assert len(kept["rows"]) >= 20
    assert all(row["farthest"] <= 1e-5 for row in kept["rows"])


@promise("packed_training_vision")
def models_with_images_train_as_one_by_one(kept):
    rows = [row for row in kept["rows"] if "farthest" in row]
    assert len(rows) >= 10
    assert all(row["farthest"] <= 1e-5 or row["flips of routing"] for row in rows)


@promise("seqset_vae_quality")
def sets_and_risk_are_learned_and_the_result_names_its_command(kept):
    assert kept["command"].startswith("python -m truebatch.bench.seqset_quality")
    truths = [value for value in kept["detector truth table"].values() if isinstance(value, bool)]
    assert truths == [True] * 6
    check_clusters(kept["sets of six kinds"])
    check_planted(kept["planted risk"])
    check_dealt(kept["labels dealt at random"])
    assert kept["planted risk"]["cpu_seconds"] <= 300


@promise("vl_reward_editing")
def three_editors_of_unequal_speed_are_close_to_ideal(kept):
    (uneven,) = [row for row in kept["rows"] if len(set(row["speeds"])) > 1]
    assert (uneven["workers"], uneven["over_ideal"] <= 1.15) == (3, True)
    assert uneven["edit_seconds"] < uneven["barrier_seconds"]


@promise("stitched_llm_quality")
def every_stored_form_of_a_stitched_model_is_as_good(kept):
    rows = {(row["stored"], row["steps"]): row for row in kept["tiny"]}
    assert set(rows) == set(TINY)
    for row in rows.values():
        check_stitched(row)
    full = rows["fp32", 100]
    for stored, size in (("bf16", 0.55), ("int8", 0.35)):
        row = rows[stored, 100]
        assert row["weights_bytes"] < size * full["weights_bytes"]
        for place in ("least_squares_start", "stitched"):
            assert row["perplexity"][place] == pytest.approx(full["perplexity"][place], rel=5e-3)


@promise("stitched_llm_quality")
def real_weights_say_what_an_adapter_gives_back(kept):
    assert tuple(row["gap"] for row in kept["real"]) == GAPS
    for row in kept["real"]:
        found = row["perplexity"]
        assert found["donor"] < found["least_squares_start"] < found["cut_without_adapter"], row
        assert found["trained"] < found["least_squares_start"], row


@promise("chinese_poems_cpu")
def poems_keep_their_lines_and_are_foreseen_better_than_by_the_same_model_under_the_trainer(kept):
    written = kept["forms"][0]
    assert written["texts"] == 200
    assert written["regular"] >= 0.9
    assert all(ratio >= 1 for name, ratio in kept["ratios"].items() if name.startswith("perplexity"))


@promise("stitched_llm_deepspeed")
def deepspeed_moves_an_adapter_by_the_gradient_one_by_one(kept):
    assert [row["layout"] for row in kept["rows"]] == list(stitched_processes.LAYOUTS)
    assert all(row["stage"] == 2 and row["relative_error"] <= 1e-6 for row in kept["rows"])
    assert kept["run"]["donors_are_untouched"]
    assert kept["run"]["saved_is_trained"]


@promise("deepspeed")
def deepspeed_under_the_trainer_gives_the_gradient_one_by_one(kept):
    assert kept["largest_error"] <= 1e-6
    assert {row["stage"] for row in kept["rows"]} == set(trainer_processes.STAGES)


@promise("nafld_cpu")
def real_persons_are_judged_above_the_known_figure_and_the_interval_holds_logistic_regression(kept):
    rows = {row["way"]: row for row in kept["rows"]}
    for name in (OURS, MEAN):
        assert rows[name]["auroc"] >= 0.877
        assert rows[name]["auroc_minus"][LOGISTIC]["high"] >= 0
    assert rows[MEAN]["auroc"] >= rows[LOGISTIC]["auroc"]
    low, high = rows[OURS]["auroc_interval"]
    assert low < rows[OURS]["auroc"] < high


@promise("stitched_llm_cuda")
def packed_rows_of_a_stitched_model_are_eight_times_as_fast_on_the_gpu(kept):
    ratios, rows = kept["ratios"], {one["way"]: one for one in kept["rows"]}
    assert ratios["packed at the fitted budget / the note"] >= 8
    assert ratios["packed in the note's own memory / the note"] >= 8
    assert ratios["packed in 15 GiB: cells"] > 2048
    assert rows["packed, 8192 cells, checkpointing"]["peak_gib"] < 0.5 * rows["packed, 8192 cells"]["peak_gib"]


@pytest.mark.parametrize("name", PROMISES)
def test_what_is_kept_is_within_what_is_promised(name):
    result, check = PROMISES[name]
    check(json.loads((RESULTS / f"{result}.json").read_text(encoding="utf-8")))
