"""Target `python`: a script of plain PEFT and transformers that trains the configuration as the study did.

A study's script comes with the study's own rows, split and tokenised, and repeats its run: data order, what adapter
and head begin with, dropout, schedule. A recommendation's script reads files of the user's. Imports none of the
packages that the script needs.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import numpy as np

from ranksearch.config import whole
from ranksearch.data.prepared import Prepared, Split
from ranksearch.errors import ExportError, Fault, StoreError
from ranksearch.export.fields import FIELDS
from ranksearch.export.shared import PEFT_METHODS, PRECISIONS, comment, unknown, value_faults
from ranksearch.export.source import Source
from ranksearch.methods import METHODS, own_parameters
from ranksearch.records import StudyRecord

__all__ = ["ABOUT", "EXPRESSES", "TARGET", "build", "refuses"]

TARGET = "python"
ABOUT = "train.py: a script of PEFT and transformers that repeats the study's run, with its tokenised rows"
# A ratio of ranks is written as the patterns that it makes.
EXPRESSES = set(FIELDS) - set(own_parameters(METHODS)) | {"mlp_rank_ratio"}

_COLUMNS = {"classification": ("text", "label"), "generation": ("prompt", "completion")}


def refuses(source: Source) -> dict[str, str]:
    """Values that the script does not know."""
    out = value_faults(source, methods=tuple(PEFT_METHODS), whole_alpha=False, classifies=True)
    # The script splits a batch as training does, evenly or not.
    out.pop("gradient_accumulation", None)
    if source.values.get("lr_scheduler_type", "linear") != "linear":
        out["lr_scheduler_type"] = "the script's is linear"
    return out


def build(source: Source) -> dict[str, bytes]:
    """The script, and the rows where there is a study.

    Raises:
        ExportError: The study's rows are not there, or are torn.
    """
    files: dict[str, bytes] = {}
    data = None
    if source.study is not None:
        data = _prepared(source)
        files = {"train.jsonl": _rows(data.train), "eval.jsonl": _rows(data.eval)}
    return {"train.py": _script(source, data).encode()} | files


def _prepared(source: Source) -> Prepared:
    folder = source.folder
    try:
        if folder is None:
            raise StoreError("the study has no folder")
        return Prepared.load(folder / "data")
    except StoreError as error:
        raise ExportError(
            Fault(
                "the study's folder must hold its tokenised rows",
                str(error),
                source.title,
                "Run `ranksearch search SPEC --resume`, which writes them again.",
            )
        ) from error


def _rows(split: Split) -> bytes:
    lines = []
    for i in range(len(split)):
        row: dict[str, Any] = {"input_ids": split.row(i).tolist()}
        if split.token_type_ids is not None:
            row["token_type_ids"] = split.token_type_ids[split.span(i)].tolist()
        if split.labels is not None:
            row["label"] = int(split.labels[i])
        if split.trained is not None:
            row["trained"] = split.trained[split.span(i)].astype(np.int8).tolist()
        lines.append(json.dumps(row) + "\n")
    return "".join(lines).encode()


def _script(source: Source, data: Prepared | None) -> str:
    body = _text("train")
    rows = _text("rows_given" if data is None else "rows_saved")
    if data is None:
        body = body.replace("import copy\n", "import copy\nimport csv\n")
        body = body.replace("SequenceClassification\n", "SequenceClassification, AutoTokenizer\n", 1)
    body = body.replace("#: rows\n", rows).replace("#: settings\n", _settings(source, data))
    run = source.run()
    notes = [
        "Needs torch, transformers and peft, nothing else. Run `python train.py`.",
        *(
            ()
            if run is None
            else (
                f"Repeats trial {run.number}, seed {run.seed}, up to rounding, which a high learning rate amplifies "
                "from step to step.",
            )
        ),
        *unknown(source, "model", "max_steps", "precision"),
    ]
    if source.values.get("precision") in ("bf16", "fp16"):
        notes.append("PEFT adds in float32 where the study did in half precision: losses agree to about 1 %.")
    return comment(source, notes) + "\n" + body


def _settings(source: Source, data: Prepared | None) -> str:
    values, study, run = source.values, source.study, source.run()
    settings: dict[str, Any] = {
        "MODEL": source.base_model(),
        "REVISION": None if study is None else study.spec["model"].get("revision"),
        "TASK": values.get("task", "classification"),
        "PRECISION": _precision(values),
        "SEED": values.get("seed", 0) if run is None else run.seed,
        "LORA": _lora(source),
        "TOP_RANK": values.get("r", 0) if study is None else _top_rank(study, values),
        "BLOCKS": None if study is None else study.model.blocks,
        "LEARNING_RATE": values.get("learning_rate"),
        "LAYER_GROUP_LR": {g: values.get(f"layer_group_lr.{g}", 1.0) for g in ("bottom", "middle", "top")},
        "LORAPLUS_LR_RATIO": values.get("loraplus_lr_ratio", 1),
        "HEAD_LR_RATIO": values.get("head_lr_ratio", 1),
        "WEIGHT_DECAY": values.get("weight_decay", 0.0),
        "BATCH_SIZE": values.get("batch_size", 32),
        "GRADIENT_ACCUMULATION": values.get("gradient_accumulation", 1),
        "GRADIENT_CHECKPOINTING": values.get("gradient_checkpointing", False),
        "WARMUP_STEPS": values.get("warmup_steps", 0),
        "MAX_STEPS": values.get("max_steps"),
        "MAX_GRAD_NORM": values.get("max_grad_norm", 1.0),
    }
    if data is None:
        settings |= {"MAX_LENGTH": values.get("max_length", 512), "COLUMNS": _COLUMNS[settings["TASK"]]}
    else:
        last = {int(t) for s in (data.train, data.eval, data.test) if len(s) for t in s.ids[s.offsets[1:] - 1]}
        free = (i for i in range(study.model.vocab_size if study else 0) if i not in last)
        other = data.pad_id if data.pad_id not in last else next(free, data.pad_id)
        settings |= {"CLASSES": list(data.labels), "PAD_ID": data.pad_id, "OTHER_PAD_ID": other}
    return "".join(f"{name} = {_code(value)}\n" for name, value in settings.items())


def _precision(values: Any) -> str:
    precision = values.get("precision", "fp32")
    return "bf16" if precision == "auto" else str(precision) if precision in PRECISIONS else "fp32"


def _lora(source: Source) -> dict[str, Any]:
    """Arguments of LoraConfig."""
    values = source.values
    out = {f.lora: values[n] for n, f in FIELDS.items() if f.lora is not None and n in values}
    if "lora_alpha" in out:
        out["lora_alpha"] = whole(out["lora_alpha"])
    if not isinstance(out.get("target_modules", ""), str):
        out["target_modules"] = list(out["target_modules"])
    out |= PEFT_METHODS[values.get("method", "lora")]
    out["task_type"] = "CAUSAL_LM" if values.get("task") == "generation" else "SEQ_CLS"
    if source.study is not None and source.study.model.head_modules:
        out["modules_to_save"] = list(source.study.model.head_modules)
    return out


def _top_rank(study: StudyRecord, values: Any) -> int:
    """The largest rank of the study's space: every adapter begins as the first rows of one of that rank."""
    asked = study.spec.get("space", {}).get("r", values.get("r", 0))
    if isinstance(asked, dict):
        return int(max(next(iter(asked.values()))))
    return int(asked)


def _code(value: Any) -> str:
    if isinstance(value, dict):
        return "{\n" + "".join(f"    {name!r}: {inner!r},\n" for name, inner in value.items()) + "}"
    return repr(value)


def _text(name: str) -> str:
    return resources.files("ranksearch.export").joinpath(f"scripts/{name}.py.txt").read_text(encoding="utf-8")
