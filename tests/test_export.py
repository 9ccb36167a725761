"""Exports: what they hold is what was trained, what they can't say is refused by name, and nothing is half-written."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, TrainingArguments
from transformers.optimization import get_linear_schedule_with_warmup

import ranksearch.export.targets as target_package
from ranksearch.errors import ExportError, SpecError, StoreError
from ranksearch.evidence import load_evidence
from ranksearch.export import export, known_targets, read_source, study_source
from ranksearch.export.fields import FIELDS
from ranksearch.export.write import _targets
from ranksearch.methods import METHODS, own_parameters
from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.rules import learn, recommend
from ranksearch.store import Store
from ranksearch.training import AdapterRun, evaluate_saved
from tests.finished import SPEC, finish_study, values_of, write_study
from tests.tiny_models import make_config, make_workbench

# PEFT 0.21 still reads the name that transformers 5.24 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

CLASSES = 3
NEUTRAL = {"head_lr_ratio": 1}


def tiny_bert(seed: int = 0) -> BertForSequenceClassification:
    """A random BERT with hidden size 32; the seed fixes the base, not the head."""
    torch.manual_seed(seed)
    config = BertConfig(  # type: ignore[call-arg]
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=37,
        max_position_embeddings=16, num_labels=CLASSES,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (24, 8) and labels (24,) that depend on them."""
    ids = torch.randint(5, 60, (24, 8), generator=torch.Generator().manual_seed(3))
    return ids, ids[:, 1] % CLASSES


def nll(model: Any) -> float:
    ids, labels = rows()
    model.eval()
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model(input_ids=ids).logits, labels))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A home with a study whose winner's adapter was really trained, and that adapter's NLL."""
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("home")
    base = tmp_path_factory.mktemp("base")
    tiny_bert().save_pretrained(base)
    heads = ("bert.pooler", "classifier")
    config = LoraConfig(
        r=8, lora_alpha=32, target_modules=["query", "value"], modules_to_save=list(heads), task_type="SEQ_CLS",
        base_model_name_or_path=str(base),
    )  # fmt: skip
    model = get_peft_model(BertForSequenceClassification.from_pretrained(base), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids, labels = rows()
    model.train()
    for _ in range(8):
        loss = torch.nn.functional.cross_entropy(model(input_ids=ids).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    measured = nll(model)
    spec = {"model": SPEC["model"] | {"id": str(base)}}
    study, trials = finish_study(
        home, "tiny", values_of({2: 0.05, 8: 0.0}), spec=spec, config=NEUTRAL, adapter="adapters/00005"
    )
    folder = Store(home).folder("tiny") / "adapters/00005"
    folder.mkdir(parents=True)
    # `save_pretrained` would ask the hub about the base model's embedding.
    save_file(get_peft_model_state_dict(model, save_embedding_layers=False), folder / "adapter_model.safetensors")
    model.peft_config["default"].save_pretrained(folder)
    assert study.test is not None
    told = study.test.model_copy(update={"metrics": {"nll": measured, "accuracy": 0.5}})
    facts = study.model.model_copy(update={"head_modules": heads})
    write_study(home, study.model_copy(update={"test": told, "model": facts}), trials)
    return home, measured


@pytest.fixture
def home(trained: tuple[Path, float], tmp_path: Path) -> Path:
    """A copy of that home, to be spoilt."""
    shutil.copytree(trained[0], tmp_path / "home")
    return tmp_path / "home"


def source_of(home: Path, name: str = "tiny") -> Any:
    return study_source(Store(home), name)


def change(home: Path, **changes: Any) -> tuple[StudyRecord, list[TrialRecord]]:
    """Rewrites the study's record."""
    store = Store(home)
    record = store.study("tiny").model_copy(update=changes)
    write_study(home, record, store.trials("tiny"))
    return record, store.trials("tiny")


def faults_of(source: Any, target: str, out: Path, allow_loss: bool = False) -> str:
    before = sorted(out.parent.iterdir()) if out.parent.exists() else []
    with pytest.raises(ExportError) as caught:
        export(source, target, out, allow_loss)
    after = sorted(out.parent.iterdir()) if out.parent.exists() else []
    assert before == after, "a refused export leaves nothing behind"
    return str(caught.value)


