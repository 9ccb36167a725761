"""One configuration with one seed on a workbench: attach, train to a step, measure, save, let go.

What a run draws at random follows from seed and step alone, so runs can be stopped, resumed and interleaved. Knows
nothing of rungs or of who decides how far to train.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ranksearch.config import TrialConfig
from ranksearch.lora import layer_group
from ranksearch.records import Cost
from ranksearch.training.attaching import attach
from ranksearch.training.device import peak_memory_mb, reset_peak_memory
from ranksearch.training.evaluation import evaluate
from ranksearch.training.facts import block_of
from ranksearch.training.failures import Diverged, memory_guard
from ranksearch.training.groups import make_optimizer, schedule
from ranksearch.training.heads import head_trainables
from ranksearch.training.order import DataOrder, derived_seed
from ranksearch.training.pcgrad import project
from ranksearch.training.watch import Watch, clip
from ranksearch.training.workbench import Workbench

__all__ = ["AdapterRun"]

_CLIP = 1.0
_CHECK_EVERY = {"cpu": 1, "cuda": 16}
"""Steps between two looks at the loss: on a GPU a look waits for the device."""
_HOPELESS = 1e4
"""Nats from which on a loss counts as diverged: weights that give such logits don't come back within a run."""


class AdapterRun:
    """An adapter in training.

    Args:
        workbench: Model and data; several runs may share it at the same time.
        config: The hyperparameters.
        seed: Fixes data order, head initialisation, dropout and what adapters start from.
        max_steps: Optimizer steps of the whole run: where the learning rate reaches 0.
        top_rank: Rank whose adapter the run's own starts as the first rows of; null = its own rank.

    Raises:
        SpecError: When the configuration doesn't fit the model.
        OutOfMemory: When the adapter doesn't fit.
    """

    def __init__(
        self, workbench: Workbench, config: TrialConfig, *, seed: int, max_steps: int, top_rank: int | None = None
    ) -> None:
        began = time.perf_counter()
        top_rank = config.r if top_rank is None else top_rank
        if config.r > top_rank:
            raise ValueError(f"`r <= top_rank` must hold, but got r={config.r}, top_rank={top_rank}")
        self.config = config
        self.seed = seed
        self.max_steps = max_steps
        self._bench = workbench
        self._device = workbench.device
        reset_peak_memory(self._device)
        with memory_guard("attaching the adapter"):
            self._method, self.notes = attach(workbench, config, seed=seed, max_steps=max_steps, top_rank=top_rank)
            self.target_modules = self._method.attachment.endings
            self.model: PreTrainedModel = self._method.model
            self._trainables = [*self._method.trainables(), *head_trainables(self._method.root)]
            self._optimizer = make_optimizer(self._trainables, config)
        self._parameters = [t.parameter for t in self._trainables]
        # Gradients of fp16 activations are too small for the type unless the loss is scaled up (arXiv 1710.03740).
        self._scaler = torch.amp.GradScaler(
            self._device.type, init_scale=65536.0, growth_interval=2000, enabled=workbench.precision == "fp16"
        )
        self._order = DataOrder(workbench.parts["train"].lengths, config.batch_size, seed)
        self._since = Watch(self._trainables, self._device)
        self._cost = Cost(setup_seconds=time.perf_counter() - began)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._cost.steps

    @property
    def trainable_parameters(self) -> int:
        """Parameters of adapter and head."""
        return sum(t.parameter.numel() for t in self._trainables)

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters of adapter and head. To look at."""
        return list(self._parameters)

    @property
    def cost(self) -> Cost:
        """What the run has used so far; loading the workbench is not in it.

        The peak of memory is the process's, or the device's, since the newest run on it began.
        """
        return self._cost.model_copy(update={"peak_memory_mb": peak_memory_mb(self._device)})

    def cost_metrics(self) -> dict[str, float]:
        """The cost as metrics: `cost/seconds`, `cost/samples` and so on."""
        cost = self.cost
        seconds = cost.train_seconds + cost.eval_seconds + cost.setup_seconds
        return {"cost/seconds": seconds} | {f"cost/{name}": float(value) for name, value in cost.model_dump().items()}

    def advance(self, to_step: int) -> dict[str, float]:
        """Trains until so many steps are done.

        Args:
            to_step: Counted from the start of the run; nothing happens where it was passed already.

        Returns:
            `train/loss` and `train/grad_norm` (before clipping), means over the steps since the last call, the latter
            also for each group of layers; and `train/adapter_to_base_norm/bottom` and so on, the norm of what the
            adapter adds over that of the weights that it adds it to. Nothing where there were no steps.

        Raises:
            Diverged: When the loss is no number any more, or hopeless. The run is of no use then.
            OutOfMemory: When a step doesn't fit.
        """
        began, evaluated = time.perf_counter(), self._cost.eval_seconds
        self.model.train()
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            with memory_guard(f"training from step {self.step}"), torch.random.fork_rng(devices=devices):
                while self.step < min(to_step, self.max_steps):
                    self._train_step()
                    if self.step % _CHECK_EVERY[self._device.type] == 0:
                        self._check_loss()
                self._check_loss()
        finally:
            # What a method evaluated in between is not training.
            self._add(train_seconds=time.perf_counter() - began - (self._cost.eval_seconds - evaluated))
        means = self._since.means()
        self._since.clear()
        return means | self._change_ratios() if means else {}

    def evaluate(self, part: str, *, write: bool = False) -> dict[str, float]:
        """Metrics over all rows of "train", "eval" or "test", as `eval/nll` and so on; NaN where there are no numbers.

        Args:
            part: The rows.
            write: Whether the model writes text too, for the metrics that need it; with a workbench that always
                writes it does so anyway.

        Raises:
            OutOfMemory: When a batch doesn't fit.
        """
        began = time.perf_counter()
        with memory_guard(f"evaluating at step {self.step}"):
            metrics = evaluate(
                self.model,
                self._bench.task,
                self._bench.parts[part],
                self._device,
                write=write or self._bench.always_write,
            )
        self._add(eval_seconds=time.perf_counter() - began)
        return {f"{part}/{name}": value for name, value in metrics.items()}

    def save(self, folder: Path) -> None:
        """Writes the adapter and the head, in PEFT's format where it can express them.

        Raises:
            StoreError: When the folder can't be written.
        """
        self._method.save(folder)

    def state_dict(self) -> dict[str, Any]:
        """All that going on needs; tensors and plain values, safe to load with `weights_only`."""
        return {
            "identity": self._identity(),
            "cost": self.cost.model_dump(),
            "since": self._since.state(),
            "tensors": {t.name: t.parameter.detach().clone() for t in self._trainables},
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
            "scaler": self._scaler.state_dict(),
            "method": copy.deepcopy(self._method.state()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave.

        Raises:
            ValueError: When it is the state of another configuration, seed or budget.
        """
        if dict(state["identity"]) != self._identity():
            raise ValueError(f"the state must be of this run, {self._identity()}, but got {state['identity']}")
        with torch.no_grad():
            for t in self._trainables:
                t.parameter.copy_(state["tensors"][t.name])
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._scaler.load_state_dict(state["scaler"])
        self._method.load_state(copy.deepcopy(state["method"]))
        self._since.load_state(state["since"])
        self._cost = Cost(**state["cost"])

    def close(self) -> None:
        """Lets go of the adapter. The workbench never knew of it."""
        for name in ("model", "_method", "_trainables", "_parameters", "_optimizer"):
            self.__dict__.pop(name, None)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _train_step(self) -> None:
        config, bench, part, method = self.config, self._bench, self._bench.parts["train"], self._method
        step = self.step
        rows = self._order.rows(step)
        torch.manual_seed(derived_seed(self.seed, "dropout", step))
        method.before_step(step, self._optimizer)
        factor = schedule(step, config.warmup_steps, self.max_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        weight = bench.task.weight(part, rows)
        if config.pcgrad:
            self._backward_by_task(rows, weight)
        else:
            self._backward(rows, weight)
        penalty = method.penalty()
        if penalty is not None:
            self._scaler.scale(penalty).backward()
        self._scaler.unscale_(self._optimizer)
        method.after_backward(step)
        norms = clip(self._parameters, _CLIP)
        applied = self._update()
        method.after_step(step, applied=applied)
        self._optimizer.zero_grad(set_to_none=True)
        # The scaler skips a step that overflowed, so such a norm is none of the run's.
        self._since.add_norms(norms if not self._scaler.is_enabled() else norms.nan_to_num(0, 0, 0))
        self._add(steps=1, samples=len(rows), tokens=int(part.lengths[rows].sum()))
        if method.evaluates(self.step):
            method.after_evaluation(self.evaluate("eval"))

    def _backward(self, rows: npt.NDArray[np.int64], weight: float) -> None:
        """Adds the gradients of the rows' summed loss over a weight, in as many parts as the workbench says."""
        bench, part = self._bench, self._bench.parts["train"]
        for some in np.array_split(rows, min(bench.gradient_accumulation, len(rows))):
            loss = bench.task.loss(self.model, part, part.batch(some)) / weight
            self._scaler.scale(loss).backward()
            self._since.loss += loss.detach()

    def _backward_by_task(self, rows: npt.NDArray[np.int64], weight: float) -> None:
        """The same task by task, with what conflicts between their gradients of the adapter taken out.

        Heads keep the plain sum: each task has its own outputs there.
        """
        task = self._bench.parts["train"].split.task
        if task is None:
            raise ValueError("`pcgrad` needs several tasks")
        shared = [t.parameter for t in self._trainables if t.part != "head"]
        found: list[list[torch.Tensor | None]] = []
        for k in np.unique(task[rows]):
            self._backward(rows[task[rows] == k], weight)
            found.append([p.grad for p in shared])
            for parameter in shared:
                parameter.grad = None
        # What the method freezes in this step has no gradient, and must not get one of 0: momentum would move it.
        moved = [i for i, of_tasks in enumerate(zip(*found, strict=True)) if any(g is not None for g in of_tasks)]
        gradients = [[torch.zeros_like(shared[i]) if (g := own[i]) is None else g for i in moved] for own in found]
        projected = project(gradients, derived_seed(self.seed, "pcgrad", self.step)) if moved else []
        for i, gradient in zip(moved, projected, strict=True):
            shared[i].grad = gradient

    def _update(self) -> bool:
        """The optimizer's step; False where fp16 overflowed and it was left out."""
        before = self._scaler.get_scale() if self._scaler.is_enabled() else 0.0
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return not self._scaler.is_enabled() or self._scaler.get_scale() >= before

    def _change_ratios(self) -> dict[str, float]:
        """The Frobenius norm of each group's change over that of its weights."""
        changes = self._method.change_norms()
        sums: dict[str, list[float]] = {}
        for name, norm in changes.items():
            group = layer_group(block_of(name), self._bench.facts.blocks)
            both = sums.setdefault(group, [0.0, 0.0])
            both[0] += float(norm) ** 2
            both[1] += self._bench.weight_norm(name) ** 2
        return {f"train/adapter_to_base_norm/{g}": (a / b) ** 0.5 for g, (a, b) in sorted(sums.items()) if b > 0}

    def _check_loss(self) -> None:
        mean = float(self._since.loss) / max(1, self._since.steps)
        if not mean <= _HOPELESS:
            raise Diverged(self.step, f"the training loss is {mean:.4g} nats")

    def _add(self, **used: float) -> None:
        self._cost = self._cost.model_copy(update={name: getattr(self._cost, name) + n for name, n in used.items()})

    def _identity(self) -> dict[str, Any]:
        return {"config": self.config.key, "seed": self.seed, "max_steps": self.max_steps}
