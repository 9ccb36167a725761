"""Reads saved LoRA adapters as numbers, and refuses by name what is no plain LoRA.

No base model is loaded and no pickle is opened. Knows nothing of what is made of the adapters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open

from ranksearch.errors import DataError, Fault, shown
from ranksearch.lora import scaling
from ranksearch.training.own_format import ABOUT

__all__ = ["PREFIX", "Change", "SavedAdapter", "read_adapters", "some"]

PREFIX = "base_model.model."
"""What stands before a module's name in a file that PEFT wrote."""
_FILE, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SIDES = {".lora_A.weight": 0, ".lora_B.weight": 1}
_MUTATING = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
"""Initialisations whose adapter is a change of other base weights than the original ones, or a variant."""
_OTHER_FORMS = frozenset(
    {f.name for f in fields(LoraConfig) if f.metadata.get("is_lora_variant")}
    | {"use_qalora", "layer_replication", "lora_bias", "target_parameters", "trainable_token_indices"}
    | {"megatron_config", "ensure_weight_tying"}
)
"""Options with which a layer's change is not scaling * B A, or more than that is changed."""
_KNOWN = frozenset(f.name for f in fields(LoraConfig)) | {"peft_version", "peft_type", "task_type", "auto_mapping"}
_PLAIN_LORA = "an adapter must be plain LoRA: its change is scaling * B A"


@dataclass(frozen=True)
class Change:
    """What an adapter adds to one layer's weight: scaling * B A."""

    a: torch.Tensor
    """A, (r, in)."""
    b: torch.Tensor
    """B, (out, r)."""
    scaling: float

    @property
    def sides(self) -> tuple[int, int]:
        """The layer's input and output features."""
        return self.a.shape[1], self.b.shape[0]


@dataclass(frozen=True)
class SavedAdapter:
    """One adapter."""

    folder: Path
    base: str | None
    """Folder or hub id of the base model, as the adapter names it."""
    revision: str | None
    task_type: str | None
    """PEFT's name of the task: "SEQ_CLS", "CAUSAL_LM", ..."""
    fan_in_fan_out: bool
    layers: Mapping[str, Change]
    """By the layer's full name in the base model."""
    heads: tuple[str, ...] = ()
    """`modules_to_save`: name endings of the modules that were trained whole."""
    head: Mapping[str, torch.Tensor] | None = None
    """Their tensors, by full name in the base model."""


def read_adapters(folders: Sequence[Path]) -> tuple[SavedAdapter, ...]:
    """Reads adapters that PEFT or ranksearch saved.

    Args:
        folders: Each holds `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        DataError: When one can't be read or is not plain LoRA; the faults of all folders at once.
    """
    found: list[SavedAdapter] = []
    faults: list[Fault] = []
    for folder in folders:
        try:
            found.append(_read(folder))
        except DataError as error:
            faults += error.faults
    if faults:
        raise DataError(list(dict.fromkeys(faults)))
    return tuple(found)


