"""The Ray cluster as a running study sees it: joined or started here, its room, its nodes' reach.

The only module that starts or joins a Ray cluster.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ranksearch.cluster.address import knock
from ranksearch.errors import RankSearchError, StoreError
from ranksearch.plan import Room, refuse_lack
from ranksearch.spec import ResourcesSpec, Spec
from ranksearch.storage import Storage, prefix_of

__all__ = ["Cluster", "join"]

_ENVIRONMENT = {
    # Records are the state: Tune's own checkpoints and loggers would only cost time.
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # How many trials may wait for their worker at once; how many there are is the searcher's business.
    "TUNE_MAX_PENDING_TRIALS_PG": "64",
    "TUNE_WARN_THRESHOLD_S": "30",
    # Its handler would take the place of ours.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "10",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


_OBJECT_STORE_BYTES = 200 * 2**20
"""Tokenised data travels through it once; Ray's default takes a third of the machine's memory."""


_REACH_SECONDS = 120
"""How long a node may take to answer before the study begins without its word."""


class Cluster:
    """The Ray cluster in use.

    Made before it is joined: starting Ray is a part of what a study takes.
    """

    def __init__(self, address: str | None) -> None:
        self.address = address
        self.began, self.began_at = time.monotonic(), datetime.now(UTC)

    def rooms(self) -> list[Room]:
        """What each node that is alive holds."""
        import ray

        alive = [(node["Resources"], node.get("Labels") or {}) for node in ray.nodes() if node["Alive"]]
        return [Room(cpus=held.get("CPU", 0), gpus=held.get("GPU", 0), labels=labels) for held, labels in alive]

    def workers(self, resources: ResourcesSpec) -> int:
        """Trials that run at once, by what the nodes hold now and the spec's own bound.

        Where some ask for more than others there may be more than fit; those wait in Ray's queue.
        """
        if resources.autoscaling and resources.max_concurrent is not None:
            # Trials that wait are what brings nodes.
            return resources.max_concurrent
        cpus, gpus = resources.cpus_per_trial, resources.gpus_per_trial
        room = sum(node.takes(cpus, gpus, resources.labels) for node in self.rooms())
        return min(max(1, room), resources.max_concurrent or max(1, room))

    def refuse_lack(self, spec: Spec) -> None:
        """Refuses a study whose trials no node has room for.

        Raises:
            PlanError: When a trial asks for more than any node has.
        """
        refuse_lack(spec, self.rooms())

    def check_reach(self, folder: Path, storage: Storage | None, notify: Callable[[str], None]) -> None:
        """Proves that every node sees what this machine sees where adapters are saved to.

        Args:
            folder: The study's folder, which exists.
            storage: The object storage in its place, if any.
            notify: Told of nodes that gave no answer.

        Raises:
            StoreError: When a node sees another folder, or can't write to it or to the storage.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        if self.address is None or not nodes:
            return
        probe = f".probe-{uuid.uuid4().hex}"
        place = _Folder(str(folder.resolve())) if storage is None else _Bucket(storage.uri, prefix_of(folder.name))
        place.write(probe, probe)
        try:
            asked = {}
            for node in nodes:
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(_reach)
                asked[task.remote(place, probe)] = node
            done, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_REACH_SECONDS)
            faults = []
            for reference in done:
                host = asked[reference]["NodeManagerHostname"]
                try:
                    fault = ray.get(reference)
                except ray.exceptions.RayError:
                    silent.append(reference)
                    continue
                if fault is None and place.read(f"{probe}-{asked[reference]['NodeID']}") != "seen":
                    fault = "what it wrote is not seen here"
                if fault is not None:
                    faults.append(f"{host}: {fault}")
            if faults:
                raise StoreError(
                    f"every node must see {place.told} as the driver does, but: {'; '.join(faults)}. {place.remedy}"
                )
            for reference in silent:
                host = asked[reference]["NodeManagerHostname"]
                notify(f"{host} gave no answer when asked whether it reaches {place.told}; the study goes on.")
        finally:
            for name in (probe, *(f"{probe}-{node['NodeID']}" for node in nodes)):
                place.remove(name)

    def memory_could_run_out(self, per_trial_mb: float) -> bool:
        """Whether trials at their estimated peak could fill a node, so that a killed worker may mean just that."""
        import ray

        for node in ray.nodes():
            held = node["Resources"]
            if node["Alive"] and held.get("CPU") and held.get("memory"):
                # The estimate leaves out what the allocator keeps, hence the wide margin.
                if per_trial_mb * 2**20 * held["CPU"] > 0.5 * held["memory"]:
                    return True
        return False

    def describe(self) -> dict[str, Any]:
        """What it holds, for the record."""
        import ray

        held = ray.cluster_resources()
        nodes = sum(1 for node in ray.nodes() if node["Alive"])
        return {"nodes": nodes, "cpus": held.get("CPU", 0), "gpus": held.get("GPU", 0), "local": self.address is None}


