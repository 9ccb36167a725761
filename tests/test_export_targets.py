"""Exports for other tools: read by the tools themselves, with the rates that were trained with, or refused by name."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model

from ranksearch.config import LayerGroupLr, TrialConfig
from ranksearch.errors import ExportError
from ranksearch.evidence import load_evidence
from ranksearch.examine import load_spec
from ranksearch.export import Exported, Source, export, read_source, study_source
from ranksearch.export.fields import flat
from ranksearch.lora import layer_group
from ranksearch.methods import METHODS
from ranksearch.rules import learn, recommend
from ranksearch.store import Store
from ranksearch.training.facts import block_of
from ranksearch.training.groups import learning_rate
from tests.export_matrix import REPORT, Cell, matrix, report
from tests.published import unpacked
from tests.results import BLOCKS, LAYERS, LLAMA, llama_facts, make_result, tiny_base
from tests.studies import ranksearch
from tests.tiny_models import VOCAB

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

LLM_TOOLS = ("axolotl", "llamafactory", "torchtune", "trl", "unsloth")
RATES = {"layer_group_lr": {"bottom": 0.5, "middle": 1.0, "top": 2.0}, "loraplus_lr_ratio": 4}
"""Both kinds of rate at once: axolotl has a key for one of them only."""


def save(path: Path, **changes: Any) -> Path:
    """A recommendation for generation as JSON."""
    values = {
        "task": "generation", "model": LLAMA, "r": 8, "lora_alpha": 16, "learning_rate": 2e-4, "precision": "bf16",
        "target_modules": list(LAYERS), "batch_size": 16, "warmup_steps": 10, "max_steps": 100,
    }  # fmt: skip
    path.write_text(json.dumps({"recommended": values | changes}))
    return path


def source_of(folder: Path, **changes: Any) -> Source:
    return read_source(save(folder / "r.json", **changes), Store(folder / "home"))


def written(done: Exported) -> dict[str, Any]:
    """The YAML that was written."""
    return dict(yaml.safe_load(next(f for f in done.files if f.suffix == ".yaml").read_text()))


Read = tuple[dict[tuple[str, str], Cell], dict[str, list[str]], dict[str, Path]]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """The matrix, what is wrong in each folder, and further folders by name; all read in one go."""
    work = tmp_path_factory.mktemp("matrix")
    more: dict[str, dict[str, Path]] = {}

    def add(name: str, target: str, source: Source, key: tuple[str, str, Any] | None = None) -> None:
        done = export(source, target, work / name)
        if key is not None:
            file, where, value = key
            told = yaml.safe_load((work / name / file).read_text())
            *path, last = where.split(".")
            inner = told
            for part in path:
                inner = inner[part]
            inner[last] = value
            (work / name / file).write_text(yaml.safe_dump(told))
        more.setdefault(target, {})[name] = done.files[0].parent

    record = make_result(work / "home", "generation")
    study = study_source(Store(work / "home"), record.name)
    add("axolotl: unknown key", "axolotl", study, ("config.yaml", "lora_rank", 8))
    add("llamafactory: unknown key", "llamafactory", study, ("train.yaml", "lora_r", 8))
    add("trl: unknown key", "trl", study, ("sft.yaml", "rank_pattern", {"q_proj": 4}))
    add("unsloth: unknown key", "unsloth", study, ("config.yaml", "lora.rank_pattern", {"q_proj": 4}))
    add("torchtune: unknown key", "torchtune", study, ("config.yaml", "model.use_rslora", True))
    add("llamafactory: value of another kind", "llamafactory", study, ("train.yaml", "finetuning_type", "vera"))
    for target in ("llamafactory", "trl", "unsloth", "torchtune"):
        add(f"{target}: all-linear", target, replace(study, values={**study.values, "target_modules": "all-linear"}))
        add(f"{target}: dora", target, replace(study, values={**study.values, "method": "dora"}))
    for target in ("llamafactory", "trl", "unsloth"):
        add(f"{target}: pissa", target, replace(study, values={**study.values, "method": "pissa"}))
        add(f"{target}: one layer", target, replace(study, values={**study.values, "target_modules": ["q_proj"]}))
    cells, found = matrix(work / "matrix", {t: list(folders.values()) for t, folders in more.items()})
    return cells, found, {name: place for folders in more.values() for name, place in folders.items()}


def test_every_export_is_read_by_its_own_tool_or_refused_by_name(read: Read) -> None:
    cells, _, _ = read
    assert {where: cell.faults for where, cell in cells.items() if cell.faults} == {}
    assert len(cells) == 45
    refused = {where: {name for name, _ in cell.refused} for where, cell in cells.items() if cell.refused}
    assert all("task" in refused["classification", target] for target in LLM_TOOLS)
    assert refused["multi-task", "llamafactory"] == {"layer_group_lr.bottom", "layer_group_lr.top"}
    assert not any(("generation", target) in refused for target in LLM_TOOLS)


def test_the_report_of_the_matrix_is_up_to_date(read: Read) -> None:
    assert REPORT.read_text(encoding="utf-8") == report(read[0])


def test_each_reader_finds_a_key_or_value_that_its_tool_does_not_have(read: Read) -> None:
    _, found, folders = read
    for name, folder in folders.items():
        if "unknown" in name or "another kind" in name:
            assert found[str(folder)], f"{name} went through"


def test_variants_are_read_too(read: Read) -> None:
    _, found, folders = read
    for name, folder in folders.items():
        if "unknown" not in name and "another kind" not in name:
            assert found[str(folder)] == [], name


def rates_of_training(**config: Any) -> dict[str, float]:
    """Rate of each tensor of the tiny Llama's adapter, as training sets it."""
    trial = TrialConfig(r=8, lora_alpha=16, learning_rate=1.1e-3, **config)
    out = {}
    for name in adapter_tensors(tiny_adapter()):
        part = "B" if ".lora_B." in name else "A"
        out[name] = learning_rate(trial, part, layer_group(block_of(name), BLOCKS))
    return out


