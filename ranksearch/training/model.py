"""Loads a base model, or only its facts, and refuses by name what can't be trained.

No question is asked, no code of a model's own is run unless the spec says so, and no pickle is opened.
"""

from __future__ import annotations

import functools
import socket
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants as hub
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from ranksearch.errors import DataError, Fault
from ranksearch.lora import ModelFacts
from ranksearch.training.facts import head_modules, model_facts
from ranksearch.training.failures import OutOfMemory, memory_guard
from ranksearch.training.quiet import quiet_loading

__all__ = ["Loaded", "ModelSource", "base_config", "check_weights", "empty_model", "inspect_model", "load_model"]

_NO_PICKLE = "the weights must be in safetensors files: a pickle can run code when it is opened"
_ENCODERS: Any = AutoModelForMaskedLM._model_mapping
_CLASSES = {"classification": AutoModelForSequenceClassification, "generation": AutoModelForCausalLM}


@dataclass(frozen=True)
class ModelSource:
    """Where a base model comes from."""

    path: str
    """A local folder or a hub id."""
    name: str | None = None
    """As the spec names it; null = the path."""
    revision: str | None = None
    """Git revision on the hub."""
    dtype: str = "auto"
    """What the weights are held in: "auto", "float32", "bfloat16" or "float16"."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the model may run."""

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.name or self.path


@dataclass(frozen=True)
class Loaded:
    """A base model with its weights."""

    model: PreTrainedModel
    fresh: frozenset[str]
    """Parameters of the head that the checkpoint has no values for: each run draws them from its seed."""
    notes: tuple[str, ...]


def inspect_model(source: ModelSource, task: str, num_labels: int) -> ModelFacts:
    """A model's facts, without reading its weights.

    Args:
        source: The model.
        task: "classification" or "generation".
        num_labels: Classes; ignored for generation.

    Raises:
        DataError: When there is no such model, or it can't be used for the task.
    """
    return model_facts(empty_model(source, task, num_labels), source.label)


def empty_model(source: ModelSource, task: str, num_labels: int) -> PreTrainedModel:
    """A model without weights, on the meta device.

    Args:
        source: The model.
        task: "classification" or "generation".
        num_labels: Classes; ignored for generation.

    Raises:
        DataError: When there is no such model, or it can't be used for the task.
    """
    config = _config(source, task, num_labels)
    with quiet_loading(), torch.device("meta"):
        try:
            model: PreTrainedModel = _CLASSES[task].from_config(config, trust_remote_code=source.trust_remote_code)
        except Exception as error:  # whatever a family's code makes of values that do not fit together
            raise DataError(_unloadable(source, error)) from error
    return model


