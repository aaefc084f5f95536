"""Run torchrun as if this machine were several nodes.

    usage: scripts/torchrun_nodes.py NODES PROCESSES_PER_NODE SCRIPT [options...]

Each node is a separate torchrun, whose ranks also use GPUs 0, 1, ... of this machine. NCCL refuses two ranks on one
GPU of a host. NCCL_HOSTID sets a different host for each node, and NCCL then uses sockets between them. Values equal
those of real nodes, times do not. The first nonzero exit status ends the other nodes and is returned.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time


def main(nodes: int, processes: int, script: list[str]) -> int:
    """Run `script` on `nodes` x `processes` ranks; returns the exit status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes)]
    command += ["--nproc-per-node", str(processes), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    running = [
        subprocess.Popen(
            [*command, "--node-rank", str(node), *script], env={**os.environ, "NCCL_HOSTID": f"node{node}"}
        )
        for node in range(nodes)
    ]
    try:
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running):
                time.sleep(5)  # the others' own words about it
                break
            time.sleep(0.2)
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
    return next((status for status in [process.wait() for process in running] if status), 0)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
