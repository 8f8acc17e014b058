"""The Hugging Face Trainer beside truebatch: resumed at many points, and killed inside a save.

    python -m benchmarks trainer_reliability --out docs/results/trainer_reliability.json

Resume: the same samples, with and without augmentation that draws from the global generators as datasets do; the end
must be bit-equal to that of a run which was never stopped. The Trainer alone, and with TruebatchMixin.

Kills: SIGKILL at a random moment inside a save; then the script is started again as its users start it, from the last
checkpoint in its folder. The Trainer, and truebatch.train on the same model and samples.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.harness.result_file import describe_hardware, today
from truebatch.adapters.trainer import TruebatchMixin
from truebatch.hf.heads.heads import head_of
from truebatch.hf.heads.objective import HeadObjective
from truebatch.training.checkpoint import save_resume
from truebatch.training.config import TrainConfig
from truebatch.training.data import TrainData
from truebatch.training.trainer import train

LENGTHS = [7, 19, 4, 31, 12, 9, 23, 5, 16, 28, 3, 11, 26, 8, 14, 21]
STEPS, PER_STEP = 12, 4
POINTS = (1, 3, 5, 6, 8, 11)
KILLS = 24
KILL_STEPS = 4
LOADED = [
    "truebatch.adapters.trainer",
    "truebatch.training.trainer",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "torch._dynamo",
]
"""Loaded once, before every child is forked."""
_PATIENCE_SECONDS = 300


class PlannedTrainer(TruebatchMixin, Trainer):
    """With planned steps and the exact loss."""


KINDS = {"Trainer": Trainer, "Trainer with TruebatchMixin": PlannedTrainer}


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random tokens; with augmentation one of them is exchanged, by a global generator, whenever a sample is read."""

    def __init__(self, *, is_augmented: bool, vocabulary: int) -> None:
        drawn = torch.Generator().manual_seed(0)
        self.ids = [torch.randint(1, vocabulary, (n,), generator=drawn) for n in LENGTHS]
        self.is_augmented, self.vocabulary = is_augmented, vocabulary

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids = self.ids[number].clone()
        if self.is_augmented:
            ids[random.randrange(len(ids))] = int(torch.randint(1, self.vocabulary, ()))
        return {"input_ids": ids, "labels": ids.clone()}


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What a padding collator makes."""
    rows = {name: [s[name] for s in samples] for name in ("input_ids", "labels")}
    return {
        "input_ids": nn.utils.rnn.pad_sequence(rows["input_ids"], batch_first=True),
        "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in rows["input_ids"]], batch_first=True),
        "labels": nn.utils.rnn.pad_sequence(rows["labels"], batch_first=True, padding_value=-100),
    }


def build(*, width: int, vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "vocab_size": vocabulary}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **shape))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trainer_of(kind: str, folder: Path, model: nn.Module, data: Samples, **given: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=PER_STEP,
        learning_rate=1e-3,
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="steps",
        **given,
    )
    return KINDS[kind](model=model, args=args, train_dataset=data, data_collator=pad)


# Resume


def resume_everywhere(kind: str) -> list[dict[str, Any]]:
    """How many of the points, with 0 and with 2 workers, end bit-equal to the run that was never stopped."""
    rows = []
    for is_augmented in (False, True):
        equal = [same for workers in (0, 2) for same in resume_all(kind, is_augmented, workers)]
        rows.append({"way": kind, "augmentation": is_augmented, "resumes": len(equal), "bit_equal": sum(equal)})
    return rows


def resume_all(kind: str, is_augmented: bool, workers: int) -> list[bool]:
    def run(folder: Path, resume: str | None) -> Tensor:
        model, data = build(width=16, vocabulary=50), Samples(is_augmented=is_augmented, vocabulary=50)
        given = {"max_steps": STEPS, "save_steps": 1, "dataloader_num_workers": workers}
        trainer_of(kind, folder, model, data, **given).train(resume_from_checkpoint=resume)
        return weights(model)

    with tempfile.TemporaryDirectory() as place:
        whole = run(Path(place) / "whole", None)
        return [
            bool(torch.equal(run(Path(place) / f"from {step}", f"{place}/whole/checkpoint-{step}"), whole))
            for step in POINTS
        ]


# Kills


class KillInside:
    """Kills this process a while after a save has begun, if the save is still going on then."""

    def __init__(self, number: int, delay: float) -> None:
        self.number, self.delay, self.is_inside = number, delay, False

    def around(self, save: Any) -> Any:
        def saved(*args: Any, **kwargs: Any) -> Any:
            self.number -= 1
            if self.number == 0:
                self.is_inside = True
                threading.Thread(target=self.kill, daemon=True).start()
            try:
                return save(*args, **kwargs)
            finally:
                self.is_inside = False

        return saved

    def kill(self) -> None:
        time.sleep(self.delay)
        if self.is_inside:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer_run(folder: Path, killer: KillInside | None) -> None:
    model, data = build(width=256, vocabulary=2000), Samples(is_augmented=False, vocabulary=2000)
    given = {"max_steps": KILL_STEPS, "save_steps": 1, "save_total_limit": 1}
    trainer = trainer_of("Trainer", folder, model, data, **given)
    if killer is not None:
        trainer._save_checkpoint = killer.around(trainer._save_checkpoint)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.is_dir() else None)
    (folder / "end.json").write_text(json.dumps(float(weights(model).double().sum())))


def truebatch_run(folder: Path, killer: KillInside | None) -> None:
    model, data = build(width=256, vocabulary=2000), Samples(is_augmented=False, vocabulary=2000)
    objective = HeadObjective(head=head_of(model))
    samples = [objective.head.prepare(data[i]) for i in range(len(data))]
    if killer is not None:
        save_resume.save_checkpoint = killer.around(save_resume.save_checkpoint)
    config = TrainConfig(
        epochs=1, max_steps=KILL_STEPS, samples_per_step=PER_STEP, learning_rate=1e-3, save_every=1, keep=1
    )
    train(model, objective, TrainData(samples=samples, fields=objective.head.fields), config, out=folder)
    (folder / "end.json").write_text(json.dumps(float(weights(model).double().sum())))


RUNS = {"Trainer": trainer_run, "truebatch.train": truebatch_run}


def attempt(way: str, folder: Path, killer: KillInside | None) -> None:
    RUNS[way](folder, killer)


def timed_save(way: str, folder: Path) -> None:
    """How long a save takes here, written to a file."""
    seconds: list[float] = []

    class Clock(KillInside):
        def around(self, save: Any) -> Any:
            def saved(*args: Any, **kwargs: Any) -> Any:
                began = time.monotonic()
                done = save(*args, **kwargs)
                seconds.append(time.monotonic() - began)
                return done

            return saved

    RUNS[way](folder, Clock(0, 0.0))
    (folder / "seconds.json").write_text(json.dumps(sorted(seconds)[len(seconds) // 2]))


def kill_inside_saves(way: str, place: Path) -> dict[str, Any]:
    """Kill at random moments inside saves until there were enough; how many went on by themselves."""
    quiet = place / "quiet"
    assert in_child(timed_save, way, quiet) == 0
    seconds, end = json.loads((quiet / "seconds.json").read_text()), json.loads((quiet / "end.json").read_text())
    draw, killed, went_on, equal = random.Random(0), 0, 0, 0
    while killed < KILLS:
        folder = place / f"kill {killed}"
        shutil.rmtree(folder, ignore_errors=True)
        number = draw.randint(2, KILL_STEPS)
        if in_child(attempt, way, folder, KillInside(number, draw.random() * seconds)) != -signal.SIGKILL:
            continue  # The save was over before its time came.
        killed += 1
        code = in_child(attempt, way, folder, None)
        went_on += code == 0
        equal += code == 0 and json.loads((folder / "end.json").read_text()) == end
        shutil.rmtree(folder)
    return {"kills": killed, "went_on": went_on, "ended_equal": equal, "seconds_of_a_save": round(seconds, 3)}


def in_child(work: Any, *arguments: Any) -> int:
    """Run in a process of its own, forked from one that has everything loaded; gives the exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    process = context.Process(target=quietly, args=(work, arguments))
    process.start()
    process.join(_PATIENCE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    return -1 if process.exitcode is None else process.exitcode


def quietly(work: Any, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    work(*arguments)


def measure(place: Path) -> dict[str, Any]:
    kills = {}
    for way in RUNS:
        (place / way).mkdir()
        kills[way] = kill_inside_saves(way, place / way)
        print(
            f"kills   {way:28} {kills[way]['went_on']} of {KILLS} went on, {kills[way]['ended_equal']} to the same end"
        )
    rows = []
    for kind in KINDS:
        # Workers of a loader need a process that was not forked.
        out = place / "rows.json"
        subprocess.run(
            [sys.executable, "-m", "benchmarks.scripts.trainer_reliability", "--resume", kind, "--out", str(out)],
            check=True,
        )
        rows += json.loads(out.read_text())
    for row in rows:
        print(f"resume  {row['way']:28} augmentation {row['augmentation']!s:5} {row['bit_equal']} of {row['resumes']}")
    return {"resume": rows, "kills_inside_a_save": kills}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--resume", choices=list(KINDS), default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.resume is not None:
        args.out.write_text(json.dumps(resume_everywhere(args.resume)))
        return
    with tempfile.TemporaryDirectory() as place:
        found = measure(Path(place))
    result = {
        **found,
        "command": " ".join(["python", "-m", "benchmarks", "trainer_reliability", *sys.argv[1:]]),
        "date": today(),
        "hardware": describe_hardware(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    ours = [row for row in found["resume"] if row["way"] != "Trainer"]
    kills = found["kills_inside_a_save"]["truebatch.train"]
    is_well = all(row["bit_equal"] == row["resumes"] for row in ours) and kills["ended_equal"] == kills["kills"]
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