def tiny_adapter() -> Any:
    config = LoraConfig(r=8, lora_alpha=16, target_modules=list(LAYERS), task_type="CAUSAL_LM")
    return get_peft_model(tiny_base("generation"), config)


def adapter_tensors(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def rates_in(groups: Any, model: Any) -> dict[str, float]:
    names = {id(p): name for name, p in adapter_tensors(model).items()}
    return {names[id(p)]: group["lr"] for group in groups for p in group["params"]}


@pytest.mark.parametrize(
    "recommended",
    [
        {"layer_group_lr": RATES["layer_group_lr"]},
        RATES,
        {"loraplus_lr_ratio": 4, "weight_decay": 0.1},
    ],
)
def test_axolotl_s_own_grouping_gives_each_tensor_the_rate_that_it_was_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recommended: dict[str, Any]
) -> None:
    for name in ("axolotl", "axolotl.utils", "axolotl.utils.logging"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["axolotl.utils.logging"].get_logger = lambda *_: None  # type: ignore[attr-defined]
    path = unpacked("axolotl") / "axolotl/core/trainers/mixins/optimizer.py"
    spec = importlib.util.spec_from_file_location("axolotl_optimizer", path)
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)

    record = make_result(tmp_path, "generation")
    source = study_source(Store(tmp_path), record.name)
    values = {**source.values, "weight_decay": 0.0, **flat(recommended)}
    told = written(export(replace(source, values=values), "axolotl", tmp_path / "out"))
    assert "loraplus_lr_ratio" not in told, "their optimizer for that drops the weight decay"
    model = tiny_adapter()
    arguments = types.SimpleNamespace(
        lr_groups=told["lr_groups"], weight_decay=told["weight_decay"], embedding_lr=None, embedding_lr_scale=None
    )
    trainer = types.SimpleNamespace(args=arguments, get_decay_parameter_names=lambda m: list(adapter_tensors(m)))
    groups = theirs.OptimizerMixin.create_optimizer_grouped_parameters(trainer, model, {"lr": told["learning_rate"]})
    config = {k: LayerGroupLr(**v) if k == "layer_group_lr" else v for k, v in recommended.items()}
    assert rates_in(groups, model) == pytest.approx(rates_of_training(**config))


