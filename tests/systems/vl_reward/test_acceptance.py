"""The fifteen acceptance checks of the system: which test shows each, and those that belong to no single module."""

from __future__ import annotations

import ast
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from truebatch.errors import RunError
from truebatch.generation.config import Generation
from truebatch.generation.decode_loop import collect, generate_tokens
from truebatch.generation.interface import start_session
from truebatch.scoring.backends.interface import Cost, SampleError, ScoreRequest
from truebatch.scoring.backends.transformers import model_backend
from truebatch.scoring.batch_plan import Limits, plan_batches
from truebatch.scoring.readouts import Generate
from truebatch.scoring.readouts.scale import Scale
from truebatch.scoring.runner import RunConfig
from truebatch_systems.vl_reward.config import BenchmarkSettings, RewardConfig, RewardEvaluationSettings
from truebatch_systems.vl_reward.data.prompts import build_messages
from truebatch_systems.vl_reward.data.toy_pictures import PROMPTS, ShapesJudge
from truebatch_systems.vl_reward.eval.report import markdown, write_reports
from truebatch_systems.vl_reward.eval.statistics import Row, summarise
from truebatch_systems.vl_reward.judge.tiny_judge import IMAGE, tiny_judge
from truebatch_systems.vl_reward.pipeline import load_pairs, run_benchmark
from truebatch_systems.vl_reward.stages import CAPTIONS, Judging, judge_all_edits, read_results

ROOT = Path(__file__).parents[3]
HERE, SCORING = "tests/systems/vl_reward", "tests/scoring"
SHOWN_BY = {
    1: [f"{HERE}/test_acceptance.py::test_in_any_batch_every_row_has_the_tokens_and_logits_it_has_alone"],
    2: [
        f"{SCORING}/backends/test_transformers.py::test_a_tokenizer_that_pads_right_or_cuts_is_neither_asked_nor_changed",
        f"{SCORING}/backends/test_transformers.py::test_the_check_refuses_every_kind_of_broken_batch_and_no_sound_model",
    ],
    3: [f"{HERE}/test_acceptance.py::test_an_image_belongs_to_its_row_and_a_missing_one_is_told_with_the_id"],
    4: [f"{HERE}/test_acceptance.py::test_answers_are_the_same_every_time_though_the_model_would_sample"],
    5: [
        f"{SCORING}/readouts/test_read_answer.py::test_no_number_of_the_table_is_wrong",
        f"{SCORING}/readouts/test_read_answer.py::test_yes_and_no",
    ],
    6: [
        f"{HERE}/test_statistics.py::test_failures_are_in_no_figure_and_every_one_is_counted",
        f"{HERE}/test_pipeline.py::test_failures_decide_the_exit_code_by_the_rate_that_is_allowed",
    ],
    7: [f"{HERE}/test_stages.py::test_failures_of_every_stage_are_statuses_and_in_no_mean"],
    8: [
        f"{SCORING}/test_runner.py::test_out_of_memory_splits_lowers_the_budget_and_loses_nothing",
        f"{SCORING}/test_bisect.py::test_every_sample_has_its_own_outcome_in_order",
    ],
    9: [f"{HERE}/test_acceptance.py::test_batches_by_tokens_keep_the_budget_and_waste_less_than_batches_by_number"],
    10: [
        f"{HERE}/test_survival.py::test_killed_runs_end_with_the_report_of_one_that_was_not",
        f"{HERE}/test_acceptance.py::test_another_prompt_is_judged_again_and_another_metric_is_refused",
    ],
    11: [f"{HERE}/test_stages.py::test_editors_and_judges_are_given_back_also_after_an_error"],
    12: [
        f"{HERE}/test_judges.py::"
        "test_a_judge_that_prints_dies_exits_hangs_or_answers_for_too_few_or_too_many_costs_only_that_sample"
    ],
    13: [f"{HERE}/test_stages.py::test_seeds_and_pictures_do_not_depend_on_the_number_of_editors"],
    14: [
        f"{HERE}/test_dataset.py::test_a_fault_is_named_with_its_record_and_the_others_are_read",
        f"{HERE}/test_dataset.py::test_templates_are_checked_before_they_are_used",
        f"{HERE}/test_dataset.py::test_pictures_of_every_kind_become_rgb",
    ],
    15: [
        f"{HERE}/test_acceptance.py::test_the_report_of_known_scores_is_known",
        f"{HERE}/test_pipeline.py::test_the_embedded_benchmark_runs_and_its_report_can_be_made_again",
        f"{HERE}/test_statistics.py::test_pairs_are_made_by_id_and_the_counts_add_up",
    ],
}

