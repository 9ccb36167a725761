"""One command: a cluster of real services on this machine, a study on it, everything that may break, and a table.

python -m tests.faults                         a tiny study, all faults
python -m tests.faults --only driver-killed    some of them
python -m tests.faults --spec search_spaces/quickstart.yaml --report reports/faults.md
"""

from __future__ import annotations

import argparse
import platform
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from ranksearch.store import write_atomic
from tests.faults.faults import FAULTS, Running, Skipped, begin, check
from tests.faults.services import Services, lacking, refused
from tests.studies import write_inputs, write_spec

GRID = {
    "r": {"choices": [2, 4, 8]},
    "lora_alpha": 32,
    "learning_rate": 3.0e-3,
    "batch_size": 16,
    "warmup_steps": 3,
}
"""Small, and without a draw: what a fault may shift is when a trial runs, not which."""


def write_tiny(folder: Path, steps: int = 120) -> Path:
    """Writes a tiny study's inputs and spec."""
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(folder)
    budget = {"trials": 3, "min_steps": 40, "max_steps": steps, "reduction_factor": 3}
    return write_spec(folder, space=GRID, strategy="grid", budget=budget, seeds=3, max_seeds=3)


def run_one(services: Services, spec: Path, name: str, reference: Running | None) -> str:
    """Runs a study with one fault; gives a row of the table."""
    fault, began = FAULTS[name], time.monotonic()
    try:
        with begin(services, spec, name, small=name == "disk-full", clock=name == "clock-jumps") as study:
            study.wait_for_trials(2)
            fault(study)
            if study.submitted and (state := study.end()) != "SUCCEEDED":
                log = services.ranksearch("logs", name, "--address", services.address).stdout
                raise AssertionError(f"its job is {state}: {log[-3000:]}")
            if not study.submitted:
                # The driver is waited for when its clock is taken down.
                pass
            else:
                told = check(study, reference)
        if not study.submitted:
            told = check(study, reference)
        outcome = "survived: " + "; ".join([*study.notes, told])
    except Skipped as error:
        outcome = f"not made here: {error}"
    except Exception as error:
        traceback.print_exc()
        outcome = f"FAILED: {' '.join(str(error).split())[:400]}"
    return f"| {fault.__doc__} | {outcome} | {time.monotonic() - began:.0f} |"


def doors(services: Services) -> list[str]:
    """Rows about who is let in."""
    experiments = f"{services.mlflow_uri}/api/2.0/mlflow/experiments/search?max_results=1"
    jobs = f"{services.address}/api/jobs/"
    rows = []
    for what, url, wrong in (("job server", jobs, "Bearer " + "x" * 64), ("MLflow", experiments, "Basic YWRtaW46eA==")):
        without, bad = refused(url), refused(url, wrong)
        verdict = "survived" if without in (401, 403) and bad in (401, 403) else "FAILED"
        rows.append(f"| {what} without, and with a wrong, token or password | {verdict}: HTTP {without}, {bad} | |")
    leaked = services.leaked()
    verdict = "survived: found in no file" if not leaked else f"FAILED: {', '.join(leaked)}"
    rows.append(f"| All secrets searched for in records, logs, Ray's and MLflow's files | {verdict} | |")
    return rows


def main() -> int:
    """Runs the faults and prints the table; 1 when one was not survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--spec", type=Path, help="The study; by default a tiny one is made.")
    parser.add_argument("--only", help="Faults, separated by commas.")
    parser.add_argument("--report", type=Path, help="Write the table there too.")
    parser.add_argument("--keep", action="store_true", help="Leave the services' folder behind.")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(FAULTS)
    if unknown := [n for n in names if n not in FAULTS]:
        parser.error(f"no such faults: {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    if reason := lacking():
        parser.error(reason)
    root = Path(tempfile.mkdtemp(prefix="rsf-"))
    root.chmod(0o711)
    try:
        with Services(root) as services:
            spec = given.spec.resolve() if given.spec else write_tiny(root / "study")
            with begin(services, spec, "undisturbed") as reference:
                if (state := reference.end()) != "SUCCEEDED":
                    raise AssertionError(f"the undisturbed study is {state}")
            check(reference, None)
            rows = []
            for name in names:
                rows.append(run_one(services, spec, name, reference))
                print(rows[-1], flush=True)
            rows += doors(services)
    finally:
        if not given.keep:
            shutil.rmtree(root, ignore_errors=True)
    text = "\n".join(["| what was done | what came of it | seconds |", "| --- | --- | --- |", *rows]) + "\n"
    print("\n" + text)
    if given.report is not None:
        write_atomic(given.report, _report(text))
    return int(any("FAILED" in row for row in rows))


def _report(table: str) -> str:
    command = shlex.join(["python", "-m", "tests.faults", *sys.argv[1:]])
    return f"""# Faults survived

PostgreSQL, an MLflow server with a login on it, and a Ray cluster of three nodes (a head without CPUs, two workers of
one CPU each), started on one machine by the scripts of `docker/bin`. A study is submitted for each fault; the fault is
made when two of its trials are over and others run. Then these must hold: every trial is there once and is over, no
report stands twice, no configuration was trained twice with one seed, MLflow has one run a trial with the right end
state, and values, decision and test result are equal to those of the undisturbed run.

{table}
Reproduce with:

```bash
{command}
```

{platform.platform()}, Python {platform.python_version()}. Seconds include the start of the driver and of its workers,
on a machine that was busy with other work.
"""


if __name__ == "__main__":
    sys.exit(main())