def arguments_of(out: Path) -> TrainingArguments:
    parser = HfArgumentParser((TrainingArguments,))
    (arguments,) = parser.parse_yaml_file(str(out / "training_arguments.yaml"), allow_extra_keys=False)
    return arguments


def test_the_exported_adapter_loads_by_peft_and_repeats_the_tested_nll(
    trained: tuple[Path, float], tmp_path: Path
) -> None:
    home, measured = trained
    written = export(source_of(home), "peft", tmp_path / "out")
    assert {p.name for p in written.files} == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    torch.manual_seed(99)
    base = BertForSequenceClassification.from_pretrained(config["base_model_name_or_path"], num_labels=CLASSES)
    torch.nn.init.normal_(base.classifier.weight)
    model = PeftModel.from_pretrained(base, str(tmp_path / "out"))
    assert nll(model) == pytest.approx(measured, abs=1e-6)
    assert Store(home).study("tiny").test.metrics["nll"] == measured  # type: ignore[union-attr]


def test_what_an_adapter_run_saved_is_exported_and_repeats_its_numbers(tmp_path: Path) -> None:
    bench = make_workbench(tmp_path / "model")
    made = make_config(r=8)
    with AdapterRun(bench, made, seed=1, max_steps=6, top_rank=8) as run:
        run.advance(6)
        measured = run.evaluate("test")["test/nll"]
        run.save(tmp_path / "home/studies/real/adapters/00005")
    settings = made.model_dump(exclude={"r", "method", "method_parameters", "layer_group_lr"})
    finish_study(tmp_path / "home", "real", values_of({2: 0.05, 8: 0.0}), config=settings, adapter="adapters/00005")
    export(source_of(tmp_path / "home", "real"), "peft", tmp_path / "out")
    assert evaluate_saved(bench, tmp_path / "out", "test")["test/nll"] == pytest.approx(measured, abs=1e-6)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]).is_dir()


def test_the_card_names_study_decision_versions_and_what_was_measured(
    trained: tuple[Path, float], tmp_path: Path
) -> None:
    home, measured = trained
    export(source_of(home), "peft", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    record = Store(home).study("tiny")
    assert card.startswith("---\nbase_model:") and "library_name: peft" in card
    assert record.decision is not None and record.decision["why"] in card
    assert "Study tiny" in card and "torch 2.13.0" in card and f"nll {measured:.6g}" in card
    assert "num_labels=2" in card and '["DESC", "HUM"]' in card


def test_an_adapter_outside_of_the_study_s_folder_is_refused(home: Path, tmp_path: Path) -> None:
    record, trials = change(home)
    outside = home.parent / "outside"
    shutil.copytree(Store(home).folder("tiny") / "adapters/00005", outside)
    assert record.test is not None
    for adapter in ("../../../outside", str(outside)):
        moved = [t.model_copy(update={"adapter": adapter}) if t.number == record.test.trial else t for t in trials]
        write_study(home, record, moved)
        with pytest.raises(StoreError, match="must lie within the study's folder"):
            source_of(home)


def test_an_adapter_that_links_out_of_the_study_s_folder_is_refused(home: Path, tmp_path: Path) -> None:
    weights = Store(home).folder("tiny") / "adapters/00005/adapter_model.safetensors"
    secret = home.parent / "secret.safetensors"
    shutil.move(weights, secret)
    weights.symlink_to(secret)
    assert "must lie in its study's folder" in faults_of(source_of(home), "peft", tmp_path / "out")


def test_a_torn_or_missing_adapter_is_refused(home: Path, tmp_path: Path) -> None:
    folder = Store(home).folder("tiny") / "adapters/00005"
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    assert "must be whole" in faults_of(source_of(home), "peft", tmp_path / "out")
    (folder / "adapter_config.json").write_text("{")
    assert "must be JSON" in faults_of(source_of(home), "peft", tmp_path / "out")
    weights.unlink()
    assert "no adapter_model.safetensors" in faults_of(source_of(home), "peft", tmp_path / "out")


def test_an_adapter_that_is_not_the_recommended_one_is_refused_with_both_values(home: Path, tmp_path: Path) -> None:
    recommended = dict(Store(home).study("tiny").recommended or {})
    change(home, recommended=recommended | {"r": 4, "lora_alpha": 16})
    told = faults_of(source_of(home), "peft", tmp_path / "out")
    assert "8 instead of 4" in told and "32 instead of 16" in told and "rank 8 instead of 4" in told


def test_a_study_without_a_kept_adapter_points_to_the_other_target(home: Path, tmp_path: Path) -> None:
    finish_study(home, "bare", values_of({2: 0.05, 8: 0.0}), config=NEUTRAL)
    assert "--to transformers" in faults_of(source_of(home, "bare"), "peft", tmp_path / "out")
    assert export(source_of(home, "bare"), "transformers", tmp_path / "out")


@pytest.mark.parametrize(
    ("saved", "named", "expected"),
    [
        (None, "org/model", "org/model"),
        ("org/model", "org/model", "org/model"),
        ("/gone/from/this/machine", "asset:minilm-l6", "asset:minilm-l6"),
    ],
)
def test_the_adapter_names_its_base_by_where_it_is_loaded_from(
    home: Path, tmp_path: Path, saved: str | None, named: str, expected: str
) -> None:
    path = Store(home).folder("tiny") / "adapters/00005/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": saved}))
    spec = Store(home).study("tiny").spec
    change(home, spec=spec | {"model": spec["model"] | {"id": named, "revision": "abc"}})
    export(source_of(home), "peft", tmp_path / "out")
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (expected, "abc")


