"""Reads what is to be replayed: a folder of PEFT results, or studies of our own.

Knows the files; nothing of strategies. Our own records are read as such, not through the evidence table, which keeps
neither the values by the space's names nor truncation curves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ranksearch.config import TrialConfig
from ranksearch.errors import EvidenceError, Fault, StoreError
from ranksearch.evidence.importers import peft
from ranksearch.evidence.reading import Reading
from ranksearch.plan import Budget
from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.replay.recording import RecordedRun, Recording, direction_of
from ranksearch.space import PARAMETERS, Choices, Domain, Fixed, IntRange, Space
from ranksearch.store import Store, StudyFolder

__all__ = ["read_recording"]

_REMEDY = "Give a folder of PEFT's method_comparison results, a RANKSEARCH_HOME or a study's folder."


def read_recording(path: Path) -> Recording:
    """Reads evidence with its curves.

    Args:
        path: A folder of PEFT results or one task's folder above it, a RANKSEARCH_HOME, or a study's folder in one.

    Raises:
        EvidenceError: When there is nothing to replay: no curves, a single run, runs that don't compare; with every
            fault.
    """
    if not path.exists():
        raise EvidenceError(Fault("evidence must exist", "no such file or folder", str(path), _REMEDY))
    if (path / "study.json").is_file():
        recording = _from_studies([StudyFolder(path)], str(path))
    elif path.is_dir() and (names := Store(path).studies()):
        recording = _from_studies([Store(path).open(name) for name in names], str(path))
    elif path.is_dir() and any(path.rglob("*.json")):
        recording = _from_reading(peft.read(path), str(path))
    else:
        got = "a folder without results" if path.is_dir() else "a single file"
        raise EvidenceError(
            Fault("evidence for a replay must be a folder of runs with curves", got, str(path), _REMEDY)
        )
    return _checked(recording)


def _checked(recording: Recording) -> Recording:
    if not recording.searchable:
        raise EvidenceError(
            Fault(
                "a replay needs curves",
                f"{len(recording.runs)} runs with a value at the end alone",
                recording.source,
                "Give runs that were evaluated on the way.",
            )
        )
    configurations = {run.config.key for run in recording.searchable}
    if len(configurations) < 2 or len(recording.judged) < 2:
        raise EvidenceError(
            Fault(
                "a replay needs at least two configurations that got to the end",
                f"{len(recording.judged)}",
                recording.source,
                "Give more runs.",
            )
        )
    return recording


def _from_reading(reading: Reading, source: str) -> Recording:
    """A recording of runs of any method, which only their names tell apart."""
    rows, notes = _one_group(reading.rows, source)
    notes += [note for note in reading.notes if "did not end well" in note]
    curves: dict[str, dict[str, dict[int, float | None]]] = defaultdict(lambda: defaultdict(dict))
    for point in reading.curves:
        # The entry at the end repeats what the last evaluation told; the first value counts, as in the table.
        curves[point["id"]][point["metric"]].setdefault(point["fidelity"], point["value"])
    ended = [row for row in rows if row["outcome"] == "complete" and row["value"] is not None]
    lost = [str(row["source_file"]) for row in rows if row["outcome"] == "complete" and row["value"] is None]
    if lost:
        notes.append(f"{len(lost)} runs are left out, whose final value is not finite: {', '.join(lost)}.")
    if not ended:
        raise EvidenceError(Fault("evidence must hold runs that ended well", "none", source, "Give more results."))
    metric = str(ended[0]["metric"])
    direction = ended[0]["direction"] or direction_of(metric)
    if direction is None:
        raise EvidenceError(
            Fault("it must be known which way the final metric is better", metric, source, "Give other results.")
        )
    unit: dict[str, Domain] = {"method": Fixed("recorded"), "r": Fixed(1), "lora_alpha": Fixed(1)}
    space = Space(unit | {"learning_rate": Fixed(1.0), "run": IntRange(0, len(ended) - 1)})
    runs = tuple(
        RecordedRun(
            name=str(row["source_file"]).removesuffix(".json"),
            values={"run": i},
            config=space.config({"run": i}),
            seed=0,
            curves={m: dict(c) for m, c in curves[row["id"]].items()},
            final=row["value"],
            seconds=row["seconds"],
            trainable_parameters=row["trainable_parameters"],
        )
        for i, row in enumerate(ended)
    )
    return Recording(
        source=source,
        runs=runs,
        space=space,
        max_steps=max(run.length for run in runs),
        final_metric=metric,
        direction=direction,
        named=True,
        tolerance=0.0,
        notes=tuple(notes),
    )


def _one_group(rows: Iterable[Mapping[str, Any]], source: str) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The rows of the one set of comparable runs; a few strays of others are left out and told."""
    rows = list(rows)
    count = Counter(row["group"] for row in rows if row["outcome"] == "complete")
    if not count:
        raise EvidenceError(Fault("evidence must hold runs that ended well", "none", source, "Give more results."))
    (group, most), *others = count.most_common()
    if 2 * most <= count.total():
        raise EvidenceError(
            Fault(
                "the runs must compare with each other: one model, data set and budget",
                "; ".join(f"{n} of {g}" for g, n in count.most_common()),
                source,
                "Give the folder of one of them.",
            )
        )
    notes = [f"{n} of {g}: left out, as they don't compare with the others." for g, n in others]
    return [row for row in rows if row["group"] == group], notes


