"""Tiny random models and data that training's tests share: a second to make, nothing to fetch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
)

from ranksearch.config import TrialConfig
from ranksearch.data import Prepared, Split
from ranksearch.training import ModelSource, Workbench

VOCAB = 60
CLASSES = ("cat", "dog", "owl")


def _bert(dropout: float) -> PreTrainedModel:
    return BertModel(
        BertConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=64, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip


def _roberta(dropout: float) -> PreTrainedModel:
    return RobertaModel(
        RobertaConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=66, pad_token_id=1, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip


def _distilbert(dropout: float) -> PreTrainedModel:
    return DistilBertModel(
        DistilBertConfig(
            vocab_size=VOCAB, dim=32, n_layers=3, n_heads=2, hidden_dim=64, max_position_embeddings=64, dropout=dropout,
            attention_dropout=dropout, seq_classif_dropout=dropout,
        )
    )  # fmt: skip


def _gpt2(dropout: float) -> PreTrainedModel:
    return GPT2Model(
        GPT2Config(
            vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )
    )  # fmt: skip


def _llama(dropout: float) -> PreTrainedModel:
    return LlamaModel(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=64, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


FAMILIES = {"bert": _bert, "roberta": _roberta, "distilbert": _distilbert, "gpt2": _gpt2, "llama": _llama}


def save_model(folder: Path, family: str = "bert", *, dropout: float = 0.1) -> ModelSource:
    """Writes a random model without a head and gives its source."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        FAMILIES[family](dropout).save_pretrained(folder)
    return ModelSource(str(folder))


def save_decoder(folder: Path, family: str = "llama") -> ModelSource:
    """Writes a random decoder with its output layer and a tokenizer of the words w0, w1, ...; w2 ends a text."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = FAMILIES[family](0.0)
        # Random features tell words apart only when they are large.
        body.config.initializer_range = 0.3
        kind = {"llama": LlamaForCausalLM, "gpt2": GPT2LMHeadModel}[family]
        kind(body.config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w2", model_max_length=64
    ).save_pretrained(folder)
    return ModelSource(str(folder))


def make_answers(rows: int, seed: int) -> Split:
    """Prompts of random length with an animal word in them; the answer is three words of that animal, and an end."""
    rng = np.random.default_rng(seed)
    texts, marks, sizes = [], [], []
    for _ in range(rows):
        length, animal = int(rng.integers(3, 15)), int(rng.integers(0, len(CLASSES)))
        prompt = rng.integers(10, VOCAB, length)
        prompt[rng.integers(0, length)] = 5 + animal
        answer = [20 + animal, 30 + animal, *[40 + animal] * int(rng.integers(1, 4)), 2]
        texts.append(np.array([*prompt, *answer], dtype=np.int32))
        marks.append(np.arange(len(texts[-1])) >= length)
        sizes.append(4 * (len(answer) - 1) - 1)
    offsets = np.concatenate([[0], np.cumsum([len(t) for t in texts])]).astype(np.int64)
    return Split(
        np.concatenate(texts), offsets, trained=np.concatenate(marks), target_bytes=np.array(sizes, dtype=np.int64),
        whole=np.ones(rows, dtype=np.bool_),
    )  # fmt: skip


def make_generation(folder: Path, family: str = "llama", **options: object) -> Workbench:
    """A workbench for generation in fp32 on the CPU."""
    parts = [make_answers(n, seed) for seed, n in enumerate((96, 40, 40))]
    data = Prepared("generation", *parts, labels=(), pad_id=0, max_length=20, ends=(2,))
    return Workbench(save_decoder(folder, family), data, **{"precision": "fp32", "device": "cpu", **options})  # type: ignore[arg-type]


def make_split(rows: int, seed: int, *, longest: int = 20) -> Split:
    """Rows of random length whose class is that of the animal word in them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, longest + 1, rows)
    labels = rng.integers(0, len(CLASSES), rows)
    texts = []
    for length, label in zip(lengths, labels, strict=True):
        text = rng.integers(10, VOCAB, length)
        text[rng.integers(0, length)] = 5 + label
        texts.append(text.astype(np.int32))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Split(np.concatenate(texts), offsets, labels=labels.astype(np.int64))


def make_data(*, rows: int = 96, pad_id: int = 0) -> Prepared:
    """A task that a tiny model can learn."""
    parts = [make_split(n, seed) for seed, n in enumerate((rows, 40, 40))]
    return Prepared("classification", *parts, labels=CLASSES, pad_id=pad_id, max_length=20)


def make_workbench(folder: Path, family: str = "bert", *, dropout: float = 0.1, **options: object) -> Workbench:
    """A workbench in fp32 on the CPU."""
    source = save_model(folder, family, dropout=dropout)
    data = make_data(pad_id=1 if family == "roberta" else 0)
    return Workbench(source, data, **{"precision": "fp32", "device": "cpu", **options})  # type: ignore[arg-type]


def make_config(**values: object) -> TrialConfig:
    """A configuration that learns something in a few steps."""
    defaults = {"r": 4, "lora_alpha": 8, "learning_rate": 5e-3, "head_lr_ratio": 2, "batch_size": 8, "warmup_steps": 2}
    return TrialConfig.model_validate({**defaults, **values})
