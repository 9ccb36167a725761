"""The staged strategy: its stages, its candidates, and how it spends seeds."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ranksearch.config import TrialConfig
from ranksearch.records import TrialRecord, TruncationPoint
from ranksearch.strategies.staged import StagedStrategy, expected_gain, middle_rank
from tests.driving import SPACE, Files, drive, loss_at, make

NOISE = 0.004


def loss_with_elbow(elbow: int, noise: float = NOISE, height: float = 0.1) -> Any:
    """A loss that falls with the rank up to an elbow and is flat after it."""

    def loss(config: TrialConfig, seed: int, fidelity: int) -> float:
        rank = height * max(0.0, 1 - config.r / elbow)
        rate = 0.3 * abs(config.learning_rate / 1e-3 - 1) ** 0.5 * 0.1
        return 0.3 + rate + rank + 2.0 / fidelity + random.Random(f"{config.r}{seed}").gauss(0, noise)

    return loss


def curve(elbow: int) -> Any:
    """What truncating the top rank's adapter would measure."""

    def points(record: TrialRecord, ranks: tuple[int, ...], whole: float) -> tuple[TruncationPoint, ...]:
        return tuple(
            TruncationPoint(
                kind="uniform", r=r, metrics={"eval/nll": whole + 0.2 * max(0.0, 1 - r / elbow)}, trainable_parameters=r
            )
            for r in ranks
        )

    return points


def run(elbow: int, *, noise: float = NOISE, height: float = 0.1, **changes: Any) -> tuple[Files, Any]:
    files = Files()
    coordinator = make(files, strategy="staged", **changes)
    drive(coordinator, loss=loss_with_elbow(elbow, noise, height), truncation=curve(elbow))
    return files, coordinator


def test_the_stages_follow_each_other_and_each_says_why() -> None:
    files, _ = run(8)
    stages = [t.stage for t in sorted(files.trials.values(), key=lambda t: t.number)]
    order = list(dict.fromkeys(stages))
    assert order == ["search", "truncate", "candidates", "decide"]
    # Only the top rank's own variants may overlap with its truncated run.
    assert order == sorted(order, key=["search", "truncate", "candidates", "decide"].index)
    assert all(t.why for t in files.trials.values())


def test_the_search_keeps_to_the_middle_rank_and_prunes() -> None:
    files, _ = run(8)
    search = [t for t in files.trials.values() if t.purpose == "search"]
    assert 10 <= len(search) <= 16 and {t.config.r for t in search} == {16}
    assert any(t.state == "PRUNED" for t in search)


@pytest.mark.parametrize(
    ("elbow", "candidates"),
    [(2, [2, 4, 8, 64]), (8, [4, 8, 16, 64]), (32, [8, 16, 32, 64]), (64, [8, 16, 32, 64])],
)
def test_candidates_are_the_truncations_answer_its_neighbours_and_the_top(elbow: int, candidates: list[int]) -> None:
    _, coordinator = run(elbow)
    assert coordinator.strategy.candidates(coordinator.trials()) == candidates


def test_the_smallest_sufficient_rank_is_chosen() -> None:
    for elbow in (2, 8, 32):
        _, coordinator = run(elbow)
        decision = coordinator.strategy.decision(coordinator.trials())
        # At 0.1 (1 - r / elbow) the rank below the elbow loses 0.05, more than the tolerance of 0.03.
        assert decision.status == "decided" and decision.chosen_r == elbow


def misled(elbow: int, truncated: int, *, noise: float = 0.001, height: float = 0.2) -> tuple[Files, Any]:
    """A study whose truncated adapter points at another rank than the one from which on the loss is flat."""
    files = Files()
    coordinator = make(files, strategy="staged")
    drive(coordinator, loss=loss_with_elbow(elbow, noise, height), truncation=curve(truncated))
    return files, coordinator


def compared(files: Files) -> list[int]:
    """Ranks in the order in which they had their first fresh seed."""
    decided = sorted((t for t in files.trials.values() if t.purpose == "decide"), key=lambda t: t.number)
    return list(dict.fromkeys(t.config.r for t in decided))


def test_ranks_that_truncation_left_out_join_halfway_until_none_lies_between() -> None:
    files, coordinator = misled(elbow=16, truncated=4)
    assert coordinator.strategy.candidates(coordinator.trials()) == [2, 4, 8, 64]
    assert compared(files) == [2, 4, 8, 64, 32, 16]
    decision = coordinator.strategy.decision(coordinator.trials())
    assert (decision.chosen_r, decision.seeds) == (16, 3)
    assert [point.r for point in decision.curve] == [2, 4, 8, 16, 32, 64]
    joined = [t.why for t in files.trials.values() if t.purpose == "select" and t.config.r == 32]
    assert joined and all("r=32 lies between" in why for why in joined)


