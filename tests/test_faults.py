"""Studies that can't go well: each ends with one clear message, the right exit code, and nothing lost."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ranksearch.errors import InputError
from ranksearch.search.check import check_study
from ranksearch.store import Store
from tests.studies import SPEC, ranksearch, write_inputs, write_spec

pytestmark = pytest.mark.timeout(1500)

BUDGET = {"trials": 4, "min_steps": 4, "max_steps": 12, "reduction_factor": 3}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def check(folder: Path, inputs: Path, train: bytes | None, **data: Any) -> list[str]:
    """Every fault of a study on such a training file."""
    if train is not None:
        (folder / "train.csv").write_bytes(train)
    write_spec(folder, model=str(inputs / "model"), data={"train": "train.csv", **data})
    return [str(f) for f in check_study(folder / "spec.yaml").faults]


def test_a_file_that_is_not_there_is_named(tmp_path: Path, inputs: Path) -> None:
    (fault,) = check(tmp_path, inputs, None)
    assert "train.csv" in fault


@pytest.mark.parametrize("content", [b"", b"text,label\n", b"\n\n\n"])
def test_a_file_without_rows_is_named(tmp_path: Path, inputs: Path, content: bytes) -> None:
    (fault,) = check(tmp_path, inputs, content)
    assert "train.csv" in fault and "row" in fault


def test_a_file_of_one_class_is_refused(tmp_path: Path, inputs: Path) -> None:
    rows = "".join(f"the word {i},cat\n" for i in range(40))
    (fault,) = check(tmp_path, inputs, b"text,label\n" + rows.encode())
    assert "cat" in fault and "class" in fault


def test_a_label_in_eval_that_train_lacks_is_refused(tmp_path: Path, inputs: Path) -> None:
    rows = "".join(f"the word {i},{'cat' if i % 2 else 'dog'}\n" for i in range(40))
    (tmp_path / "eval.csv").write_text("text,label\na new word,cat\nanother word,fox\n")
    (fault,) = check(tmp_path, inputs, b"text,label\n" + rows.encode(), eval="eval.csv")
    assert "fox" in fault and "eval.csv" in fault and "line 3" in fault


def test_binary_rubbish_is_refused(tmp_path: Path, inputs: Path) -> None:
    assert check(tmp_path, inputs, bytes(range(256)) * 20)


def test_spec_data_model_and_targets_are_told_in_one_go(tmp_path: Path, inputs: Path) -> None:
    (tmp_path / "train.csv").write_text("text,kind\na,b\n")
    write_spec(tmp_path, model=str(inputs / "model"), seeds=0, space=SPEC["space"] | {"target_modules": "nothing.*"})
    faults = [str(f) for f in check_study(tmp_path / "spec.yaml").faults]
    assert len(faults) == 3
    assert any("seeds" in f for f in faults) and any("kind" in f for f in faults)
    assert any("nothing.*" in f for f in faults)


def test_a_rank_that_no_layer_can_hold_is_refused(tmp_path: Path, inputs: Path) -> None:
    write_inputs(tmp_path)
    write_spec(tmp_path, space=SPEC["space"] | {"r": {"choices": [2, 64]}})
    with pytest.raises(InputError, match="64"):
        check_study(tmp_path / "spec.yaml").setup()


def test_a_home_that_can_not_be_written_is_the_machines_fault(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_spec(tmp_path)
    (tmp_path / "home").write_text("a file, not a folder")
    ran = ranksearch(tmp_path, "search", "spec.yaml", RANKSEARCH_HOME=str(tmp_path / "home"))
    assert ran.code == 1 and "home" in ran.err and "RANKSEARCH_HOME" in ran.err


def test_a_study_that_no_node_has_room_for_is_refused_and_leaves_its_name_free(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_spec(tmp_path, budget=BUDGET, resources={"gpus_per_trial": 2})
    ran = ranksearch(tmp_path, "search", "spec.yaml", RAY_OVERRIDE_RESOURCES='{"GPU": 1}')
    assert ran.code == 2 and "gpus_per_trial=2, 1 GPUs" in ran.err, ran.err
    assert Store(tmp_path / ".ranksearch").studies() == []
    assert not list(tmp_path.rglob("mlflow.db")) and not list(tmp_path.rglob("spool*"))


@pytest.mark.slow
def test_a_study_whose_every_trial_diverges_fails_with_one_message_and_keeps_its_records(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_spec(tmp_path, space=SPEC["space"] | {"learning_rate": {"log": [1e12, 1e14]}}, budget=BUDGET)
    ran = ranksearch(tmp_path, "search", "spec.yaml", "--json")
    assert ran.code == 1
    assert ran.json["status"] == "failed" and ran.json["recommended"] is None
    (message,) = [line for line in ran.err.splitlines() if line.startswith("Error")]
    assert "none of its 4 trials completed" in message and "diverged" in message
    trials = Store(tmp_path / ".ranksearch").trials("tiny")
    assert {(t.state, t.violation) for t in trials} == {("PRUNED", "diverged")}


ALLOCATOR_LIMIT = '''
import importlib.abc, importlib.machinery, resource, sys

class LimitMemory(importlib.abc.MetaPathFinder):
    """Gives each adapter run 150 MB beyond what its process has taken already."""

    def find_spec(self, name, path, target=None):
        if name != "ranksearch.training.adapter_run":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            begin = module.AdapterRun.__init__

            def limited(self, *args, **kwargs):
                with open("/proc/self/status") as status:
                    taken = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
                _, hard = resource.getrlimit(resource.RLIMIT_DATA)
                resource.setrlimit(resource.RLIMIT_DATA, (taken + 150 * 2**20, hard))
                begin(self, *args, **kwargs)

            module.AdapterRun.__init__ = limited

        spec.loader.exec_module = exec_module
        return spec

if any("default_worker" in argument for argument in sys.orig_argv):
    sys.meta_path.insert(0, LimitMemory())
'''


@pytest.mark.slow
def test_a_rank_that_always_runs_out_of_memory_is_pruned_and_the_others_decide(tmp_path: Path) -> None:
    write_inputs(tmp_path, hidden=512)
    (tmp_path / "limit").mkdir()
    (tmp_path / "limit" / "sitecustomize.py").write_text(textwrap.dedent(ALLOCATOR_LIMIT))
    space = {"r": {"choices": [2, 4, 512]}, "learning_rate": 1e-3, "batch_size": 4, "warmup_steps": 1}
    write_spec(tmp_path, space=space, budget=BUDGET, seeds=2, strategy="grid")
    path = os.pathsep.join([str(tmp_path / "limit"), os.environ.get("PYTHONPATH", "")])
    ran = ranksearch(tmp_path, "search", "spec.yaml", "--json", PYTHONPATH=path)
    assert ran.code == 0, ran.err
    trials = Store(tmp_path / ".ranksearch").trials("tiny")
    large = [t for t in trials if t.config.r == 512]
    assert large and {(t.state, t.violation) for t in large} == {("PRUNED", "out_of_memory")}
    assert {t.state for t in trials if t.config.r < 512} == {"COMPLETE"}
    assert {p["r"] for p in ran.json["decision"]["curve"]} <= {2, 4}


def test_torn_weights_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_spec(tmp_path, budget=BUDGET)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"torn")
    ran = ranksearch(tmp_path, "search", "spec.yaml", "--json")
    assert ran.code == 2 and "model.safetensors" in ran.err
    assert not (tmp_path / ".ranksearch" / "studies").exists()
