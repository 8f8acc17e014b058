"""Tang poems through the commands: what is written keeps its form, and is foreseen better than by counts of words."""

import pytest

from benchmarks.scripts.chinese_poems import PoemSettings, run_poems


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_poems_keep_their_lines_and_no_other_way_foresees_them_better_in_the_same_time(tmp_path):
    result = run_poems(PoemSettings(steps=1000), tmp_path / "poems.json")
    written, real, dealt = result["forms"]
    assert written["regular"] >= 0.9
    assert written["lines_of_training_poems"] <= 0.1
    assert dealt["rhyming"] < 0.2 < 0.6 < real["rhyming"]
    assert all(ratio >= 1 for name, ratio in result["ratios"].items() if name.startswith("perplexity"))
