"""Chat templates of strangers: rendered as transformers renders them, and stopped where they would take everything."""

# ruff: noqa: E501

from __future__ import annotations

import pytest
import transformers
from tokenizers import Tokenizer, models

from truebatch.hf.template_sandbox import TemplateLimitError, apply_template

MESSAGES = [
    {"role": "system", "content": "be good"},
    {"role": "user", "content": "hello {{ there }} 你好"},
    {"role": "assistant", "content": "<think>\nso\n</think>\nyes"},
    {"role": "user", "content": "and?"},
]
QWEN = r"""{%- set ns = namespace(last=messages|length - 1, found=[]) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string and not message.content.startswith('<tool>') %}
        {%- set ns.last = index %}{%- set ns.found = ns.found + [index] %}
    {%- endif %}
{%- endfor %}
{%- macro turn(m, last=false) %}{{ '<|im_start|>' ~ m['role'] ~ '\n' }}{{ m.content|trim }}{% if last %}!{% endif %}{% endmacro %}
{%- for message in messages if message.role != 'system' %}
    {%- set content = message.content %}
    {%- if '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {{- 'thought: ' + thought + '\n' + content.replace('y', 'Y') }}
    {%- else %}
        {{- turn(message, last=loop.last) + '<|im_end|>\n' }}
    {%- endif %}
    {%- generation %}{{ '%s-%03d' % (message.role, loop.index) }}{% endgeneration %}
    {{- message|tojson(indent=2) }}{{ "{}: {!r}".format(loop.index, message.role) }}{{ message.items()|list }}
{%- endfor %}
{{- ns.found|join(', ') }}{{ [1, 2] * 2 }}{{ 3 * 4 ** 2 % 7 }}{{ {'a': (1, 2)} }}{{ undefined_name }}{{ bos_token }}
{%- for group in messages|groupby('role') %}{{ group.grouper }}{{ group.list|length }}{% endfor %}
{%- filter upper %}{{ messages|map(attribute='role')|unique|join('-') }}{% endfilter %}
{%- for row in [[1, [2, 3]]] recursive %}{% if row is iterable %}{{ loop(row) }}{% else %}{{ row }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
BILLION = 1_000_000_000
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
ENDS = "{% endfor %}{% endfor %}{% endfor %}"
GROWN = "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = GROW %}{% endfor %}{{ ns.x|length }}"
HOSTILE = {
    "nested loops": LOOPS + "x" + ENDS,
    "nested loops that write nothing": LOOPS + ENDS,
    "loops that choose nothing": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for x in [[1] * 9999] * 9 recursive %}{{ loop([[1] * 9999] * 9) }}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a macro with a long text": "{% macro f() %}{% for i in range(99999) %}" + "y" * 99999 + "{% endfor %}{% endmacro %}{{ f()|length }}",
    "a macro with short texts": "{% macro f() %}{% for i in range(99999) %}" + "yyyy{{ 1 }}" * 9999 + "{% endfor %}{% endmacro %}{{ f()|length }}",
    "a width": f"{{{{ '%{BILLION}d' % 1 }}}}",
    "a width as a filter": f"{{{{ '%{BILLION}d'|format(1) }}}}",
    "a width from a value": f"{{{{ '%*d' % ({BILLION}, 1) }}}}",
    "a width of format": f"{{{{ '{{:>{BILLION}}}'.format('x') }}}}",
    "a width of format from a value": f"{{{{ '{{0:{{1}}}}'.format('x', {BILLION}) }}}}",
    "center": f"{{{{ 'x'.center({BILLION}) }}}}",
    "center as a filter": f"{{{{ 'x'|center({BILLION}) }}}}",
    "center in map": f"{{{{ ['x']|map('center', {BILLION})|list }}}}",
    "center around a block": f"{{% filter center({BILLION}) %}}x{{% endfilter %}}",
    "zfill": f"{{{{ 'x'.zfill({BILLION}) }}}}",
    "a text many times": f"{{{{ 'x' * {BILLION} }}}}",
    "many times a text": f"{{{{ {BILLION} * 'x' }}}}",
    "a list many times": f"{{{{ [1] * {BILLION} }}}}",
    "a power of a power": "{{ 9 ** 9999999999 }}",
    "squares of squares": "{% set ns = namespace(x=10) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling": GROWN.replace("GROW", "ns.x ~ ns.x"),
    "doubling by plus": GROWN.replace("GROW", "ns.x + ns.x"),
    "doubling of lists": GROWN.replace("GROW", "[ns.x, ns.x]"),
    "doubling of pairs": GROWN.replace("GROW", "(ns.x, ns.x)"),
    "doubling of dictionaries": GROWN.replace("GROW", "{'a': ns.x, 'b': ns.x}"),
    "replacing": GROWN.replace("GROW", "ns.x.replace('x', 'x' * 1000)"),
    "replacing as a filter": GROWN.replace("GROW", "ns.x|replace('x', 'x' * 1000)"),
    "joining": "{{ range(99999)|join('x' * 99999) }}",
    "joining by a method": "{{ ('x' * 99999).join('y' * 99999) }}",
    "an indent": "{{ ('a\n' * 99999)|indent(99999) }}",
    "an indent of JSON": f"{{{{ messages|tojson(indent={BILLION}) }}}}",
    "tabs": "{{ ('\t' * 99999).expandtabs(99999) }}",
    "batches": f"{{% for x in range(3)|batch({BILLION}, 'x') %}}{{{{ x|length }}}}{{% endfor %}}",
    "slices": f"{{% for x in range(3)|slice({BILLION}) %}}{{% endfor %}}",
    "a sum of lists": "{{ ([[1]] * 99999)|sum(start=[])|length }}",
    "looking through a long text": "{% set b = 'y' * 9000000 %}" + LOOPS + "{% if 'z' in b %}{% endif %}" + ENDS,
    "a source of 2 MB": "x" * (2 << 20),
}  # fmt: skip


def tokenizer(template):
    made = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", bos_token="<s>")
    found.chat_template = template
    return found


def test_a_template_renders_as_it_does_without_bounds():
    owner = tokenizer(QWEN)
    for messages in (MESSAGES, MESSAGES[:2], MESSAGES[1:]):
        for is_open in (False, True):
            plain = owner.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_open)
            assert apply_template(owner, messages, tokenize=False, add_generation_prompt=is_open) == plain
    settings = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    assert apply_template(owner, MESSAGES, **settings) == owner.apply_chat_template(MESSAGES, **settings)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_would_take_everything_is_stopped(name):
    with pytest.raises(TemplateLimitError):
        apply_template(tokenizer(HOSTILE[name]), MESSAGES, tokenize=False)


def test_outside_of_ours_transformers_renders_as_ever():
    owner = tokenizer("{{ lipsum is defined }}{{ 'x'|center(11) }}{{ '%12345d' % 1 }}")
    assert len(owner.apply_chat_template(MESSAGES, tokenize=False)) == 4 + 11 + 12345


def test_a_long_conversation_is_rendered():
    many = [MESSAGES[1], MESSAGES[2]] * 2000
    owner = tokenizer("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    assert apply_template(owner, many, tokenize=False) == owner.apply_chat_template(many, tokenize=False)
