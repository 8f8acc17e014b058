"""The commands as a user types them, rightly and wrongly, and the starting files."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.systems.stitched_llm.conftest import SMALL
from tests.systems.stitched_llm.two_vocabularies import write_donors
from truebatch.cli.app import run
from truebatch_systems.stitched_llm.cli import _train_command
from truebatch_systems.stitched_llm.config import StitchConfig
from truebatch_systems.stitched_llm.data.toy_donors import embedded_folder
from truebatch_systems.stitched_llm.eval.layer_search import CutPair, write_search

pytestmark = pytest.mark.xdist_group("stitched_donors")
SETTINGS = [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def trained(cached, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    code = run(
        [
            "train",
            "stitched_llm",
            *SETTINGS,
            "--set",
            "train.max_steps=5",
            "--out",
            str(folder),
            "--log-format",
            "plain",
        ]
    )
    assert code == 0
    return folder


def test_a_dry_run_trains_no_donor(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path))
    assert (
        run(["train", "stitched_llm", "--set", "made_up_samples=50", "--dry-run", "--out", str(tmp_path / "run")]) == 0
    )
    shown = capsys.readouterr()
    assert "memory, GiB" in shown.out
    assert "is trained first" not in shown.err
    assert not list(tmp_path.rglob("model.safetensors"))


def test_train_then_evaluate_then_generate(trained, capsys):
    assert run(["evaluate", str(trained), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["perplexity"]
    assert found["stitched"] < found["cut_without_adapter"]
    assert set(found) == {"stitched", "cut_without_adapter", "bottom_donor", "top_donor", "unigram"}
    assert (trained / "evaluation" / "perplexity.svg").read_text().startswith("<svg")
    assert json.loads((trained / "evaluation" / "eval.json").read_text())["perplexity"] == found
    given = ["generate", str(trained), "--temperature", "1", "--max-new-tokens", "6", "--json"]
    assert run([*given, "--prompt", "the boat", "--prompt", "soup"]) == 0
    together = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    alone = []
    for prompt in ("the boat", "soup"):
        assert run([*given, "--prompt", prompt]) == 0
        alone += [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["text"] for one in together] == [one["text"] for one in alone]
    assert any(one["text"] for one in together)


def test_a_run_is_exported_as_one_folder_that_transformers_loads(trained, tmp_path, capsys, monkeypatch):
    from transformers import AutoModelForCausalLM, dynamic_module_utils
    from transformers.models.auto import configuration_auto

    from truebatch_systems.stitched_llm.model.save_load import load_stitched

    assert run(["stitched_llm", "export", str(trained), "--out", str(tmp_path / "merged")]) == 0
    merged, own = AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), load_stitched(trained / "model")
    # As in a process that never imported truebatch: transformers knows no stitched_llm.
    monkeypatch.delitem(configuration_auto.CONFIG_MAPPING._extra_content, "stitched_llm")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    unknown = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", trust_remote_code=True)
    unknown.save_pretrained(tmp_path / "again")
    assert not list((tmp_path / "again").glob("*.py"))
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        assert torch.equal(merged(input_ids=ids).logits, own(input_ids=ids).logits)
        assert torch.equal(unknown(input_ids=ids).logits, own(input_ids=ids).logits)
    assert run(["stitched_llm", "export", str(trained), "--out", str(tmp_path / "merged")]) == 2
    assert "is there already" in capsys.readouterr().err


def test_inspect_shows_both_donors_and_the_self_test(cached, capsys):
    assert run(["stitched_llm", "inspect", *SETTINGS]) == 0
    shown = capsys.readouterr().out
    assert "llama" in shown
    assert "mask self-test: causal" in shown
    assert "trained: 6,240 of" in shown
    assert run(["stitched_llm", "inspect", *SETTINGS, "--set", "cut_bottom=9"]) == 2
    assert "from 1 to 4" in capsys.readouterr().err
    assert run(["stitched_llm", "inspect", "--set", "bottom=nowhere"]) == 2
    assert "go together" in capsys.readouterr().err


def test_search_ranks_every_pair_and_draws_it(cached, tmp_path, capsys):
    given = [
        "stitched_llm",
        "search",
        *SETTINGS,
        "--tokens",
        "1500",
        "--measure",
        "3",
        "--out",
        str(tmp_path),
        "--json",
    ]
    assert run(given) == 0
    pairs = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {(p["cut_bottom"], p["cut_top"]) for p in pairs} == {(k, j) for k in range(1, 5) for j in range(5)}
    measured = [p["perplexity"] for p in pairs if p["perplexity"] is not None]
    assert len(measured) == 3
    assert measured == sorted(measured)
    assert all(0 < p["residual"] < 1 for p in pairs)
    assert (tmp_path / "residual.svg").read_text().startswith("<svg")
    assert (tmp_path / "perplexity.svg").exists()


def test_a_search_of_a_number_that_is_none_is_refused(tmp_path, capsys):
    for wrong in (["--measure", "-1"], ["--tokens", "0"]):
        assert run(["stitched_llm", "search", *wrong, "--out", str(tmp_path)]) == 2
        assert wrong[0] in capsys.readouterr().err


def test_what_follows_a_search_repeats_what_was_typed():
    found = _train_command(Path("my file.yaml"), ["bottom=a", "cut_top=4", "data=b"], CutPair(2, 1, 0.5))
    assert found == (
        "truebatch train stitched_llm --config 'my file.yaml' --set bottom=a --set data=b "
        "--set cut_bottom=2 --set cut_top=1"
    )


def test_a_search_without_losses_draws_one_picture(tmp_path):
    files = write_search([CutPair(1, 0, 0.5), CutPair(1, 1, 0.6)], tmp_path)
    assert [file.name for file in files] == ["search.json", "residual.svg"]


def test_the_starting_files_train_and_speak(cached, tmp_path, monkeypatch, capsys):
    default = StitchConfig()
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path / "cache"))
    # The donors of these tests in the place of the larger ones the script would train.
    home = embedded_folder(samples=default.made_up_samples, steps=default.donor_steps, seed=0)
    for role in ("bottom", "top"):
        shutil.copytree(cached / role, home / role)
    start = tmp_path / "start"
    assert run(["init", "stitched_llm", "--out", str(start)]) == 0
    monkeypatch.chdir(start)
    monkeypatch.syspath_prepend(start)
    monkeypatch.setattr(sys, "argv", ["main.py", "2"])
    try:
        runpy.run_path("main.py", run_name="__main__")
    finally:
        sys.modules.pop("stitchllm", None)
    shown = capsys.readouterr().out
    assert "✅ effective batch_size: 8 × 4 (gradient_accumulation) = 32" in shown
    for prompt in ("the boat", "soup with salt and"):
        assert any(line.startswith(prompt) for line in shown.splitlines())
    assert (start / "stitch_model_optimized" / "adapter.safetensors").is_file()


@pytest.mark.parametrize("vocabulary", ["retokenize", "by_text"])
def test_search_ranks_the_cuts_of_donors_of_two_vocabularies(tmp_path, capsys, vocabulary):
    home = write_donors(tmp_path / "donors")
    given = {"bottom": home / "bottom", "top": home / "top", "data": home / "texts.jsonl"}
    words = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    asked = ["stitched_llm", "search", *words, "--tokens", "200", "--measure", "1", "--out", str(tmp_path / "found")]
    assert run(asked) == 2
    assert "vocabulary=retokenize" in capsys.readouterr().err
    assert run([*asked, "--set", f"vocabulary={vocabulary}"]) == 0
    said = capsys.readouterr().out
    assert f"--set vocabulary={vocabulary}" in said.splitlines()[-1]
    pairs = json.loads((tmp_path / "found" / "search.json").read_text())
    assert {(p["cut_bottom"], p["cut_top"]) for p in pairs} == {(k, j) for k in (1, 2, 3) for j in range(4)}
    assert sum(p["perplexity"] is not None for p in pairs) == 1


def test_the_starting_script_describes_its_options_and_trains_nothing_for_it(tmp_path, monkeypatch, capsys):
    assert run(["init", "stitched_llm", "--out", str(tmp_path)]) == 0
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["main.py", "--help"])
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(tmp_path / "main.py"), run_name="__main__")
    finally:
        sys.modules.pop("stitchllm", None)
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for option in ("steps", "--output_dir", "--learning_rate", "--per_device_train_batch_size"):
        assert option in said
    assert "适配器" in said
