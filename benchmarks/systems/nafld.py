"""Real persons: who dies within five years of the index day, judged by seqset_vae and by two usual ways.

    python -m benchmarks nafld --out docs/results/nafld_cpu.json

Logistic regression and gradient boosting get how often each variable was charted and its last value; seqset_vae gets
the same as a set of events, values and counts carried forward. All learn from the same four fifths, and are judged on
the same fifth. The settings of seqset_vae were chosen on quarters of the four fifths, never on the last one. Intervals
draw the persons of that fifth again.
Needs the packages survival and scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.command_line import command_line
from benchmarks.harness.result_file import keep_result, today
from truebatch.errors import ConfigError
from truebatch.training.load_trained import open_trained
from truebatch.training.train_system import Start, train_system
from truebatch_systems.seqset_vae.config import NAFLD, LossConfig, ModelConfig, SeqSetConfig, SeqSetTrainConfig
from truebatch_systems.seqset_vae.data.admissions import Stays
from truebatch_systems.seqset_vae.data.prepare import PreparedStays, prepare
from truebatch_systems.seqset_vae.eval.evaluate import predict
from truebatch_systems.seqset_vae.eval.metrics import auroc, paired_difference, summarise
from truebatch_systems.seqset_vae.system import SEQSET_VAE

Scores = NDArray[np.float64]
Say = Callable[[str], None]
LOGISTIC, BOOSTING, OURS, MEAN = (
    "logistic regression",
    "gradient boosting",
    "seqset_vae: one set, classifier only",
    "the same, mean of three runs",
)
FOREVER = 1e9
"""Minutes: what was once known of a person stays known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NafldBenchConfig:
    """What is compared."""

    data: SeqSetConfig = field(
        default_factory=lambda: SeqSetConfig(
            data=NAFLD,
            validation_share=0.0,
            carry_minutes=FOREVER,
            carry_counts=True,
            max_sets=1,
            mode="finetune",
            freeze=False,
            model=ModelConfig(
                embedding_dim=32,
                reduced_dim=32,
                latent_dim=32,
                levels=1,
                inducing_points=8,
                transformer_layers=1,
                feedforward_dim=64,
                dropout=0.4,
                votes=True,
            ),
            loss=LossConfig(class_warmup=0, label_smoothing=0.0),
        )
    )
    train: SeqSetTrainConfig = field(
        default_factory=lambda: SeqSetTrainConfig(
            epochs=4, samples_per_step=64, schedule="cosine", warmup_steps=50, patience=None
        )
    )
    seeds: tuple[int, ...] = (0, 1, 2)
    """The first is a row of its own; the probabilities of all are averaged for another."""
    draws: int = 1000
    """For the intervals."""


def run_nafld(config: NafldBenchConfig, *, out: Path | None, say: Say) -> dict[str, Any]:
    """Fit all three, say each row as it comes, and rewrite `out` after every one."""
    ways: dict[str, Callable[[], Scores]] = {
        LOGISTIC: lambda: _logistic(_plain(config)),
        BOOSTING: lambda: _boosting(_plain(config)),
        OURS: lambda: _ours(config, config.seeds[0]),
        MEAN: lambda: np.mean([scores[OURS], *(_ours(config, seed) for seed in config.seeds[1:])], axis=0),
    }
    labels = _test(_plain(config)).labels
    scores: dict[str, Scores] = {}
    result: dict[str, Any] = {**_about(config), "rows": []}
    for name, fit in ways.items():
        start = time.perf_counter()
        scores[name] = fit()
        row = {"way": name, "seconds": round(time.perf_counter() - start, 1)}
        row |= summarise(labels, scores[name], draws=config.draws)
        if name in (OURS, MEAN):
            row["auroc_minus"] = _differences(labels, scores, name, draws=config.draws)
        result["rows"].append(row)
        say(_line(row))
        keep_result(result, out)
    return result


def count_and_last(stays: Stays, number: int, *, missing: float) -> Scores:
    """[N, 2V] how often each variable was charted, and its last value."""
    table = np.full((len(stays), 2 * number), missing)
    for i in range(len(stays)):
        sample = stays[i]
        table[i, :number] = np.bincount(sample["var"], minlength=number)
        table[i, number + sample["var"]] = sample["val"]  # The last of several is written last.
    return table


