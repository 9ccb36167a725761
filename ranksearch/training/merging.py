"""Merges a composed adapter into its base model: a full model folder that transformers loads.

PEFT merges; the model is loaded here, and what would damage it is refused. Knows nothing of how adapters are composed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from peft.utils import set_peft_model_state_dict
from safetensors import SafetensorError
from transformers import PreTrainedModel

from ranksearch.data.tokenizer import load_tokenizer
from ranksearch.errors import DataError, Fault, StoreError, shown
from ranksearch.training.composing import Composed
from ranksearch.training.facts import sides
from ranksearch.training.failures import memory_guard
from ranksearch.training.model import ModelSource, base_config, empty_model, load_model
from ranksearch.training.quiet import quiet_loading, quiet_wrapping
from ranksearch.training.saved_adapters import some
from ranksearch.training.saving import new_folder

__all__ = ["attach", "load_base", "merge", "write_merged"]

_TASKS = {"SEQ_CLS": "classification", "CAUSAL_LM": "generation"}


def load_base(composed: Composed) -> PreTrainedModel:
    """The base model of an adapter, in float32 on the CPU, with the classes of the adapter's head.

    Raises:
        DataError: When there is none, or the adapter does not fit it; all faults at once.
        OutOfMemory: When it doesn't fit.
    """
    place = composed.base or "the adapters"
    if composed.base is None:
        rule = "a base model must be known"
        raise DataError(Fault(rule, "none named by the adapters", place, "Name it: --base MODEL."))
    if composed.task_type not in _TASKS:
        rule = f"the adapters' task_type must be {' or '.join(_TASKS)}, so that the class of the model is known"
        remedy = "Compose them into one adapter (--how cat), and merge that with PEFT."
        raise DataError(Fault(rule, shown(composed.task_type), place, remedy))
    source, task = ModelSource(composed.base, revision=composed.revision), _TASKS[composed.task_type]
    config = base_config(source, task)
    if getattr(config, "quantization_config", None):
        rule = "the base model's weights must not be quantised: they can't take a change"
        raise DataError(Fault(rule, "a quantization_config", place, "Name the unquantised model: --base MODEL."))
    classes = _classes(source, task, composed.head) if composed.head else int(config.num_labels)
    loaded = load_model(source, task, classes, torch.float32)
    untrained = sorted(name for name in loaded.fresh if name not in composed.head)
    faults = _misfits(loaded.model, composed, place)
    if untrained:
        rule = "every weight must come from the base model or an adapter"
        remedy = "Take adapters that hold their head, or a base model that has one."
        faults.append(Fault(rule, f"none for {some(untrained)}", place, remedy))
    if faults:
        raise DataError(faults)
    return loaded.model


def attach(model: PreTrainedModel, adapters: Mapping[str, Composed]) -> PeftModel:
    """Wraps a model with adapters; the first is active."""
    attached: PeftModel | None = None
    # PEFT sets fan_in_fan_out itself where a layer needs it, and says so each time.
    with quiet_wrapping(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to", UserWarning)
        for name, composed in adapters.items():
            if attached is None:
                attached = get_peft_model(model, composed.config(), adapter_name=name)
            else:
                attached.add_adapter(name, composed.config())
            set_peft_model_state_dict(attached, composed.tensors(), adapter_name=name)
    if attached is None:
        raise ValueError("no adapter to attach")
    attached.eval()
    return attached


def merge(model: PreTrainedModel, composed: Composed) -> PreTrainedModel:
    """Puts an adapter's change into the weights, and its head in the place of the model's.

    Args:
        model: From `load_base`; is changed.
        composed: The adapter.
    """
    with memory_guard("merging"):
        merged: PreTrainedModel = attach(model, {"default": composed}).merge_and_unload()
    return merged


def write_merged(model: PreTrainedModel, composed: Composed, out: Path) -> tuple[str, ...]:
    """Writes a merged model with its tokenizer, in the number type of its base.

    Args:
        model: From `merge`.
        composed: The adapter that was merged.
        out: Folder to write.

    Returns:
        What the user should know, as sentences.

    Raises:
        DataError: When the weights don't fit the number type.
        StoreError: When the folder can't be written.
    """
    source = ModelSource(str(composed.base), revision=composed.revision)
    config = base_config(source, _TASKS[str(composed.task_type)])
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    torch.nn.Module.to(model, dtype)
    # Loading for training turns the cache off; a model that is handed on has what its base has.
    if "use_cache" in config.to_dict():
        model.config.use_cache = config.use_cache
    else:
        del model.config.use_cache
    if broken := [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]:
        rule = f"the merged weights must fit {str(dtype).removeprefix('torch.')}"
        raise DataError(Fault(rule, f"NaN or infinity in {some(broken)}", str(composed.base), "Give smaller weights."))
    notes = []
    if dtype != torch.float32:
        notes.append(f"Merged in float32 and rounded to the base model's {str(dtype).removeprefix('torch.')}.")
    tokenizer: Any = None
    try:
        tokenizer = load_tokenizer(source.path, source.revision)
    except DataError:
        notes.append(f"{source.label} has no tokenizer that loads: none was written.")
    with new_folder(out) as folder, quiet_loading():
        try:
            model.save_pretrained(folder)
        except SafetensorError as error:
            raise StoreError(f"{out} can't be written: {error}. Free space, or give another --out.") from error
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    return tuple(notes)


def _classes(source: ModelSource, task: str, head: Mapping[str, torch.Tensor]) -> int:
    """How many classes a head tells apart: the number with which the model's own head gets its shapes."""
    candidates = sorted({t.shape[0] for t in head.values() if t.numel() > 0 and t.dim() > 0})
    for count in candidates:
        shapes = {name: p.shape for name, p in empty_model(source, task, count).named_parameters()}
        if all(shapes.get(name) == t.shape for name, t in head.items()):
            return count
    rule = "the head must fit the base model"
    got = some(f"{name} {tuple(t.shape)}" for name, t in head.items())
    raise DataError(Fault(rule, got, source.label, "Name the base model that it was trained on: --base MODEL."))


def _misfits(model: PreTrainedModel, composed: Composed, place: str) -> list[Fault]:
    """Layers of the adapter that the model lacks, has in another shape, or shares with an embedding."""
    modules = dict(model.named_modules())
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    shared = {name for names in owners.values() if len(names) > 1 for name in names}
    faults = []
    absent = [name for name in composed.layers if name not in modules]
    unlike = [
        f"{name} with {a.shape[1]} x {b.shape[0]}"
        for name, (a, b) in composed.layers.items()
        if name in modules and sides(modules[name]) != (a.shape[1], b.shape[0])
    ]
    remedy = "Name the base model that the adapters were trained on: --base MODEL."
    if absent:
        faults.append(
            Fault("the base model must have every layer of the adapters", f"no {some(absent)}", place, remedy)
        )
    if unlike:
        rule = "every layer of the adapters must be a linear layer of the same sides in the base model"
        faults.append(Fault(rule, some(unlike), place, remedy))
    tied = [n for n in (*(f"{name}.weight" for name in composed.layers), *composed.head) if n in shared]
    if tied:
        rule = "a weight that two modules share must not be merged into: it would change both (tie_word_embeddings)"
        remedy = "Compose into one adapter (--how cat or svd, without --measure), or leave that layer out."
        faults.append(Fault(rule, some(tied), place, remedy))
    return faults