def _from_studies(folders: Sequence[StudyFolder], source: str) -> Recording:
    """A recording of our own studies that share all that makes runs comparable; they may differ in seed."""
    faults: list[Fault] = []
    groups: dict[str, list[tuple[StudyRecord, list[TrialRecord]]]] = defaultdict(list)
    for folder in folders:
        try:
            study, trials = folder.study(), folder.trials()
        except StoreError as error:
            faults.append(Fault("a record must be whole", str(error), folder.path.name, "Repair or remove it."))
            continue
        groups[_comparable(study)].append((study, trials))
    if faults:
        raise EvidenceError(faults)
    if len(groups) > 1:
        named = "; ".join(", ".join(study.name for study, _ in group) for group in groups.values())
        raise EvidenceError(
            Fault(
                "the runs must compare with each other: one model, data set and budget",
                f"{len(groups)} kinds of studies: {named}",
                source,
                "Give the folder of one study, or a home that holds only studies that compare.",
            )
        )
    (group,) = groups.values()
    return _merged(group, source)


def _comparable(study: StudyRecord) -> str:
    """What studies must share for their runs to stand in one table."""
    spec, data = study.spec, study.data
    parts = sorted((part, facts["sha256"]) for part, facts in data["parts"].items())
    budget = spec["budget"]
    fixed = [study.model.source, spec["objective"]["metric"], budget["min_steps"], budget["max_steps"]]
    weights = [(name, facts.get("weight")) for name, facts in data.get("tasks", {}).items()]
    return repr((parts, fixed, budget["reduction_factor"], weights))


def _merged(group: Sequence[tuple[StudyRecord, list[TrialRecord]]], source: str) -> Recording:
    study = group[0][0]
    metric, direction = study.metric()
    by_ratio = "alpha_ratio" in study.spec.get("space", {})
    ended = [t for _, trials in group for t in trials if t.state == "COMPLETE" or (t.violation and t.reports)]
    stopped = sum(t.state == "PRUNED" and t.violation is None for _, trials in group for t in trials)
    notes = []
    if stopped:
        notes.append(
            f"{stopped} runs are left out: they were stopped early, so nobody knows how they would have ended."
        )
    once: dict[tuple[str, int], TrialRecord] = {}
    for trial in ended:
        # A seed that ran twice (a finalist of one study, searched in another) counts once, with the longer curve.
        held = once.get((trial.config.key, trial.seed))
        if held is None or len(trial.reports) > len(held.reports):
            once[trial.config.key, trial.seed] = trial
    if not once:
        raise EvidenceError(Fault("evidence must hold runs that ended", "none", source, "Let a study go on."))
    flat = {key: _flat(trial.config, by_ratio) for key, trial in once.items()}
    space = _space(list(flat.values()))
    runs = tuple(
        RecordedRun(
            name=f"{study.name}/{trial.number}",
            values={n: flat[key][n] for n in space.searched if n in flat[key]},
            config=space.config(flat[key]),
            seed=trial.seed,
            curves=_curves(trial),
            final=trial.value(metric) if trial.state == "COMPLETE" else None,
            seconds=trial.cost.train_seconds or None,
            violation=trial.violation,
            truncation=trial.truncation,
            trainable_parameters=trial.trainable_parameters,
        )
        for key, trial in sorted(once.items(), key=lambda pair: (pair[1].seed, pair[1].number))
    )
    told, tolerance = study.spec["budget"], study.spec["objective"]["tolerance"]
    relative = isinstance(tolerance, Mapping)
    budget = Budget(
        min_steps=told["min_steps"],
        max_steps=told["max_steps"],
        reduction_factor=told["reduction_factor"],
        reference_batch_size=1,
    )
    return Recording(
        source=source,
        runs=runs,
        space=space,
        max_steps=told["max_steps"],
        final_metric=metric,
        direction=direction,
        named=False,
        tolerance=tolerance["relative"] if relative else tolerance,
        relative=relative,
        rungs=budget.rungs[:-1],
        reduction_factor=budget.reduction_factor,
        notes=tuple(notes),
    )


def _curves(trial: TrialRecord) -> dict[str, dict[int, float | None]]:
    curves: dict[str, dict[int, float | None]] = defaultdict(dict)
    for report in trial.reports:
        for name, value in report.metrics.items():
            curves[name][report.fidelity] = value
    return dict(curves)


def _flat(config: TrialConfig, by_ratio: bool) -> dict[str, Any]:
    """A configuration by the space's names."""
    plain = config.model_dump()
    groups = plain.pop("layer_group_lr")
    own = plain.pop("method_parameters")
    flat: dict[str, Any] = plain | {f"layer_group_lr.{group}": value for group, value in groups.items()} | own
    if by_ratio:
        flat["alpha_ratio"] = flat.pop("lora_alpha") / flat["r"]
    return flat


def _space(points: Sequence[Mapping[str, Any]]) -> Space:
    """The smallest space that holds all points: of every parameter the values that were recorded."""
    # A method's own parameters stand only in the points of the method.
    given = set().union(*points)
    names = [*(n for n in PARAMETERS if n in given), *sorted(given - set(PARAMETERS))]
    domains: dict[str, Domain] = {}
    for name in names:
        values = list(dict.fromkeys(point[name] for point in points if name in point))
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        if len(values) == 1:
            domains[name] = Fixed(values[0])
        else:
            domains[name] = Choices(tuple(sorted(values) if numbers else sorted(values, key=str)))
    return Space(domains)
