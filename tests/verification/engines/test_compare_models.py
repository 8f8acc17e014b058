"""Two engines for the same weights: planted differences are found in the right module, right pairs are not alarmed."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import truebatch as tb
from truebatch.cli.app import run
from truebatch.errors import ConfigError
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.verification.subjects.hf_subject import random_samples

ARCHITECTURES = ["llama", "gpt2", "gpt_neox", "gemma2", "qwen3"]
MORE = ["mistral", "qwen2", "gemma", "phi", "opt", "bloom", "olmo2", "granite", "cohere", "stablelm"]


def halved(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def changed(architecture, change, attention=None):
    """A model and a copy with a fault."""
    model = tiny_model(architecture)
    if attention:
        model.set_attn_implementation(attention)
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(other)
    return model, other


def scale_down_proj(model):
    model.model.layers[1].mlp.down_proj.weight.mul_(1.01)


def scale_one_entry(model):
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.view(-1)[weight.abs().argmax()] *= 1.01


def other_theta(model):
    width = 2 * len(model.model.rotary_emb.inv_freq)
    model.model.rotary_emb.inv_freq.copy_(1 / 500_000 ** (torch.arange(0, width, 2) / width))


def other_eps(model):
    model.model.layers[0].input_layernorm.variance_epsilon *= 10


def no_final_norm(model):
    model.model.norm = nn.Identity()


def untied(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight * (1 + 0.1 * torch.randn_like(model.lm_head.weight)))


def no_softcap(model):
    model.config.final_logit_softcapping = None


def no_score_cap(model):
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None


def temperature(model):
    model.model.layers[1].self_attn.scaling *= 1.1


def bias(model):
    model.gpt_neox.layers[0].attention.dense.bias.add_(0.01)


def activation(model):
    model.transformer.h[0].mlp.act = nn.GELU()


PLANTED = {
    "a weight 1 % larger": ("llama", scale_down_proj, "model.layers.1.mlp.down_proj"),
    "one entry 1 % larger": ("llama", scale_one_entry, "model.layers.0.self_attn.v_proj"),
    "another rope theta": ("llama", other_theta, "model.rotary_emb"),
    "another eps": ("llama", other_eps, "model.layers.0.input_layernorm"),
    "no final norm": ("llama", no_final_norm, "model.norm"),
    "an untied head": ("gemma2", untied, "lm_head"),
    "no cap of logits": ("gemma2", no_softcap, ""),
    "another temperature of attention": ("qwen3", temperature, "model.layers.1.self_attn"),
    "a bias": ("gpt_neox", bias, "gpt_neox.layers.0.attention.dense"),
    "another activation": ("gpt2", activation, "transformer.h.0.mlp.act"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_difference_is_found_in_its_module(fault):
    architecture, change, place = PLANTED[fault]
    model, other = changed(architecture, change)
    report = tb.verify(model, against=other)
    assert report.verdict == "different", report
    assert report.first_module.name == place, report


@pytest.mark.parametrize("fault", ["a weight 1 % larger", "another rope theta", "no final norm", "another activation"])
def test_it_is_found_in_half_precision_too(fault):
    architecture, change, place = PLANTED[fault]
    model, other = changed(architecture, change)
    report = tb.verify(halved(model), against=halved(other))
    assert report.verdict == "different", report
    assert report.first_module.name == place, report


def test_a_cap_inside_attention_is_the_code_of_attention():
    model, other = changed("gemma2", no_score_cap, attention="eager")
    report = tb.verify(model, against=other)
    assert report.first_module.name == "model.layers.0.self_attn"
    assert "in its own code, before model.layers.0.self_attn.o_proj" in str(report)


class Unnormed(nn.Module):
    """A model of one's own whose final norm is there or is not even called."""

    def __init__(self, is_normed):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm, self.head = nn.Embedding(50, 8), nn.LayerNorm(8), nn.Linear(8, 50)
        self.is_normed = is_normed

    def forward(self, ids):
        hidden = self.words(ids)
        return self.head(self.norm(hidden) if self.is_normed else hidden)


class NextToken:
    def counts(self, batch):
        return {"loss": int(batch.is_real.sum())}

    def sums(self, model, batch):
        logits = model(batch["ids"])
        return {"loss": logits.square().mean(-1).masked_fill(~batch.is_real, 0.0).sum()}


