"""What columns mean: the names of the settings, or those of a format that is recognised by them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from truebatch_systems.seqset_vae.config import ColumnConfig

TIME_NAMES = ("minute", "time")
"""The files of the carry-forward tool call it `time`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Which column holds what."""

    patient: str
    time: str
    variable: str
    value: str | None
    """None: every row is an event without a value."""
    needs_values: bool = True
    """A missing value is a fault; else an event without a value."""
    prefix: str = ""
    """Of every variable, where names of several tables would be confused."""


MEDS = Shape("subject_id", "time", "code", "numeric_value", needs_values=False)
PHYSIONET_2012 = ("Time", "Parameter", "Value")
OMOP_TABLES = (
    ("measurement", "measurement_concept_id", ("measurement_datetime", "measurement_date"), "value_as_number"),
    ("observation", "observation_concept_id", ("observation_datetime", "observation_date"), "value_as_number"),
    (
        "condition_occurrence", "condition_concept_id", ("condition_start_datetime", "condition_start_date"), None,
    ),
    ("drug_exposure", "drug_concept_id", ("drug_exposure_start_datetime", "drug_exposure_start_date"), "quantity"),
    ("procedure_occurrence", "procedure_concept_id", ("procedure_datetime", "procedure_date"), None),
    ("device_exposure", "device_concept_id", ("device_exposure_start_datetime", "device_exposure_start_date"), None),
)  # fmt: skip
"""ColumnTable, concept, times (the first that is there), value."""


def shape_of(columns: ColumnConfig, have: Collection[str], *, is_long: bool) -> Shape:
    """The shape of a table with these columns: that of the settings where it fits, else a known format."""
    time = columns.time
    if time not in have and time in TIME_NAMES:
        time = next((name for name in TIME_NAMES if name in have), time)
    own = Shape(columns.patient, time, columns.variable, columns.value)
    needed = [own.time, own.variable, columns.value, *([own.patient] if is_long else [])]
    if all(name in have for name in needed):
        return own
    if {MEDS.patient, MEDS.time, MEDS.variable} <= set(have):
        return MEDS if MEDS.value in have else Shape(MEDS.patient, MEDS.time, MEDS.variable, None, needs_values=False)
    return omop_shape(columns, have) or own


def omop_shape(columns: ColumnConfig, have: Collection[str]) -> Shape | None:
    """The shape of a table of OMOP, recognised by its concept; None for any other table."""
    for name, concept, times, value in OMOP_TABLES:
        time = next((one for one in times if one in have), None)
        if concept in have and time is not None and "person_id" in have:
            patient = columns.patient if columns.patient in have else "person_id"
            return Shape(
                patient, time, concept, value if value in have else None, needs_values=False, prefix=f"{name}//"
            )
    return None


def label_columns(columns: ColumnConfig, have: Sequence[str]) -> tuple[str, str]:
    """Whose label it is, and the label: the columns of the settings, or those of a known format."""
    for patient, label in (
        (columns.label_patient, columns.label),
        ("RecordID", "In-hospital_death"),
        ("subject_id", "boolean_value"),
        (columns.patient, columns.label),
        ("person_id", columns.label),
    ):
        if patient in have and label in have:
            return patient, label
    return columns.label_patient, columns.label
