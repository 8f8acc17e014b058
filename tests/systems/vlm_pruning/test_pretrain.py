"""A tiny backbone that has not learned begins again with other weights."""

from __future__ import annotations

import pytest

from truebatch_systems.vlm_pruning.train import pretrain
from truebatch_systems.vlm_pruning.train.pretrain import Lessons, pretrain_tiny


@pytest.fixture
def beginnings(monkeypatch):
    """Accuracies that one beginning after the other comes to -> (attempt, folder) of those that were made."""

    def play(*accuracies):
        made = []

        def learn(folder, seed, attempt, lessons, say):
            made.append((attempt, folder.name))
            return folder / "run"

        left = iter(accuracies)
        monkeypatch.setattr(pretrain, "_learn", learn)
        monkeypatch.setattr(pretrain, "_accuracy", lambda run: next(left))
        return made

    return play


@pytest.mark.parametrize(
    ("accuracies", "number", "chosen"),
    [((0.95,), 1, "."), ((0.5, 0.9), 2, "again-1"), ((0.5, 0.7, 0.6), 3, "again-1"), ((0.89, 0.3, 0.99), 3, "again-2")],
)
def test_beginnings_are_made_until_one_has_learned(tmp_path, beginnings, accuracies, number, chosen):
    made, said = beginnings(*accuracies), []
    found = pretrain_tiny(tmp_path, say=said.append)
    assert made == [(0, tmp_path.name), (1, "again-1"), (2, "again-2")][:number]
    assert found == tmp_path / chosen / "run" / "model"
    assert sum("begins again" in line for line in said) == number - 1
    assert sum("validation questions" in line for line in said) == sum(a < 0.9 for a in accuracies)


def test_a_backbone_to_go_on_with_is_not_exchanged(tmp_path, beginnings):
    made, said = beginnings(0.2), []
    assert pretrain_tiny(tmp_path, lessons=Lessons(start=tmp_path / "given"), say=said.append).parent.name == "run"
    assert len(made) == 1
    assert not any("begins again" in line for line in said)


def test_another_beginning_has_other_weights_and_the_same_data(tmp_path):
    """Trained for a step each, for real: the accuracy of the best counts."""
    lessons = Lessons(samples=48, epochs=1, steps=1, attempts=2, least_accuracy=1.1)
    found = pretrain_tiny(tmp_path, seed=3, lessons=lessons)
    one, two = (tmp_path / part / "aligned/model.safetensors" for part in (".", "again-1"))
    assert one.read_bytes() != two.read_bytes()
    settings = [(tmp_path / part / "run/config.yaml").read_text().replace("again-1/", "") for part in (".", "again-1")]
    assert settings[0] == settings[1]
    assert (found / "config.json").exists()