def test_a_norm_that_one_model_does_not_call_is_named_in_a_model_of_ones_own():
    fields, samples = [tb.Field(name="ids")], [{"ids": torch.arange(n)} for n in (3, 7, 2)]
    report = tb.verify(Unnormed(True), NextToken(), samples, fields, against=Unnormed(False))
    assert report.first_module.name == "norm"
    assert "which only the first runs" in str(report)
    again = tb.verify(Unnormed(True), NextToken(), samples, fields, against=Unnormed(True))
    assert again.ok
    assert tb.verify(Unnormed(True), NextToken(), samples, fields, against="bfloat16").ok


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("against", ["attn:eager", "float64", "bfloat16"])
def test_a_right_pair_is_equal(architecture, against):
    report = tb.verify(tiny_model(architecture), against=against)
    assert report.ok, report
    assert report.first_module is None


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MORE])
def test_right_pairs_of_many_seeds_are_equal(architecture):
    wrong = []
    for seed in range(5):
        model = tiny_model(architecture, seed=seed)
        samples = random_samples(model, seed)
        wrong += [(seed, spec) for spec in ("attn:eager", "bfloat16") if not tb.verify(model, samples, against=spec).ok]
        if not tb.verify(halved(model), samples, against="attn:eager").ok:
            wrong.append((seed, "eager in half precision"))
    assert not wrong


class OtherCompiled(nn.Module):
    """Takes another way where it is compiled, as code with kernels of its own does."""

    def forward(self, x):
        return x * 1.01 if torch.compiler.is_compiling() else x


class Deep(nn.Module):
    """A small model with a module inside of a module."""

    def __init__(self, inner):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.block = nn.Embedding(50, 8), nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 8))

    def forward(self, ids):
        return self.block(self.words(ids))


IDS = [tb.Field(name="ids")]
FEW = [{"ids": torch.arange(n)} for n in (3, 7, 2)]


def test_the_same_weights_compiled_are_equal_and_the_model_is_put_back():
    model = Deep(nn.Tanh())
    before = model(FEW[0]["ids"])
    report = tb.verify(model, NextToken(), FEW, IDS, against="compile:aot_eager")
    assert report.ok
    assert report.against == "the same model compiled with aot_eager"
    assert model._compiled_call_impl is None
    assert torch.equal(model(FEW[0]["ids"]), before)


def test_what_compiling_changes_is_found_in_its_module():
    report = tb.verify(Deep(OtherCompiled()), NextToken(), FEW, IDS, against="compile:eager")
    assert report.verdict == "different"
    assert report.first_module.name == "block.1"


def test_what_cannot_be_compiled_is_unproven():
    def refuse(_graph, _inputs):
        raise RuntimeError("no kernel for this")

    torch._dynamo.register_backend(refuse, name="refusing")
    report = tb.verify(Deep(nn.Tanh()), NextToken(), FEW, IDS, against="compile:refusing")
    assert report.verdict == "unproven"
    assert "no kernel for this" in report.unproven


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("is_half", [False, True])
def test_compiled_hugging_face_models_are_equal(architecture, is_half):
    model = tiny_model(architecture)
    report = tb.verify(halved(model) if is_half else model, against="compile")
    assert report.ok, report


def test_what_is_rounded_before_it_should_be_is_not_called_rounding():
    """Positions in half precision: a known fault of engines, which casting parameters alone does not have."""
    model = halved(tiny_model("llama"))
    other = copy.deepcopy(model).bfloat16()  # rotary frequencies, too
    report = tb.verify(model, [list(range(5, 155)), [5, 6, 7]], against=other)
    assert report.verdict == "different"
    assert report.first_module.name == "model.rotary_emb"


