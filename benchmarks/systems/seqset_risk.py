"""seqset_vae as it is documented for some thousands of stays, beside logistic regression and gradient boosting.

    python -m benchmarks seqset_risk --json docs/results/seqset_risk_nafld.json
    python -m benchmarks seqset_risk --data /data/cinc2012 --json cinc2012.json

The model reads whole sequences of sets, reconstructs them and has a KL term, with the settings of few_stays.yaml, which
`truebatch init seqset_vae` writes. All learn from the same stays and are judged on the same test stays; the two
yardsticks get what the model's summary set holds: of each variable how often it was charted, and its last, mean, lowest
and highest value. `nafld` needs the package survival; the yardsticks need scikit-learn.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.benchmark import Benchmark, Options, Row, option
from benchmarks.systems.nafld import sklearn_part
from truebatch.config.load import load_config
from truebatch.training.load_trained import open_trained
from truebatch.training.logging.metrics_jsonl import read_metrics
from truebatch.training.train_system import Start, train_system
from truebatch_systems.seqset_vae.config import SeqSetConfig
from truebatch_systems.seqset_vae.data.admissions import Stays
from truebatch_systems.seqset_vae.data.prepare import PreparedStays, prepare
from truebatch_systems.seqset_vae.eval.evaluate import predict
from truebatch_systems.seqset_vae.eval.metrics import summarise
from truebatch_systems.seqset_vae.system import SEQSET_VAE
from truebatch_systems.seqset_vae.train.callbacks import CHECKS

Table = NDArray[np.float64]
LOGISTIC, BOOSTING, OURS = "logistic regression", "gradient boosting", "seqset_vae"
SETTINGS = "few_stays.yaml.template"


@dataclass(frozen=True, kw_only=True, slots=True)
class RiskOptions(Options):
    """Whose risk, and how often."""

    data: str = option("nafld", "What truebatch reads: nafld, a folder, a table.")
    seeds: tuple[int, ...] = option((0, 1, 2), "Of the weights and noise of seqset_vae.")
    max_steps: int = option(0, "Updates of a run; 0: as the settings say.")
    draws: int = option(1000, "For the intervals.")


def settings(options: RiskOptions) -> SeqSetConfig:
    """The documented settings with these data."""
    text = files("truebatch_systems.seqset_vae").joinpath("starter", SETTINGS).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "few_stays.yaml"
        path.write_text(text, encoding="utf-8")
        config = load_config(SeqSetConfig, path, overrides=[f"data={options.data}"])
    return replace(config, train=replace(config.train, max_steps=options.max_steps or None))


def measure(prepared: tuple[RiskOptions, str], method: str) -> Row:
    """Figures on the test stays, and the CPU seconds of learning."""
    options, _ = prepared
    config = settings(options)
    ready = prepare(config)
    assert ready.test is not None
    began = time.process_time()
    more: dict[str, Any] = {"train_stays": len(ready.train)}
    if method.startswith(OURS):
        scores, said = _ours(config, ready.test, int(method.rpartition(" ")[2]))
        more |= said
    else:
        scores = (_logistic if method == LOGISTIC else _boosting)(ready)
    figures = summarise(ready.test.labels, scores, draws=options.draws)
    return {**figures, **more, "cpu_seconds": round(time.process_time() - began, 1)}


def _ours(config: SeqSetConfig, test: Stays, seed: int) -> tuple[Table, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train_system(SEQSET_VAE, replace(config, train=replace(config.train, seed=seed)), Start(out=run))
        model = open_trained(run).model
        last = read_metrics(run / CHECKS)[-1]
        posterior = {name: last[name] for name in ("state", "kl", "information", "active")}
        return predict(model, test)[:, 1], {"posterior": posterior}


def _tables(ready: PreparedStays, *, missing: float) -> tuple[Table, NDArray[np.int64], Table]:
    """What is learned from, its labels, and what is judged: one column a variable of the summary."""
    parts = [ready.train, *([ready.validation] if ready.validation is not None else [])]
    assert ready.test is not None
    tables = [summary_table(stays, len(ready.variables), missing=missing) for stays in (*parts, ready.test)]
    learned, labels = np.concatenate(tables[:-1]), np.concatenate([stays.labels for stays in parts])
    is_used = np.array([len(np.unique(column[~np.isnan(column)])) > 1 for column in learned.T])
    return learned[labels >= 0][:, is_used], labels[labels >= 0], tables[-1][:, is_used]


def summary_table(stays: Stays, number: int, *, missing: float) -> Table:
    """[N, V] the values of the last set of every stay."""
    table = np.full((len(stays), number), missing)
    for i in range(len(stays)):
        sample = stays[i]
        size = int(sample["set_size"][-1])
        table[i, sample["var"][-size:]] = sample["val"][-size:]
    return table


def _logistic(ready: PreparedStays) -> Table:
    table, labels, test = _tables(ready, missing=0.0)
    steps = [
        sklearn_part("preprocessing").StandardScaler(),
        sklearn_part("linear_model").LogisticRegression(C=0.01, max_iter=500),
    ]
    found: Table = sklearn_part("pipeline").make_pipeline(*steps).fit(table, labels).predict_proba(test)[:, 1]
    return found


def _boosting(ready: PreparedStays) -> Table:
    table, labels, test = _tables(ready, missing=np.nan)
    kind = sklearn_part("ensemble").HistGradientBoostingClassifier
    model = kind(max_iter=100, learning_rate=0.05, max_leaf_nodes=8, l2_regularization=1.0, random_state=0)
    found: Table = model.fit(table, labels).predict_proba(test)[:, 1]
    return found


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The AUROC of every way, and that of ours over all seeds less the yardsticks'."""
    by_method = {row["method"]: row["auroc"] for row in rows}
    ours = [value for name, value in by_method.items() if name.startswith(OURS)]
    found: dict[str, Any] = {"auroc": by_method}
    if ours:
        found["seqset_vae, mean of seeds"] = float(np.mean(ours))
        found["worst seed less"] = {n: min(ours) - by_method[n] for n in (LOGISTIC, BOOSTING) if n in by_method}
    return found


BENCHMARK = Benchmark(
    name="seqset_risk",
    about=__doc__ or "",
    options=RiskOptions,
    cases=lambda options: [Path(options.data).name],
    methods=lambda options: [LOGISTIC, BOOSTING, *(f"{OURS}, seed {seed}" for seed in options.seeds)],
    measure=measure,
    summary=summary,
    libraries=("torch", "scikit-learn"),
)
