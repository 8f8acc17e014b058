"""The demo shows equality because it is there, and would say so if it were not."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch

from truebatch.cli.app import run
from truebatch.training.trainer import train
from truebatch_systems.chinese_gpt import demo, demo_speed
from truebatch_systems.chinese_gpt.config import ChineseGPTConfig
from truebatch_systems.chinese_gpt.data.prepare import prepare
from truebatch_systems.chinese_gpt.demo import DemoSize, cut_one_step, run_cut, run_demo
from truebatch_systems.chinese_gpt.model.model import ChineseGPT

SMALL = DemoSize(
    corpus=ChineseGPTConfig(embedded_statements=60, embedded_dialogues=120),
    width=16,
    samples_per_step=8,
    compared_steps=6,
    steps=6,
    about=("动物", "水果", "省份"),
    answers=2,
)


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal gets its tables in another form
    monkeypatch.setattr(demo.run_demo, "__kwdefaults__", {"seed": 0, "size": SMALL, "out": tmp_path / "demo"})


@pytest.fixture(scope="module")
def dialogues():
    return demo._dialogues(prepare(SMALL.corpus).train)


@pytest.mark.usefixtures("small")
def test_the_demo_ends_well_and_shows_its_five_parts(capsys, tmp_path):
    assert run(["demo"]) == 0
    out = capsys.readouterr().out
    for words in (
        "1. Cells that hold nothing but padding",
        "fixed 128  dynamic  bucketed  packed",
        "2. One layer of this model forgets where a sample ends",
        "blocks.1",
        "mended: EQUAL",
        "3. One step of 16 dialogues",
        "padded left",
        "packed rows, 3 ranks",
        "4. 6 steps of 8 dialogues, trained twice",
        "o one by one, x true batches",
        "samples per second",
        "5. 6 steps in true batches",
        "用户：",
        "Equal to one by one in every part",
        "next: truebatch train chinese_gpt",
        f"report: {tmp_path / 'demo' / 'report.html'}",
    ):
        assert words in out
    _check_report(tmp_path / "demo" / "report.html")


def _check_report(file):
    """All parts that are tables or pictures, whole in itself, and small enough to be sent."""
    page = file.read_text(encoding="utf-8")
    for words in ("1. Cells that hold", "3. One step of", "packed rows, 3 ranks", "both losses", "speed", "用户："):
        assert words in page
    assert "<script" not in page
    assert not re.search(r"(src|href)=[\"']https?:", page)
    assert len(page.encode()) < 1.5e6


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_signal_in_any_of_its_trainings_ends_the_demo_with_75(monkeypatch, capsys, number):
    trained = []

    def asked_to_stop(model, objective, data, config, **given):
        trained.append(config)
        if len(trained) == number:
            model.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGHUP))
        return train(model, objective, data, config, **given)

    monkeypatch.setattr(demo, "train", asked_to_stop)
    assert run(["demo"]) == 75
    assert len(trained) == number
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_without_matplotlib_the_demo_says_what_the_report_needs(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "_can_draw", lambda: False)
    assert run(["demo"]) == 0
    assert "pip install 'truebatch[report]'" in capsys.readouterr().out
    assert not (tmp_path / "demo").exists()


def test_a_model_that_breaks_the_law_is_found_in_every_part(capsys, monkeypatch, tmp_path):
    forward, step = ChineseGPT.forward, ChineseGPT.forward_step

    def mixing(self, input_ids, positions, segments, *, labels=None, **options):
        shift = 1e-1 * input_ids.float().mean() / self.shape.vocabulary
        return forward(self, input_ids, positions, segments, labels=labels, **options) * (1 + shift)

    def mixing_step(self, tokens, positions, cache, is_real_key):
        logits, cache = step(self, tokens, positions, cache, is_real_key)
        return logits.roll(tokens.shape[0], dims=-1), cache

    monkeypatch.setattr(ChineseGPT, "forward", mixing)
    monkeypatch.setattr(ChineseGPT, "forward_step", mixing_step)
    assert not run_demo(size=SMALL, out=tmp_path)
    last = capsys.readouterr().out
    assert "NOT EQUAL" in last
    for words in (
        "the model as it is was called broken",
        "padded right",
        "the training stopped before its first update",
    ):
        assert words in last.partition("NOT EQUAL")[2]


def test_every_cut_holds_the_same_samples(dialogues):
    cuts = cut_one_step(dialogues, samples_per_step=16, seed=3)
    ids = [sorted(i for batch in cut.batches for i in batch.sample_ids) for cut in cuts]
    assert all(one == ids[0] for one in ids)
    assert len(cuts[0].batches) == len(ids[0]) > len(cuts[1].batches) > 1


def test_a_cut_gives_the_gradient_of_the_whole_step(dialogues):
    model = demo._model(prepare(SMALL.corpus), SMALL, 0).eval()
    cuts = cut_one_step(dialogues, samples_per_step=16, seed=1)
    alone, packed = (run_cut(model, cut, repeats=1).gradients for cut in (cuts[0], cuts[3]))
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-6)


def test_a_batch_is_never_slower_without_a_reason(monkeypatch):
    monkeypatch.setattr(demo_speed.os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    monkeypatch.setattr(demo_speed.os, "cpu_count", lambda: 2)
    said = list[str]()
    rows = [
        ("padded right", 0.8, 200),
        ("packed rows", 0.7, 100),
        ("packed rows, 3 ranks", 1.2, 100),
        ("equal", 0.99, 100),
    ]
    demo_speed.write_reasons(said.append, rows, tokens=100)
    assert said == [
        "   padded right was slower than one by one: 50% of its cells are padding",
        "   packed rows was slower than one by one: 9 programs share 2 cores and their caches",
    ]
    monkeypatch.setattr(demo_speed.os, "getloadavg", lambda: (0.5, 9.0, 9.0))
    assert "larger products" in demo_speed.why_slower("packed rows", 0.7, cells=100, tokens=100)


def test_the_clock_of_a_training_gives_its_usual_step(monkeypatch):
    times = iter([0.0, 1.0, 3.0, 13.0])
    monkeypatch.setattr(demo_speed, "cpu_seconds", lambda: next(times))
    clock = demo_speed.CpuClock()
    clock.begin(0, 3)
    for step in (1, 2, 3):
        clock.record({"step": step})
    assert clock.usual_step() == 2.0
