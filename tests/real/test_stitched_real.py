"""Real weights: SmolLM2 stitched to itself over a gap; what a least-squares start and a short training give back."""

import pytest

from tests.systems.stitched_llm.quality import GAPS, PAIR, pair, real


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("gap", GAPS)
def test_an_adapter_bridges_a_gap_in_real_weights(gap):
    found = real(gap)["perplexity"]
    # The start only imitates the donor; training also learns what this kind of text is like, and may go below it.
    assert found["donor"] < found["least_squares_start"] < found["cut_without_adapter"], found
    assert found["trained"] < found["least_squares_start"], found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("vocabulary", PAIR)
def test_donors_of_two_vocabularies_beat_the_bottom_donor_and_word_counts(vocabulary):
    found = pair(vocabulary)["perplexity"]
    assert found["stitched"] < found["least_squares_start"], found
    assert found["stitched"] < min(found["bottom_donor"], found["unigram"]), found
