"""Reads exported files with the tools' own schemas and parsers, in one process apart from the tests.

`check` starts it; it puts the unpacked packages on its path and gives folder -> what is wrong there, [] where nothing
is. What a package imports without needing it here is stubbed by name.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

__all__ = ["READERS", "check"]


def check(packages: Mapping[str, Path], exports: Mapping[str, Sequence[Path]]) -> dict[str, list[str]]:
    """Folder -> what the tool does not accept in it.

    Args:
        packages: Target -> folder of the unpacked package.
        exports: Target -> folders with its exports.
    """
    asked = {
        "packages": {target: str(place) for target, place in packages.items()},
        "exports": {target: [str(f) for f in folders] for target, folders in exports.items()},
    }
    environment = os.environ | {"DISABLE_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.readers"], input=json.dumps(asked),
        capture_output=True, text=True, timeout=800, env=environment, cwd=Path(__file__).parent.parent, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _unkept(given: Any, read: Any, where: str) -> list[str]:
    """Values that are not what they were once the tool has read them."""
    if isinstance(given, Mapping):
        return [t for k, v in given.items() for t in _unkept(v, _inside(read, k), f"{where}.{k}" if where else k)]
    if isinstance(given, list) and isinstance(read, list | tuple) and len(given) == len(read):
        return [t for i, v in enumerate(given) for t in _unkept(v, read[i], f"{where}[{i}]")]
    plain = getattr(read, "value", read)
    if isinstance(plain, Path):
        plain = str(plain)
    return [] if plain == given else [f"{where}={given!r} is read as {plain!r}"]


def _inside(read: Any, key: str) -> Any:
    return read.get(key, "nothing") if isinstance(read, Mapping) else getattr(read, key, "nothing")


def _axolotl(package: Path) -> Callable[[Path], list[str]]:
    from axolotl.utils.schemas.config import AxolotlConfigWCapabilities  # type: ignore[import-not-found]

    machine = {
        "capabilities": {"bf16": True, "fp8": False, "n_gpu": 1, "n_node": 1, "compute_capability": "sm_90"},
        "env_capabilities": {"torch_version": "2.10.0"},
    }

    def read(folder: Path) -> list[str]:
        given = yaml.safe_load((folder / "config.yaml").read_text())
        # Its schema drops keys that it does not know, without a word.
        unknown = [f"no such key: {k}" for k in given if k not in AxolotlConfigWCapabilities.model_fields]
        return unknown or _unkept(given, AxolotlConfigWCapabilities(**given, **machine), "")

    return read


def _llamafactory(package: Path) -> Callable[[Path], list[str]]:
    stub = types.ModuleType("omegaconf")  # only reads files that a command line names
    stub.OmegaConf = stub.DictConfig = stub.ListConfig = object  # type: ignore[attr-defined]
    sys.modules["omegaconf"] = stub
    from llamafactory import hparams  # type: ignore[import-not-found]
    from llamafactory.extras.constants import DATA_CONFIG  # type: ignore[import-not-found]
    from transformers import HfArgumentParser

    parts = ("ModelArguments", "DataArguments", "TrainingArguments", "FinetuningArguments", "GeneratingArguments")
    parser = HfArgumentParser([getattr(hparams, name) for name in parts])
    attributes = _class_fields(package / "llamafactory/data/parser.py", "DatasetAttr")

    def read(folder: Path) -> list[str]:
        given = yaml.safe_load((folder / "train.yaml").read_text())
        merged: dict[str, Any] = {}
        for arguments in parser.parse_dict(dict(given), allow_extra_keys=False):
            merged |= {n: getattr(arguments, n) for n in arguments.__dataclass_fields__}
        # It splits names at commas.
        told = {n: v.split(",") if n in ("lora_target", "dataset") else v for n, v in given.items()}
        faults = _unkept(told, merged, "")
        if "dataset" in given:
            info = json.loads((folder / DATA_CONFIG).read_text())
            faults += [f"{DATA_CONFIG} lacks {n}" for n in given["dataset"].split(",") if n not in info]
            names = {n for entry in info.values() for part in ("columns", "tags") for n in entry.get(part, {})}
            faults += [f"{DATA_CONFIG}: no such column or tag: {n}" for n in sorted(names - attributes)]
        return faults

    return read


def _class_fields(path: Path, name: str) -> set[str]:
    """Annotated fields of a class, from its source."""
    found = next(n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef) and n.name == name)
    return {n.target.id for n in found.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def _trl(package: Path) -> Callable[[Path], list[str]]:
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser, get_peft_config  # type: ignore[import-not-found] # noqa: E501

    def read(folder: Path) -> list[str]:
        file = folder / "sft.yaml"
        given = yaml.safe_load(file.read_text())
        parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
        parsed = parser.parse_args_and_config(["--config", str(file)], fail_with_unknown_args=True)
        merged: dict[str, Any] = {}
        for arguments in parsed:
            merged |= {n: getattr(arguments, n) for n in arguments.__dataclass_fields__}
        if len(given.get("lora_target_modules", ())) == 1:
            given["lora_target_modules"] = given["lora_target_modules"][0]
        get_peft_config(parsed[2])
        return _unkept(given, merged, "") + _compiles(folder / "train.py", needed=False)

    return read


def _unsloth(package: Path) -> Callable[[Path], list[str]]:
    # Its __init__ needs a terminal framework; the schema itself needs pydantic only.
    spec = importlib.util.spec_from_file_location("unsloth_config", package / "unsloth_cli/config.py")
    assert spec is not None and spec.loader is not None
    config = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(config)
    peft = importlib.util.find_spec("peft")
    assert peft is not None and peft.submodule_search_locations is not None
    # What the call does not name itself goes on to PEFT.
    takes = _arguments(package / "unsloth/models/llama.py", "get_peft_model")
    takes |= _class_fields(Path(peft.submodule_search_locations[0]) / "tuners/lora/config.py", "LoraConfig")

    def read(folder: Path) -> list[str]:
        given = yaml.safe_load((folder / "config.yaml").read_text())
        faults = _unkept(given, config.load_config(folder / "config.yaml"), "") + _compiles(folder / "train.py")
        adapter = _constant(folder / "train.py", "ADAPTER")
        return faults + [f"get_peft_model takes no {n}" for n in adapter if n not in takes]

    return read


def _torchtune(package: Path) -> Callable[[Path], list[str]]:
    recipe = (package / "recipes/lora_finetune_single_device.py").read_text()
    read_keys = set(re.findall(r"cfg\.(\w+)", recipe)) | set(re.findall(r"cfg\.get\(\s*\"(\w+)\"", recipe))
    shipped = yaml.safe_load((package / "recipes/configs/llama3_2/1B_lora_single_device.yaml").read_text())

    def read(folder: Path) -> list[str]:
        given = yaml.safe_load((folder / "config.yaml").read_text())
        faults = [f"the recipe reads no {k}" for k in given if k not in read_keys | set(shipped)]
        faults += [f"the recipe needs {k}" for k in shipped if k not in given and k not in ("profiler",)]
        for entry in [*given.values(), *(d for d in [given.get("dataset")] if isinstance(d, list) for d in d)]:
            if not isinstance(entry, Mapping) or not entry["_component_"].startswith("torchtune."):
                continue
            path, _, name = entry["_component_"].rpartition(".")
            takes = _takes(package, path, name)
            more = {"data_files", "name"} if "dataset" in name else set()  # handed on to load_dataset
            faults += [f"{name} takes no {k}" for k in entry if k != "_component_" and k not in takes | more]
        return faults

    return read


def _takes(package: Path, path: str, name: str) -> set[str]:
    """Arguments of a function or class that a package's module exports, from the source."""
    place = package / path.replace(".", "/")
    for file in [place.with_suffix(".py")] if place.with_suffix(".py").is_file() else sorted(place.rglob("*.py")):
        if re.search(rf"^(?:def|class) {name}\b", file.read_text(), re.MULTILINE):
            return _arguments(file, name)
    raise LookupError(f"{path} has no {name}")


