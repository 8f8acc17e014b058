"""Questions from the command line."""

from __future__ import annotations

import pytest

from tests.systems.vlm_pruning.test_training import SMALL, settings
from tests.systems.vlm_pruning.worlds import picture
from truebatch.cli.app import run
from truebatch.errors import DataError
from truebatch.generation.config import Generation
from truebatch_systems.vlm_pruning.eval.generate import generate, read_question
from truebatch_systems.vlm_pruning.system import build_model


def test_a_prompt_names_its_images_in_brackets():
    assert read_question("[a.png] [b/c d.png]What is [it]?") == {
        "id": "[a.png] [b/c d.png]What is [it]?",
        "image": ["a.png", "b/c d.png"],
        "question": "What is [it]?",
    }
    for wrong in ("What is it?", "[a.png]", ""):
        with pytest.raises(DataError, match="brackets"):
            read_question(wrong)


@pytest.mark.parametrize("stage", ["pruning", "backbone"])
def test_questions_together_are_answered_as_alone(tmp_path, stage):
    picture(0).save(tmp_path / "a.png")
    picture(1).save(tmp_path / "b.png")
    config = settings(f"method_settings.stage={stage}")
    model = build_model(config).eval()
    prompts = [f"[{tmp_path / 'a.png'}] What?", f"[{tmp_path / 'a.png'}][{tmp_path / 'b.png'}] How many red circles?"]
    greedy = Generation(max_new_tokens=5, temperature=0.0)

    def texts(asked):
        found = [""] * len(asked)
        for number, text in generate(config, model, asked, greedy):
            found[number] += text
        return found

    assert texts(prompts) == [texts([prompt])[0] for prompt in prompts]


def test_the_commands_train_and_generate(tmp_path, capsys):
    picture(0).save(tmp_path / "a.png")
    folder = str(tmp_path / "run")
    overrides = [part for one in (*SMALL, "train.max_steps=1") for part in ("--set", one)]
    assert run(["train", "vlm_pruning", "--out", folder, *overrides, "--log-format", "plain"]) == 0
    assert run(["generate", folder, "--prompt", f"[{tmp_path / 'a.png'}] What?", "--max-new-tokens", "3"]) == 0
    capsys.readouterr()
    assert run(["generate", folder, "--prompt", "What?"]) == 2
    assert "brackets" in capsys.readouterr().err
    unknown = "method_settings.prunning_layers=[1]"
    assert run(["train", "vlm_pruning", "--out", folder + "2", *overrides, "--set", unknown]) == 2
    assert "pruning_layers" in capsys.readouterr().err


def test_verify_finds_every_arrangement_equal(capsys):
    overrides = [part for one in SMALL for part in ("--set", one)]
    assert run(["verify", "vlm_pruning", *overrides]) == 0
    said = capsys.readouterr().out
    assert "EQUAL" in said
    assert "packed" in said
