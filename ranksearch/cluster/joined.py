"""The Ray cluster as a running study sees it: joined or started here, its room, its nodes' reach.

The only module that starts or joins a Ray cluster.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

from ranksearch.errors import RankSearchError
from ranksearch.plan import refuse_lack
from ranksearch.spec import ResourcesSpec, Spec

__all__ = ["Cluster", "join", "knock"]

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


class Cluster:
    """The Ray cluster in use."""

    def __init__(self, address: str | None) -> None:
        self.address = address

    def workers(self, resources: ResourcesSpec) -> int:
        """Trials that run at once, by what the nodes hold now and the spec's own bound."""
        import ray

        cpus, gpus = resources.cpus_per_trial, resources.gpus_per_trial
        room = 0
        for node in ray.nodes():
            if node["Alive"]:
                held = node["Resources"]
                fits = int(held.get("CPU", 0) / cpus + 1e-9)
                if gpus:
                    fits = min(fits, int(held.get("GPU", 0) / gpus + 1e-9))
                room += fits
        # Never none: a cluster that scales up begins by being asked.
        return min(max(1, room), resources.max_concurrent or max(1, room))

    def refuse_lack(self, spec: Spec) -> None:
        """Refuses a study whose trials no node has room for.

        Raises:
            PlanError: When a trial asks for more than any node has.
        """
        import ray

        held = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        refuse_lack(spec, max(h.get("CPU", 0) for h in held), max(h.get("GPU", 0) for h in held))

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


def knock(address: str) -> None:
    """Finds out at once whether anything listens at an address: Ray itself would try for minutes.

    Raises:
        ConnectionError: When nothing does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like: Ray knows where to look.
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from error


@contextlib.contextmanager
def join(address: str | None) -> Iterator[Cluster]:
    """Joins a cluster, or starts one on this machine and ends it again.

    Raises:
        RankSearchError: When it can't be joined or has no room.
    """
    os.environ.update({k: v for k, v in _ENVIRONMENT.items() if k not in os.environ})
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    if ray.is_initialized():
        yield Cluster(address)
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
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise RankSearchError(
            f"the Ray cluster at {address or 'this machine'} can't be joined: {error}. "
            "See that it runs (`ray status`) and that the address is right."
        ) from error
    try:
        yield Cluster(address)
    finally:
        ray.shutdown()
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
