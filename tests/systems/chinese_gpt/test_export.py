"""An exported model in a process that has transformers and not truebatch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.systems.chinese_gpt.test_generate import CORPUS
from truebatch.generation.config import Generation
from truebatch_systems.chinese_gpt.model.export import export_model
from truebatch_systems.chinese_gpt.model.generate import continue_texts, prompt_ids
from truebatch_systems.chinese_gpt.model.model import ChineseGPT, ModelShape
from truebatch_systems.chinese_gpt.tokenizer.vocabulary import Vocab

ROOT = Path(__file__).parents[3]
OTHER = ["  深度\n\n学习 很有趣 ", "学习效率 AI 2024", "AI，你好！\r\n北京"]

FOREIGN = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

found = []
for case in json.load(open(sys.argv[1], encoding="utf-8")):
    model = AutoModelForCausalLM.from_pretrained(case["folder"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(case["folder"])
    if case["words"]:
        ids = [tokenizer(words, is_split_into_words=True).input_ids for words in case["words"]]
    else:
        ids = [tokenizer(text).input_ids for text in case["texts"]]
    torch.save([model(torch.tensor([one])).logits[0].detach() for one in ids], case["folder"] + "/logits.pt")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "你好吗？"}], add_generation_prompt=True, tokenize=False
    )
    out = model.generate(torch.tensor([ids[0]]), max_new_tokens=12, do_sample=False, suppress_tokens=[0, 1, 2, 4, 5, 6])
    found.append({
        "ids": ids,
        "texts": [tokenizer.decode(one, skip_special_tokens=True) for one in ids],
        "chat": chat,
        "new": tokenizer.decode(out[0, len(ids[0]):], skip_special_tokens=True),
    })
assert "truebatch" not in sys.modules
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Models of all backends, exported, and what a foreign process made of them."""
    folder = tmp_path_factory.mktemp("exported")
    models, cases = {}, []
    for backend in ("builtin", "character", "bpe", "jieba"):
        vocab = Vocab.build_from_texts(CORPUS, backend=backend)
        shape = ModelShape(vocabulary=len(vocab), embedding_dim=32, hidden_dim=48, layers=2, heads=4, max_seq_len=64)
        model = ChineseGPT(shape, seed=2, vocab=vocab).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter * 5 if parameter.ndim == 2 else parameter + 0.1)
        export_model(model, folder / backend)
        texts = [*CORPUS, *OTHER] if backend != "jieba" else CORPUS
        words = [vocab.segmenter.cut(text) for text in texts] if backend == "jieba" else []
        cases.append({"folder": str(folder / backend), "texts": texts, "words": words})
        models[backend] = (model, texts)
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN, str(folder / "cases.json")], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return folder, models, dict(zip(models, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.xdist_group("chinese_gpt_export")
@pytest.mark.parametrize("backend", ["builtin", "character", "bpe", "jieba"])
def test_plain_transformers_has_the_same_tokens_logits_and_text(exported, backend):
    folder, models, foreign = exported
    model, texts = models[backend]
    vocab, found = model.vocab, foreign[backend]
    assert found["ids"] == [vocab.encode_prompt(text) for text in texts]
    known = slice(len(CORPUS))  # an unknown word is shown by us and left out by transformers
    assert found["texts"][known] == [vocab.decode(ids) for ids in found["ids"][known]]
    assert found["chat"] == "用户：你好吗？助手："
    logits = torch.load(folder / backend / "logits.pt")
    for ids, theirs in zip(found["ids"], logits, strict=True):
        cells = torch.tensor([ids])
        real = torch.ones_like(cells, dtype=torch.bool)
        with torch.no_grad():
            ours = model.forward_step(cells, torch.arange(len(ids))[None], None, real)[0][0]
        assert (ours - theirs).abs().max() <= 1e-5 * max(1.0, float(ours.abs().max()))


@pytest.mark.xdist_group("chinese_gpt_export")
def test_plain_transformers_generates_the_same_text(exported):
    _, models, foreign = exported
    model, texts = models["builtin"]
    assert prompt_ids(model.vocab, texts[0]) == tuple(model.vocab.encode_prompt(texts[0]))
    ours = continue_texts(model, texts[:1], Generation(max_new_tokens=12, temperature=0))[0]
    assert foreign["builtin"]["new"] == ours


@pytest.mark.xdist_group("chinese_gpt_export")
def test_the_folder_says_how_it_is_used_and_holds_the_vocabulary(exported):
    folder, models, _ = exported
    for backend, (model, _) in models.items():
        assert Vocab.load(folder / backend / "vocabulary.json").hash == model.vocab.hash
        assert backend in (folder / backend / "README.md").read_text(encoding="utf-8")
    assert "jieba.lcut" in (folder / "jieba" / "README.md").read_text(encoding="utf-8")
