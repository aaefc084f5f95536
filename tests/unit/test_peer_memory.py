"""Test conditions for shared memory of ranks that are known before communication."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from te_fsdp import peer_memory as peers
from te_fsdp.upstream import symmetric_memory as _torch_transport


def test_symmetric_memory_keys_are_numbered_per_group():
    """torch numbers keys per process. Ranks with different earlier groups must still use the same keys."""
    store = dist.HashStore()
    first, second = _torch_transport._Numbered(store), _torch_transport._Numbered(store)
    for number in range(3):
        for kind in ("memory", "handles"):
            first.set(f"{kind}/{number}/0", f"{kind} {number}".encode())
    for number in range(3):
        for kind in ("memory", "handles"):
            assert second.get(f"{kind}/{number + 7}/0") == f"{kind} {number}".encode()


def test_alias_shares_memory_with_its_own_storage():
    """The alias shares memory through its own storage, which has exactly its size and cannot be resized."""
    memory = torch.zeros(1024, dtype=torch.uint8)
    result = peers.alias(memory, 256, torch.empty(8, dtype=torch.bfloat16))
    result.fill_(1)
    assert memory.view(torch.bfloat16).nonzero().flatten().tolist() == list(range(128, 136))
    assert result.untyped_storage().nbytes() == 16 and result.storage_offset() == 0
    assert not result.untyped_storage().resizable()


@pytest.mark.parametrize(
    ("allowed", "shared"), [((False, False), False), ((True, False), False), ((True, True), True)]
)
def test_ranks_share_a_gpu_only_if_all_allow_it(monkeypatch, allowed, shared):
    """All ranks must enable the torch setting. A single rank would wait for the others."""
    told = [("host", "GPU-0", set(), flag, "token") for flag in allowed]
    monkeypatch.setattr(peers, "is_simulated", lambda: False)
    monkeypatch.setattr(peers, "_identity", lambda device: "GPU-0")
    monkeypatch.setattr(peers, "_out_of_reach", lambda device: set())
    monkeypatch.setattr(peers, "gather", lambda own, group: told if isinstance(own, tuple) else [own])
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # on this rank

    def share(*arguments):
        raise RuntimeError("asked for memory")

    monkeypatch.setattr(peers, "PeerGroup", share)
    reason = peers.connect_peers(torch.device("cuda", 0), None)
    assert ("asked for memory" in reason) == shared and ("share a GPU" in reason) != shared, reason