def _arguments(path: Path, name: str) -> set[str]:
    """Arguments of a function, or of a class's __init__, from its source."""
    tree = ast.parse(path.read_text())
    found: Any = next(
        n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name
    )  # fmt: skip
    if isinstance(found, ast.ClassDef):
        found = next(n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    return {a.arg for a in (*found.args.args, *found.args.kwonlyargs)}


def _constant(path: Path, name: str) -> dict[str, Any]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            found: dict[str, Any] = ast.literal_eval(node.value)
            return found
    raise LookupError(name)


def _compiles(path: Path, needed: bool = True) -> list[str]:
    if not path.is_file():
        return [f"no {path.name}"] if needed else []
    compile(path.read_text(), str(path), "exec")
    return []


def _peft(package: Path) -> Callable[[Path], list[str]]:
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import load_file

    from tests.results import tiny_base

    def read(folder: Path) -> list[str]:
        task = json.loads((folder / "adapter_config.json").read_text())["task_type"]
        model = PeftModel.from_pretrained(tiny_base("classification" if task == "SEQ_CLS" else "generation"), folder)
        loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
        saved = load_file(folder / "adapter_model.safetensors")
        return [f"{n} is not loaded as saved" for n, t in saved.items() if n not in loaded or not t.equal(loaded[n])]

    return read


def _transformers(package: Path) -> Callable[[Path], list[str]]:
    from peft import LoraConfig, get_peft_model
    from transformers import HfArgumentParser, TrainingArguments

    from tests.results import tiny_base

    def read(folder: Path) -> list[str]:
        file = folder / "training_arguments.yaml"
        (arguments,) = HfArgumentParser((TrainingArguments,)).parse_yaml_file(str(file), allow_extra_keys=False)
        config = LoraConfig(**json.loads((folder / "lora_config.json").read_text()))
        get_peft_model(tiny_base("classification" if config.task_type == "SEQ_CLS" else "generation"), config)
        return _unkept(yaml.safe_load(file.read_text()), arguments, "")

    return read


def _python(package: Path) -> Callable[[Path], list[str]]:
    from tests.results import tiny_base

    def read(folder: Path) -> list[str]:
        script = folder / "train.py"
        task = "classification" if "TASK = 'classification'" in script.read_text() else "generation"
        with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()) as printed:
            tiny_base(task).save_pretrained(place)
            sys.argv = [str(script), "--model", place, "--stop", "2", "--out", f"{place}/adapter"]
            runpy.run_path(str(script), run_name="__main__")
        losses = [v for line in printed.getvalue().splitlines() for n, v in json.loads(line).items() if n != "step"]
        return [] if len(losses) == 3 and all(map(math.isfinite, losses)) else [f"losses {losses}"]

    return read


