"""Reservation of a Ray cluster's resources for a pipeline's workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from stages.cluster.actor import ActorConnection, ActorWorker
from stages.cluster.membership import join
from stages.placement import Placement
from stages.remote.codec import encode
from stages.remote.fork_server import import_path
from stages.remote.messages import WorkerSpec
from stages.remote.supervisor import Connection, NoPlaceError

_RESERVE_TIMEOUT_S = 60.0
_PLACE_TIMEOUT_S = 60.0
_NODE_ID = "ray.io/node-id"
_GROUPS = {"take": 1, "say": 2, "hand over": 1}
"""Threads per concurrency group; a call of ``say`` waits for the previous one."""

_REMOTE: Any = ray.remote
_OPTIONS: Any = {
    "concurrency_groups": _GROUPS,
    # Messages have their own sequence numbers. In Ray's order, all calls after a lost one would
    # wait for it until the calls before it have ended, which those of ``say`` never do.
    "allow_out_of_order_execution": True,
}
_ACTOR: Any = _REMOTE(**_OPTIONS)(ActorWorker)
_DIRECT_ACTOR: Any = _REMOTE(**_OPTIONS, enable_tensor_transport=True)(ActorWorker)
"""Separate class, as the transport is a class option; it adds threads."""


class Reservation:
    """A placement group with a bundle for every worker of a pipeline. ::

        writer     {CPU: 1}     replica 0        an actor that dies is replaced by another one
        reader     {CPU: 1}     replica 0        in the same bundle
                   {CPU: 1}     replica 1

    Args:
        address: address of the cluster to join, until this is closed; None starts one. See
            :func:`~stages.cluster.membership.join`.

    Raises:
        ValueError: it cannot be joined, or the requested resources do not exist or are not free.
            Nothing is reserved then, and the cluster is left.
    """

    def __init__(self, address: str | None, placements: Mapping[str, Placement]) -> None:
        with ExitStack() as joined:
            self._membership = join(address)
            joined.callback(self._membership.leave)
            self._reserve(placements)
            joined.pop_all()

    def _reserve(self, placements: Mapping[str, Placement]) -> None:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self._bundles: dict[tuple[str, int], int] = {}
        self._needs: list[dict[str, float]] = []
        self._selectors: list[dict[str, str]] = []
        for name, placement in placements.items():
            try:
                needs = _needs(placement)
                selector = _selector(placement, nodes)
                _check_fits(needs, selector, nodes)
            except ValueError as error:
                raise ValueError(f"stage {name!r}: placement{error}") from error
            for replica in range(placement.replicas):
                self._bundles[name, replica] = len(self._needs)
                # Ray refuses to reserve an empty bundle.
                self._needs.append(needs or {"CPU": 0.001})
                self._selectors.append(selector)
        self._group = placement_group(
            self._needs,
            strategy="PACK",
            bundle_label_selector=self._selectors if any(self._selectors) else None,
        )
        if not self._group.wait(_RESERVE_TIMEOUT_S):
            remove_placement_group(self._group)
            wanted, free = "; ".join(map(_format, self._needs)), _format(ray.available_resources())
            raise ValueError(
                f"the Ray cluster has no room for {len(self._needs)} workers: reserving {wanted} "
                f"took more than {_RESERVE_TIMEOUT_S:g} s, and {free} "
                "is free; see num_cpus, num_gpus, resources and node of each stage's placement"
            )

    def connect(
        self, spec: WorkerSpec, on_message: Callable[[Any], None], on_end: Callable[[str], None]
    ) -> Connection:
        """Start an actor in its bundle; see :data:`~stages.remote.supervisor.Connect`.

        Raises:
            ConnectionError: this process has left the cluster.
            NoPlaceError: the cluster has lost the nodes with the bundle's resources.
        """
        if not ray.is_initialized():  # creating an actor would start another cluster
            raise ConnectionError("this process has left the Ray cluster")
        index = self._bundles[spec.name, spec.replica]
        begun_s = time.monotonic()
        self._check_placed(index, begun_s)
        needs = dict(self._needs[index])
        kind = _ACTOR if spec.tensor_transport is None else _DIRECT_ACTOR
        actor = kind.options(
            num_cpus=needs.pop("CPU", 0),
            num_gpus=needs.pop("GPU", 0),
            resources=needs,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            ),
            runtime_env={"env_vars": _environment(spec.threads)},
        ).remote(encode(spec))
        check_there = partial(self._check_placed, index, begun_s)
        held = self._membership.held
        return ActorConnection(actor, held, spec.label, on_message, on_end, check_there)

    def _check_placed(self, index: int, begun_s: float) -> None:
        """Check that a bundle that was lost with its node has been placed, or soon will be."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        try:
            _check_fits(self._needs[index], self._selectors[index], nodes)
        except ValueError as error:
            raise NoPlaceError(f"placement{error}") from error
        table = placement_group_table(self._group)
        if table["state"] == "CREATED":
            return
        lost = [each for each, node in table["bundles_to_node_id"].items() if not node]
        # Ray places the lost bundles only all together.
        for (name, _), each in self._bundles.items() if index in lost else ():
            try:
                if each in lost:
                    _check_fits(self._needs[each], self._selectors[each], nodes)
            except ValueError as error:
                raise NoPlaceError(
                    "placement: Ray places what was lost with a node together, and stage "
                    f"{name!r} was lost with it{error}"
                ) from error
        if time.monotonic() - begun_s > _PLACE_TIMEOUT_S:
            raise NoPlaceError(
                f"placement: its node was lost, and what it needs, {_format(self._needs[index])}, "
                f"has not been free on another one for {_PLACE_TIMEOUT_S:g} s"
            )

    def close(self) -> None:
        """Free the reservation, and leave the cluster. Actors that are still alive are killed."""
        if ray.is_initialized():
            with suppress(ray.exceptions.RayError):  # it ends with this process's job anyway
                remove_placement_group(self._group)
        self._membership.leave()