@pytest.mark.parametrize("noise", [0.001, 0.016])
def test_ranks_that_join_and_later_seeds_keep_all_workers_busy(noise: float) -> None:
    files = Files()
    coordinator = make(files, strategy="staged", workers=3)
    at_once: dict[int, int] = {}
    ask = coordinator.next

    def asked() -> Any:
        launch = ask()
        if launch is not None:
            at_once[launch.number] = coordinator.running()
        return launch

    coordinator.next = asked  # type: ignore[method-assign]
    drive(coordinator, loss=loss_with_elbow(16, noise, 0.2), truncation=curve(4), workers=3)
    joined = [t for t in files.trials.values() if t.config.r in (16, 32) and t.stage != "search"]
    later = [t for t in files.trials.values() if t.purpose == "decide" and t.seed > 3]
    assert joined if noise < 0.01 else later
    for purpose, some in (("select", joined), ("decide", joined), ("decide", later)):
        these = [at_once[t.number] for t in some if t.purpose == purpose]
        assert not these or max(these) == 3, purpose


def test_ranks_below_the_candidates_join_when_the_smallest_of_them_suffices() -> None:
    files, coordinator = misled(elbow=2, truncated=64)
    assert coordinator.strategy.candidates(coordinator.trials()) == [8, 16, 32, 64]
    assert compared(files) == [8, 16, 32, 64, 4, 2]
    assert coordinator.strategy.decision(coordinator.trials()).chosen_r == 2


def test_no_rank_joins_where_neighbours_are_compared_or_noise_would_hide_a_tie() -> None:
    files, _ = misled(elbow=4, truncated=4)
    assert compared(files) == [2, 4, 8, 64]
    noisy, coordinator = misled(elbow=64, truncated=4, noise=0.03, height=2.0)
    decision = coordinator.strategy.decision(coordinator.trials())
    bound = decision.constant * decision.residual_sd * (2 / decision.seeds) ** 0.5 / 2**0.5
    assert decision.chosen_r == 64 and bound > decision.tolerance, "the noise is to be too large for a tie"
    assert compared(noisy) == [2, 4, 8, 64]


@pytest.mark.parametrize("stop_after", [30, 33, 36, 39, 42])
def test_a_study_killed_while_ranks_join_ends_as_the_undisturbed_one(stop_after: int) -> None:
    def undisturbed(files: Files, **how: Any) -> None:
        coordinator = make(files, strategy="staged")
        drive(coordinator, loss=loss_with_elbow(16, 0.001, 0.2), truncation=curve(4), workers=1, **how)

    whole, broken = Files(), Files()
    undisturbed(whole)
    assert len(whole.trials) > stop_after
    undisturbed(broken, stop_after=stop_after)
    undisturbed(broken)
    assert {n: (t.config, t.seed, t.state) for n, t in broken.trials.items()} == {
        n: (t.config, t.seed, t.state) for n, t in whole.trials.items()
    }


def test_of_a_ranks_variants_one_goes_on_and_no_configuration_runs_twice_with_one_seed() -> None:
    files, coordinator = run(8)
    runs = [(t.config.key, t.seed) for t in files.trials.values()]
    assert len(runs) == len(set(runs))
    for r in coordinator.strategy.candidates(coordinator.trials()):
        ended = [
            t for t in files.trials.values() if t.purpose == "select" and t.config.r == r and t.state == "COMPLETE"
        ]
        assert len(ended) <= 2


def test_the_decision_uses_fresh_seeds_only() -> None:
    files, _ = run(8)
    chose = {t.seed for t in files.trials.values() if t.purpose != "decide"}
    assert chose == {0} and {t.seed for t in files.trials.values() if t.purpose == "decide"} >= {1, 2, 3}


def test_noise_buys_more_seeds_and_calm_does_not() -> None:
    calm, _ = run(8, noise=0.001)
    noisy, _ = run(8, noise=0.02)
    seeds = [len({t.seed for t in f.trials.values() if t.purpose == "decide"}) for f in (calm, noisy)]
    assert seeds[0] == 3 and seeds[1] in (5, 8, 12)


def test_hopeless_noise_ends_undecided_with_the_seeds_that_it_would_take() -> None:
    files, coordinator = run(8, noise=0.5)
    decision = coordinator.strategy.decision(coordinator.trials())
    assert decision.status == "undecided" and decision.chosen_r is None
    assert len({t.seed for t in files.trials.values() if t.purpose == "decide"}) == 3
    assert "it would take" in coordinator.finished


def test_a_curve_that_still_rises_at_the_top_says_to_widen_the_ranks() -> None:
    _, coordinator = run(512, height=1.0)
    decision = coordinator.strategy.decision(coordinator.trials())
    assert decision.guess_r == 64 and any("widen r" in note for note in decision.notes)


def test_ranks_that_tie_end_at_the_smallest_candidate() -> None:
    _, coordinator = run(1)
    decision = coordinator.strategy.decision(coordinator.trials())
    assert decision.chosen_r == 2