def _spec(package: Path) -> Callable[[Path], list[str]]:
    from ranksearch.examine import load_spec

    def read(folder: Path) -> list[str]:
        size = load_spec(folder / "spec.yaml").parameters.size
        return [] if size == 1 else [f"{size} configurations"]

    return read


READERS: Mapping[str, Callable[[Path], Callable[[Path], list[str]]]] = {
    "axolotl": _axolotl,
    "llamafactory": _llamafactory,
    "peft": _peft,
    "python": _python,
    "spec": _spec,
    "torchtune": _torchtune,
    "transformers": _transformers,
    "trl": _trl,
    "unsloth": _unsloth,
}
"""Target -> takes the folder of its package, and gives what reads a folder of its exports."""


def main() -> None:
    """Reads what stdin names, and prints what was wrong."""
    asked = json.load(sys.stdin)
    sys.path[:0] = list(asked["packages"].values())
    if set(asked["exports"]) & {"llamafactory", "transformers", "trl"}:
        import transformers.training_args

        # Exports of bf16 runs are for machines that have it; this one need not.
        transformers.training_args.is_torch_bf16_gpu_available = lambda *_: True  # type: ignore[attr-defined]
    out: dict[str, list[str]] = {}
    for target, folders in asked["exports"].items():
        read = READERS[target](Path(asked["packages"].get(target, ".")))
        for folder in folders:
            try:
                out[folder] = read(Path(folder))
            except Exception as error:  # whatever a schema raises is its answer
                out[folder] = [f"{type(error).__name__}: {error}"]
    print(json.dumps(out))


if __name__ == "__main__":
    main()
