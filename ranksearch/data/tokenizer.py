"""Loads a tokenizer without asking a question and without running a model's own code unless that was asked for.

Knows nothing of data. Leaves `model_max_length` at what tokenizer and model can both take.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranksearch.errors import DataError, Fault, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["NO_LIMIT", "check_own_code", "load_tokenizer"]

NO_LIMIT = 1_000_000
"""A `model_max_length` from here on means that none is known: transformers writes 1e30 then."""
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx")
_OFFSET = {
    "camembert",
    "data2vec-text",
    "esm",
    "ibert",
    "layoutlmv3",
    "lilt",
    "longformer",
    "luke",
    "markuplm",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}
"""Families whose positions start after the padding token's, so that the last of them can't be reached."""


def load_tokenizer(
    path_or_id: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model.

    Args:
        path_or_id: A folder or a hub id.
        revision: Git revision on the hub.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        DataError: When there is no model, it needs code of its own, or its tokenizer can't be loaded.
    """
    config = check_own_code(path_or_id, revision, trust_remote_code)
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            path_or_id, revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers and the hub's client have no common root
        raise DataError(_not_loaded("the model's tokenizer must load", path_or_id, error)) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # transformers makes one without words where the files are missing.
        got, remedy = "none", "Save the tokenizer beside the model with save_pretrained."
        raise DataError(Fault("the model's tokenizer must have a vocabulary", got, path_or_id, remedy))
    own = tokenizer.model_max_length
    if isinstance(own, bool) or not isinstance(own, int | float) or own < 1:
        rule = "`model_max_length` must be a number of tokens"
        raise DataError(Fault(rule, shown(own), f"{path_or_id}/tokenizer_config.json", "Correct it, or take it out."))
    positions = next((config[name] for name in _POSITIONS if isinstance(config.get(name), int)), None)
    if positions is not None:
        if config.get("model_type") in _OFFSET:
            positions -= int(config.get("pad_token_id") or 0) + 1
        tokenizer.model_max_length = min(int(own), positions)
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


def check_own_code(path_or_id: str, revision: str | None = None, trust_remote_code: bool = False) -> dict[str, Any]:
    """Refuses a model that only its own Python code can build, before anything of it is loaded.

    A model that names code of its own but is of a family that transformers has is fine: transformers' class is used.

    Args:
        path_or_id: A folder or a hub id.
        revision: Git revision on the hub.
        trust_remote_code: Whether such code may run; nothing is refused then.

    Returns:
        The model's configuration as it stands in config.json.

    Raises:
        DataError: When there is no model, or it needs code of its own.
    """
    config = _json(path_or_id, "config.json", revision)
    if trust_remote_code:
        return config
    from transformers import CONFIG_MAPPING

    if config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING:
        raise DataError(_own_code(path_or_id, "config.json", config["auto_map"]))
    tokenizer = _json(path_or_id, "tokenizer_config.json", revision, needed=False)
    mapped = tokenizer.get("auto_map")
    named = mapped.get("AutoTokenizer") if isinstance(mapped, dict) else mapped
    if named and config.get("model_type") not in CONFIG_MAPPING:
        raise DataError(_own_code(path_or_id, "tokenizer_config.json", mapped))
    return config


def _own_code(path_or_id: str, file: str, mapped: object) -> Fault:
    return Fault(
        "a model must need no code of its own, which ranksearch does not run",
        f"`auto_map` naming {_modules(mapped)}",
        f"{path_or_id}/{file}",
        "Choose a model of a known family; where you trust that code, set `model: {id: ..., trust_remote_code: true}` "
        "and give --trust-remote-code.",
    )


def _modules(mapped: object) -> str:
    """The files that an auto_map names."""
    values = mapped.values() if isinstance(mapped, dict) else [mapped]
    flat = [
        v for value in values for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, str)
    ]
    return ", ".join(sorted({f"{v.split('--')[-1].rpartition('.')[0]}.py" for v in flat}))


def _json(path_or_id: str, name: str, revision: str | None, *, needed: bool = True) -> dict[str, Any]:
    """A JSON file of the model, local or on the hub."""
    folder = Path(path_or_id)
    if folder.exists():
        path = folder / name
        if not folder.is_dir():
            raise DataError(
                Fault(
                    "a model must be a folder, a hub id or an asset",
                    "a file",
                    path_or_id,
                    "Give the folder that holds config.json.",
                )
            )
        if not path.is_file():
            if not needed:
                return {}
            raise DataError(
                Fault(
                    "a model's folder must hold config.json",
                    "none",
                    path_or_id,
                    "Give a folder that save_pretrained wrote.",
                )
            )
    elif path_or_id.startswith((".", "/", "~")) or path_or_id.count("/") > 1:
        raise DataError(
            Fault(
                "a model must be a folder, a hub id or an asset",
                "no such folder",
                path_or_id,
                "Correct the path; it is relative to the spec.",
            )
        )
    else:
        found = _from_hub(path_or_id, name, revision, needed)
        if found is None:
            return {}
        path = found
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            Fault(f"{name} must be readable JSON", str(error), f"{path_or_id}/{name}", "Repair it.")
        ) from error
    if not isinstance(values, dict):
        raise DataError(
            Fault(f"{name} must hold an object", type(values).__name__, f"{path_or_id}/{name}", "Repair it.")
        )
    return values


def _from_hub(identifier: str, name: str, revision: str | None, needed: bool) -> Path | None:
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(identifier, name, revision=revision, _raise_exceptions_for_missing_entries=needed)
    except Exception as error:  # transformers and the hub's client have no common root
        raise DataError(
            _not_loaded("a model must be a folder, an asset, or on the hub and within reach", identifier, error)
        ) from error
    return Path(found) if found else None


def _not_loaded(rule: str, path_or_id: str, error: Exception) -> Fault:
    why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return Fault(
        rule,
        why[:300],
        path_or_id,
        "Check its name and the network; offline, give a folder or an asset (`ranksearch assets list`).",
    )