def test_training_arguments_are_read_strictly_and_say_what_was_recommended(
    trained: tuple[Path, float], tmp_path: Path
) -> None:
    home, _ = trained
    export(source_of(home), "transformers", tmp_path / "out")
    read = arguments_of(tmp_path / "out")
    record = Store(home).study("tiny")
    recommended: dict[str, Any] = dict(record.recommended or {})
    assert read.learning_rate == recommended["learning_rate"]
    assert read.per_device_train_batch_size == recommended["batch_size"]
    assert (read.max_steps, read.warmup_steps, read.weight_decay) == (130, 10, 0.0)
    assert (read.lr_scheduler_type.value, read.max_grad_norm) == ("linear", 1.0)  # type: ignore[attr-defined]
    assert (read.bf16, read.fp16, read.use_cpu) == (True, False, True)
    assert record.test is not None
    seed = next(t.seed for t in Store(home).trials("tiny") if t.number == record.test.trial)
    assert read.seed == read.data_seed == seed


def test_the_lora_config_beside_it_builds_the_adapter_that_was_trained(
    trained: tuple[Path, float], tmp_path: Path
) -> None:
    home, _ = trained
    export(source_of(home), "transformers", tmp_path / "out")
    config = LoraConfig(**json.loads((tmp_path / "out/lora_config.json").read_text()))
    again = get_peft_model_state_dict(get_peft_model(tiny_bert(), config), save_embedding_layers=False)
    weights = load_file(Store(home).folder("tiny") / "adapters/00005/adapter_model.safetensors")
    assert {name: t.shape for name, t in again.items()} == {name: t.shape for name, t in weights.items()}
    assert (config.r, config.lora_alpha, config.use_rslora, config.task_type) == (8, 32, False, "SEQ_CLS")


def test_the_file_opens_with_study_decision_and_versions_on_a_line_each(
    trained: tuple[Path, float], tmp_path: Path
) -> None:
    home, _ = trained
    export(source_of(home), "transformers", tmp_path / "out")
    first, second, third, *_ = (tmp_path / "out/training_arguments.yaml").read_text().splitlines()
    assert first.startswith("# Study tiny") and "Decided" in second and third.startswith("# Versions: ranksearch 0.1.0")


def test_a_name_with_a_line_break_cannot_become_an_argument(home: Path, tmp_path: Path) -> None:
    spec = Store(home).study("tiny").spec
    change(home, spec=spec | {"data": {"train": "x.csv\nlearning_rate: 1.0\n\x1b[2J", "tasks": None}})
    export(source_of(home), "transformers", tmp_path / "out")
    assert arguments_of(tmp_path / "out").learning_rate == pytest.approx(1.1e-3)


def test_very_small_rates_stay_numbers_in_the_yaml(home: Path, tmp_path: Path) -> None:
    recommended = dict(Store(home).study("tiny").recommended or {})
    change(home, recommended=recommended | {"learning_rate": 6e-05})
    export(source_of(home), "transformers", tmp_path / "out")
    assert arguments_of(tmp_path / "out").learning_rate == 6e-05


