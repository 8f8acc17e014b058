"""`truebatch train hf --task embedding`: from pairs of texts to a folder of transformers and of sentence-transformers."""

import json
import shutil

import pytest
import torch
from transformers import AutoModel

from tests.hf.finetune.folders import model_folder, write_lines
from truebatch.cli.app import run
from truebatch.errors import ConfigError, DataError
from truebatch.hf.embedding.sentence_folder import max_length_of, pooling_of
from truebatch.hf.finetune.config import FinetuneConfig
from truebatch.hf.finetune.text_pairs import read_pairs
from truebatch.training.logging.metrics_jsonl import read_metrics

WORDS = ["the sky", "the grass is green", "hello", "red and white blue", "what is the colour"]
PAIRS = [
    {"anchor": f"{WORDS[i % 5]} {'blue ' * (i % 4)}", "positive": f"{WORDS[i % 5]} sky", "negatives": WORDS[: i % 3]}
    for i in range(16)
]
COMMON = [
    "--task", "embedding", "--set", "train.samples_per_step=8", "--set", "train.epochs=2", "--set", "train.precision=fp32",
    "--set", "train.layout=packed", "--set", "train.workers=0", "--set", "train.compile=false", "--set", "train.save_every=1",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRUEBATCH_CACHE", str(tmp_path / "cache"))
    write_lines(tmp_path / "pairs.jsonl", PAIRS)
    model_folder(tmp_path / "model", "bert")
    return tmp_path


def train(folder, out, *more):
    line = ["train", "hf", "--model", "model", "--data", "pairs.jsonl", "--out", out, *COMMON, *more]
    assert run(line) == 0
    weights = AutoModel.from_pretrained(folder / out / "model").state_dict()
    return [record["loss"] for record in read_metrics(folder / out / "metrics.jsonl") if "loss" in record], weights


def test_a_run_ends_the_same_in_any_cut_and_after_a_stop(folder, capsys):
    losses, weights = train(folder, "whole", "--set", "train.cells=1000", "--set", "train.check_samples=8")
    assert "equality: checked on 8 samples, embeddings " in capsys.readouterr().out
    cut, others = train(folder, "cut", "--set", "train.cells=60", "--set", "train.check_samples=0")
    assert cut == pytest.approx(losses, rel=1e-5)
    moved = torch.cat([(weights[k] - others[k]).flatten() for k in weights])
    assert float(moved.abs().max()) < 1e-5
    train(
        folder, "stopped", "--set", "train.cells=1000", "--set", "train.max_steps=1", "--set", "train.check_samples=8"
    )
    _, found = train(folder, "stopped", "--set", "train.cells=1000", "--set", "train.check_samples=8")
    assert all(torch.equal(weights[k], found[k]) for k in weights)


def test_an_export_is_a_folder_of_sentence_transformers(folder):
    train(folder, "run", "--set", "train.cells=1000", "--set", "pooling=cls", "--set", "train.max_steps=1")
    exported = folder / "run" / "model"
    assert pooling_of(exported) == "cls"
    kinds = [module["type"] for module in json.loads((exported / "modules.json").read_text())]
    assert kinds == ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"]
    shutil.rmtree(folder / "model")
    shutil.copytree(exported, folder / "model")
    train(folder, "again", "--set", "train.cells=1000", "--set", "train.max_steps=1")
    assert pooling_of(folder / "again" / "model") == "cls"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls", "embedding_dimension": 16}, "cls"),
    ],
)
def test_pooling_is_read_from_the_folder(tmp_path, settings, expected):
    write_sentence_folder(tmp_path, settings)
    assert pooling_of(tmp_path) == expected
    assert max_length_of(tmp_path) == 128


def write_sentence_folder(folder, settings, kinds=("Transformer", "Pooling", "Normalize")):
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "2_Dense"}
    modules = [{"idx": at, "path": paths[kind], "type": f"x.{kind}"} for at, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 128}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("settings", "kinds", "said"),
    [
        ({"pooling_mode_max_tokens": True}, ("Transformer", "Pooling"), "pools in a way that is not known"),
        ({"pooling_mode": ["mean", "cls"]}, ("Transformer", "Pooling"), "pools in a way that is not known"),
        ({"pooling_mode": "mean"}, ("Transformer", "Pooling", "Dense"), "modules that are not trained here"),
    ],
)
def test_a_folder_that_does_more_is_refused(tmp_path, settings, kinds, said):
    write_sentence_folder(tmp_path, settings, kinds)
    with pytest.raises(ConfigError, match=said):
        pooling_of(tmp_path)


@pytest.mark.parametrize(
    ("line", "texts", "score"),
    [
        ({"anchor": "a", "positive": "b"}, [("a", "b")], None),
        ({"anchor": "a", "positive": "b", "negative": "c"}, [("a", "b", "c")], None),
        ({"anchor": "a", "positive": "b", "negative_1": "c", "negative_2": "d"}, [("a", "b", "c", "d")], None),
        ({"query": "a", "pos": ["b", "c"], "neg": ["d"]}, [("a", "b", "d"), ("a", "c", "d")], None),
        ({"question": "a", "answer": "b"}, [("a", "b")], None),
        ({"sentence1": "a", "sentence2": "b"}, [("a", "b")], None),
        ({"sentence1": "a", "sentence2": "b", "score": "0.5"}, [("a", "b")], 0.5),
    ],
)
def test_usual_schemas_are_read(line, texts, score):
    found = read_pairs(line, "x:1")
    assert [pair.texts for pair in found] == texts
    assert {pair.score for pair in found} == {score}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"ancho": "a", "positive": "b"}, "did you mean 'anchor'"),
        ({"query": "a", "positve": "b"}, "did you mean 'positive'"),
        ({"anchor": "a", "positive": 3}, "needs a text, or a list of them, under 'positive'"),
        ({"anchor": "a", "positive": []}, "is not one pair of texts"),
        ({"sentence1": "a", "sentence2": "b", "score": "high"}, "needs a number under 'score'"),
        ({"anchor": "a", "positive": "b", "negative": "c", "score": 1}, "is not one pair of texts"),
        (["a", "b"], "is not a JSON object"),
    ],
)
def test_a_bad_line_is_named(line, said):
    with pytest.raises(DataError, match=said):
        read_pairs(line, "x:1")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"task": "causal_lm", "pooling": "cls"}, "pooling is for embeddings"),
        ({"task": "causal_lm", "temperature": 0.1}, "temperature is for embeddings"),
        ({"task": "embedding", "temperature": 0.0}, "the temperature must be above 0"),
        ({"task": "embedding", "streaming": True}, "read as a whole"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(tmp_path, more, said):
    with pytest.raises(ConfigError, match=said):
        FinetuneConfig(model=tmp_path, data=tmp_path / "x.jsonl", **more)
