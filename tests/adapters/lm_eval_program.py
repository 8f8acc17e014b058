"""Run as a program: tiny tasks from local files in lm-eval, at several batch sizes; every number as JSON."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import warnings
from pathlib import Path

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "home", "very", "fast", "while", "birds", "sing"]
TASKS = {
    "tiny_choice": (
        "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: 0\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]"
    ),
    "tiny_rolling": (
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]"
    ),
    "tiny_answers": (
        "output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{text}}'\n"
        'generation_kwargs: {until: ["q"], max_gen_toks: 12, num_beams: 1}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]"
    ),
    "tiny_samples": (
        "output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{text}}'\n"
        "generation_kwargs: {until: [], max_gen_toks: 6, do_sample: true, temperature: 0.8, top_k: 9}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]"
    ),
}


def write_tasks(folder: Path) -> None:
    """Four tasks over one file, some texts longer than the model's positions."""
    draw = random.Random(0)
    some = lambda least, most: " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, most)))  # noqa: E731
    rows = [{"question": some(2, 14), "choices": ["a", " b", some(1, 3)], "text": some(3, 40)} for _ in range(10)]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        place = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {folder / 'cache'}}}"
        (folder / f"{name}.yaml").write_text(f"task: {name}\ntest_split: test\n{place}\n{text}\n")


def write_model(folder: Path) -> None:
    """A tiny Llama whose tokens are characters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    names = ["<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz \n"]
    plain = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(names), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, bos_token_id=0, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def evaluate(folder: Path, model: str, **settings: object) -> dict[str, object]:
    """What lm-eval says: the metrics, and the model's answer to every request."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        model, f"pretrained={folder / 'model'}", tasks=list(TASKS), bootstrap_iters=0, device="cpu",
        task_manager=TaskManager(include_path=str(folder), include_defaults=False), **settings,
    )  # fmt: skip
    samples = {name: [row["filtered_resps"] for row in rows] for name, rows in found["samples"].items()}
    return {"samples": samples, "metrics": found["results"]}


def main(folder: Path) -> None:
    """Every batch size, some of the samples alone, and the model `hf` beside them."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import truebatch  # noqa: F401  # makes the name known

    write_tasks(folder)
    write_model(folder / "model")
    runs = {str(size): evaluate(folder, "truebatch", batch_size=size) for size in (1, 8, "auto")}
    runs["few"] = evaluate(folder, "truebatch", batch_size="auto", limit=3)
    runs["hf"] = evaluate(folder, "hf", batch_size=1)
    print("RESULT" + json.dumps(runs, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
