"""Reads a model's facts off its modules: which layers may be adapted, what each does, what is trained whole.

Works on a model without weights (meta device) as on a loaded one. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ranksearch.lora import ModelFacts, ModuleFacts

__all__ = ["block_of", "head_modules", "model_facts", "role_of", "sides"]

NO_LIMIT = 1_000_000
"""Longest input of a model that states none (relative positions)."""

_ROLES = {
    "q": {"q_proj", "query", "q_lin", "query_proj", "q", "wq"},
    "k": {"k_proj", "key", "k_lin", "key_proj", "k", "wk"},
    "v": {"v_proj", "value", "v_lin", "value_proj", "v", "wv"},
    "qkv": {"c_attn", "qkv_proj", "query_key_value", "Wqkv", "qkv", "qkv_lin"},
    "o": {"o_proj", "out_lin"},
    "mlp": {
        "gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "fc_in", "fc_out", "c_fc", "lin1", "lin2",
        "dense_h_to_4h", "dense_4h_to_h", "Wi", "ffn", "ffn_output",
    },
}  # fmt: skip
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}
_ATTENTION = {"attn", "attention", "self_attn", "self_attention"}
_MLP = {"mlp", "ffn", "ff", "feed_forward", "intermediate"}


def role_of(name: str) -> str:
    """What a linear layer does, from its dotted name: "q", "k", "v", "qkv", "o", "mlp" or "other".

    Layers of one name (`dense`, `c_proj`, `out_proj`, `Wo`) mean different things inside of the attention and outside.
    """
    *path, leaf = name.split(".")
    if leaf in _ROLE_OF:
        return _ROLE_OF[leaf]
    if block_of(name) is None:
        return "other"
    if _ATTENTION & set(path):
        return "o"
    # BERT's second feed-forward matrix is `layer.N.output.dense`.
    return "mlp" if _MLP & set(path) or path[-1:] == ["output"] else "other"


def block_of(name: str) -> int | None:
    """Index of the transformer block: the first number in a dotted name."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def sides(layer: nn.Module) -> tuple[int, int] | None:
    """Input and output features of a layer that LoRA can wrap, None for any other module."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, Conv1D):
        inputs, outputs = layer.weight.shape
        return inputs, outputs
    return None


def head_modules(model: PreTrainedModel) -> tuple[str, ...]:
    """Modules that are trained whole, outermost names: what stands beside the base model, and its pooler.

    In a model for classification that is whatever `transformers` puts on top. A model for generation has none: its
    output layer comes from pretraining.
    """
    if model.can_generate():
        return ()
    prefix = model.base_model_prefix
    names = [name for name, child in model.named_children() if name != prefix and _has_parameters(child)]
    pooler = getattr(getattr(model, prefix), "pooler", None)
    if isinstance(pooler, nn.Module) and _has_parameters(pooler):
        names.insert(0, f"{prefix}.pooler")
    return tuple(names)


def model_facts(model: PreTrainedModel, source: str) -> ModelFacts:
    """All facts of a model.

    Args:
        model: As `transformers` builds it for the task, on any device.
        source: As the spec names it.
    """
    config = model.config.get_text_config()
    heads = head_modules(model)
    output = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    tied, modules, inside = [], [], []
    for name, layer, (inputs, outputs) in _linear(model):
        if layer is output:
            if embedding is not None and layer.weight is embedding.weight:
                tied.append(name)
        elif any(name == head or name.startswith(f"{head}.") for head in heads):
            inside.append(name)
        else:
            modules.append(
                ModuleFacts(
                    name=name, in_features=inputs, out_features=outputs, block=block_of(name), role=role_of(name)
                )
            )
    return ModelFacts(
        source=source,
        architecture=type(model).__name__,
        model_type=config.model_type,
        parameters=sum(p.numel() for p in model.parameters()),
        blocks=max((m.block + 1 for m in modules if m.block is not None), default=0),
        max_length=_max_length(model),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        head_modules=heads,
        head_layers=tuple(inside),
        head_parameters=sum(p.numel() for head in heads for p in model.get_submodule(head).parameters()),
        modules=tuple(modules),
        tied_modules=tuple(tied),
    )


def _linear(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[int, int]]]:
    for name, layer in model.named_modules():
        shape = sides(layer)
        if shape is not None:
            yield name, layer, shape


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _max_length(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    stated = [getattr(config, name, None) for name in ("max_position_embeddings", "seq_length")]
    length = next((int(n) for n in stated if isinstance(n, int) and n > 0), NO_LIMIT)
    for name, layer in model.named_modules():
        # RoBERTa's positions start after the padding token's, so the last of them can't be reached.
        if name.endswith("position_embeddings") and isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
            return min(length, layer.num_embeddings - layer.padding_idx - 1)
    return length
