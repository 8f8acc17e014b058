"""Stays made up from a seed, shaped like those of an intensive care unit, with a risk planted in their values.

severity over hours -> times of vitals, laboratory and drugs -> values that follow it -> a label drawn from its end
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truebatch.planning.rows import Ints
from truebatch_systems.seqset_vae.config import GeneratorConfig
from truebatch_systems.seqset_vae.data.admissions import Stays, make_stays, with_labels
from truebatch_systems.seqset_vae.data.variables import NOTHING_NAME, Variables

Array = NDArray[np.float64]

VITALS = {
    "HR": (86, 18), "SBP": (121, 22), "DBP": (61, 14), "MBP": (79, 15), "RR": (19, 6), "O2 Saturation": (97, 3),
    "Temperature": (37, 0.8), "Urine": (110, 110),
}  # fmt: skip
DRUGS = {
    "D5W": (25, 40), "Normal Saline": (60, 120), "KCl": (12, 18), "Insulin": (3, 4), "Propofol": (45, 50),
    "Fentanyl": (30, 50), "Morphine": (2, 3), "Heparin": (700, 500), "Furosemide": (25, 25), "Norepinephrine": (6, 8),
    "FiO2": (0.5, 0.15), "GCS_eye": (3, 1.1), "GCS_motor": (5, 1.5), "GCS_verbal": (3, 1.8),
}  # fmt: skip
LABS = {
    "Glucose (Blood)": (138, 55), "Potassium": (4.1, 0.6), "Sodium": (138, 5), "Chloride": (104, 6), "BUN": (28, 22),
    "Creatinine Blood": (1.4, 1.3), "Bicarbonate": (24, 5), "Hematocrit": (30, 5), "Hgb": (10, 1.8), "WBC": (12, 7),
    "Platelet Count": (205, 120), "Magnesium": (2, 0.35), "Calcium Total": (8.3, 0.8), "Phosphorous": (3.6, 1.4),
    "pH Blood": (7.38, 0.08), "PO2": (125, 70), "PCO2": (41, 10), "Lactate": (2.4, 2.1), "Base Excess": (0, 5),
    "PT": (16, 6), "PTT": (40, 21), "INR": (1.5, 0.8), "Anion Gap": (13.5, 4), "Bilirubin (Total)": (2.4, 4.9),
    "ALT": (140, 420), "AST": (190, 640), "Alkaline Phosphate": (120, 110), "Albumin": (3, 0.6),
}  # fmt: skip
AGE, GENDER = "Age", "Gender"
SHARED = 0.6
"""Mean cosine of two variables' vectors, as text encoders give."""
MOST_SETS = 600


@dataclass(frozen=True, slots=True, eq=False)
class Catalogue:
    """What can be charted: names, units, and how strongly each variable follows severity."""

    variables: Variables
    loading: Array
    vitals: Ints
    drugs: Ints
    labs: Ints


def generate_stays(config: GeneratorConfig, *, width: int = 768) -> tuple[Stays, Variables]:
    """Stays with raw values and labels, and their variables with the true mean and deviation.

    Stay i depends on the seed and on i only; the labels on all of them, because their share is fixed.
    """
    catalogue = make_catalogue(config, width=width)
    made = [_make_stay(config, catalogue, i) for i in range(config.stays)]
    risk = np.array([config.signal * severity + 0.3 * (age - 65) / 15 for _, severity, age in made])
    stays = make_stays(sample for sample, _, _ in made)
    return with_labels(stays, _draw_labels(config, risk)), catalogue.variables


def make_catalogue(config: GeneratorConfig, *, width: int) -> Catalogue:
    """Known names first, then numbered ones, up to `num_variables`; vectors with a shared part."""
    rng = np.random.default_rng([config.seed, 131])
    known = {AGE: (65.0, 15.0), GENDER: (0.5, 0.5), **VITALS, **DRUGS, **LABS}
    names = list(known)[: config.num_variables]
    names += [f"{'Lab' if i % 3 else 'Drug'} {i}" for i in range(len(names), config.num_variables)]
    more = {name: (rng.uniform(1, 100), rng.uniform(0.5, 20)) for name in names[len(known) :]}
    units = np.array([(0.0, 1.0), *((known | more)[name] for name in names)])
    number = len(names) + 1
    loading = rng.choice([-1.0, 1.0], number) * rng.uniform(0.3, 0.9, number)
    loading[:3] = 0.0  # nothing, age and gender do not follow severity
    shared, own = rng.standard_normal(width), rng.standard_normal((number, width))
    vectors = np.sqrt(SHARED) * shared + np.sqrt(1 - SHARED) * own
    vectors[0] = 0.0
    variables = Variables((NOTHING_NAME, *names), vectors.astype(np.float32), units[:, 0], units[:, 1])

    def numbers(group: dict[str, Any], prefix: str) -> Ints:
        return np.array([i + 1 for i, n in enumerate(names) if n in group or n.startswith(prefix)], dtype=np.int64)

    return Catalogue(variables, loading, numbers(VITALS, "\0"), numbers(DRUGS, "Drug "), numbers(LABS, "Lab "))