def save_model_with_words(folder: Path) -> None:
    """The tiny Llama with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCAB - 4))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    tiny_base("generation").save_pretrained(folder)


def test_trl_runs_the_exported_script_with_the_pattern_and_the_rates(tmp_path: Path) -> None:
    package = unpacked("trl")
    save_model_with_words(tmp_path / "model")
    rows = [{"prompt": f"w{i} w{i + 1}", "completion": f" w{i + 2} w3"} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = make_result(tmp_path / "home", "rank pattern")
    source = study_source(Store(tmp_path / "home"), record.name)
    values = {**source.values, **flat(RATES), "max_steps": 2, "batch_size": 4, "precision": "fp32"}
    export(replace(source, values=values | {"lora_alpha": 4.5}), "trl", tmp_path / "out")
    told = yaml.safe_load((tmp_path / "out/sft.yaml").read_text())
    assert "lora_alpha" not in told, "TRL wants a whole number there"
    told["datasets"][0]["data_files"] = str(tmp_path / "train.jsonl")
    told |= {"model_name_or_path": str(tmp_path / "model"), "use_cpu": True, "report_to": "none"}
    (tmp_path / "out/sft.yaml").write_text(yaml.safe_dump(told))
    code = (
        "import json, runpy; t = runpy.run_path('train.py')['trainer'];"
        "n = {id(p): n for n, p in t.model.named_parameters()};"
        "g = {n[id(p)]: g['initial_lr'] for g in t.optimizer.param_groups for p in g['params']};"
        "json.dump([g, t.state.global_step], open('told.json', 'w'))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path / "out", capture_output=True, text=True, timeout=800,
        env=os.environ | {"PYTHONPATH": str(package), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rates, steps = json.loads((tmp_path / "out/told.json").read_text())
    assert steps == 2
    expected = rates_of_training(layer_group_lr=LayerGroupLr(bottom=0.5, top=2.0), loraplus_lr_ratio=4)
    assert rates == pytest.approx(expected)
    config = json.loads((tmp_path / "out/outputs/adapter_config.json").read_text())
    assert config["rank_pattern"] == {"gate_proj": 4, "up_proj": 4, "down_proj": 4} and config["lora_alpha"] == 4.5


def test_one_layer_reaches_peft_as_a_pattern_since_trl_hands_on_a_text(tmp_path: Path) -> None:
    told = written(export(source_of(tmp_path, target_modules=["mlp.up_proj"]), "trl", tmp_path / "out"))
    (pattern,) = told["lora_target_modules"]
    model = get_peft_model(tiny_base("generation"), LoraConfig(r=2, target_modules=pattern, task_type="CAUSAL_LM"))
    assert model.targeted_module_names == [f"model.layers.{i}.mlp.up_proj" for i in range(BLOCKS)]


@pytest.mark.parametrize("target", ["axolotl", "llamafactory"])
def test_a_fractional_alpha_is_refused_where_a_whole_one_is_wanted(tmp_path: Path, target: str) -> None:
    source = source_of(tmp_path, lora_alpha=4.5)
    with pytest.raises(ExportError, match=r"`lora_alpha`, but got lora_alpha=4.5 \(it wants a whole number\)"):
        export(source, target, tmp_path / "out")
    done = export(source, target, tmp_path / "out", allow_loss=True)
    assert "lora_alpha" not in written(done) and done.lost == {"lora_alpha": 4.5}


def test_every_field_that_can_t_be_said_is_named_at_once_and_listed_when_that_is_allowed(tmp_path: Path) -> None:
    source = source_of(
        tmp_path, method="vera", vera_dropout=0.1, lora_alpha=4.5, rank_pattern={"q_proj": 2}, batch_size=10,
        gradient_accumulation=4, target_modules="attention", **RATES,
    )  # fmt: skip
    names = {
        "method", "vera_dropout", "lora_alpha", "rank_pattern", "gradient_accumulation", "target_modules",
        "layer_group_lr.bottom", "layer_group_lr.top",
    }  # fmt: skip
    with pytest.raises(ExportError) as caught:
        export(source, "llamafactory", tmp_path / "out")
    assert {fault.got.partition("=")[0] for fault in caught.value.faults} == names
    done = export(source, "llamafactory", tmp_path / "out", allow_loss=True)
    assert set(done.lost) == names == set(json.loads((tmp_path / "out/not_exported.json").read_text()))
    opening = [line for line in done.files[0].read_text().splitlines() if line.startswith("# NOT IN HERE")]
    assert len(opening) == 1 and all(f"{name}=" in opening[0] for name in names)


@pytest.mark.parametrize("target", [*LLM_TOOLS, "transformers", "python", "spec"])
@pytest.mark.parametrize("task", ["classification", "generation"])
def test_each_target_writes_what_is_left_when_nearly_nothing_can_be_said(
    tmp_path: Path, target: str, task: str
) -> None:
    source = source_of(
        tmp_path, task=task, model="asset:minilm-l6", method="vera", vera_dropout=0.1, lora_alpha=4.5, batch_size=10,
        gradient_accumulation=4, target_modules="attention", precision="int8", lr_scheduler_type="polynomial",
        max_grad_norm=0.3, alpha_pattern={"q_proj": 2.5}, head_lr_ratio=3.0, **RATES,
    )  # fmt: skip
    done = export(source, target, tmp_path / "out", allow_loss=True)
    assert "method" in done.lost
    for file in done.files:
        text = file.read_text()
        if file.suffix == ".py":
            compile(text, str(file), "exec")
        if file.suffix == ".yaml":
            assert yaml.safe_load(text)
        if file.suffix in (".py", ".yaml"):
            assert "# NOT IN HERE" in text and 'method="vera"' in text


def test_torchtune_gets_the_same_scaling_without_rslora_and_says_so(tmp_path: Path) -> None:
    source = source_of(tmp_path, use_rslora=True, r=16, lora_alpha=8)
    done = export(source, "torchtune", tmp_path / "out")
    told = written(done)
    assert told["model"]["lora_alpha"] / told["model"]["lora_rank"] == pytest.approx(8 / 4)
    text = done.files[0].read_text()
    assert "no rsLoRA" in text and "legacy" in text


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (["q_proj", "gate_proj"], "together or not at all"),
        (["gate_proj", "up_proj", "down_proj"], "never the MLP alone"),
        (["layers.0.self_attn.q_proj"], "in all blocks"),
    ],
)
def test_torchtune_refuses_layers_that_its_builders_can_t_choose(
    tmp_path: Path, targets: list[str], reason: str
) -> None:
    with pytest.raises(ExportError, match=reason):
        export(source_of(tmp_path, target_modules=targets), "torchtune", tmp_path / "out")


def test_what_a_study_does_not_say_of_its_model_axolotl_can_t_group_by(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="layer_group_lr.top=2.0 .its lr_groups name layers"):
        export(source_of(tmp_path, **RATES), "axolotl", tmp_path / "out")


def test_a_pattern_says_all_that_the_ratio_it_was_made_from_says(tmp_path: Path) -> None:
    made = {"mlp_rank_ratio": 0.5, "rank_pattern": {"up_proj": 4}, "alpha_pattern": {"up_proj": 8}}
    told = written(export(source_of(tmp_path, **made), "axolotl", tmp_path / "out"))
    assert (told["lora_rank_pattern"], told["lora_alpha_pattern"]) == ({"up_proj": 4}, {"up_proj": 8})
    with pytest.raises(ExportError, match="mlp_rank_ratio=0.5"):
        export(source_of(tmp_path, mlp_rank_ratio=0.5), "axolotl", tmp_path / "more")


@pytest.mark.parametrize("pattern", [{"up_proj": 0}, {"up_proj": "4"}, {"": 4}, [4], {"up_proj": 4.5}])
def test_a_pattern_that_no_adapter_could_have_is_refused(tmp_path: Path, pattern: Any) -> None:
    with pytest.raises(ExportError, match="`rank_pattern` must be"):
        source_of(tmp_path, rank_pattern=pattern)


@pytest.mark.parametrize("target", [*LLM_TOOLS, "transformers", "python", "spec"])
def test_each_target_opens_with_source_decision_and_versions(tmp_path: Path, target: str) -> None:
    done = export(source_of(tmp_path), target, tmp_path / "out")
    for file in done.files:
        if file.suffix in (".yaml", ".py"):
            first, second, third, *_ = file.read_text().splitlines()
            assert first.startswith("# Recommendation from r.json") and second.startswith("# ")
            assert third.startswith("# Versions: ranksearch ")


@pytest.mark.parametrize("target", [*LLM_TOOLS, "transformers", "python", "spec"])
def test_a_recommendation_says_what_is_left_to_its_reader(tmp_path: Path, target: str) -> None:
    flow = learn(load_evidence(tmp_path / "empty"))
    (tmp_path / "r.json").write_text(recommend(flow, task="generation", model=LLAMA, examples=5000).model_dump_json())
    done = export(read_source(tmp_path / "r.json", Store(tmp_path)), target, tmp_path / "out")
    text = done.files[0].read_text()
    assert "Not known, so not set" in text and "max_steps" in text
    assert "prior" in text.lower()


def test_a_leaf_of_a_saved_flow_is_exported_with_its_usual_choices_named(tmp_path: Path) -> None:
    flow = learn(load_evidence(tmp_path / "empty"))
    (tmp_path / "rules.json").write_text(flow.model_dump_json())
    source = read_source(f"{tmp_path}/rules.json#prior-generation-one-task", Store(tmp_path))
    assert (source.values["r"], source.values["target_modules"]) == (16, "all-linear")
    text = export(source, "axolotl", tmp_path / "out").files[0].read_text()
    assert "# Rule prior-generation-one-task from rules.json" in text
    assert "Usual choices, which the rule does not speak of:" in text and "learning_rate" in text.split("\n")[1]
    assert yaml.safe_load(text)["lora_target_linear"] is True


@pytest.mark.parametrize("method", METHODS)
def test_a_spec_asks_for_any_method_with_its_own_parameters(tmp_path: Path, method: str) -> None:
    facts = METHODS[method]
    config = TrialConfig(method=method, r=8 if facts.ranked else 1, lora_alpha=16, learning_rate=1e-3).plain()
    del config["method_parameters"]
    source = source_of(tmp_path, **config | facts.own({}))
    export(source, "spec", tmp_path / "out")
    told = yaml.safe_load((tmp_path / "out/spec.yaml").read_text()) | {"data": {"train": "x.csv"}}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(told))
    space = load_spec(tmp_path / "spec.yaml").parameters
    assert space.size == 1 and told["space"]["method"] == method
    assert set(facts.parameters) <= set(told["space"])


def test_a_method_without_an_adapter_is_no_loss_that_can_be_allowed(tmp_path: Path) -> None:
    source = source_of(tmp_path, method="full", r=1, learning_rate=1e-3)
    with pytest.raises(ExportError, match='got method="full".*There is no adapter.*--to spec'):
        export(source, "transformers", tmp_path / "out", allow_loss=True)
    assert not (tmp_path / "out").exists()


def test_a_spec_takes_a_model_by_its_asset_name_and_other_tools_are_told_to_name_it(tmp_path: Path) -> None:
    source = source_of(tmp_path, model="asset:smollm2-135m", r=4, lora_alpha=16, learning_rate=1e-3)
    told = [export(source, t, tmp_path / t).files[0].read_text() for t in ("spec", "llamafactory")]
    assert ["own name; give the folder" in text for text in told] == [False, True]


@pytest.mark.parametrize("target", [*LLM_TOOLS, "transformers", "python"])
def test_a_penalty_that_no_tool_has_is_lost_unless_it_is_zero(tmp_path: Path, target: str) -> None:
    export(source_of(tmp_path, l2_lambda=0.0, mlp_rank_ratio=1.0), target, tmp_path / "out")
    with pytest.raises(ExportError, match="l2_lambda=0.1"):
        export(source_of(tmp_path, l2_lambda=0.1), target, tmp_path / "more")


@pytest.mark.parametrize("what", ["rules.json", "rules.json#prior-generation-one-tusk", "rules.json#"])
def test_a_flow_without_a_rule_of_that_name_says_which_there_are(tmp_path: Path, what: str) -> None:
    (tmp_path / "rules.json").write_text(learn(load_evidence(tmp_path / "empty")).model_dump_json())
    with pytest.raises(ExportError, match="must be one of prior-classification-large, "):
        read_source(tmp_path / what, Store(tmp_path))


def test_the_command_lists_files_and_losses_as_json(tmp_path: Path) -> None:
    save(tmp_path / "r.json", head_lr_ratio=5.0, lora_alpha=4.5)
    told = ("export", "r.json", "--to", "axolotl", "--out", "out", "--json")
    refused = ranksearch(tmp_path, *told)
    assert refused.code == 2 and "lora_alpha=4.5" in refused.err and not (tmp_path / "out").exists()
    done = ranksearch(tmp_path, *told, "--allow-loss")
    assert done.json == {
        "source": "r.json", "target": "axolotl", "files": ["out/config.yaml", "out/not_exported.json"],
        "lost": {"lora_alpha": 4.5},
    }  # fmt: skip
    assert "lora_alpha=4.5" in done.err
    assert "head_lr_ratio" not in done.err, "a model for generation has no head that it could matter to"


def test_a_study_s_own_names_and_files_go_to_each_tool(tmp_path: Path) -> None:
    record = make_result(tmp_path / "home", "multi-task")
    source = study_source(Store(tmp_path / "home"), record.name)
    assert record.model.blocks == llama_facts().blocks
    axolotl = written(export(source, "axolotl", tmp_path / "axolotl"))
    assert [d["path"] for d in axolotl["datasets"]] == ["facts.jsonl", "code.jsonl"]
    assert axolotl["datasets"][0]["roles_to_train"] == ["assistant"]
    plain = replace(source, values={n: v for n, v in source.values.items() if not n.startswith("layer_group_lr")})
    export(plain, "llamafactory", tmp_path / "lf")
    info = json.loads((tmp_path / "lf/dataset_info.json").read_text())
    assert {n: e["file_name"] for n, e in info.items()} == {"facts": "facts.jsonl", "code": "code.jsonl"}
    assert written(export(source, "unsloth", tmp_path / "u"))["data"]["local_dataset"] == ["facts.jsonl", "code.jsonl"]
    assert len(written(export(plain, "torchtune", tmp_path / "tt"))["dataset"]) == 2
