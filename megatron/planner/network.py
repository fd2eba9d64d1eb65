"""Predicts the time of collectives and messages on a cluster of equal nodes.

A node has `node_size` devices that are connected with each other, and that share one connection to the other
nodes. Ranks fill the nodes in order. A ring collective of n ranks moves (n - 1) / n of its bytes over every
link of the ring; an all-reduce moves twice as much. These are the factors of the bus bandwidth (arXiv
1909.08053; NVIDIA's nccl-tests, "Performance reported by NCCL tests"). If rings extend over several nodes,
all rings of a node's devices share the node's connection.

The default rates are the rates of the vendors' systems, per direction:

    V100   DGX-1: 6 NVLinks of 25 GB/s per device, 4 x 100 Gbit/s per node
    A100   DGX A100: 12 NVLinks of 25 GB/s, 8 x 200 Gbit/s
    H100   DGX H100 (and H200): 18 NVLinks of 25 GB/s, 8 x 400 Gbit/s
    B200   DGX B200: 18 NVLinks of 50 GB/s, 8 x 400 Gbit/s
    GB200  GB200 NVL72: 72 devices with 18 NVLinks of 50 GB/s, 72 x 400 Gbit/s

Collectives reach only a part of these rates. This part (`ACHIEVED`) and the latencies are assumptions.
--network-figures replaces the default rates with rates that the preflight has measured; `ACHIEVED` does not
apply to measured rates. The model leaves out congestion, rings over a part of the links, trees, and SHARP.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

from megatron.cluster.preflight import read_network_figures
from megatron.config import Config
from megatron.mpu.mesh import Mesh
from megatron.planner.simulation.passes import GROUP_AXES, Collective, Group

ALL_REDUCE = "allreduce_"
ALL_TO_ALL = "alltoall_base_"

ACHIEVED = 0.75
"""Fraction of a link's rate that collectives reach."""
LATENCY_S = {"intra": 5e-6, "inter": 15e-6}
"""Seconds per step of a collective, within a node and between nodes."""
_BITS = 8e-9


def _reached(gbps: float) -> float:
    return ACHIEVED * gbps / _BITS


@cache
def _members(group: Group, mesh: Mesh, node_size: int) -> tuple[int, int]:
    """Returns the size of the process group to which the rank of `mesh` belongs, and how many of its ranks
    are in one node at most."""
    if isinstance(group, str):
        ranks = mesh.ranks_along(GROUP_AXES[group], mesh.rank)
    else:  # a group of some pipeline ranks
        ranks = tuple(stage * mesh.ranks_per_stage for stage in group)
    return len(ranks), max(Counter(rank // node_size for rank in ranks).values())


@dataclass(frozen=True)
class Network:
    """The connections of a cluster. All rates are per direction.

    node_size: devices per node. intra_bytes_per_s: rate of one device within its node. inter_bytes_per_s:
    rate of all devices of a node together to other nodes.
    """

    node_size: int
    intra_bytes_per_s: float
    inter_bytes_per_s: float

    @classmethod
    def of_links(cls, node_size: int, intra_node_gbps: float, inter_node_gbps: float) -> Network:
        """Returns a network with these nominal rates in Gbit/s. intra_node_gbps: rate of a device within its
        node. inter_node_gbps: rate of a node to other nodes."""
        return cls(node_size, _reached(intra_node_gbps), _reached(inter_node_gbps))

    def seconds(self, call: Collective, mesh: Mesh) -> float:
        """Returns the seconds that a collective takes on the rank of `mesh`, if all ranks of the run call it
        in their own groups at the same time."""
        ranks, in_node = _members(call.group, mesh, self.node_size)
        if call.operation == ALL_TO_ALL:
            return self.all_to_all_seconds(call.bytes, ranks, in_node)
        all_reduce = call.operation == ALL_REDUCE
        return self.collective_seconds(all_reduce, call.bytes, ranks, in_node, mesh.world_size)

    def collective_seconds(
        self, all_reduce: bool, size: float, ranks: int, in_node: int, world_size: int
    ) -> float:
        """Returns the seconds of a collective of `size` bytes, if all groups of the run communicate at the
        same time. all_reduce: False for an all-gather or a reduce-scatter. ranks: size of the group. in_node:
        largest number of its ranks in one node."""
        if ranks == 1:
            return 0.0
        share = (2 if all_reduce else 1) * (ranks - 1) / ranks
        steps = 2 * math.ceil(math.log2(ranks))
        if in_node == ranks:
            return share * size / self.intra_bytes_per_s + steps * LATENCY_S["intra"]
        rings = max(min(self.node_size, world_size) // in_node, 1)
        rate = min(self.inter_bytes_per_s / rings, self.intra_bytes_per_s)
        return share * size / rate + steps * LATENCY_S["inter"]

    def all_to_all_seconds(self, size: float, ranks: int, in_node: int) -> float:
        """Returns the seconds of an all-to-all in which each rank sends `size` bytes, in equal parts to all
        ranks, if all groups of the run communicate at the same time. in_node: largest number of a group's
        ranks in one node."""
        if ranks == 1:
            return 0.0
        near = (in_node - 1) / ranks * size / self.intra_bytes_per_s
        if in_node == ranks:
            return near + (ranks - 1) * LATENCY_S["intra"]
        far = (ranks - in_node) / ranks * size * self.node_size / self.inter_bytes_per_s
        return max(near, far) + (ranks - 1) * LATENCY_S["inter"]

    def message_seconds(self, size: float, source: int, destination: int, mesh: Mesh) -> float:
        """Returns the seconds of a message of `size` bytes, if all ranks of the two stages exchange a message
        at the same time."""
        if source // self.node_size == destination // self.node_size:
            return size / self.intra_bytes_per_s + LATENCY_S["intra"]
        senders = min(self.node_size, mesh.ranks_per_stage)
        rate = min(self.inter_bytes_per_s / senders, self.intra_bytes_per_s)
        return size / rate + LATENCY_S["inter"]


KINDS = {
    "v100": Network.of_links(8, 1200, 400),
    "a100": Network.of_links(8, 2400, 1600),
    "h100": Network.of_links(8, 3600, 3200),
    "h200": Network.of_links(8, 3600, 3200),
    "b200": Network.of_links(8, 7200, 3200),
    "gb200": Network.of_links(72, 7200, 28800),
}


def find_network(config: Config) -> Network | None:
    """Returns the network of the run; None without --gpu. Its rates come from --node-size, --intra-node-gbps
    and --inter-node-gbps, then from the measured rates in --network-figures, then from the defaults of the
    kind of GPU. Raises ConfigError if the file of --network-figures cannot be used."""
    if config.training.gpu is None:
        return None
    usual = KINDS[config.training.gpu.partition("-")[0]]
    if (figures := read_network_figures(config)) is not None:
        usual = Network(
            figures.node_size,
            figures.intra_bytes_per_s or usual.intra_bytes_per_s,
            figures.inter_bytes_per_s or usual.inter_bytes_per_s,
        )
    parallel = config.parallel
    intra, inter = parallel.intra_node_gbps, parallel.inter_node_gbps
    return Network(
        parallel.node_size or usual.node_size,
        usual.intra_bytes_per_s if intra is None else _reached(intra),
        usual.inter_bytes_per_s if inter is None else _reached(inter),
    )
