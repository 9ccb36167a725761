"""How the best learning rate moves with the rank: found where it is there, withheld where it can't be told."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from ranksearch.analysis import rate_coupling
from ranksearch.config import TrialConfig
from ranksearch.records import TrialRecord
from tests.made_records import BEGAN, report, study, trial

RATES = [3e-4 * 1.5**i for i in range(8)]


def grid(exponent: float, *, noise: float, curve: float = 0.1, seed: int = 0) -> list[TrialRecord]:
    """Runs whose best rate is 1e-3 at rank 8 and moves by an exponent."""
    dice = random.Random(seed)
    made = []
    for r in (2, 4, 8, 16, 32, 64):
        for rate in RATES:
            config = TrialConfig(r=r, lora_alpha=32, learning_rate=rate)
            away = math.log2(rate / (1e-3 * (r / 8) ** exponent))
            value = 0.4 + 0.05 / r + curve * away**2 + dice.gauss(0, noise)
            told = (report(config, 0, 130, BEGAN, value),)
            made.append(trial(len(made), config, steps=(130,), reports=told))
    return made


@pytest.mark.parametrize("exponent", [0.0, -0.5, -1.0])
def test_the_exponent_of_a_known_surface_is_found(exponent: float) -> None:
    found = rate_coupling(study(), grid(exponent, noise=0.005))
    assert found.exponent == pytest.approx(exponent, abs=0.05) and found.missing is None
    assert f"rank^{found.exponent:.2f}" in found.sentence()


def test_its_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(200):
        found = rate_coupling(study(), grid(-0.3, noise=0.03, seed=seed))
        hits += found.low is not None and found.high is not None and found.low <= -0.3 <= found.high
    # 95 % of 200 is 190; four standard errors are 12.
    assert 178 <= hits <= 200


def test_a_maximised_metric_gives_the_same() -> None:
    runs = grid(-0.5, noise=0.005)
    turned = []
    for t in runs:
        value = t.value("eval/nll")
        assert value is not None
        metrics = {"eval/accuracy": 1 - value}
        turned.append(t.model_copy(update={"reports": (t.reports[0].model_copy(update={"metrics": metrics}),)}))
    objective = {"metric": "eval/accuracy", "direction": "maximize", "tolerance": 0.01}
    record = study(spec=study().spec | {"objective": objective})
    assert rate_coupling(record, turned).exponent == pytest.approx(rate_coupling(study(), runs).exponent)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"noise": 3.0}, "no clear minimum"), ({"noise": 0.001, "curve": 0.0}, "no clear minimum")],
)
def test_noise_or_a_flat_surface_is_no_exponent(changes: dict[str, Any], words: str) -> None:
    found = rate_coupling(study(), grid(0.0, **changes))
    assert found.exponent is None and words in found.sentence()


def test_too_few_ranks_or_runs_are_told() -> None:
    runs = grid(0.0, noise=0.005)
    assert "one rank" in rate_coupling(study(), [t for t in runs if t.config.r == 8]).sentence()
    assert "too few" in rate_coupling(study(), runs[:2] + runs[8:10]).sentence()
    assert "no run" in rate_coupling(study(), []).sentence()


def test_the_convention_is_stated_because_the_exponent_depends_on_it() -> None:
    space = {k: v for k, v in study().spec["space"].items() if k != "lora_alpha"} | {"alpha_ratio": 2}
    assert rate_coupling(study(spec=study().spec | {"space": space}), []).convention == "alpha_ratio"