def _make_stay(config: GeneratorConfig, catalogue: Catalogue, at: int) -> tuple[dict[str, Any], float, float]:
    rng = np.random.default_rng([config.seed, 0, at])
    hours = config.fixed_hours or float(np.clip(rng.lognormal(np.log(config.median_hours), 0.8), 4, 480))
    grid = int(np.ceil(hours)) + 1
    age = float(np.clip(rng.normal(65, 15), 18, 95))
    severity = rng.normal(0, 0.8) + rng.normal(0, 1.0) * np.linspace(0, 1, grid) + 0.3 * _wander(rng, (grid,))
    minute, var = _draw_charting(rng, hours, severity, catalogue)
    minutes, sizes = np.unique(minute, return_counts=True)
    minutes, sizes = minutes[-MOST_SETS:], sizes[-MOST_SETS:]
    var = var[-int(sizes.sum()) :]
    val = _draw_values(rng, catalogue, var, np.repeat(minutes, sizes), severity)
    val = _with_person(catalogue, var, val, age, float(rng.integers(0, 2)))
    sample = {"id": f"{200001 + at}", "label": 0, "var": var, "val": val, "set_minute": minutes, "set_size": sizes}
    return sample, float(severity[-1]), age


def _draw_charting(rng: np.random.Generator, hours: float, severity: Array, catalogue: Catalogue) -> tuple[Ints, Ints]:
    """Minute and variable of every event, sorted; the sicker, the more often. A variable is charted once a minute."""
    sick = 1 / (1 + np.exp(-severity))
    hourly = np.arange(len(severity) - 1)
    vital = hourly[rng.random(len(hourly)) < 0.35 + 0.45 * sick[:-1]]
    lab = np.cumsum(rng.uniform(3, 12, size=int(hours / 3) + 1) * (1.3 - 0.6 * sick[0]))
    drug = rng.uniform(0, hours, size=rng.poisson(0.2 * hours * (0.5 + sick.mean())))
    admission = np.array([1, 2, *catalogue.vitals[:4]], dtype=np.int64)
    parts = [(np.zeros(len(admission)), admission[admission < len(catalogue.variables)])]
    for when, group, sizes in (
        (vital * 60 + rng.integers(-10, 11, len(vital)), catalogue.vitals, (4, 8)),
        (lab[lab < hours] * 60, catalogue.labs, (10, 25)),
        (drug * 60, catalogue.drugs, (1, 3)),
    ):
        parts.append(_draw_panels(rng, np.clip(np.round(when), 0, np.floor(hours * 60)), group, sizes))
    minute, var = (np.concatenate([part[k][: len(part[1])] for part in parts]).astype(np.int64) for k in (0, 1))
    pairs = np.unique(np.stack([minute, var]), axis=1)
    return pairs[0], pairs[1]


def _draw_panels(rng: np.random.Generator, when: Array, group: Ints, sizes: tuple[int, int]) -> tuple[Array, Ints]:
    """Minute and variable of panels of a group; the first of it are charted most, as words in a language are."""
    weights = np.log(1 / np.arange(1, len(group) + 1) ** 1.1)
    # The largest of these sums are a weighted draw without putting back.
    order = np.argsort(-(weights + rng.gumbel(size=(len(when), len(group)))), axis=1)
    number = np.minimum(rng.integers(sizes[0], sizes[1] + 1, size=len(when)), len(group))
    is_drawn = np.arange(len(group)) < number[:, None]
    return np.repeat(when, number), group[order[is_drawn]]


def _draw_values(rng: np.random.Generator, catalogue: Catalogue, var: Ints, minute: Array, severity: Array) -> Array:
    """Own level, a slow walk and severity, with some wild outliers, in the units of each variable."""
    hour = np.minimum((minute / 60).astype(np.int64), len(severity) - 1)
    kinds, which = np.unique(var, return_inverse=True)
    walk = _wander(rng, (len(severity), len(kinds)))[hour, which]
    level = rng.normal(0, 0.5, len(kinds))[which]
    z = level + 0.6 * walk + severity[hour] * catalogue.loading[var] + 0.2 * rng.standard_normal(len(var))
    z += 6 * rng.choice([-1, 1], len(var)) * (rng.random(len(var)) < 0.015)
    return catalogue.variables.mean[var] + catalogue.variables.std[var] * z


def _with_person(catalogue: Catalogue, var: Ints, val: Array, age: float, gender: float) -> Array:
    numbers = catalogue.variables.numbers()
    val = np.where(var == numbers.get(AGE, -1), age, val)
    return np.where(var == numbers.get(GENDER, -1), gender, val)


def _wander(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """A walk that forgets: variance 1 at every hour."""
    noise = rng.standard_normal(shape)
    for t in range(1, shape[0]):
        noise[t] = 0.9 * noise[t - 1] + np.sqrt(1 - 0.81) * noise[t]
    return noise


def _draw_labels(config: GeneratorConfig, risk: Array) -> Ints:
    """Exactly the asked share of positives: those whose risk lies furthest above their own chance."""
    rng = np.random.default_rng([config.seed, 1])
    chance = rng.logistic(size=len(risk))
    positive = np.argsort(-(risk + chance), kind="stable")[: round(config.positives * len(risk))]
    labels = np.zeros(len(risk), dtype=np.int64)
    labels[positive] = 1
    return rng.permutation(labels) if config.shuffled else labels