def some(names: Iterable[str]) -> str:
    """The first three of some names, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _read(folder: Path) -> SavedAdapter:
    try:
        if not folder.is_dir():
            remedy = "Correct the path; an adapter on a hub must be downloaded first."
            raise DataError(Fault("an adapter must be a folder on this machine", "no such folder", str(folder), remedy))
        config = _config(folder)
        tensors = _tensors(folder)
    except OSError as error:
        got = error.strerror or str(error)
        raise DataError(
            Fault("an adapter must be readable", got, str(folder), "Correct the path or the permissions.")
        ) from error
    layers, others, faults = _layers(folder, config, tensors)
    heads = tuple(dict.fromkeys(config.get("modules_to_save") or ()))
    head = {key.removeprefix(PREFIX): t for key, t in others.items() if key.startswith(PREFIX) and _inside(key, heads)}
    if foreign := sorted(key for key in others if key.removeprefix(PREFIX) not in head or not key.startswith(PREFIX)):
        rule = "an adapter's file must hold A and B of linear layers, and modules_to_save, and nothing else"
        remedy = (
            "Save it without them: copies of embeddings stay out by save_pretrained(..., save_embedding_layers=False)."
        )
        faults.append(Fault(rule, some(foreign), str(folder / _FILE), remedy))
    if (heads or config.get("task_type") == "SEQ_CLS") and not head:
        rule = (
            "an adapter for SEQ_CLS, or with modules_to_save, must hold what was trained whole: PEFT loads none without"
        )
        faults.append(Fault(rule, "no tensors of a head", str(folder / _FILE), "Save it again with its head."))
    if odd := sorted(f"{name} ({t.dtype})" for name, t in tensors.items() if t.dtype not in _FLOATS):
        rule = "every weight must be a floating-point number of 16 to 64 bits"
        faults.append(Fault(rule, some(odd), str(folder / _FILE), "Save the adapter without quantising it."))
    elif broken := sorted(name for name, t in tensors.items() if not bool(t.isfinite().all())):
        rule = "every weight must be a finite number"
        remedy = "The training diverged: take another checkpoint."
        faults.append(Fault(rule, f"NaN or infinity in {some(broken)}", str(folder / _FILE), remedy))
    if faults:
        raise DataError(faults)
    return SavedAdapter(
        folder=folder,
        base=config.get("base_model_name_or_path") or None,
        revision=config.get("revision") or None,
        task_type=config.get("task_type") or None,
        fan_in_fan_out=bool(config.get("fan_in_fan_out")),
        layers=layers,
        heads=heads if head else (),
        head=head,
    )


def _config(folder: Path) -> dict[str, Any]:
    """`adapter_config.json`, checked."""
    path = folder / _CONFIG
    if not path.is_file() and (folder / ABOUT).is_file():
        got = f"ranksearch's own format ({ABOUT}), for methods that PEFT's can't express"
        raise DataError(Fault(_PLAIN_LORA, got, str(folder), "Take adapters of other methods."))
    if not path.is_file():
        remedy = "Name the folder that save_pretrained or ranksearch wrote."
        raise DataError(Fault(f"an adapter's folder must hold {_CONFIG}", "none", str(folder), remedy))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        got = f"{type(error).__name__}: {shown(str(error))}"
        raise DataError(Fault(f"{_CONFIG} must be JSON", got, str(path), "Save the adapter again.")) from error
    if not isinstance(config, dict):
        got = f"a {type(config).__name__}"
        raise DataError(Fault(f"{_CONFIG} must hold an object", got, str(path), "Save the adapter again."))
    if config.get("peft_type") != "LORA":
        got = f"peft_type={shown(config.get('peft_type'))}"
        remedy = "Take LoRA adapters; PEFT's save_as_lora turns some other kinds into one."
        raise DataError(Fault(_PLAIN_LORA, got, str(path), remedy))
    faults = [*_other_forms(config, path), *_wrong_values(config, path)]
    if faults:
        raise DataError(faults)
    return config


def _other_forms(config: Mapping[str, Any], path: Path) -> list[Fault]:
    faults = []
    used = sorted(name for name in _OTHER_FORMS if config.get(name))
    if config.get("bias", "none") != "none":
        used.append("bias")
    init = config.get("init_lora_weights")
    for name in used:
        remedy = "Convert it to plain LoRA, or train it again without that option."
        faults.append(Fault(_PLAIN_LORA, f"{name}={shown(config[name])}", str(path), remedy))
    if isinstance(init, str) and init.lower().startswith(_MUTATING):
        rule = "an adapter must be a change of the original base weights"
        got = f"init_lora_weights={shown(init)}"
        remedy = "Convert it: save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        faults.append(Fault(rule, got, str(path), remedy))
    unknown = sorted(str(name) for name, value in config.items() if name not in _KNOWN and value)
    if unknown:
        rule = "every option in use must be one that the installed PEFT knows: another may change what a layer does"
        faults.append(Fault(rule, some(map(shown, unknown)), str(path), "Install the PEFT that wrote the adapter."))
    return faults


def _wrong_values(config: Mapping[str, Any], path: Path) -> list[Fault]:
    """Faults of the values that composing reads."""
    rules = {
        "r": ("a whole number of at least 1", _is_rank(config.get("r"))),
        "lora_alpha": ("a finite number", _is_number(config.get("lora_alpha"))),
        "use_rslora": ("true or false", isinstance(config.get("use_rslora", False), bool)),
        "fan_in_fan_out": ("true or false", isinstance(config.get("fan_in_fan_out", False), bool)),
        "rank_pattern": ("patterns of names with ranks", _is_pattern(config.get("rank_pattern"), _is_rank)),
        "alpha_pattern": ("patterns of names with numbers", _is_pattern(config.get("alpha_pattern"), _is_number)),
        "modules_to_save": ("a list of names", _is_names(config.get("modules_to_save"))),
    }
    for name in ("base_model_name_or_path", "revision"):
        rules[name] = ("a text or null", isinstance(config.get(name), str | None))
    tasks = [task.value for task in TaskType]
    rules["task_type"] = (f"null or one of {', '.join(tasks)}", config.get("task_type") in [None, *tasks])
    return [
        Fault(f"`{name}` must be {rule}", shown(config.get(name)), str(path), "Save the adapter again.")
        for name, (rule, kept) in rules.items()
        if not kept
    ]


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e30 and not (isinstance(value, float) and math.isnan(value))


def _is_names(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) and name for name in value))


def _is_pattern(value: object, is_value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or not all(map(is_value, value.values())):
        return False
    try:
        for pattern in value:
            # As PEFT puts it together.
            re.compile(rf"(.*\.)?({pattern})$")
    except re.error:
        return False
    return True


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / _FILE
    if not path.is_file():
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth"})
        rule = f"an adapter's weights must lie in {_FILE}: a pickle can run code when it is opened"
        remedy = "Save it where you trust it, with save_pretrained(..., safe_serialization=True)."
        raise DataError(Fault(rule, ", ".join(pickled) or "none", str(folder), remedy))
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        rule, remedy = "a file of weights must be whole", "Save the adapter, or fetch it, again."
        raise DataError(Fault(rule, str(error), str(path), remedy)) from error


def _layers(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Change], dict[str, torch.Tensor], list[Fault]]:
    """Layers by name, all other tensors by their key, and what is wrong with the layers."""
    factors: dict[str, dict[int, torch.Tensor]] = {}
    others = {}
    for key, tensor in tensors.items():
        ending = next((e for e in _SIDES if key.endswith(e)), None)
        if ending is None or not key.startswith(PREFIX):
            others[key] = tensor
        else:
            factors.setdefault(key.removeprefix(PREFIX).removesuffix(ending), {})[_SIDES[ending]] = tensor
    wrong: dict[str, list[str]] = {}
    layers = {}
    for name, sides in sorted(factors.items()):
        a, b = sides.get(0), sides.get(1)
        if a is None or b is None:
            wrong.setdefault("each layer must have both A and B", []).append(f"{name} without {'AB'[a is not None]}")
            continue
        shapes = f"{name} with A {tuple(a.shape)}, B {tuple(b.shape)}"
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            wrong.setdefault("A must be of shape (r, in) and B of shape (out, r)", []).append(shapes)
            continue
        r, alpha = (
            _by_pattern(config, name, *keys) for keys in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
        )
        if a.shape[0] != r:
            wrong.setdefault(f"the ranks in {_CONFIG} must be those of the file", []).append(f"r={r} and {shapes}")
            continue
        layers[name] = Change(a, b, scaling(int(r), alpha, config.get("use_rslora", False)))
    if not factors:
        wrong["an adapter must change at least one layer"] = ["no lora_A and lora_B"]
    place, remedy = str(folder / _FILE), "Save the adapter again."
    return layers, others, [Fault(rule, some(names), place, remedy) for rule, names in wrong.items()]


def _by_pattern(config: Mapping[str, Any], name: str, patterns: str, default: str) -> float:
    """A layer's value by PEFT's rule: the first pattern that its name ends in, else the value for all."""
    by_name = config.get(patterns) or {}
    value: float = by_name.get(get_pattern_key(by_name.keys(), name), config[default])
    return value


def _inside(key: str, modules: Sequence[str]) -> bool:
    """Whether a tensor belongs to one of `modules_to_save`, which PEFT takes as endings of a module's name."""
    parts = key.removeprefix(PREFIX).split(".")
    return any(".".join(parts[:i]).endswith(m) for i in range(1, len(parts)) for m in modules)
