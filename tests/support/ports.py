"""Ports that a test can choose in advance without the risk that other programs get them.

python -m tests.support.ports 3    # prints three ports, one per line
"""

from __future__ import annotations

import random
import socket
import sys
from pathlib import Path

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Returns different free ports, outside the range from which the kernel chooses."""
    first_ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0]) if _EPHEMERAL_RANGE.exists() else 32768
    candidates = list(range(first_ephemeral // 2, first_ephemeral))
    random.SystemRandom().shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            return found
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            found.append(port)
    raise OSError(f"{len(found)} of {count} ports below {first_ephemeral} are free")


if __name__ == "__main__":
    print(*free_ports(int(sys.argv[1])), sep="\n")
