"""Log-probabilities of completions, packed with shared prompts, are those of one at a time: values and gradients."""

import pytest
import torch
import transformers

import truebatch as tb
from tests.hf.tiny_models import CONFIGS
from truebatch.errors import BatchError, ConfigError
from truebatch.testing.tiny_hf.model import tiny_model

SYSTEM = list(range(20, 38))
PROMPTS = [[5, 6, 7, 8], [5, 6, 7, 8], [*SYSTEM, 40, 41], [*SYSTEM, 50], [5, 6, 7, 8], [9]]
COMPLETIONS = [[11, 12, 13], [14], [15, 16], [17, 18, 19], [], [11, 12, 13, 14, 15]]


def one_by_one(model, prompts=PROMPTS, completions=COMPLETIONS, temperature=1.0):
    """Slow and obvious: each prompt with its completion through the plain model."""
    tokens, entropies = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion]])
        log_p = (model(input_ids=ids, use_cache=False).logits[0] / temperature).log_softmax(-1)
        log_p = log_p[len(prompt) - 1 : len(prompt) - 1 + len(completion)]
        tokens.append(log_p.gather(1, torch.tensor(completion, dtype=torch.int64)[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return tokens, entropies


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def off(one, other):
    return ((one - other).norm() / other.norm()).item()


def a_loss(tokens, entropies):
    """Of a user's own: not linear, different for every completion."""
    parts = [(part.sum() / 10).exp() * (at + 1) for at, part in enumerate(tokens)]
    return torch.stack(parts).sum() + 0.1 * torch.cat(entropies).square().sum()


def model_of(name):
    torch.manual_seed(0)
    kind, settings = CONFIGS[name]
    config = getattr(transformers, kind)(**settings)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


SHARING = ["llama", "qwen3", "gpt2", "gpt_neox"]
COPYING = {"mistral": "window of 4", "gemma2": "window of 4"}


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("share", ["prompts", "beginnings", "nothing"])
@pytest.mark.parametrize("cells", [16_384, 24])
def test_values_and_gradients_are_those_of_one_at_a_time(name, share, cells):
    model = model_of(name)
    wanted = one_by_one(model, temperature=0.8)
    found = tb.logprobs(model, PROMPTS, COMPLETIONS, entropy=True, temperature=0.8, share=share, cells=cells)
    assert found.why_copied == ""
    assert off(torch.cat(found.tokens), torch.cat(wanted[0])) < 1e-6
    assert off(torch.cat(found.entropies), torch.cat(wanted[1])) < 1e-6
    assert [len(part) for part in found.tokens] == [len(one) for one in COMPLETIONS]
    torch.testing.assert_close(found.sums, torch.stack([part.sum() for part in wanted[0]]), atol=1e-5, rtol=1e-6)
    ours = gradient(model, a_loss(found.tokens, found.entropies))
    assert off(ours, gradient(model, a_loss(*wanted))) < 1e-6


def test_shared_cells_are_computed_once():
    model = model_of("llama")
    counts = [tb.logprobs(model, PROMPTS, COMPLETIONS, share=how).cells for how in ("nothing", "prompts", "beginnings")]
    shared = sum(map(len, COMPLETIONS))
    assert counts == [sum(map(len, PROMPTS)) + shared, 4 + 20 + 19 + 1 + shared, 4 + 18 + 2 + 1 + 1 + shared]


@pytest.mark.parametrize("name", COPYING)
def test_a_model_that_cannot_share_gets_copies_and_says_why(name):
    model = model_of(name)
    found = tb.logprobs(model, PROMPTS, COMPLETIONS)
    assert COPYING[name] in found.why_copied
    assert off(torch.cat(found.tokens), torch.cat(one_by_one(model)[0])) < 1e-6
    assert found.cells == sum(map(len, PROMPTS)) + sum(map(len, COMPLETIONS))


def test_a_window_that_no_path_reaches_is_no_hindrance():
    model = model_of("mistral")
    found = tb.logprobs(model, [[1, 2], [1, 2]], [[3], [4, 5]])
    assert found.why_copied == ""
    assert off(torch.cat(found.tokens), torch.cat(one_by_one(model, [[1, 2]] * 2, [[3], [4, 5]])[0])) < 1e-6


@pytest.mark.parametrize("name", ["mamba", "recurrent_gemma"])
def test_a_model_with_a_state_gets_copies_and_says_why(name):
    model = tiny_model(name)
    found = tb.logprobs(model, PROMPTS, COMPLETIONS)
    assert found.why_copied
    assert off(torch.cat(found.tokens), torch.cat(one_by_one(model)[0])) < 1e-5


def test_dropout_is_drawn_for_copies():
    model = model_of("gpt2").train()
    found = tb.logprobs(model, PROMPTS, COMPLETIONS)
    assert "dropout" in found.why_copied
    assert tb.logprobs(model.eval(), PROMPTS, COMPLETIONS).why_copied == ""


def test_a_reference_model_is_read_in_the_same_pass():
    model, other = model_of("llama"), model_of("qwen3")
    found = tb.logprobs(model, PROMPTS, COMPLETIONS, reference=other)
    assert off(torch.cat(found.reference), torch.cat(one_by_one(other)[0])) < 1e-6
    assert not found.reference_sums.requires_grad
    assert tb.logprobs(model, PROMPTS, COMPLETIONS).reference is None


@pytest.mark.parametrize("wrapped", [True, False])
def test_the_reference_may_be_the_model_without_its_adapter(wrapped):
    peft = pytest.importorskip("peft")
    model = model_of("llama")
    wanted = [part.detach() for part in one_by_one(model)[0]]
    settings = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    if wrapped:
        model = peft.get_peft_model(model, settings)
    else:
        model.add_adapter(settings)
    found = tb.logprobs(model, PROMPTS, COMPLETIONS, reference="without_adapter")
    assert off(torch.cat(found.reference), torch.cat(wanted)) < 1e-6
    assert off(torch.cat(found.tokens), torch.cat(wanted)) > 1e-3
    assert off(torch.cat(found.tokens), torch.cat(one_by_one(model)[0])) < 1e-6


def test_checkpointed_layers_find_the_tree_again_in_backward():
    model = model_of("llama").train()
    wanted = gradient(model, a_loss(*one_by_one(model)))
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigError, match="set_attn_implementation"):
        tb.logprobs(model, PROMPTS, COMPLETIONS)
    model.set_attn_implementation("truebatch")
    found = tb.logprobs(model, PROMPTS, COMPLETIONS, entropy=True)
    assert found.why_copied == ""
    assert off(gradient(model, a_loss(found.tokens, found.entropies)), wanted) < 1e-6


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda m: tb.logprobs(m, ["a text"], [[1]]), "not a list of token ids"),
        (lambda m: tb.logprobs(m, [[1]], [[1], [2]]), "needs its prompt"),
        (lambda m: tb.logprobs(m, [[]], [[1]]), "prompt 0 is empty"),
        (lambda m: tb.logprobs(m, [[1]], [[2]], reference="without_adapter"), "it has none"),
        (lambda m: tb.logprobs(m, [[1]], [[2]]).reference_sums, "no reference was asked for"),
        (lambda m: tb.reward(m, [[1]], [[2]]), "head for classes"),
        (lambda _: tb.logprobs(tiny_model("bert", "masked_lm"), [[1]], [[2]]), "need a language model"),
    ],
)
def test_mistakes_are_told(call, named):
    with pytest.raises((BatchError, ConfigError), match=named):
        call(model_of("llama"))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_rewards_are_those_of_one_at_a_time(name):
    model = tiny_model(name, "sequence_classification")
    rows = [torch.tensor([[*a, *b]]) for a, b in zip(PROMPTS, COMPLETIONS, strict=True)]
    wanted = torch.cat([model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits for ids in rows])
    found = tb.reward(model, PROMPTS, COMPLETIONS)
    found = found[:, None] if found.ndim == 1 else found
    assert off(found, wanted) < 1e-6
    assert off(gradient(model, found.exp().sum()), gradient(model, wanted.exp().sum())) < 1e-6
