"""Reads a spec and finds every fault in it at once.

Each section is checked by itself, and the rules that join several keys are applied to whatever is sound, so that one
wrong key hides no other. Knows nothing of files other than the spec itself: whether the data or the model exist is not
asked here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranksearch.blocks import block_rules, examine_blocks
from ranksearch.errors import Fault, SpecError, shown, without_login
from ranksearch.sections import examine_section
from ranksearch.space import Fixed, Space, read_space
from ranksearch.spec import METRICS, MOST, SECTIONS, DataSpec, ModelSpec, Spec
from ranksearch.yamlfile import YamlFault, parse_yaml

__all__ = ["Examination", "examine_spec", "examine_values", "load_spec", "own_code_faults"]

_LONGEST = 2**20
"""Characters of a spec at most: whatever is longer is another file, or has no end."""


@dataclass(frozen=True)
class Examination:
    """What became of a spec: the parts that are sound, and every fault."""

    spec: Spec | None
    """None when there is any fault."""
    data: DataSpec | None
    """The data block when it is sound by itself, so that the files can be checked beside other faults."""
    task: str | None
    model: ModelSpec | None
    parameters: Space | None
    faults: tuple[Fault, ...]
    source: str
    base_dir: Path
    """Folder that relative paths are relative to."""
    raw: Mapping[str, Any]
    """The spec as written, overrides included."""


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> Spec:
    """Reads a spec that has to be right.

    Args:
        path: The YAML file.
        overrides: `key.path=value` pairs, values in YAML.

    Raises:
        SpecError: With every fault.
    """
    examined = examine_spec(path, overrides)
    if examined.spec is None:
        raise SpecError(examined.faults)
    return examined.spec


def examine_spec(path: str | Path, overrides: Sequence[str] = ()) -> Examination:
    """Reads a spec and finds every fault in it.

    Raises:
        SpecError: When the file can't be read as YAML at all.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(_LONGEST + 1)
        if len(text) > _LONGEST:
            raise ValueError(f"more than {_LONGEST:,} characters")
    except (OSError, ValueError) as error:
        reason = (
            error.strerror
            if isinstance(error, OSError)
            else "it is not UTF-8"
            if isinstance(error, UnicodeDecodeError)
            else error
        )
        raise SpecError(
            Fault(
                "the spec must be a readable file",
                str(reason),
                str(path),
                "Give the path of a YAML spec; search_spaces/ holds some to copy.",
            )
        ) from error
    try:
        raw = parse_yaml(text)
    except YamlFault as error:
        raise SpecError(Fault("the spec must be YAML", str(error), str(path), "Correct that line.")) from error
    if not isinstance(raw, dict):
        raise SpecError(
            Fault(
                "the spec must be a mapping of keys",
                "an empty file" if raw is None else shown(raw),
                str(path),
                "Begin with `name:`.",
            )
        )
    return examine_values(_override(raw, overrides), source=str(path), base_dir=path.parent.resolve())


def examine_values(raw: Mapping[str, Any], *, source: str, base_dir: Path) -> Examination:
    """Finds every fault in a spec that is already a mapping."""
    values, faults = examine_section(Spec, raw, "")
    sections: dict[str, Any] = {}
    for name, cls in SECTIONS.items():
        if name in raw and isinstance(
            block := ({"id": raw[name]} if name == "model" and isinstance(raw[name], str) else raw[name]), Mapping
        ):
            sections[name], more = examine_section(cls, block, name)
            faults += more
        elif name in raw and name not in ("data", "model"):
            if raw[name] is not None or name not in values:
                faults.append(
                    Fault(
                        f"`{name}` must be a mapping", shown(raw[name]), name, f"Write the keys of `{name}` below it."
                    )
                )
        elif name in raw:
            faults.append(
                Fault(f"`{name}` must be a mapping", shown(raw[name]), name, f"Write the keys of `{name}` below it.")
            )
        else:
            sections[name] = {n: f.default for n, f in cls.model_fields.items() if not f.is_required()}
    blocks, tasks, more = examine_blocks(raw.get("data"), sections.get("data", {}))
    faults += more
    space, space_faults = (None, []) if "space" not in raw else read_space(raw["space"], tasks=tasks)
    faults += space_faults
    for place, block in blocks.items():
        faults += block_rules(place, block, values.get("task"))
    faults += _cross_rules(raw, values, sections, space)
    data = None
    if "data" in raw and isinstance(raw["data"], Mapping):
        data_fields = {k: v for k, v in raw["data"].items() if k in DataSpec.model_fields and k in sections["data"]}
        if tasks is not None and all(block.get("train") is not None for block in blocks.values()):
            data = DataSpec.model_validate(data_fields)
    model = None
    if "model" in sections and "id" in sections["model"]:
        model = ModelSpec.model_validate({k: v for k, v in sections["model"].items() if k in ModelSpec.model_fields})
    placed = tuple(Fault(f.rule, f.got, f"{source}: {f.place}", f.remedy) for f in faults)
    spec = None
    if not faults:
        spec = Spec.model_validate(
            {k: v for k, v in raw.items() if v is not None or k not in SECTIONS} | {"space": dict(raw["space"])}
        )
    return Examination(spec, data, values.get("task"), model, space, placed, source, base_dir, raw)


