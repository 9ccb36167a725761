"""What is exported: a study's recommended configuration with its records, a saved recommendation, or a rule.

Knows the store and the shapes of `search --json`, `recommend --json` and `learn --json`; nothing of targets.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ranksearch import __version__
from ranksearch.errors import ExportError, Fault, shown
from ranksearch.export.fields import flat
from ranksearch.methods import METHODS, own_parameters
from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.space import PARAMETERS, Parameter
from ranksearch.store import Store

__all__ = ["Source", "Truncation", "read_source", "study_source"]

_KNOWN: Mapping[str, Parameter] = {
    **{name: p for name, p in PARAMETERS.items() if name != "method"},
    **own_parameters(METHODS),
    "max_steps": Parameter("int", low=1),
    "gradient_accumulation": Parameter("int", low=1),
    "gradient_checkpointing": Parameter("bool"),
    "max_length": Parameter("int", low=1),
    "max_grad_norm": Parameter("float", low=0),
    "seed": Parameter("int", low=0),
    "task": Parameter("text", options=("classification", "generation")),
}
"""What the values must be, whoever wrote them; which methods there are, each target says."""

_REQUIRED = ("r", "lora_alpha", "learning_rate", "target_modules")


@dataclass(frozen=True)
class Truncation:
    """A study's adapter at fewer ranks, written and measured before it is exported."""

    trial: int
    """The run whose adapter it was."""
    from_r: int
    metrics: Mapping[str, float | None]
    """On the eval rows."""
    whole: Mapping[str, float | None]
    """The same before the cut."""
    folder: Path


