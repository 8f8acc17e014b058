"""A result that is longer in a micro-batch than alone: padding is told from something more."""

import pytest
import torch

from truebatch.verification.align import own_cells, place_of
from truebatch.verification.api import verify

PROMPTS = [[7, 8, 9], [1, 2, 3, 4, 5, 6], [4], [9, 3], [5, 5, 5, 2, 1]]


def generated(prompt):
    """As many new tokens as the first one says, two at least."""
    return [10 + (prompt[0] * k) % 7 for k in range(1, 2 + prompt[0] % 4)]


def padded(results, pad=0, side="right"):
    width = max(map(len, results))
    rows = [r + [pad] * (width - len(r)) if side == "right" else [pad] * (width - len(r)) + r for r in results]
    return torch.tensor(rows)


BATCHED = {
    "a list each": lambda c: [generated(s) for s in c],
    "padded right": lambda c: padded([generated(s) for s in c]),
    "padded left": lambda c: padded([generated(s) for s in c], 99, "left"),
    "rows of a padded tensor": lambda c: padded([generated(s) for s in c], -1).tolist(),
    "a fixed width": lambda c: padded([*[generated(s) for s in c], [0] * 20])[:-1],
}


@pytest.mark.parametrize("way", BATCHED)
def test_padding_of_generated_tokens_is_no_difference(way):
    report = verify(BATCHED[way], one=generated, samples=PROMPTS)
    assert report.ok, str(report)


def goes_on(chosen):
    """Does not stop a sample before all have stopped."""
    results = [generated(s) for s in chosen]
    width = max(map(len, results))
    return torch.tensor([[*r, *[20 + k for k in range(width - len(r))]] for r in results])


def one_too_many(chosen):
    return [generated(s) + ([11] if len(chosen) > 1 else []) for s in chosen]


def one_too_many_beside_padding(chosen):
    results = [generated(s) for s in chosen]
    return padded([[*r, 11] if len(chosen) > 1 and at == 0 else r for at, r in enumerate(results)])


@pytest.mark.parametrize("wrong", [goes_on, one_too_many, one_too_many_beside_padding])
def test_tokens_beyond_the_end_of_a_sample_are_not_taken_for_padding(wrong):
    report = verify(wrong, one=generated, samples=PROMPTS)
    assert report.is_broken, str(report)
    assert "of sample" in str(report)


def test_prompts_padded_on_the_left_and_answers_padded_on_the_right_are_no_difference():
    def one(prompt):
        return prompt + generated(prompt)

    def batched(chosen):
        asked = padded(chosen, 99, "left")
        return torch.cat([asked, padded([generated(s) for s in chosen], 99)], 1)

    report = verify(batched, one=one, samples=PROMPTS)
    assert report.ok, str(report)


def test_whatever_stands_in_cells_beyond_the_samples_own_is_no_difference():
    def tag(chosen):
        width = max(map(len, chosen))
        return torch.stack([torch.tensor(s + list(range(50, 50 + width - len(s)))) * 2 for s in chosen])

    def feel(chosen):
        return tag(chosen).float()[..., None] / 3

    for function in (tag, feel):
        report = verify(function, one=lambda s, f=function: f([s])[0], samples=PROMPTS)
        assert report.ok, str(report)


def test_a_wrong_cell_in_a_padded_result_is_found():
    def wrong(chosen):
        found = padded([generated(s) for s in chosen])
        found[:, 0] += len(chosen) > 2
        return found

    assert verify(wrong, one=generated, samples=PROMPTS).is_broken


def test_results_of_different_widths_in_one_micro_batch_are_not_padded():
    alone = {0: torch.tensor([1, 2]), 1: torch.tensor([3])}
    ragged = {0: torch.tensor([1, 2]), 1: torch.tensor([3, 0, 0])}
    places = place_of(list(ragged.values()), [0, 1], [2, 1])
    assert own_cells(ragged, alone, places)[1] == []
    stacked = {0: torch.tensor([1, 2, 0]), 1: torch.tensor([3, 0, 0])}
    places = place_of(list(stacked.values()), [0, 1], [2, 1])
    assert any(torch.equal(part, alone[1]) for part in own_cells(stacked, alone, places)[1])


# --- texts ------------------------------------------------------------------------------------------------------------


def spoken(prompt):
    return " ".join(map(str, generated(prompt)))


TEXTS = {
    "texts": (lambda c: [spoken(s) for s in c], spoken),
    "named texts": (lambda c: {"text": [spoken(s) for s in c]}, lambda s: {"text": spoken(s)}),
    "a list of one text": (lambda c: [spoken(s) for s in c], lambda s: [spoken(s)]),
    "several texts": (lambda c: [[spoken(s), "b"] for s in c], lambda s: [spoken(s), "b"]),
}


@pytest.mark.parametrize("way", TEXTS)
def test_equal_texts_are_equal(way):
    batched, one = TEXTS[way]
    report = verify(batched, one=one, samples=PROMPTS)
    assert report.ok, str(report)


@pytest.mark.parametrize("end", [" 11", " ", ".", "\0"])
def test_a_text_with_anything_more_in_it_is_another_text(end):
    def wrong(chosen):
        return [spoken(s) + (end if len(chosen) > 1 and len(s) == 1 else "") for s in chosen]

    report = verify(wrong, one=spoken, samples=PROMPTS)
    assert report.is_broken
    assert report.results[0].verdict == "equal"
    assert report.results[1].moved == {2}


def test_an_empty_text_in_place_of_one_is_an_exception_swallowed():
    report = verify(lambda c: [spoken(s) if len(c) == 1 else "" for s in c], one=spoken, samples=PROMPTS)
    assert report.causes[0].name == "exception swallowed"


def test_a_sample_that_generates_nothing_has_a_result():
    def kept(prompt):
        return [p for p in prompt if p > 4]

    assert verify(lambda c: [kept(s) for s in c], one=kept, samples=PROMPTS).ok
    report = verify(lambda c: [kept(s) or [0] * (len(c) > 1) for s in c], one=kept, samples=PROMPTS)
    assert report.is_broken
