"""A whole generation study under a real local Ray cluster: from chats in a file to an exported adapter."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from ranksearch.records import StudyRecord, TrialRecord
from ranksearch.store import Store
from tests.studies import FILLER, WORDS, Ran, ranksearch

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)

SPEC: dict[str, Any] = {
    "name": "talk",
    "task": "generation",
    "model": "./model",
    "data": {"train": "train.jsonl", "messages": "messages"},
    "space": {
        "r": {"choices": [2, 4, 8]},
        "lora_alpha": 32,
        "learning_rate": {"log": [5e-3, 3e-2]},
        "batch_size": 16,
        "warmup_steps": 3,
    },
    "precision": "fp32",
    "objective": {"metric": "eval/nll", "direction": "minimize", "tolerance": 0.6},
    "budget": {"trials": 4, "min_steps": 20, "max_steps": 60, "reduction_factor": 3},
    "seeds": 2,
    "max_seeds": 2,
}


USER_AND_ASSISTANT = ("user", "assistant")


def write_inputs(folder: Path, template: str | None = TEMPLATE, roles: tuple[str, str] = USER_AND_ASSISTANT) -> None:
    """Writes `train.jsonl`, chats about animals and their noises, and a random Llama that knows the words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    dice = random.Random(0)
    lines: set[str] = set()
    while len(lines) < 200:
        animal = dice.choice(sorted(WORDS))
        words = [animal, *dice.choices(FILLER, k=dice.randint(1, 6))]
        dice.shuffle(words)
        turns = [{"role": roles[0], "content": " ".join(words)}, {"role": roles[1], "content": WORDS[animal]}]
        lines.add(json.dumps({"messages": turns}))
    (folder / "train.jsonl").write_text("\n".join(sorted(lines)))
    marks = ["<pad>", "<unk>", "</s>", "<|user|>", "<|assistant|>"]
    vocabulary = [*marks, *FILLER, *WORDS, *WORDS.values()]
    tokens = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # No token for padding, as with many decoders.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, unk_token="<unk>", eos_token="</s>", additional_special_tokens=marks[3:],
        model_max_length=64,
    )  # fmt: skip
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "model")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, intermediate_size=64, max_position_embeddings=64, bos_token_id=None, eos_token_id=2,
            initializer_range=0.3, tie_word_embeddings=True,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder / "model")


def write_spec(folder: Path, **changes: Any) -> None:
    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC | changes))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("talk")
    write_inputs(folder)
    write_spec(folder)
    ran = ranksearch(folder, "search", "spec.yaml", "--json", timeout=1200)
    assert ran.code == 0, ran.err
    return ran


@pytest.fixture(scope="module")
def records(done: Ran) -> tuple[StudyRecord, list[TrialRecord]]:
    folder = Store(done.folder / ".ranksearch").open("talk")
    return folder.study(), folder.trials()


def test_it_learned_the_answers_and_says_what_the_bare_model_reaches(done: Ran) -> None:
    test = done.json["test"]
    assert set(test) == {"nll", "bits_per_byte", "exact_match", "chrf", "zero_shot_nll", "n"}
    # Half of what is predicted is the end of the turn; the rest is one of three words.
    assert test["nll"] < test["zero_shot_nll"] - 1
    assert test["exact_match"] > 0.6 and test["chrf"] > 60


def test_text_is_written_by_the_runs_that_decide(records: tuple[StudyRecord, list[TrialRecord]]) -> None:
    study, trials = records
    assert study.zero_shot.keys() == {"eval/nll", "eval/bits_per_byte", "test/nll", "test/bits_per_byte"}
    for trial in trials:
        wrote = "eval/chrf" in trial.reports[-1].metrics
        assert wrote == (trial.purpose == "decide" and trial.state == "COMPLETE")
        assert all(r.metrics["eval/bits_per_byte"] is not None for r in trial.reports)
    assert {t.purpose for t in trials} >= {"search", "reference", "decide"}