def own_code_faults(model: ModelSpec, allowed: bool) -> list[Fault]:
    """The fault of a spec that asks for a model's own code while the command line does not.

    Args:
        model: The model's block.
        allowed: Whether the command line allows it.
    """
    if allowed or not model.trust_remote_code:
        return []
    return [
        Fault(
            "a model's own code runs only where the spec and the command line both say so",
            "model.trust_remote_code: true, no --trust-remote-code",
            "model.trust_remote_code",
            "Read that code, then add --trust-remote-code; or set it to false.",
        )
    ]


def _override(raw: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Applies `key.path=value` pairs to a copy."""
    faults: list[Fault] = []
    out = {k: dict(v) if isinstance(v, dict) else v for k, v in raw.items()}
    given: dict[str, str] = {}
    for pair in overrides:
        key, sign, text = pair.partition("=")
        if not sign or not all(key.split(".")):
            faults.append(
                Fault(
                    "an override must be KEY=VALUE", shown(pair), "command line", "Write for example budget.trials=8."
                )
            )
            continue
        if key in given:
            got = f"{given[key]} and {without_login(pair)}"
            faults.append(Fault("a key may be overridden once", got, "command line", "Keep one of them."))
            continue
        given[key] = without_login(pair)
        try:
            value = parse_yaml(text)
        except YamlFault as error:
            faults.append(
                Fault(
                    "an override's value must be YAML",
                    str(error),
                    f"command line: {shown(pair)[1:-1]}",
                    "Quote it for the shell.",
                )
            )
            continue
        place: dict[str, Any] = out
        *parents, leaf = key.split(".")
        for parent in parents:
            inner = place.get(parent)
            # A short form is spelled out, so that model.revision=X works on `model: asset:minilm-l6`.
            if parent == "model" and place is out and isinstance(inner, str):
                inner = {"id": inner}
            place[parent] = dict(inner) if isinstance(inner, dict) else {}
            place = place[parent]
        place[leaf] = value
    if faults:
        raise SpecError(faults)
    return out


def _one_kind_of_device(resources: Mapping[str, Any]) -> list[Fault]:
    """Values from CPUs and from GPUs are not compared, and a number of trials is needed where room is no measure."""
    faults = []
    more = resources.get("more") or []
    if resources.get("gpus_per_trial") == 0 and any(m.gpus_per_trial for m in more):
        rule = "all trials must train on one kind of device, or they can't be compared"
        got = "gpus_per_trial=0 beside more of it for some"
        faults.append(Fault(rule, got, "resources.more", "Give every trial a share of a GPU."))
    if resources.get("autoscaling") and resources.get("max_concurrent", 0) is None:
        rule = "a cluster that grows must be told how far: `max_concurrent` must be given with `autoscaling`"
        faults.append(Fault(rule, "null", "resources.max_concurrent", "Give the number of trials to run at once."))
    return faults


def _cross_rules(
    raw: Mapping[str, Any], top: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], space: Space | None
) -> list[Fault]:
    """Rules that join several keys, each applied where its operands are sound."""
    faults: list[Fault] = []
    budget = sections.get("budget", {})
    objective, task = sections.get("objective", {}), top.get("task")
    faults += _one_kind_of_device(sections.get("resources", {}))
    ratio = None if space is None else space.domains["head_lr_ratio"]
    if task == "generation" and ratio is not None and ratio != Fixed(1.0):
        faults.append(
            Fault(
                "`head_lr_ratio` must be left out of a generation study: it has no new head, only adapters are trained",
                shown(raw["space"]["head_lr_ratio"]),
                "space.head_lr_ratio",
                "Take it out.",
            )
        )
    metric = objective.get("metric")
    if metric is not None and metric not in METRICS:
        # No "did you mean": eval_loss is not eval/nll, and must not be read as it.
        faults.append(
            Fault(
                "`metric` must be one of " + ", ".join(METRICS),
                shown(metric),
                "objective.metric",
                "Choose one of them by its full name.",
            )
        )
    elif metric is not None:
        direction, tasks = METRICS[metric]
        if task is not None and task not in tasks:
            there = ", ".join(m for m, (_, t) in METRICS.items() if task in t)
            faults.append(
                Fault(
                    f"the metric of a {task} study must be one of {there}",
                    metric,
                    "objective.metric",
                    "Choose one of them.",
                )
            )
        if objective.get("direction", direction) != direction:
            faults.append(
                Fault(
                    f"`{metric}` has the direction {direction}",
                    str(objective["direction"]),
                    "objective.direction",
                    f"Write {direction}.",
                )
            )
        tolerance = objective.get("tolerance")
        if metric in MOST and isinstance(tolerance, int | float) and tolerance >= MOST[metric]:
            faults.append(
                Fault(
                    f"`tolerance` must be below {MOST[metric]:g}, as `{metric}` goes from 0 to {MOST[metric]:g}",
                    f"{tolerance:g}",
                    "objective.tolerance",
                    f"One point of a hundred is {MOST[metric] / 100:g}.",
                )
            )
    low, high = budget.get("min_steps"), budget.get("max_steps")
    if low is not None and high is not None and low > high:
        faults.append(
            Fault(
                "`min_steps <= max_steps` must hold",
                f"min_steps={low}, max_steps={high}",
                "budget",
                f"Lower min_steps to {high} or less.",
            )
        )
    seeds, most = top.get("seeds"), top.get("max_seeds")
    if seeds is not None and most is not None and seeds > most:
        faults.append(
            Fault(
                "`seeds <= max_seeds` must hold",
                f"seeds={seeds}, max_seeds={most}",
                "seeds, max_seeds",
                f"Raise max_seeds to {seeds}.",
            )
        )
    strategy = top.get("strategy")
    if "sampler" in raw and strategy in ("grid", "random") and top.get("sampler", strategy) != strategy:
        faults.append(
            Fault(
                f"the strategy {strategy} draws its configurations itself: `sampler` must be {strategy} or left out",
                str(top["sampler"]),
                "sampler",
                f"Write sampler: {strategy}, or strategy: joint.",
            )
        )
    if space is not None and (strategy == "grid" or top.get("sampler") == "grid"):
        endless = [n for n, d in space.domains.items() if d.size is None]
        if endless:
            faults.append(
                Fault(
                    "a grid must be finite",
                    f"continuous ranges of {', '.join(endless)}",
                    "space",
                    "Give {choices: [...]} for them.",
                )
            )
        elif strategy == "grid" and "trials" in budget and budget["trials"] < (space.size or 0):
            faults.append(
                Fault(
                    "`budget.trials` of a grid must be at least the number of its points",
                    f"trials={budget['trials']}, {space.size} points",
                    "budget.trials",
                    f"Write trials: {space.size}, or strategy: random.",
                )
            )
    if space is not None and low is not None and high is not None:
        for name, longest in space.steps_at_most().items():
            if name in raw.get("space", {}) and longest >= high:
                rule, got = f"`{name} < max_steps` must hold", f"{name}={longest}, max_steps={high}"
                faults.append(Fault(rule, got, f"space.{name}", f"Lower {name}."))
    return faults