def test_the_schedule_that_trainer_would_use_is_the_one_that_was_trained_with() -> None:
    from ranksearch.training.groups import schedule

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_linear_schedule_with_warmup(optimizer, 10, 130)
    rates = []
    for _ in range(130):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert rates == pytest.approx([schedule(step, 10, 130) for step in range(130)])


def test_gradient_accumulation_splits_the_batch_and_refuses_what_does_not_divide(home: Path, tmp_path: Path) -> None:
    recommended = dict(Store(home).study("tiny").recommended or {})
    change(home, recommended=recommended | {"gradient_accumulation": 4, "gradient_checkpointing": True})
    export(source_of(home), "transformers", tmp_path / "out")
    read = arguments_of(tmp_path / "out")
    assert (read.per_device_train_batch_size, read.gradient_accumulation_steps) == (8, 4)
    assert read.activation_checkpointing is True
    change(home, recommended=recommended | {"gradient_accumulation": 5})
    told = faults_of(source_of(home), "transformers", tmp_path / "more")
    assert "gradient_accumulation=5 (batch_size=32 must be a multiple of it)" in told


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("auto", (True, False)), ("bf16", (True, False)), ("fp32", (False, False)), ("fp16", (False, True))],
)
def test_each_precision_becomes_its_flags(
    home: Path, tmp_path: Path, precision: str, expected: tuple[bool, bool]
) -> None:
    recommended = dict(Store(home).study("tiny").recommended or {})
    change(home, recommended=recommended | {"precision": precision})
    export(source_of(home), "transformers", tmp_path / "out")
    read = arguments_of(tmp_path / "out")
    assert (read.bf16, read.fp16) == expected


LOST = {
    "head_lr_ratio": 5.0,
    "loraplus_lr_ratio": 16,
    "layer_group_lr": {"bottom": 0.5, "middle": 1.0, "top": 2.0},
    "method": "vera",
    "vera_dropout": 0.1,
}


def test_what_trainer_lacks_is_refused_field_by_field_with_its_value(home: Path, tmp_path: Path) -> None:
    recommended = dict(Store(home).study("tiny").recommended or {})
    change(home, recommended=recommended | LOST)
    told = faults_of(source_of(home), "transformers", tmp_path / "out")
    for said in (
        "head_lr_ratio=5.0", "loraplus_lr_ratio=16", "layer_group_lr.bottom=0.5", "layer_group_lr.top=2.0",
        'method="vera"', "vera_dropout=0.1",
    ):  # fmt: skip
        assert said in told
    assert "layer_group_lr.middle" not in told, "1 is what Trainer does anyway"


def test_a_loss_that_is_allowed_is_listed_beside_the_rest(home: Path, tmp_path: Path) -> None:
    recommended = dict(Store(home).study("tiny").recommended or {})
    change(home, recommended=recommended | LOST)
    written = export(source_of(home), "transformers", tmp_path / "out", allow_loss=True)
    assert {p.name for p in written.files} == {"training_arguments.yaml", "lora_config.json", "not_exported.json"}
    assert json.loads((tmp_path / "out/not_exported.json").read_text()) == {
        "head_lr_ratio": 5.0, "loraplus_lr_ratio": 16, "layer_group_lr.bottom": 0.5, "layer_group_lr.top": 2.0,
        "method": "vera", "vera_dropout": 0.1,
    }  # fmt: skip
    assert arguments_of(tmp_path / "out").learning_rate == pytest.approx(1.1e-3)


def save_recommendation(path: Path, **asked: Any) -> Path:
    path.write_text(recommend(learn(load_evidence(path.parent / "empty")), **asked).model_dump_json())
    return path


def test_a_saved_recommendation_is_exported_with_how_sure_it_is(tmp_path: Path) -> None:
    path = save_recommendation(tmp_path / "r.json", task="generation", examples=5000)
    export(read_source(path, Store(tmp_path / "home")), "transformers", tmp_path / "out")
    text = (tmp_path / "out/training_arguments.yaml").read_text()
    assert "# Prior, not measured here" in text and "Not known, so not set: max_steps" in text
    assert arguments_of(tmp_path / "out").learning_rate == pytest.approx(2e-4)
    config = LoraConfig(**json.loads((tmp_path / "out/lora_config.json").read_text()))
    assert (config.r, config.target_modules, config.task_type) == (16, "all-linear", "CAUSAL_LM")


