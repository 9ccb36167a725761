"""Adapters on disk: in PEFT's format, with the head, or where that can't express them in the one of `own_format`.

PEFT's is `adapter_config.json` and `adapter_model.safetensors`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ranksearch.config import TrialConfig
from ranksearch.errors import StoreError
from ranksearch.training.attaching import attach
from ranksearch.training.evaluation import evaluate
from ranksearch.training.failures import memory_guard
from ranksearch.training.heads import keep_heads_wide
from ranksearch.training.own_format import ABOUT, read_own, restore
from ranksearch.training.quiet import quiet_wrapping
from ranksearch.training.workbench import Workbench

__all__ = ["evaluate_saved", "load_saved", "load_trained", "new_folder", "write_adapter"]


def write_adapter(
    config: PeftConfig, tensors: Mapping[str, torch.Tensor], target_modules: Sequence[str], folder: Path
) -> None:
    """Writes an adapter's two files.

    Args:
        config: PEFT's configuration.
        tensors: Weights by the names that PEFT gives them in a file.
        target_modules: Name endings of the adapted layers.
        folder: Is made where it is missing; a file of that name in it is replaced.

    Raises:
        StoreError: When the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in tensors.items()},
            folder / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )
        config.save_pretrained(folder)
        path = folder / "adapter_config.json"
        plain = json.loads(path.read_text(encoding="utf-8"))
        # PEFT writes sets in any order, names the head twice, and means "to be trained" by a false inference_mode.
        plain["target_modules"] = sorted(target_modules)
        plain["modules_to_save"] = list(dict.fromkeys(plain["modules_to_save"] or [])) or None
        plain["inference_mode"] = True
        path.write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        message = f"an adapter must be written, but got: {error} ({folder}). Free space or permit writing."
        raise StoreError(message) from error


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when the block ends well: as a whole or not at all.

    Args:
        out: The name; nothing but an empty folder may stand there.

    Raises:
        StoreError: When it can't be written.
    """
    staging: Path | None = None
    out = Path(os.path.abspath(out))  # "." and ".." have no name to give
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name[:100]}.", dir=out.parent))
        yield staging
        os.chmod(staging, 0o755)
        os.rename(staging, out)
    except OSError as error:
        raise StoreError(f"{out} can't be written: {error.strerror or error}. Give another --out.") from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def evaluate_saved(workbench: Workbench, folder: Path, part: str) -> dict[str, float]:
    """Loads a saved adapter, as PEFT does where the format is PEFT's, and measures it, what it writes included.

    Args:
        workbench: Base model and data.
        folder: What `AdapterRun.save` wrote.
        part: "train", "eval" or "test".

    Returns:
        Metrics as `test/nll` and so on.

    Raises:
        StoreError: When there is no adapter, or it is torn.
        OutOfMemory: When a batch doesn't fit.
    """
    with memory_guard("evaluating a saved adapter"):
        model = load_trained(workbench, folder)
        metrics = evaluate(model, workbench.task, workbench.parts[part], workbench.device, write=True)
    return {f"{part}/{name}": value for name, value in metrics.items()}


def load_trained(workbench: Workbench, folder: Path) -> PreTrainedModel:
    """The base model with a saved adapter of either format, ready to be called.

    Args:
        workbench: The base model; stays as it is.
        folder: What `AdapterRun.save` wrote.

    Raises:
        StoreError: When there is no adapter, it is torn, or it is for another model.
    """
    if (folder / ABOUT).is_file():
        return _own(workbench, folder)
    base: PreTrainedModel = load_saved(workbench, folder).get_base_model()
    return base


def load_saved(workbench: Workbench, folder: Path) -> PeftModel:
    """An adapter in PEFT's format on a skeleton of its base model, as PEFT loads it.

    Raises:
        StoreError: When there is none.
    """
    if not (folder / "adapter_config.json").is_file():
        raise StoreError(f"a saved adapter must lie there, but got none ({folder}). Train the configuration again.")
    with quiet_wrapping():
        model: PeftModel = PeftModel.from_pretrained(workbench.skeleton(), folder, torch_device=str(workbench.device))
    keep_heads_wide(model.get_base_model(), workbench.facts.head_modules, workbench.dtype)
    return model


def _own(workbench: Workbench, folder: Path) -> PreTrainedModel:
    about, tensors = read_own(folder)
    try:
        config = TrialConfig.model_validate(about["config"])
        given = {name: int(about[name]) for name in ("seed", "max_steps", "top_rank")}
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"a saved adapter must tell how it was made, but got: {error} ({folder}). Train it again."
        ) from error
    method, _ = attach(workbench, config, **given)
    restore(method, tensors, folder)
    return method.model
