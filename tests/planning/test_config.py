"""Settings that contradict each other are refused where they are made."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.planning.reference import plan_configs
from truebatch.errors import PlanError
from truebatch.planning.config import MicroBatchLimits, PlanConfig


@pytest.mark.parametrize(("values", "wrong"), [
    ({"layout": "paded"}, "layout is not known"),
    ({"grouping": "random"}, "grouping is not known"),
    ({"overlong": "truncate"}, "overlong is not known"),
    ({"layout": "packed", "grouping": "bucketed", "samples": 4}, "does not support this grouping"),
    ({"layout": "padded", "grouping": "packed"}, "does not support this grouping"),
    ({"grouping": "fixed"}, "needs the number of samples"),
    ({"grouping": "bucketed", "cells": 99}, "needs the number of samples"),
    ({"samples_per_step": 8, "tokens_per_step": 99}, "a step has one size"),
    ({"rows_per_step": 8, "cells": 9}, "rows_per_step is for packed rows"),
    ({"row_cells": 8, "cells": 9}, "row_cells is the capacity of fixed packed rows"),
    ({"row_cells": 8, "layout": "packed", "samples_per_step": 3}, "row_cells is the capacity of fixed packed rows"),
    ({"micro_batches_per_step": 8}, "need a limit"),
    ({"rows_per_step": 8, "layout": "packed"}, "need a capacity"),
    ({"rows_per_step": 8, "layout": "packed", "cells": 8, "row_cells": 9}, "more cells than its micro-batch"),
    ({"seed": -1}, "seed must be a whole number"),
    ({"seed": 1.5}, "seed must be a whole number"),
    ({"pair_cost": float("nan")}, "pair_cost must be"),
    ({"pair_cost": -1.0}, "pair_cost must be"),
    ({"pair_cost": "8e-5"}, "pair_cost must be"),
])  # fmt: skip
def test_settings_that_cannot_be_kept_are_refused(values: dict[str, object], wrong: str) -> None:
    with pytest.raises(PlanError, match=wrong) as caught:
        PlanConfig(**values)  # type: ignore[arg-type]
    assert caught.value.seen
    assert caught.value.do


@pytest.mark.parametrize("name", ["cells", "pairs", "samples", "bucket_width", "samples_per_step", "row_cells"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8", 2**62])
def test_a_number_that_is_not_a_positive_integer_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(PlanError, match=f"{name} must be a whole number"):
        PlanConfig(**{name: value})  # type: ignore[arg-type]


def test_a_limit_on_a_cost_is_checked_by_name() -> None:
    with pytest.raises(PlanError, match=r"costs\['patches'\] must be"):
        PlanConfig(costs={"patches": 0})


def test_auto_means_budget_for_padded_and_packed_for_packed() -> None:
    assert PlanConfig().grouping == "budget"
    assert PlanConfig(layout="packed").grouping == "packed"
    assert PlanConfig().samples_per_step == 32


@given(plan_configs())
def test_settings_survive_as_plain_data(config: PlanConfig) -> None:
    assert PlanConfig(**config.to_dict()) == config


def test_settings_and_limits_cannot_be_changed_behind_a_plan() -> None:
    config = PlanConfig(costs={"patches": 9})
    with pytest.raises(TypeError):
        config.costs["patches"] = 10  # type: ignore[index]
    assert MicroBatchLimits().is_unlimited
    assert not config.limits.is_unlimited