def _plain(config: NafldBenchConfig) -> PreparedStays:
    """The same split, with every event as it was charted."""
    return prepare(
        replace(config.data, carry_minutes=None, carry_counts=False, max_sets=None, max_events=None, last_hours=None)
    )


def _test(ready: PreparedStays) -> Stays:
    assert ready.test is not None
    return ready.test


def _tables(ready: PreparedStays, *, missing: float) -> tuple[Scores, NDArray[np.int64], Scores]:
    parts = [ready.train, *([ready.validation] if ready.validation is not None else [])]
    number = len(ready.variables)
    tables = [count_and_last(stays, number, missing=missing) for stays in (*parts, _test(ready))]
    is_used = np.nanstd(np.nan_to_num(np.concatenate(tables[:-1])), axis=0) > 0
    fitted = np.concatenate(tables[:-1])[:, is_used]
    return fitted, np.concatenate([stays.labels for stays in parts]), tables[-1][:, is_used]


def _logistic(ready: PreparedStays) -> Scores:
    table, labels, test = _tables(ready, missing=0.0)
    mean, std = table.mean(0), table.std(0)
    model = sklearn_part("linear_model").LogisticRegression(C=0.1, max_iter=2000).fit((table - mean) / std, labels)
    found: Scores = model.predict_proba((test - mean) / std)[:, 1]
    return found


def _boosting(ready: PreparedStays) -> Scores:
    table, labels, test = _tables(ready, missing=np.nan)
    kind = sklearn_part("ensemble").HistGradientBoostingClassifier
    model = kind(max_iter=100, learning_rate=0.05, max_leaf_nodes=8, l2_regularization=1.0, random_state=0)
    found: Scores = model.fit(table, labels).predict_proba(test)[:, 1]
    return found


def _ours(config: NafldBenchConfig, seed: int) -> Scores:
    with tempfile.TemporaryDirectory() as folder:
        settings = replace(config.data, train=replace(config.train, seed=seed))
        train_system(SEQSET_VAE, settings, Start(out=Path(folder) / "run"))
        model = open_trained(Path(folder) / "run").model
        return predict(model, _test(prepare(config.data)))[:, 1]


def _differences(labels: Any, scores: Mapping[str, Scores], ours: str, *, draws: int) -> dict[str, dict[str, float]]:
    return {
        name: paired_difference(auroc, labels, scores[ours], scores[name], draws=draws).as_dict()
        for name in (LOGISTIC, BOOSTING)
    }


def sklearn_part(part: str) -> Any:
    try:
        return import_module(f"sklearn.{part}")
    except ImportError as error:
        raise ConfigError(
            "this comparison needs scikit-learn", seen=str(error), do="pip install scikit-learn survival"
        ) from error


def _line(row: Mapping[str, Any]) -> str:
    low, high = row["auroc_interval"]
    return (
        f"{row['way']:25} AUROC {row['auroc']:.4f} ({low:.4f} to {high:.4f})  AUPRC {row['auprc']:.4f}  "
        f"Brier {row['brier']:.4f}  {row['seconds']:.0f} s"
    )


def _about(config: NafldBenchConfig) -> dict[str, Any]:
    ready = _plain(config)
    cuda = torch.cuda.is_available()
    return {
        "command": command_line("benchmarks.systems.nafld"),
        "date": today(),
        "hardware": torch.cuda.get_device_name()
        if cuda
        else f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {name: version(name) for name in ("torch", "scikit-learn", "survival")},
        "stays": {split: len(stays) for split, stays in ready.splits.items()},
        "settings": json.loads(json.dumps(asdict(config), default=str)),
    }


def make_config(*, quick: bool = False) -> NafldBenchConfig:
    """All of it, or a dry run of a few steps."""
    config = NafldBenchConfig()
    return replace(config, train=replace(config.train, epochs=1, max_steps=5), draws=20) if quick else config


def main() -> None:
    """The command line of this file alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps only: a dry run")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    run_nafld(make_config(quick=given.quick), out=given.out, say=_say)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
