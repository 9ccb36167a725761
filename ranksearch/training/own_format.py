"""What PEFT's format cannot express, on disk: the trained tensors, and how to attach them again.

`ranksearch_adapter.safetensors` holds every trained tensor, head included, by its name in the attached model;
`ranksearch_adapter.json` the method, the configuration and the base model. Attaching the configuration anew and
copying the tensors in gives the trained model back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ranksearch.errors import StoreError
from ranksearch.training.heads import head_trainables
from ranksearch.training.methods import Method

__all__ = ["ABOUT", "read_own", "restore", "write_own"]

ABOUT, _WEIGHTS = "ranksearch_adapter.json", "ranksearch_adapter.safetensors"
_FORMAT, _VERSION = "ranksearch-adapter", 1


def write_own(method: Method, folder: Path) -> None:
    """Writes what a method trained.

    Args:
        method: The attached method.
        folder: Is made where it is missing; files of those names in it are replaced.

    Raises:
        StoreError: When the folder can't be written.
    """
    given = method.attachment
    about = {
        "format": _FORMAT,
        "version": _VERSION,
        "config": given.config.plain(),
        "seed": given.seed,
        "max_steps": given.max_steps,
        "top_rank": given.top_rank,
        "target_modules": list(given.endings),
        "base_model_name_or_path": given.base,
        "revision": given.revision,
        "task_type": given.task_type,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({n: t.detach().cpu().contiguous() for n, t in _tensors(method).items()}, folder / _WEIGHTS)
        (folder / ABOUT).write_text(json.dumps(about, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        message = f"an adapter must be written, but got: {error} ({folder}). Free space or permit writing."
        raise StoreError(message) from error


def read_own(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The description and the tensors.

    Raises:
        StoreError: When they can't be read, or a newer version wrote them.
    """
    remedy = "Train the configuration again."
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        tensors = load_file(folder / _WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise StoreError(f"a saved adapter must be whole, but got: {error} ({folder}). {remedy}") from error
    got = (about.get("format"), about.get("version")) if isinstance(about, dict) else None
    if got != (_FORMAT, _VERSION):
        wanted = f"{_FORMAT}, version {_VERSION}"
        raise StoreError(f"a saved adapter must be in the format {wanted}, but got {got} ({folder}). {remedy}")
    return about, tensors


@torch.no_grad()
def restore(method: Method, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Copies saved tensors into an attached method.

    Raises:
        StoreError: When they are those of another model or configuration.
    """
    wanted = _tensors(method)
    wrong = sorted(
        set(wanted) ^ set(tensors) | {n for n in set(wanted) & set(tensors) if wanted[n].shape != tensors[n].shape}
    )
    if wrong:
        told = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        message = (
            f"a saved adapter must fit its base model, but {told} do not ({folder}). Give the model it was trained on."
        )
        raise StoreError(message)
    for name, tensor in wanted.items():
        tensor.copy_(tensors[name])


def _tensors(method: Method) -> dict[str, torch.Tensor]:
    trained = [*method.trainables(), *head_trainables(method.root)]
    return {t.name: t.parameter for t in trained} | method.constants()