def test_a_recommendation_has_no_adapter_to_export(tmp_path: Path) -> None:
    path = save_recommendation(tmp_path / "r.json", task="generation")
    told = faults_of(read_source(path, Store(tmp_path / "home")), "peft", tmp_path / "out/there")
    assert "peft needs a study's trained adapter" in told


def test_the_saved_result_of_a_search_finds_its_study(trained: tuple[Path, float], tmp_path: Path) -> None:
    home, _ = trained
    path = tmp_path / "result.json"
    path.write_text(json.dumps(Store(home).study("tiny").result))
    assert read_source(path, Store(home)).study is not None
    elsewhere = read_source(path, Store(tmp_path / "other"))
    assert elsewhere.study is None and "smallest rank" in elsewhere.decision
    assert export(elsewhere, "transformers", tmp_path / "out").files


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "must be a JSON file"),
        ("[1]", "must hold `recommended`"),
        ('{"recommended": null, "abstained": true, "reason": "too far"}', "too far"),
        ('{"recommended": [1]}', "must be an object"),
        ('{"recommended": {"r": 8}}', "`learning_rate` must be there"),
        (
            '{"recommended": {"r": "8", "lora_alpha": NaN, "learning_rate": 1e-3, "target_modules": []}}',
            "`target_modules`",
        ),
    ],
)
def test_a_file_that_is_no_recommendation_is_refused_with_the_reason(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(ExportError, match=reason):
        read_source(tmp_path / "r.json", Store(tmp_path))


def test_a_preset_is_no_name_that_another_tool_knows(tmp_path: Path) -> None:
    recommended = {
        "r": 8,
        "lora_alpha": 16,
        "learning_rate": 1e-3,
        "target_modules": "attention-qv",
        "precision": "int8",
    }
    (tmp_path / "r.json").write_text(json.dumps({"recommended": recommended}))
    told = faults_of(read_source(tmp_path / "r.json", Store(tmp_path)), "transformers", tmp_path / "out")
    assert 'target_modules="attention-qv"' in told and 'precision="int8"' in told


def test_a_fractional_alpha_reaches_peft_as_it_is(tmp_path: Path) -> None:
    recommended = {"r": 3, "lora_alpha": 4.8, "learning_rate": 1e-3, "target_modules": ["query"]}
    (tmp_path / "r.json").write_text(json.dumps({"recommended": recommended}))
    export(read_source(tmp_path / "r.json", Store(tmp_path)), "transformers", tmp_path / "out")
    config = LoraConfig(**json.loads((tmp_path / "out/lora_config.json").read_text()))
    layer = get_peft_model(tiny_bert(), config).base_model.model.bert.encoder.layer[0].attention.self.query
    assert layer.scaling["default"] == pytest.approx(1.6)


def test_a_study_that_does_not_exist_and_one_without_an_answer_are_refused(home: Path) -> None:
    with pytest.raises(SpecError, match="tiny"):
        read_source("tinny", Store(home))
    change(home, recommended=None, state="FAILED")
    with pytest.raises(ExportError, match="recommended configuration"):
        read_source("tiny", Store(home))


def test_nothing_is_overwritten(trained: tuple[Path, float], tmp_path: Path) -> None:
    source = source_of(trained[0])
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("keep")
    (tmp_path / "file").write_text("keep")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    (tmp_path / "empty").mkdir()
    for name in ("full", "file", "link"):
        assert "new or empty" in faults_of(source, "transformers", tmp_path / name)
    assert (tmp_path / "full/mine.txt").read_text() == (tmp_path / "file").read_text() == "keep"
    assert len(export(source, "transformers", tmp_path / "empty").files) == 2


def test_an_export_that_breaks_while_writing_leaves_no_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    (tmp_path / "to").mkdir()
    with pytest.raises(StoreError, match="No space left"):
        export(source_of(home), "peft", tmp_path / "to/out")
    assert not list((tmp_path / "to").iterdir())


def test_an_unknown_target_is_answered_with_those_there_are(trained: tuple[Path, float], tmp_path: Path) -> None:
    told = faults_of(source_of(trained[0]), "pefft", tmp_path / "out")
    assert "llamafactory, peft, python" in told and "Did you mean `peft`" in told


@pytest.fixture
def one_more_target(tmp_path: Path) -> Iterator[None]:
    """A file beside the targets, on the package's path."""
    folder = tmp_path / "targets"
    folder.mkdir()
    (folder / "rank_only.py").write_text(
        "TARGET = 'rank-only'\nABOUT = 'the rank'\nEXPRESSES = {'r'}\n"
        "def build(source):\n    return {'rank.txt': str(source.values['r']).encode()}\n"
    )
    target_package.__path__.append(str(folder))
    _targets.cache_clear()
    yield
    target_package.__path__.remove(str(folder))
    _targets.cache_clear()
    sys.modules.pop("ranksearch.export.targets.rank_only", None)


@pytest.mark.usefixtures("one_more_target")
def test_a_new_target_is_one_new_file(trained: tuple[Path, float], tmp_path: Path) -> None:
    assert known_targets()["rank-only"] == "the rank"
    told = faults_of(source_of(trained[0]), "rank-only", tmp_path / "out")
    assert "learning_rate=0.0011" in told and "r=8" not in told.replace("lora", "")
    export(source_of(trained[0]), "rank-only", tmp_path / "out", allow_loss=True)
    assert (tmp_path / "out/rank.txt").read_text() == "8"


def test_every_target_says_only_fields_of_the_table() -> None:
    for info in pkgutil.iter_modules(target_package.__path__):
        module = importlib.import_module(f"ranksearch.export.targets.{info.name}")
        assert module.EXPRESSES is None or set(module.EXPRESSES) <= set(FIELDS) | set(own_parameters(METHODS))


def test_the_table_s_names_are_arguments_of_trainer_and_of_lora_config() -> None:
    arguments = {f.trainer for f in FIELDS.values() if f.trainer}
    config = {f.lora for f in FIELDS.values() if f.lora}
    assert arguments <= set(TrainingArguments.__dataclass_fields__)
    assert config <= set(LoraConfig.__dataclass_fields__)


def test_exporting_needs_neither_torch_nor_ray() -> None:
    import subprocess

    code = (
        "import sys, ranksearch.evidence, ranksearch.rules, ranksearch.export as e; e.known_targets();"
        "print([m for m in ('torch', 'ray', 'peft', 'transformers', 'mlflow', 'optuna') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("r", 8.5),
        ("r", 10**400),
        ("lora_dropout", "x"),
        ("lora_dropout", 5),
        ("use_rslora", "yes"),
        ("weight_decay", float("nan")),
        ("warmup_steps", -1),
        ("max_steps", 1.5),
        ("target_modules", [""]),
        ("task", "nonsense"),
        ("seed", "x"),
        ("gradient_checkpointing", "x"),
        ("max_length", -5),
    ],
)
def test_a_value_that_no_run_could_have_is_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    told = {"r": 8, "lora_alpha": 32, "learning_rate": 1e-3, "target_modules": ["query"]} | NEUTRAL
    (tmp_path / "r.json").write_text(json.dumps({"recommended": told | {name: value}}))
    with pytest.raises(ExportError, match=f"`{name}` must be"):
        read_source(tmp_path / "r.json", Store(tmp_path))


def test_json_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("[" * 100_000)
    with pytest.raises(ExportError, match="must be a JSON file"):
        read_source(tmp_path / "r.json", Store(tmp_path))


def test_a_name_that_is_a_study_and_a_file_is_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish_study(tmp_path / "home", "both", values_of({8: 0.0, 16: 0.0}))
    (tmp_path / "both").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match="not both"):
        read_source("both", Store(tmp_path / "home"))


@pytest.mark.parametrize("adapter", ["a\0b", "x" * 5000])
def test_an_adapter_that_no_folder_can_be_called_is_refused(tmp_path: Path, adapter: str) -> None:
    finish_study(tmp_path, "s", values_of({8: 0.0, 16: 0.0}), adapter=adapter)
    with pytest.raises(ExportError, match="must lie in a folder"):
        export(study_source(Store(tmp_path), "s"), "peft", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_can_not_be_called_so_is_the_machines_fault(tmp_path: Path) -> None:
    finish_study(tmp_path, "s", values_of({8: 0.0, 16: 0.0}), config=NEUTRAL)
    with pytest.raises(StoreError, match="File name too long"):
        export(study_source(Store(tmp_path), "s"), "transformers", tmp_path / ("x" * 300))