@dataclass(frozen=True)
class Source:
    """A configuration and where it comes from."""

    title: str
    """One line: which study or recommendation."""
    decision: str
    """One line: what was decided and how surely."""
    values: Mapping[str, Any]
    """`recommended`, flat, values left to the reader not among them."""
    versions: Mapping[str, str]
    """Package -> version that it was found with."""
    study: StudyRecord | None = None
    trials: tuple[TrialRecord, ...] = ()
    folder: Path | None = None
    """The study's folder."""
    truncated: Truncation | None = None
    """The adapter to write instead of the winner's."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """What the target can't express, when that is allowed: field -> `field=value` and why."""

    def winner(self) -> TrialRecord | None:
        """The run whose adapter was tested; where none was, the best completed run of the configuration."""
        if self.study is None:
            return None
        if self.study.test is not None:
            return next((t for t in self.trials if t.number == self.study.test.trial), None)
        metric, direction = self.study.metric()
        sign = 1 if direction == "minimize" else -1
        same = [t for t in self.trials if t.state == "COMPLETE" and t.adapter and _agrees(t, self.values)]
        return min(same, key=lambda t: sign * (v if (v := t.value(metric)) is not None else math.inf), default=None)

    def run(self) -> TrialRecord | None:
        """A run of the configuration: the winner; where no adapter was kept, the first completed one."""
        same = (t for t in self.trials if t.state == "COMPLETE" and _agrees(t, self.values))
        return self.winner() or next(same, None)

    def base_model(self) -> str | None:
        """Folder or hub id that the base model is loaded from; None where only ranksearch knows its name."""
        winner = self.winner()
        if winner is not None and self.folder is not None:
            try:
                config = json.loads((self.folder / str(winner.adapter) / "adapter_config.json").read_text("utf-8"))
                saved = config.get("base_model_name_or_path")
            except (OSError, ValueError, AttributeError):
                saved = None
            if isinstance(saved, str) and saved and (Path(saved).is_dir() or not Path(saved).is_absolute()):
                return saved
        named = self.values.get("model") if self.study is None else self.study.spec["model"]["id"]
        return None if named is None or named.startswith("asset:") else str(named)

    def header(self) -> list[str]:
        """The lines that an exported file opens with."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        told = [self.title, self.decision, f"Versions: {versions}"]
        if self.lost:
            told.append("NOT IN HERE, as the target has no place for it: " + "; ".join(self.lost.values()))
        return [_line(text) for text in told]


def study_source(store: Store, name: str) -> Source:
    """A study as the source of an export.

    Raises:
        SpecError: When there is no such study.
        ExportError: When it has no recommended configuration.
        StoreError: When a record is torn.
    """
    study = store.study(name)
    if study.recommended is None:
        raise ExportError(
            Fault(
                "a study must have a recommended configuration",
                f"state {study.state}",
                name,
                "Finish it with --resume, or see its report.",
            )
        )
    decision = dict(study.decision or {})
    status = decision.get("status", "undecided")
    why = decision.get("why") or "no run with a fresh seed gave a value; the best search run is taken."
    return Source(
        title=(
            f"Study {name} ({study.study_id[:8]}): {study.spec['task']} on {study.trained_on()}, "
            f"model {study.model.source}."
        ),
        decision=_line(f"{status.capitalize()}: {why}"),
        values=_checked(study.recommended, name),
        versions=study.versions,
        study=study,
        trials=tuple(store.trials(name)),
        folder=store.folder(name),
    )


def read_source(what: str | Path, store: Store) -> Source:
    """The study of that name, or the JSON file at that path; `FILE#ID` is a rule of the flow in a file.

    Raises:
        ExportError: When the file is no recommendation, or it abstained.
        SpecError: When it is neither a file nor a study.
        StoreError: When a record is torn.
    """
    flow, _, rule = str(what).rpartition("#")
    if flow and not os.path.isfile(what) and os.path.isfile(flow):
        return _rule_source(_read_json(Path(flow)), flow, rule)
    path = Path(what)
    # A name that is too long for a file, or holds what no file may, is none.
    if not os.path.isfile(what):
        return study_source(store, str(what))
    if store.exists(str(what)):
        raise ExportError(
            Fault(
                "the source must be a study or a file, not both",
                shown(str(what)),
                "SOURCE",
                f"Write ./{what} for the file; run it from another folder for the study.",
            )
        )
    value = _read_json(path)
    if isinstance(value, Mapping) and isinstance(value.get("rules"), list):
        return _rule_source(value, str(path), "")
    if not isinstance(value, Mapping) or "recommended" not in value:
        raise ExportError(
            Fault(
                "the JSON must hold `recommended`",
                _short(value),
                str(path),
                "Save the output of `search --json` or `recommend --json`.",
            )
        )
    if isinstance(value.get("study"), str) and store.exists(value["study"]):
        return study_source(store, value["study"])
    if value["recommended"] is None:
        reason = value.get("reason") or "no reason given"
        raise ExportError(
            Fault("there must be a configuration to export", f"none: {reason}", str(path), "Run a search of this case.")
        )
    return Source(
        title=f"{'Study ' + str(value['study']) if 'study' in value else 'Recommendation'} from {path.name}.",
        decision=_line(_told(value)),
        values=_checked(value["recommended"], str(path)),
        versions={"ranksearch": __version__},
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ExportError(
            Fault(
                "a recommendation must be a JSON file", str(error), str(path), "Save the output of `recommend --json`."
            )
        ) from error


def _rule_source(value: Any, path: str, rule_id: str) -> Source:
    """A rule of a saved flow: what it says, and the usual choice where it is silent."""
    from pydantic import ValidationError

    from ranksearch.rules import Flow, settled

    try:
        flow = Flow.model_validate({k: value[k] for k in ("rules",) if k in value})
    except (ValidationError, TypeError) as error:
        told = str(error).splitlines()[0]
        raise ExportError(
            Fault("a flow must be what `learn` wrote", told, path, "Save `learn --json` again.")
        ) from error
    rules = {rule.id: rule for rule in flow.rules}
    if rule_id not in rules:
        near = get_close_matches(rule_id, rules, n=1)
        remedy = f"Did you mean {path}#{near[0]}?" if near else f"Write {path}#ID."
        raise ExportError(
            Fault("the rule must be one of " + (", ".join(rules) or "none"), shown(rule_id or "nothing"), path, remedy)
        )
    if sum(rule.id == rule_id for rule in flow.rules) > 1:
        raise ExportError(
            Fault("the rule must be named by its id alone", f"several rules {rule_id}", path, "Run `learn` again.")
        )
    rule = rules[rule_id]
    values, guessed = settled(rule)
    usual = f" Usual choices, which the rule does not speak of: {', '.join(guessed)}." if guessed else ""
    return Source(
        title=f"Rule {rule.id} from {Path(path).name} ({', '.join(rule.sources) or 'no source'}).",
        decision=_line(f"{rule.status.capitalize()}: {rule.says}{usual}"),
        values=_checked(values, path),
        versions={"ranksearch": __version__},
    )


def _told(value: Mapping[str, Any]) -> str:
    basis = value.get("basis")
    if isinstance(basis, Mapping):
        return f"{str(basis.get('status', '')).capitalize()}: {value.get('why', '')} {basis.get('how_sure', '')}"
    decision = value.get("decision")
    why = decision.get("why") if isinstance(decision, Mapping) else None
    return f"{str(value.get('status', 'undecided')).capitalize()}: {why or 'no decision is told.'}"


def _checked(recommended: object, place: str) -> dict[str, Any]:
    """The values, when they can be a configuration at all."""
    if not isinstance(recommended, Mapping):
        raise ExportError(Fault("`recommended` must be an object", _short(recommended), place, "Save the JSON again."))
    values = flat(recommended)
    faults = [
        Fault(f"`{name}` must be there", "nothing", f"{place}: recommended", "Save the JSON again.")
        for name in _REQUIRED
        if name not in values
    ]
    for name, parameter in _KNOWN.items():
        if name not in values:
            continue
        value = values[name]
        if not parameter.accepts(tuple(value) if isinstance(value, list) else value):
            rule = f"`{name}` must be {parameter.rule()}"
            faults.append(Fault(rule, shown(value), f"{place}: recommended", "Correct it."))
        elif parameter.kind == "int":
            values[name] = int(value)
    faults += [
        Fault(f"`{name}` must be a text", _short(values[name]), f"{place}: recommended", "Correct it.")
        for name in ("method", "model", "precision", "lr_scheduler_type")
        if not isinstance(values.get(name, ""), str)
    ]
    for name, rule, accepted in (
        ("rank_pattern", "module endings with whole ranks of at least 1", _KNOWN["r"]),
        ("alpha_pattern", "module endings with alphas above 0", _KNOWN["lora_alpha"]),
    ):
        pattern = values.get(name, {})
        if not isinstance(pattern, Mapping) or not all(
            isinstance(k, str) and k and accepted.accepts(v) for k, v in pattern.items()
        ):
            faults.append(Fault(f"`{name}` must be {rule}", _short(pattern), f"{place}: recommended", "Correct it."))
    if faults:
        raise ExportError(faults)
    return values


def _agrees(trial: TrialRecord, values: Mapping[str, Any]) -> bool:
    config = flat(trial.config.plain())
    return all(config[name] == values[name] for name in config if name in values and name != "target_modules")


def _line(text: str) -> str:
    """On one line, whatever breaks and control characters it holds."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _short(value: object) -> str:
    text = repr(list(value)) if isinstance(value, Mapping) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
