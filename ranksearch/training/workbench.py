"""The workbench: base model, device, number type and tokenised data, loaded once and shared by every adapter run.

Nothing changes it afterwards. A run works on a skeleton: modules of its own around the workbench's tensors.
"""

from __future__ import annotations

import copy
import functools
import time

import torch
from transformers import PreTrainedModel

from ranksearch.data import Prepared, load_tokenizer
from ranksearch.errors import DataError, Fault
from ranksearch.lora import ModelFacts
from ranksearch.training.batches import Part
from ranksearch.training.device import DTYPES, choose_device, make_repeatable, resolve_precision
from ranksearch.training.facts import model_facts
from ranksearch.training.failures import memory_guard
from ranksearch.training.model import ModelSource, load_model
from ranksearch.training.targets import Targets, resolve_targets, shortest_suffixes
from ranksearch.training.tasks import task_of

__all__ = ["Workbench"]


class Workbench:
    """Everything heavy that adapter runs share.

    Args:
        source: The base model.
        data: The tokenised data.
        precision: "auto", "bf16", "fp16" or "fp32"; what "auto" means is `resolve_precision`'s business.
        device: "cpu", "cuda", "cuda:1"; null = CUDA where there is any.
        gradient_accumulation: Parts that a batch is trained in; the step is that of the whole batch, the memory that
            of a part.
        gradient_checkpointing: Whether activations are computed again on the way back instead of kept.
        always_write: Whether every evaluation lets the model write text: where that is what runs are compared by.

    Raises:
        DataError: When model, data and options can't be trained together.
        OutOfMemory: When the model doesn't fit.
    """

    def __init__(
        self,
        source: ModelSource,
        data: Prepared,
        *,
        precision: str = "auto",
        device: str | None = None,
        gradient_accumulation: int = 1,
        gradient_checkpointing: bool = False,
        always_write: bool = False,
    ) -> None:
        began = time.perf_counter()
        self.source = source
        self.data = data
        self.task = task_of(
            data, functools.partial(load_tokenizer, source.path, source.revision, source.trust_remote_code)
        )
        self.always_write = always_write
        self.device = choose_device(device)
        self.precision = resolve_precision(precision, source.dtype, self.device)
        self.dtype = DTYPES[self.precision]
        self.gradient_accumulation = gradient_accumulation
        self.gradient_checkpointing = gradient_checkpointing
        make_repeatable(self.device)
        loaded = load_model(source, data.task, len(data.labels), self.dtype)
        self._model = loaded.model
        with memory_guard("moving the model to the device"):
            self._model.to(device=self.device)  # type: ignore[call-arg]
        self.fresh = loaded.fresh
        self.facts: ModelFacts = model_facts(self._model, source.label)
        if gradient_checkpointing and not self._model.supports_gradient_checkpointing:
            rule = "`gradient_checkpointing` must be false for a model that can't do it"
            raise DataError(Fault(rule, self.facts.architecture, "gradient_checkpointing", "Set it to false."))
        pad_id, pad_notes = _pad_id(self._model, data)
        self._model.config.get_text_config().pad_token_id = pad_id
        self.notes = (*loaded.notes, *pad_notes)
        self.parts = {n: Part(getattr(data, n), pad_id, self.device) for n in ("train", "eval", "test")}
        self._norms: dict[str, float] = {}
        self.load_seconds = time.perf_counter() - began

    def skeleton(self) -> PreTrainedModel:
        """A copy of the model's modules that shares the model's tensors: light, and free to be wrapped."""
        shared = {id(t): t for t in (*self._model.parameters(), *self._model.buffers())}
        model: PreTrainedModel = copy.deepcopy(self._model, shared)
        if self.gradient_checkpointing:
            model.activation_checkpointing_enable()
        return model

    def targets(self, target_modules: str | tuple[str, ...]) -> Targets:
        """The layers that a choice of target modules means.

        Raises:
            SpecError: When it means none, or some that must not be adapted.
        """
        return resolve_targets(target_modules, self.facts)

    def endings(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The shortest name endings that mean exactly these layers, in the whole model."""
        return shortest_suffixes(names, [name for name, _ in self._model.named_modules() if name])

    def weight_norm(self, layer: str) -> float:
        """Frobenius norm of a layer's weight, by the layer's full name; computed once."""
        if layer not in self._norms:
            self._norms[layer] = float(torch.linalg.vector_norm(self._model.get_parameter(f"{layer}.weight").float()))
        return self._norms[layer]

    @property
    def base(self) -> PreTrainedModel:
        """The base model. To look at: runs work on a `skeleton`."""
        return self._model


def _pad_id(model: PreTrainedModel, data: Prepared) -> tuple[int, tuple[str, ...]]:
    """What fills rows up, and what to say about it.

    A decoder reads its answer at the last token that is not the padding token. Where the checkpoint has none, and rows
    end in the token that the tokenizer would pad with, those would be read too early: another token must do. The
    attention mask hides it in any case, so which one it is changes nothing else.
    """
    if data.task == "generation" or model.config.get_text_config().pad_token_id is not None:
        return data.pad_id, ()
    splits = (data.train, data.eval, data.test)
    last = {int(token) for s in splits if len(s) for token in s.ids[s.offsets[1:] - 1]}
    if data.pad_id not in last:
        return data.pad_id, ()
    other = next((i for i in range(model.config.get_text_config().vocab_size) if i not in last), None)
    if other is None:
        rule = "a decoder without a padding token needs a token that no text ends in"
        got = f"texts that end in every one of the {len(last)} tokens"
        raise DataError(Fault(rule, got, str(model.config.name_or_path), "Take a model with a padding token."))
    return other, (
        f"The model has no padding token, and some texts end in token {data.pad_id}, which it would be padded with: "
        f"token {other} is used. Set `pad_token_id={other}` in the model's config to get the same answers elsewhere.",
    )