def _environment(threads: int) -> dict[str, str]:
    """Return variables by which a worker's process finds this process's modules, if on its node."""
    path = map(os.path.abspath, import_path())
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), "OMP_NUM_THREADS": str(threads)}


def _needs(placement: Placement) -> dict[str, float]:
    amounts = {"CPU": placement.reserved_cpus, "GPU": placement.reserved_gpus}
    return {name: amount for name, amount in amounts.items() if amount} | placement.resources


def _selector(placement: Placement, nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the Ray label selector of the nodes that a bundle may be on."""
    if placement.node is None:
        return {}
    wanted = placement.node
    found = [
        node["NodeID"]
        for node in nodes
        if wanted in (node["NodeID"], node["NodeManagerAddress"], node.get("NodeManagerHostname"))
    ]
    if not found:
        there = ", ".join(f"{node['NodeManagerAddress']} ({node['NodeID']})" for node in nodes)
        raise ValueError(f".node: the Ray cluster has no node {wanted!r}; there are {there}")
    return {_NODE_ID: found[0] if len(found) == 1 else f"in({','.join(found)})"}


def _check_fits(
    needs: Mapping[str, float], selector: Mapping[str, str], nodes: Sequence[Mapping[str, Any]]
) -> None:
    there = [
        node["Resources"]
        for node in nodes
        if node["NodeID"] in selector.get(_NODE_ID, node["NodeID"])
    ]
    for resources in there:
        if all(resources.get(name, 0) >= amount for name, amount in needs.items()):
            return
    shown = "; ".join(_format(resources) for resources in there[:8])
    raise ValueError(
        f": each worker needs {_format(needs)}, and no node of the Ray cluster has that: there is "
        f"{shown}"
    )


def _format(resources: Mapping[str, float]) -> str:
    """Format the resources that users know: neither memory sizes nor Ray's internal ones."""
    known = {
        name: amount
        for name, amount in resources.items()
        if ":" not in name
        and name not in ("memory", "object_store_memory")
        and "_group_" not in name
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(known.items())) or "nothing"