def test_a_folder_saved_again_is_equal_and_a_tokenizer_that_adds_a_token_is_not(tmp_path, capsys):
    model = tiny_model("llama")
    first, second, third = (tmp_path / name for name in "abc")
    for folder in (first, second, third):
        model.save_pretrained(folder)
    words(first, begin=False)
    words(second, begin=False)
    words(third, begin=True)
    assert run(["verify", str(first), "--against", str(second)]) == 0
    assert "EQUAL" in capsys.readouterr().out
    assert run(["verify", str(first), "--against", str(third), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "different"
    assert "tokenizers" in report["reasons"][0]


def words(folder, begin):
    """A tokenizer of words, which puts a token before every text or does not."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    table = {"<s>": 0, "<unk>": 1, "The": 2, "quick": 3, "brown": 4, "fox": 5}
    made = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if begin:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>").save_pretrained(folder)


def adapted(tmp_path):
    """A base folder and an adapter's folder beside it."""
    peft = pytest.importorskip("peft")
    base, folder = tmp_path / "base", tmp_path / "adapter"
    model = tiny_model("llama")
    model.save_pretrained(base)
    model.add_adapter(peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    return base, folder


def test_an_adapter_is_equal_to_itself_merged_and_different_from_its_base(tmp_path, capsys):
    base, folder = adapted(tmp_path)
    assert run(["verify", str(folder), "--against", "merged"]) == 0
    assert run(["verify", str(folder), "--against", str(base)]) == 1
    assert "first difference: model.layers.0.self_attn.q_proj" in capsys.readouterr().out


def test_the_figures_of_a_sample_are_those_of_its_logits():
    model, other = changed("llama", scale_down_proj)
    ids = [5, 6, 7, 8, 9]
    (one,) = tb.verify(model, [ids], against=other).samples
    with torch.no_grad():
        rows = [torch.log_softmax(m(torch.tensor([ids])).logits[0, :-1].double(), -1) for m in (model, other)]
    own = [row.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0] for row in rows]
    gap = own[0] - own[1]
    assert one.tokens == 4
    assert one.max_gap == pytest.approx(float(gap.abs().max()), rel=1e-3)
    assert one.kl == pytest.approx(float((rows[0].exp() * (rows[0] - rows[1])).sum(-1).mean()), rel=1e-3)
    assert one.k3 == pytest.approx(float((gap.exp() - 1 - gap).mean()), rel=1e-3)


def test_a_weight_that_no_sample_reads_is_a_difference_all_the_same():
    model, other = changed("llama", lambda m: m.model.embed_tokens.weight[50].mul_(1.01))
    report = tb.verify(model, [[5, 6, 7], [8, 9]], against=other)
    assert report.verdict == "different"
    assert "model.embed_tokens.weight" in report.reasons[0]


class Sharp(nn.Module):
    """Chooses by rounding: far from equal in half precision, whatever the engine."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.91, 1.13, 4))

    def forward(self, ids):
        return torch.sin(ids[..., None] * self.weight * 3e3)


class Whole:
    def counts(self, batch):
        return {"loss": batch.num_samples}

    def sums(self, model, batch):
        return {"loss": model(batch["x"]).sum()}


def test_what_rounding_hides_is_unproven():
    samples = [{"x": torch.rand(n) + 0.3} for n in (3, 5)]
    report = tb.verify(Sharp(), Whole(), samples, [tb.Field(name="x", dtype="float32")], against="bfloat16")
    assert report.verdict == "unproven"
    assert not report.ok


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--against", "fp8"], "this is nothing to verify against"),
        (["--against", "attn:nothing"], "cannot be given this attention"),
        (["--against", "compile:nothing"], "unknown backend"),
        (["--against", "merged"], "no adapter to merge"),
        (["--against", "compile", "--layout", "packed"], "omit --layout"),
        (["--against", "compile", "--served-model", "x"], "this option is only for a server"),
        (["--served-dtype", "bfloat16"], "this option is only for a server"),
        (["--against", "http://name:secret@localhost:1/v1"], "an address must not contain a user name"),
        (["--against", "http://127.0.0.1:9/v1"], "cannot be reached"),
    ],
)
def test_a_wrong_question_says_what_to_do(tmp_path, capsys, arguments, words):
    tiny_model("llama").save_pretrained(tmp_path / "m")
    assert run(["verify", str(tmp_path / "m"), *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "secret" not in said


def test_a_model_whose_attention_is_fixed_is_not_called_equal():
    with pytest.raises(ConfigError, match="cannot be changed"):
        tb.verify(tiny_model("falcon"), against="attn:eager")


def test_a_batch_is_not_asserted_against_an_engine():
    with pytest.raises(ConfigError, match="one by one"):
        tb.assert_batchable(tiny_model("llama"), [[5, 6], [7]], against="compile")