@pytest.mark.parametrize("stop_after", [3, 17, 25, 33, 41])
def test_a_killed_study_ends_as_the_undisturbed_one(stop_after: int) -> None:
    def undisturbed(files: Files, **how: Any) -> None:
        drive(make(files, strategy="staged"), loss=loss_with_elbow(8), truncation=curve(8), workers=1, **how)

    whole, broken = Files(), Files()
    undisturbed(whole)
    undisturbed(broken, stop_after=stop_after)
    undisturbed(broken)
    assert {n: (t.config, t.seed, t.state) for n, t in broken.trials.items()} == {
        n: (t.config, t.seed, t.state) for n, t in whole.trials.items()
    }


def test_a_single_rank_is_measured_and_compared_with_nothing() -> None:
    space = {"r": 8, "learning_rate": {"log": [1e-4, 1e-2]}}
    files, coordinator = run(8, space=space)
    assert {t.purpose for t in files.trials.values()} == {"search", "decide"}
    decision = coordinator.strategy.decision(coordinator.trials())
    assert decision.chosen_r == 8 and "nothing to compare" in decision.why


def test_a_top_run_that_diverges_leaves_the_middle_of_the_ladder_as_candidates() -> None:
    files = Files()
    coordinator = make(files, strategy="staged")
    drive(coordinator, loss=lambda c, s, f: float("nan") if c.r == 64 else loss_at(c, s, f), truncation=curve(8))
    assert isinstance(coordinator.strategy, StagedStrategy)
    assert coordinator.strategy.candidates(coordinator.trials()) == [8, 16, 32, 64]
    decision = coordinator.strategy.decision(coordinator.trials())
    # r=4 lay below those candidates, and joined once r=8 was shown to suffice.
    assert decision.chosen_r == 4


@pytest.mark.parametrize(("ladder", "middle"), [((2, 4, 8, 16, 32, 64), 16), ((8, 16), 8), ((64,), 64), ((2, 4), 2)])
def test_the_middle_rank_is_nearest_to_16_and_below_the_top(ladder: tuple[int, ...], middle: int) -> None:
    assert middle_rank(ladder) == middle


def test_the_expected_gain_is_that_of_a_random_order() -> None:
    dice = random.Random(0)
    losses = [dice.expovariate(1) for _ in range(12)]
    gains = []
    for _ in range(20_000):
        kept = dice.sample(losses, 8)
        gains.append(min(kept) - min(losses))
    assert expected_gain(losses, 4) == pytest.approx(sum(gains) / len(gains), rel=0.03)
    assert expected_gain([1.0] * 12, 6) == pytest.approx(0)


def test_a_search_that_has_little_left_to_gain_ends_early_and_says_so() -> None:
    flat = Files()
    drive(make(flat, strategy="staged", trials=60), loss=lambda c, s, f: 0.3 + 2 / f, truncation=curve(8))
    search = [t for t in flat.trials.values() if t.purpose == "search"]
    assert 30 <= len(search) < 35
    (reference,) = [t for t in flat.trials.values() if t.purpose == "reference"]
    assert f"ended at {len(search)} of 60" in reference.why


PISSA = SPACE | {"method": "pissa"}


def test_where_adapters_cannot_be_truncated_the_whole_ladder_is_tried_and_the_study_says_why() -> None:
    _, coordinator = run(8, space=PISSA)
    trials = coordinator.trials()
    assert not any(t.purpose == "reference" for t in trials)
    selected = [t for t in trials if t.stage == "candidates"]
    assert {t.config.r for t in selected} | {16} == {2, 4, 8, 16, 32, 64}
    assert all("adapters of pissa can't be truncated" in t.why for t in selected)
    decision = coordinator.strategy.decision(trials)
    assert decision is not None and decision.chosen_r == 8
    stages = {s.name: s for s in coordinator.strategy.stages()}
    assert "truncate" not in stages and "pissa can't be truncated" in stages["candidates"].about
    assert stages["candidates"].runs >= len(selected)


def test_a_long_ladder_is_tried_in_steps_of_its_log() -> None:
    space = PISSA | {"r": {"int": [2, 64]}}
    strategy = make(Files(), strategy="staged", space=space).strategy
    assert isinstance(strategy, StagedStrategy)
    assert strategy._spread() == [2, 4, 8, 16, 32, 64]


def test_a_search_over_methods_truncates_when_the_best_one_can_be() -> None:
    space = SPACE | {"method": {"choices": ["lora", "dora"]}}

    def loss(config: TrialConfig, seed: int, fidelity: int) -> float:
        return loss_with_elbow(8)(config, seed, fidelity) + (0.5 if config.method == "dora" else 0.0)

    coordinator = make(Files(), strategy="staged", space=space)
    drive(coordinator, loss=loss, truncation=curve(8))
    (reference,) = [t for t in coordinator.trials() if t.purpose == "reference"]
    assert reference.config.method == "lora" and reference.truncation
    assert {s.name for s in coordinator.strategy.stages()} >= {"truncate", "candidates"}
