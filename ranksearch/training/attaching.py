"""Attaches a configuration's method to a skeleton of the workbench: layers wrapped, head started, nothing trained."""

from __future__ import annotations

import numpy as np
import torch

from ranksearch.config import TrialConfig
from ranksearch.errors import SpecError
from ranksearch.methods import METHODS
from ranksearch.training.dropout import use_quick_dropout
from ranksearch.training.heads import start_heads
from ranksearch.training.methods import Attachment, Method, find_method
from ranksearch.training.order import derived_seed
from ranksearch.training.targets import Targets, rank_faults
from ranksearch.training.workbench import Workbench

__all__ = ["attach"]


def attach(
    workbench: Workbench, config: TrialConfig, *, seed: int, max_steps: int, top_rank: int
) -> tuple[Method, tuple[str, ...]]:
    """A configuration on the workbench's model, ready to be trained.

    Args:
        workbench: Model and data; stays as it is.
        config: The hyperparameters.
        seed: Seed of the run.
        max_steps: Optimizer steps of the whole run.
        top_rank: Rank whose A smaller ones are the first rows of.

    Returns:
        The method, and what the user should know, as sentences.

    Raises:
        SpecError: When the configuration doesn't fit the model.
        OutOfMemory: When the adapter doesn't fit.
    """
    kind = find_method(config)
    method_facts, facts = METHODS[config.method], workbench.facts
    faults = method_facts.model_faults(config.method_parameters, facts)
    targets = Targets(())
    if method_facts.ranked:
        targets = workbench.targets(config.target_modules)
        faults += rank_faults(method_facts.widest_rank(config.r, config.method_parameters), targets.names, facts)
    if faults:
        raise SpecError(faults)
    part = workbench.parts["train"]
    shuffled = np.random.default_rng(derived_seed(seed, "inputs")).permutation(len(part.lengths))

    def inputs(start: int, count: int) -> dict[str, torch.Tensor]:
        return part.batch(np.take(shuffled, range(start, start + count), mode="wrap")).inputs

    method = kind(
        Attachment(
            config=config,
            names=targets.names,
            endings=workbench.endings(targets.names),
            facts=facts,
            task_type=workbench.task.peft_type,
            base=workbench.source.path,
            revision=workbench.source.revision,
            seed=seed,
            max_steps=max_steps,
            top_rank=top_rank,
            dtype=workbench.dtype,
            inputs=inputs,
        )
    )
    method.attach(workbench.skeleton())
    if workbench.device.type == "cpu":
        use_quick_dropout(method.model)
    start_heads(method.model, facts.head_modules, workbench.fresh, workbench.dtype, seed)
    return method, targets.notes
