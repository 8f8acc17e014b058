"""The name `truebatch` is known to transformers whichever package is imported first, and nothing is loaded for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

USE = """
import torch
config = transformers.LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                  num_attention_heads=2, pad_token_id=None, bos_token_id=None, eos_token_id=None)
model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="truebatch").eval()
row = torch.tensor([[1, 2, 3, 4, 5]])
alone = model(row[:, 3:]).logits[0]
assert (model(row, position_ids=torch.tensor([[0, 1, 2, 0, 1]])).logits[0, 3:] - alone).abs().max() < 1e-6
assert transformers.modeling_utils.__spec__.loader.__class__.__module__.startswith(("importlib", "_frozen"))
"""
LIGHT = "import sys; assert not {'torch', 'transformers.modeling_utils'} & set(sys.modules)\n"


def succeeds(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "first",
    [
        f"import truebatch\n{LIGHT}import transformers\n",
        f"import transformers\nimport truebatch\n{LIGHT}",
        "import transformers.modeling_utils\nimport truebatch\n",
        pytest.param("import transformers, truebatch\ntransformers.LlamaConfig\n", marks=pytest.mark.slow),
        pytest.param("import truebatch\nfrom transformers.generation import utils\nimport transformers\n",
                     marks=pytest.mark.slow),
        pytest.param("import sys, truebatch\nsys.meta_path.pop(0)\nimport transformers\ntruebatch.register()\n",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_either_import_may_come_first(first):
    succeeds(first + USE)


def test_importing_truebatch_alone_loads_neither():
    succeeds("import truebatch\n" + LIGHT + "assert 'transformers' not in sys.modules")