def test_the_adapter_of_the_top_rank_is_truncated(records: tuple[StudyRecord, list[TrialRecord]]) -> None:
    (reference,) = (t for t in records[1] if t.purpose == "reference")
    assert [(p.r, p.kind) for p in reference.truncation] == [
        (r, kind) for r in (2, 4) for kind in ("uniform", "pattern")
    ]
    assert all("eval/nll" in p.metrics and "eval/chrf" not in p.metrics for p in reference.truncation)


def test_mlflow_and_the_report_hold_the_bare_models_loss(
    done: Ran, records: tuple[StudyRecord, list[TrialRecord]]
) -> None:
    from mlflow import MlflowClient

    where = done.json["mlflow"]
    parent = MlflowClient(where["tracking_uri"]).get_run(where["parent_run_id"])
    study = records[0]
    assert parent.data.metrics["zero_shot/test/nll"] == study.zero_shot["test/nll"]
    assert parent.data.metrics["test/chrf"] == done.json["test"]["chrf"]
    report = (Path(done.json["artifacts"]) / "report" / "report.html").read_text()
    assert "nll of the base model without an adapter" in report


def test_the_exported_adapter_has_the_reported_loss_on_the_test_rows(done: Ran) -> None:
    import numpy as np
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ranksearch.data import check_data, load_tokenizer
    from ranksearch.examine import load_spec

    ran = ranksearch(done.folder, "export", "talk", "--to", "peft", "--out", "adapter")
    assert ran.code == 0, ran.err
    readme = (done.folder / "adapter" / "README.md").read_text()
    assert "AutoModelForCausalLM" in readme and "test without the adapter" in readme
    base = AutoModelForCausalLM.from_pretrained(done.folder / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, done.folder / "adapter").eval()
    spec = load_spec(done.folder / "spec.yaml")
    data = check_data(spec.data, "generation", done.folder, load_tokenizer(str(done.folder / "model"))).prepared
    assert data is not None and data.test.trained is not None
    nats = tokens = 0.0
    for i in range(len(data.test)):
        ids, marks = torch.from_numpy(data.test.row(i)).long(), data.test.trained[data.test.span(i)]
        with torch.no_grad():
            logs = model(ids[None]).logits[0].log_softmax(-1)
        for k in np.flatnonzero(marks):
            nats -= float(logs[k - 1, ids[k]])
            tokens += 1
    assert nats / tokens == pytest.approx(done.json["test"]["nll"], abs=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(done.folder / "model")
    assert tokenizer.pad_token is None


def test_chats_need_known_roles_and_a_template(tmp_path: Path) -> None:
    write_inputs(tmp_path, template=None, roles=("human", "gpt"))
    write_spec(tmp_path)
    ran = ranksearch(tmp_path, "search", "spec.yaml")
    assert ran.code == 2 and "chat template" in ran.err and "data.chat_template" in ran.err
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    ran = ranksearch(tmp_path, "check", "spec.yaml", "data.chat_template=template.jinja")
    assert ran.code == 2 and "'gpt', 'human'" in ran.err and "200 of 200 rows" in ran.err
    assert not (tmp_path / ".ranksearch" / "studies").exists()


def test_an_encoder_decoder_an_encoder_and_a_searched_head_are_refused_before_training(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

    write_inputs(tmp_path)
    small = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    bert = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for model, words in (
        (T5ForConditionalGeneration(T5Config(**small)), "encoder-decoder"),
        (BertForMaskedLM(BertConfig(**bert, intermediate_size=16)), "must be a decoder"),
    ):
        model.save_pretrained(tmp_path / "model")
        write_spec(tmp_path)
        ran = ranksearch(tmp_path, "check", "spec.yaml", "space.head_lr_ratio={log: [1, 10]}")
        assert ran.code == 2 and words in ran.err and "space.head_lr_ratio" in ran.err