def load_model(source: ModelSource, task: str, num_labels: int, dtype: torch.dtype) -> Loaded:
    """A model with its weights, frozen, on the CPU.

    Args:
        source: The model.
        task: "classification" or "generation".
        num_labels: Classes; ignored for generation.
        dtype: What the weights are converted to while they are read.

    Raises:
        DataError: When there is no such model, it can't be used for the task, or its weights are unsafe or incomplete.
        OutOfMemory: When it doesn't fit.
    """
    config = _config(source, task, num_labels)
    _refuse_pickle(source)
    with quiet_loading(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            with memory_guard("loading the model"):
                model, info = _CLASSES[task].from_pretrained(
                    source.path,
                    config=config,
                    revision=source.revision,
                    trust_remote_code=source.trust_remote_code,
                    dtype=dtype,
                    use_safetensors=True,
                    local_files_only=not (Path(source.path).is_dir() or _online()),
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
        except OutOfMemory:
            raise
        except Exception as error:  # safetensors, the hub's client and transformers share no root
            raise DataError(_unloadable(source, error)) from error
    heads = head_modules(model)
    mismatched = {str(entry[0]) for entry in info["mismatched_keys"]}
    absent = set(info["missing_keys"]) | mismatched
    broken = sorted(n for n in absent if not any(n == head or n.startswith(f"{head}.") for head in heads))
    if broken:
        shown = ", ".join(broken[:3]) + (f" and {len(broken) - 3} more" if len(broken) > 3 else "")
        rule = "a checkpoint must hold every weight of its base model, in the shape that config.json says"
        remedy = "Save the model again with save_pretrained, or take another."
        raise DataError(Fault(rule, f"none, or another shape, for {shown}", source.label, remedy))
    notes = []
    if mismatched:
        notes.append(
            f"{source.label} has a head for other classes ({', '.join(sorted(mismatched))}): a new one replaces it."
        )
    model.requires_grad_(False)
    model.eval()
    return Loaded(model, frozenset(absent), tuple(notes))


def _config(source: ModelSource, task: str, num_labels: int) -> Any:
    """The model's configuration for training, checked."""
    config = base_config(source, task, num_labels)
    config.use_cache = False
    return config


def base_config(source: ModelSource, task: str, num_labels: int | None = None) -> Any:
    """A model's configuration as it stands, checked.

    Args:
        source: The model.
        task: "classification" or "generation".
        num_labels: Classes; ignored for generation; None keeps the model's own.

    Raises:
        DataError: When there is no such model, or it can't be used for the task.
    """
    folder = Path(source.path)
    looks_local = folder.is_absolute() or source.path.startswith((".", "~")) or source.path.count("/") > 1
    if not folder.is_dir() and looks_local:
        rule = "the model must be a folder with a config.json, or a hub id"
        raise DataError(Fault(rule, "no such folder", source.path, "Correct the path."))
    if folder.is_dir() and not (folder / "config.json").is_file():
        rule = "a model folder must hold a config.json"
        raise DataError(Fault(rule, "none", source.path, "Save the model there with save_pretrained."))
    labels = {"num_labels": num_labels} if task == "classification" and num_labels is not None else {}
    with quiet_loading():
        try:
            config = AutoConfig.from_pretrained(
                source.path,
                revision=source.revision,
                trust_remote_code=source.trust_remote_code,
                local_files_only=not (folder.is_dir() or _online()),
                **labels,
            )
        except Exception as error:  # the hub's client and transformers share no root
            raise DataError(_unloadable(source, error)) from error
    if getattr(config, "is_encoder_decoder", False):
        rule = "the model must be an encoder or a decoder"
        got = f"{config.model_type}, an encoder-decoder"
        raise DataError(Fault(rule, got, source.label, "Take an encoder such as BERT or a decoder such as Llama."))
    own_class = _CLASSES[task].__name__ in (getattr(config, "auto_map", None) or {})
    known: Any = _CLASSES[task]._model_mapping
    if type(config) not in known and not (own_class and source.trust_remote_code):
        rule = f"the model's family must have a class for {task} in transformers"
        raise DataError(Fault(rule, str(config.model_type), source.label, "Take a model of another family."))
    if task == "generation" and type(config) in _ENCODERS and not getattr(config, "is_decoder", False):
        rule = "a model for generation must be a decoder: an encoder reads the words that it should predict"
        raise DataError(Fault(rule, str(config.model_type), source.label, "Take a decoder such as Llama."))
    return config


def _refuse_pickle(source: ModelSource) -> None:
    folder = Path(source.path)
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    endings = {".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack"}
    found = sorted(p.name for p in folder.iterdir() if p.suffix in endings)
    remedy = "Load them once where you trust them, and save with save_pretrained(..., safe_serialization=True)."
    raise DataError(Fault(_NO_PICKLE, ", ".join(found) or "no weights", source.path, remedy))


def check_weights(source: ModelSource) -> None:
    """Opens a folder's files of weights, which reads their headers and compares them with their sizes.

    Raises:
        DataError: When there are none, or they are unsafe or torn.
    """
    _refuse_pickle(source)
    faults = []
    for file in sorted(Path(source.path).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            rule = "a file of weights must be whole"
            faults.append(Fault(rule, str(error), str(file), "Fetch it, or save the model, again."))
    if faults:
        raise DataError(faults)


def _unloadable(source: ModelSource, error: Exception) -> Fault:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        rule = "the model must be one that transformers knows: ranksearch does not run code that comes with a model"
        got = "a model that needs its own code (auto_map in config.json)"
        remedy = "Take a known family; if you trust its code, set model.trust_remote_code and give --trust-remote-code."
        return Fault(rule, got, source.label, remedy)
    got = f"{type(error).__name__}: {text[:300]}"
    if Path(source.path).is_dir():
        return Fault("the model must load", got, source.path, "Mend or replace the folder.")
    if "safetensors" in text and "does not appear" in text:
        return Fault(_NO_PICKLE, "none", source.label, "Take a revision or a copy that has them.")
    rule = "a hub model must exist and be reachable, or lie in the hub's cache"
    remedy = (
        "Check the id and the network; without one, download the model elsewhere, and name its folder; "
        "or take an `asset:` model."
    )
    return Fault(rule, got if _online() else "no network, and no copy in the cache", source.label, remedy)


@functools.cache
def _online() -> bool:
    """Whether the hub answers. Its client tries for half a minute where there is no network."""
    if hub.HF_HUB_OFFLINE:
        return False
    if urllib.request.getproxies():
        return True  # only the client knows its way through a proxy
    host = urllib.parse.urlsplit(hub.ENDPOINT)
    try:
        with socket.create_connection((host.hostname or "", host.port or 443), timeout=5):
            return True
    except OSError:
        return False
