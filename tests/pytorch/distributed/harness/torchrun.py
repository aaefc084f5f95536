"""Run one body under real torchrun, which shows that bodies do not depend on the pool.

`torchrun --nproc-per-node 2 -m harness.torchrun module:function '{"dp": 2}'`. TE_FSDP_EMULATION is the simulated
architecture on the CPU ("none": no TE). Rank 0 prints the results of all ranks as one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

import torch.distributed as dist

from . import state, wire


def main(arguments: list[str]) -> None:
    """Run the body `module:function` with keyword arguments given as JSON."""
    module_name, _, function = arguments[0].partition(":")
    kwargs = json.loads(arguments[1]) if len(arguments) > 1 else {}
    arch = os.environ.get("TE_FSDP_EMULATION", "10.0")
    state.preload(te=arch != "none", arch=arch)
    body = getattr(importlib.import_module(module_name), function)
    state.seed_everything()
    state.join_group(generation=0)
    result = wire.by_value(body(**kwargs))
    results: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