@dataclass(frozen=True)
class _Folder:
    """The study's folder, for a look from a node."""

    path: str
    remedy = (
        "Set RANKSEARCH_HOME to a folder that is mounted under the same path on all nodes, or RANKSEARCH_STORAGE to an "
        "object storage that all reach."
    )

    @property
    def told(self) -> str:
        return f"the study's folder {self.path}"

    def read(self, name: str) -> str | None:
        try:
            return (Path(self.path) / name).read_text()
        except FileNotFoundError:
            return None

    def write(self, name: str, text: str) -> None:
        (Path(self.path) / name).write_text(text)

    def remove(self, name: str) -> None:
        (Path(self.path) / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Bucket:
    """The study's copy in object storage, for a look from a node."""

    uri: str
    prefix: str
    remedy = "Each node needs its own credentials: set them where its worker is started, or give it a role."

    @property
    def told(self) -> str:
        return f"the storage {Storage(self.uri).shown}"

    def read(self, name: str) -> str | None:
        content = Storage(self.uri).read(f"{self.prefix}/{name}")
        return None if content is None else content.decode()

    def write(self, name: str, text: str) -> None:
        Storage(self.uri).write(f"{self.prefix}/{name}", text.encode())

    def remove(self, name: str) -> None:
        Storage(self.uri).remove(f"{self.prefix}/{name}")


def _reach(place: _Folder | _Bucket, probe: str) -> str | None:
    """Runs on a node: why it doesn't see a file of the driver's or can't write beside it; None where all is well."""
    import ray

    try:
        if (seen := place.read(probe)) != probe:
            return "No such file or directory" if seen is None else "it sees another file"
        place.write(f"{probe}-{ray.get_runtime_context().get_node_id()}", "seen")
    except OSError as error:
        return error.strerror or str(error)
    except StoreError as error:
        return str(error)
    return None


@contextlib.contextmanager
def join(address: str | None) -> Iterator[Cluster]:
    """Joins a cluster, or starts one on this machine and ends it again.

    Raises:
        RankSearchError: When it can't be joined.
    """
    cluster = Cluster(address)
    os.environ.update({k: v for k, v in _ENVIRONMENT.items() if k not in os.environ})
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    if ray.is_initialized():
        yield cluster
        return
    # Ray's sockets lie in it, whose paths may not be long: it can't be in the study's folder.
    own = tempfile.mkdtemp(prefix="ranksearch-ray-") if address is None else None
    try:
        if own is not None:
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=own,
                **quiet,
            )
        else:
            knock(address or "")
            ray.init(address=address, **quiet)
    except Exception as error:  # Ray raises a bare one when its node is slow to start
        raise RankSearchError(
            f"the Ray cluster at {address or 'this machine'} can't be joined: {error}. "
            "See that it runs (`ray status`) and that the address is right."
        ) from error
    try:
        yield cluster
    finally:
        ray.shutdown()
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
