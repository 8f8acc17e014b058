"""A model against a server on loopback that holds it, or something near it."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import truebatch as tb
from tests.verification.engines.completions import Completions, served
from tests.verification.engines.test_compare_models import halved, words
from truebatch.cli.app import run
from truebatch.errors import ConfigError, DataError
from truebatch.testing.tiny_hf.model import tiny_model
from truebatch.verification.engines.server_logprobs import Server, prompt_logprobs

SAMPLES = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [16, 17]]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def asked(model, completions, **server):
    with served(completions) as address:
        return tb.verify(model, SAMPLES, against=Server(address=address, **server))


@pytest.mark.parametrize("form", ["vllm", "echo", "echo1"])
def test_a_server_of_the_same_weights_is_equal_however_it_says_so(model, form):
    completions = Completions(copy.deepcopy(model), form=form)
    report = asked(model, completions)
    assert report.ok, report
    assert [one.tokens for one in report.samples] == [3, 6, 1]
    assert {request["model"] for request in completions.requests} == {"tiny"}


@pytest.mark.parametrize("form", ["vllm", "echo"])
def test_a_changed_weight_is_found_at_its_first_token(model, form):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight[11].mul_(1.5)  # the second sample's token at position 2, and a little of all others
    report = asked(model, Completions(other, form=form))
    assert report.verdict == "different"
    token = report.first_token
    assert (token.sample, token.position, token.token, token.text) == (0, 1, 6, "<6>")
    own = torch.log_softmax(model(torch.tensor([SAMPLES[0]])).logits[0, 0].double(), -1)[6]
    assert token.here == pytest.approx(float(own.detach()), abs=1e-6)
    assert token.there != pytest.approx(token.here, abs=1e-5)


@pytest.mark.parametrize(
    "change", [lambda logits: logits / 1.1, lambda logits: 3 * torch.tanh(logits / 3)], ids=["temperature", "softcap"]
)
def test_a_temperature_and_a_cap_of_logits_are_found(model, change):
    report = asked(model, Completions(model, change=change), dtype="bfloat16")
    assert report.verdict == "different"
    assert report.first_token is not None


@pytest.mark.parametrize("form", ["vllm", "echo"])
def test_a_token_put_before_the_prompt_is_found(model, form):
    report = asked(model, Completions(model, form=form, bos=1))
    assert report.verdict == "different"
    assert "the server reads 5 tokens where 4 were sent" in report.reasons[0]


def test_half_precision_on_the_server_is_judged_when_it_is_said_and_unproven_when_not(model):
    half = halved(copy.deepcopy(model))
    assert asked(model, Completions(half), dtype="bfloat16").ok
    unsure = asked(model, Completions(half))
    assert unsure.verdict == "unproven"
    assert "--served-dtype" in unsure.unproven


def test_few_decimals_are_no_difference(model):
    assert asked(model, Completions(model, decimals=4)).ok


def test_the_servers_tokenizer_is_asked_where_the_model_has_one(model, tmp_path, capsys):
    model.save_pretrained(tmp_path)
    words(tmp_path, begin=False)
    cut = [1, 2, 3, 4, 5, 1, 1, 1, 1, 1]
    with served(Completions(model, tokenize=lambda text: [0, *cut])) as address:
        code = run(["verify", str(tmp_path), "--against", address, "--served-model", "tiny", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 1
    assert "the server makes 11 tokens, the model's own 10" in report["reasons"][0]


def test_the_command_says_equal_and_prints_the_figures(model, tmp_path, capsys):
    model.save_pretrained(tmp_path)
    with served(Completions(model)) as address:
        assert run(["verify", str(tmp_path), "--against", address]) == 0
    assert "EQUAL: the server at" in capsys.readouterr().out


def test_a_server_without_log_probabilities_of_prompts_is_an_error(model):
    with pytest.raises(DataError, match="no log-probabilities of a prompt"):
        asked(model, Completions(model, form="none"))


def test_a_redirect_is_not_followed(model):
    with pytest.raises(ConfigError, match="refuses the request \\(302\\)"):
        asked(model, Completions(model, status=302))


def test_an_answer_beyond_its_limit_of_bytes_is_not_read(model):
    with pytest.raises(DataError, match="too large"):
        asked(model, Completions(model), answer_bytes=200)


def test_a_key_of_the_environment_is_not_sent_readable_to_another_machine(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with pytest.raises(ConfigError, match="plain http") as error:
        prompt_logprobs(Server(address="http://example.invalid/v1"), [[5, 6]])
    assert "sk-secret" not in str(error.value)
