"""The fifteen checks that vision-token pruning was asked to pass, and the tests that make them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CHECKS = {
    "identity": ("test_with_nothing_masked_the_backbone_says_what_it_says_by_itself",),
    "padding invariance": ("test_a_row_is_what_it_is_alone",),
    "batch is per sample": (
        "test_a_batched_step_is_the_sum_of_per_sample_steps",
        "test_mergers_learn_and_do_not_see_the_batch",
    ),
    "composition invariance": (
        "test_neighbours_and_their_order_change_nothing",
        "test_a_much_longer_neighbour_changes_no_term_of_a_sample",
    ),
    "every loss term trains": (
        "test_every_term_trains_every_head_and_never_the_backbone",
        "test_what_runs_is_removal_and_tokens_that_are_gone_still_learn",
    ),
    "budget works": (
        "test_the_budget_alone_brings_what_is_kept_to_its_target",
        "test_a_one_sided_budget_leaves_a_thrifty_start_alone",
    ),
    "no answer leakage": ("test_masks_follow_the_question_and_never_the_answer",),
    "soft-hard consistency": (
        "test_a_mask_of_zero_is_removal",
        "test_the_weight_on_a_masked_key_is_exactly_zero",
    ),
    "hard-pruning oracle": (
        "test_pruned_generation_in_a_batch_is_generation_alone_and_the_full_sequence_with_masks",
        "test_rows_keep_different_numbers_and_short_prompts_are_pruned_too",
        "test_one_token_is_kept_where_no_logit_is_positive",
    ),
    "honest accounting": ("test_the_account_is_what_stands_in_the_caches",),
    "schedules": (
        "test_schedules_are_closed_forms_of_one_clock",
        "test_the_learning_rate_is_a_closed_form_of_the_same_clock",
    ),
    "discriminator hygiene": (
        "test_unpruned_and_pruned_states_are_pooled_alike_and_pads_do_not_exist",
        "test_a_discriminator_of_equal_inputs_stays_at_chance",
        "test_a_fresh_discriminator_has_a_fresh_optimiser",
    ),
    "resume": (
        "test_a_run_in_two_parts_is_the_run_in_one",
        "test_ten_and_ten_steps_are_twenty",
        "test_weights_that_are_missing_extra_or_of_another_shape_are_refused",
    ),
    "true batching, measured": (
        "test_a_step_looks_at_all_images_at_once_and_runs_each_layer_at_most_twice",
        "test_a_dry_run_measures_every_row_and_writes_them",
        "test_bf16_autocast_gives_finite_losses_with_noise_in_fp32",
    ),
    "judges and command line": (
        "test_every_row_of_the_table_gets_its_score",
        "test_every_judge_has_ten_rows_or_more",
        "test_scores_are_the_flat_mean_whatever_the_batches",
        "test_wrong_settings_and_missing_files_end_with_code_2_and_are_never_called_finished",
    ),
}


def test_there_are_fifteen_checks():
    assert len(CHECKS) == 15


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_has_its_tests(check):
    written = "\n".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    missing = [name for name in CHECKS[check] if not re.search(rf"^def {name}\(", written, re.MULTILINE)]
    assert not missing
