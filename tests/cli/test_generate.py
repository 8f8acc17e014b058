"""`truebatch generate` as a user meets it: scripts, pipes, a terminal, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import tasks
from truebatch.cli.app import run

ROOT = Path(__file__).parents[2]
SMALL = (
    "embedded_statements=40", "embedded_dialogues=40", "embedding_dim=16", "hidden_dim=16", "heads=2",
    "train.max_steps=4", "train.samples_per_step=8", "train.batch_size=8", "train.layout=padded",
)  # fmt: skip
pytestmark = pytest.mark.xdist_group("generate")


def train(target: str, folder: Path, settings) -> Path:
    arguments = [part for one in settings for part in ("--set", one)]
    assert run(["train", target, "--out", str(folder), "--log-format", "plain", *arguments]) == 0
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> str:
    return str(train("chinese_gpt", tmp_path_factory.mktemp("generate") / "run", SMALL))


def lines_of(capsys, *arguments: str) -> list[dict[str, str]]:
    capsys.readouterr()
    assert run(["generate", *arguments, "--json", "--max-new-tokens", "12"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_prompts_of_a_script_are_answered_in_order_and_each_as_alone(trained, capsys, tmp_path):
    asked = ["你好", "北京在哪里？", "葡萄的颜色是什么？"]
    together = lines_of(capsys, trained, *(part for one in asked for part in ("--prompt", one)))
    assert [line["prompt"] for line in together] == asked
    assert [lines_of(capsys, trained, "--prompt", one)[0] for one in asked] == together
    (tmp_path / "asked.txt").write_text("\n".join(asked[::-1]) + "\n\n", encoding="utf-8")
    (tmp_path / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
    assert lines_of(capsys, trained, "--prompts", str(tmp_path / "asked.txt")) == together[::-1]
    assert lines_of(capsys, trained, "--prompts", str(tmp_path / "asked.json")) == together


def test_one_prompt_is_written_as_plain_text_and_another_seed_writes_another(trained, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        capsys.readouterr()
        assert (
            run(["generate", trained, "--prompt", "你好", "--seed", seed, "--temperature", "1.5", "--top-k", "0"]) == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert not texts[0].startswith("{")


def test_beams_and_greedy_draw_nothing(trained, capsys):
    for way in (["--beams", "3"], ["--temperature", "0"]):
        first, second = (lines_of(capsys, trained, "--prompt", "你好", *way, "--seed", seed) for seed in "12")
        assert first == second


def test_lines_of_a_pipe_are_prompts(trained, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("你好\n\n北京在哪里？\n"))
    assert [line["prompt"] for line in lines_of(capsys, trained)] == ["你好", "北京在哪里？"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", "深" * 200], "leaves no room for new tokens"),
        (["--prompts", "missing.txt"], "missing.txt"),
        (["--beams", "2", "--temperature", "0.5", "--prompt", "x"], "does not sample"),
        (["--top-p", "0", "--prompt", "x"], "top_p is out of range"),
        (["--prompt", "x", "--set", "stagge=chat"], "stage"),
    ],
)
def test_what_cannot_be_done_is_said_in_three_parts(trained, capsys, arguments, said):
    capsys.readouterr()
    assert run(["generate", trained, *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "  seen: " in error
    assert "  do:   " in error


def test_a_folder_that_is_no_run_and_a_run_without_weights_are_refused(tmp_path, trained, capsys):
    assert run(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "is not a run" in capsys.readouterr().err
    for name in ("config.yaml", "run.json"):
        (tmp_path / name).write_bytes((Path(trained) / name).read_bytes())
    assert run(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "no checkpoint yet" in capsys.readouterr().err


def test_a_system_that_generates_nothing_says_so(tmp_path, capsys):
    settings = ["train.max_steps=1", "train.samples_per_step=4"]
    folder = train(f"{Path(tasks.__file__)}:system", tmp_path / "run", settings)
    capsys.readouterr()
    assert run(["generate", str(folder), "--prompt", "x", "--system", f"{Path(tasks.__file__)}:system"]) == 2
    assert "does not generate text" in capsys.readouterr().err


def test_a_terminal_gets_a_dialogue(trained):
    script = [
        "你好", ":set temperature 0", ":set tempratur 1", ":set top_k viel", ":unknown", "深" * 200, ":set", ":help",
        "你好", ":exit",
    ]  # fmt: skip
    out = _on_a_terminal(["generate", trained, "--max-new-tokens", "8"], script)
    assert "chinese_gpt, step 4. :help for commands" in out
    assert "did you mean 'temperature'?" in out
    assert "top_k needs a number" in out
    assert "an unknown command" in out
    assert "leaves no room for new tokens" in out
    assert "temperature 0.0" in out
    assert ":clear           clear the screen" in out


def test_the_end_of_input_ends_a_dialogue(trained):
    assert "> " in _on_a_terminal(["generate", trained], ["\x04"])


def _on_a_terminal(arguments: list[str], script: list[str]) -> str:
    """What a terminal shows when these lines are typed, each at the prompt `> `."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "truebatch", *arguments]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment) as process:
        os.close(theirs)
        out, typed, until = b"", 0, time.monotonic() + 600
        while time.monotonic() < until:
            try:
                got = os.read(ours, 4096)
            except OSError:  # the other end is closed: the program has ended
                break
            if not got:
                break
            out += got
            if typed < len(script) and out.decode(errors="replace").count("> ") > typed and out.endswith(b"> "):
                line = script[typed]
                os.write(ours, line.encode() if line == "\x04" else line.encode() + b"\n")
                typed += 1
        assert process.wait(timeout=600) == 0
    os.close(ours)
    return out.decode(errors="replace").replace("\r\n", "\n")