pytestmark = pytest.mark.xdist_group("vl_reward_model")


def test_every_check_is_shown_by_a_test_that_exists():
    assert list(SHOWN_BY) == list(range(1, 16))
    for place in (place for places in SHOWN_BY.values() for place in places):
        file, _, name = place.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, place


@pytest.fixture(scope="module")
def tiny():
    return tiny_judge()


def judge_of(tiny, new_tokens=8, **reuse):
    readout = Generate(Generation(temperature=0.0, max_new_tokens=new_tokens))
    return model_backend(*tiny, readout, Limits(cells=10_000), **reuse)


def picture(seed, width, height):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def eight_questions():
    """One or two images of many sizes, prompts of 20 to 200 letters."""
    draw = random.Random(0)
    found = []
    for at in range(8):
        images = [
            picture(10 * at + n, 32 + 16 * draw.randrange(6), 32 + 16 * draw.randrange(6)) for n in range(1 + at % 2)
        ]
        words = "".join(draw.choices("abc de", k=20 + 180 * at // 7))
        found.append(
            ScoreRequest(id=str(at), messages=build_messages("judge", words, CAPTIONS[: len(images)]), images=images)
        )
    return found


def tokens_of(judge, prepared):
    pieces = generate_tokens(judge.decoder, prepared, judge.readout.settings, rows=len(prepared))
    return [tuple(one.tokens) for one in collect(pieces, len(prepared))]


def test_in_any_batch_every_row_has_the_tokens_and_logits_it_has_alone(tiny):
    judge = judge_of(tiny, reuse_prefix=False, reuse_images=False)
    prepared = [judge.prepare(one) for one in eight_questions()]
    alone = [tokens_of(judge, [one])[0] for one in prepared]
    first = torch.cat([start_session(judge.decoder, [one])[0] for one in prepared])
    assert len(set(alone)) > 4
    together, _ = start_session(judge.decoder, prepared)
    assert float((together - first).abs().max()) <= 1e-4
    for size, order in ((8, [7, 3, 1, 0, 2, 6, 5, 4]), (3, list(range(8))), (5, list(range(7, -1, -1)))):
        for at in range(0, 8, size):
            some = order[at : at + size]
            assert tokens_of(judge, [prepared[n] for n in some]) == [alone[n] for n in some]


def test_an_image_belongs_to_its_row_and_a_missing_one_is_told_with_the_id(tiny):
    judge = judge_of(tiny)
    asked = [
        ScoreRequest(id=str(at), messages=build_messages("", "x" * at, ("",)), images=[picture(at, 64, 64)])
        for at in range(4)
    ]
    swapped = [replace(one, images=asked[{1: 2, 2: 1}.get(at, at)].images) for at, one in enumerate(asked)]
    before, after = (judge.probe([judge.prepare(one) for one in some]) for some in (asked, swapped))
    changed = [bool((a - b).abs().max() > 1e-6) for a, b in zip(before, after, strict=True)]
    assert changed == [False, True, True, False]
    for one in asked:
        made = judge.prepare(one)
        grid = made.inputs["image_grid_thw"]
        assert int((torch.as_tensor(made.ids) == IMAGE).sum()) == int(grid.prod(-1).sum()) // 4
    with pytest.raises(SampleError, match="lonely"):
        judge.prepare(ScoreRequest(id="lonely", messages=build_messages("", "x", ("",)), images=[]))


def test_answers_are_the_same_every_time_though_the_model_would_sample(tiny):
    model, processor = tiny
    before = model.generation_config.do_sample
    try:
        model.generation_config.do_sample, model.generation_config.temperature = True, 0.7
        texts = []
        for _ in range(2):
            judge = judge_of((model, processor))
            answers = judge.judge([judge.prepare(one) for one in eight_questions()[:4]])
            texts.append([answer.output["text"] for answer in answers])
    finally:
        model.generation_config.do_sample, model.generation_config.temperature = before, None
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_batches_by_tokens_keep_the_budget_and_waste_less_than_batches_by_number():
    draw = random.Random(1)
    costs = {f"{at:03d}": Cost(tokens=draw.choice((120, 400, 1600)), new_tokens=8) for at in range(90)}
    batches = plan_batches(costs, Limits(cells=8000))
    assert sorted(key for batch in batches for key in batch) == sorted(costs)
    lengths = {key: cost.tokens + cost.new_tokens for key, cost in costs.items()}
    cells = [len(batch) * max(lengths[key] for key in batch) for batch in batches]
    assert max(cells) <= 8000
    keys = list(costs)
    fixed = [keys[at : at + 4] for at in range(0, 90, 4)]
    assert sum(cells) < sum(len(batch) * max(lengths[key] for key in batch) for batch in fixed)


def test_another_prompt_is_judged_again_and_another_metric_is_refused(tmp_path):
    config = RewardConfig(
        benchmark=BenchmarkSettings(samples=2), evaluation=RewardEvaluationSettings(output_dir=tmp_path / "run")
    )
    said = []
    run_benchmark(config, say=said.append)
    other = {
        name: replace(prompt, system_prompt="Judge this edit strictly, from 0 to 10.")
        for name, prompt in PROMPTS.items()
    }
    for prompts, judged in ((other, 2), ({}, 0)):
        run_benchmark(replace(config, prompts=prompts), say=said.append)
        assert "stage 1: 0 edited now, 2 in all, 0 failed" in said
        assert f"stage 2: {judged} judged now" in said
    with pytest.raises(RunError, match="another configuration"):
        run_benchmark(replace(config, evaluation=replace(config.evaluation, metric="yes_no")), say=said.append)


GOLDEN = """\
# Edit-then-judge benchmark

| category | samples | valid | mean | 95 % interval | std | median | min | max |
|---|---|---|---|---|---|---|---|---|
| 物理 | 4 | 3 | 8.000 | 6.000 to 10.000 | 2.000 | 8.000 | 6.000 | 10.000 |
| 因果 | 2 | 1 | 4.000 | - | - | 4.000 | 4.000 | 4.000 |
| all | 6 | 4 | 7.000 | 5.000 to 9.000 | 2.582 | 7.000 | 4.000 | 10.000 |

Micro mean 7.000, macro mean 6.000; std: of a sample, n - 1.
The metric is number: one number.
Best category: 物理; worst: 因果.
Failures: 33.3% of the samples; they are in no mean. By status: edit_failed 1, ok 4, parse_error 1.
"""


def test_the_report_of_known_scores_is_known():
    rows = [Row(str(score), "物理", "ok", score) for score in (6.0, 8.0, 10.0)] + [
        Row("3", "物理", "parse_error"),
        Row("4", "因果", "ok", 4.0),
        Row("5", "因果", "edit_failed"),
    ]
    found = summarise(rows)
    about = {"std_definition": "of a sample, n - 1", "metric": {"kind": "number", "aggregation": "one number"}}
    assert markdown({**found, **about}).splitlines() == GOLDEN.splitlines()
    assert found["overall"]["statuses"] == {"edit_failed": 1, "ok": 4, "parse_error": 1}
    assert (found["best_category"], found["worst_category"]) == ("物理", "因果")


def test_scores_of_pairs_and_words_are_made_by_the_rule_that_the_report_names(tmp_path):
    config = RewardConfig(
        benchmark=BenchmarkSettings(samples=2), evaluation=RewardEvaluationSettings(output_dir=tmp_path / "run")
    )
    run_benchmark(config, say=lambda line: None)
    pairs, _ = load_pairs(config)
    said = {"pair": '{"score": [7, 3.5]}', "yes_no": '{"score": "yes"}'}
    for kind, score, rule in (("pair", 3.5, "the smaller of two numbers"), ("yes_no", 1.0, "yes is 1, no is 0")):
        shutil.rmtree(tmp_path / "run" / "scores")
        judge = ShapesJudge({pair.id: said[kind] for pair in pairs})
        judging = Judging(prompts=PROMPTS, scale=Scale(kind=kind))
        judge_all_edits(pairs, lambda judge=judge: judge, tmp_path / "run", judging, RunConfig(threads=1))
        summary, _ = write_reports(pairs, read_results(pairs, tmp_path / "run"), tmp_path / "run")
        assert (summary["micro_mean"], summary["metric"]["aggregation"]) == (score, rule)
