"""Small real studies for tests: a tiny random BERT, a table that it can learn, the command line as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

WORDS = {"cat": "purr", "dog": "bark", "owl": "hoot"}
FILLER = "the a very old new small big then now here there walks sits with near".split()


def write_inputs(folder: Path, *, rows: int = 300, hidden: int = 32) -> None:
    """Writes `train.csv` and a random `model` whose tokenizer knows its words."""
    import random

    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    dice = random.Random(0)
    seen: dict[str, str] = {}
    while len(seen) < rows:
        label = dice.choice(sorted(WORDS))
        words = [dice.choice(WORDS[label].split()), *dice.choices(FILLER, k=dice.randint(2, 9))]
        dice.shuffle(words)
        seen.setdefault(" ".join(words), label)
    (folder / "train.csv").write_text("text,label\n" + "".join(f"{t},{n}\n" for t, n in seen.items()))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *FILLER, *" ".join(WORDS.values()).split()]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=64,
    ).save_pretrained(folder / "model")  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(vocabulary), hidden_size=hidden, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=2 * hidden, max_position_embeddings=64,
            # Random features tell words apart only when they are large.
            initializer_range=0.3,
        )  # fmt: skip
        BertModel(config).save_pretrained(folder / "model")


SPEC: dict[str, Any] = {
    "name": "tiny",
    "task": "classification",
    "model": "./model",
    "data": {"train": "train.csv"},
    "space": {
        "r": {"choices": [2, 4, 8]},
        "lora_alpha": 32,
        "learning_rate": {"log": [2e-3, 2e-2]},
        "head_lr_ratio": {"uniform": [0.5, 1.5]},
        "batch_size": 16,
        "warmup_steps": 3,
    },
    "precision": "fp32",
    "objective": {"metric": "eval/nll", "direction": "minimize", "tolerance": 0.6},
    "strategy": "joint",
    "budget": {"trials": 9, "min_steps": 40, "max_steps": 120, "reduction_factor": 3},
    "seeds": 3,
}


def write_spec(folder: Path, **changes: Any) -> Path:
    """Writes `spec.yaml`."""
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(SPEC | changes))
    return path


@dataclass
class Ran:
    """A command that was run."""

    folder: Path
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Its stdout, which must be one strict JSON object."""
        value = json.loads(self.out, parse_constant=lambda token: pytest.fail(f"stdout holds {token}"))
        assert isinstance(value, dict)
        return value

    @property
    def text(self) -> str:
        return self.out + self.err


def environment(**changes: str) -> dict[str, str]:
    """The environment without a home of the user's, one thread a process."""
    kept = {k: v for k, v in os.environ.items() if k != "RANKSEARCH_HOME"}
    return kept | {"OMP_NUM_THREADS": "1"} | changes


def ranksearch(folder: Path, *command: str, timeout: float = 800, stdin: Any = subprocess.DEVNULL, **env: str) -> Ran:
    """Runs a command there, as a user would; no traceback may show."""
    done = subprocess.run(
        [sys.executable, "-m", "ranksearch", *command],
        cwd=folder, env=environment(**env), stdin=stdin, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    ran = Ran(folder, done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in ran.text, ran.text
    return ran
