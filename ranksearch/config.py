"""One configuration: every hyperparameter of a trial, in PEFT's spelling.

Knows nothing of spaces, samplers or training: it is the word that they share.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

__all__ = ["LayerGroupLr", "Scalar", "TrialConfig", "whole"]

Scalar = bool | int | float | str


def whole(value: float) -> int | float:
    """Gives 32 for 32.0 and leaves 4.8 as it is: most alphas are whole, and read better so."""
    return int(value) if float(value).is_integer() else float(value)


class LayerGroupLr(BaseModel):
    """Multipliers of the adapter's learning rate by depth; `middle` is 1 unless the spec says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bottom: float = 1.0
    middle: float = 1.0
    top: float = 1.0


class TrialConfig(BaseModel):
    """Every hyperparameter of one trial; together with a seed and a step budget it fixes a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str = "lora"
    r: Annotated[int, Field(ge=1)]
    lora_alpha: Annotated[int | float, Field(gt=0), AfterValidator(whole)]
    """The numerator of the scaling, already multiplied out where the spec gives `alpha_ratio`."""
    use_rslora: bool = False
    """Scaling is lora_alpha / sqrt(r) instead of lora_alpha / r."""
    learning_rate: Annotated[float, Field(gt=0)]
    """Peak rate of the adapter in the middle layer group (after warm-up, before the linear decay)."""
    layer_group_lr: LayerGroupLr = LayerGroupLr()
    loraplus_lr_ratio: Annotated[int | float, Field(gt=0), AfterValidator(whole)] = 1
    """Learning rate of B over that of A (LoRA+, arXiv 2402.12354)."""
    head_lr_ratio: Annotated[float, Field(gt=0)] = 1.0
    """Learning rate of the classifier head (and pooler) over the adapter's."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """A preset's name, a regex over full module names, or a list of name endings."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    batch_size: Annotated[int, Field(ge=1)] = 32
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    pcgrad: bool = False
    """Of several tasks, gradients of the adapter that conflict are projected before they are summed."""
    method_parameters: dict[str, Scalar] = {}
    """What only this method knows, by its own names."""

    def plain(self) -> dict[str, Any]:
        """All values as JSON would hold them."""
        return self.model_dump(mode="json")

    @property
    def key(self) -> str:
        """Twelve hex digits that two configurations share only when every value is equal."""
        # A configuration without it has the key that it had before there was the word.
        text = self.model_dump_json(exclude=None if self.pcgrad else {"pcgrad"})
        return hashlib.sha256(text.encode()).hexdigest()[:12]
