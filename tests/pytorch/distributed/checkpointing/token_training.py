"""Steps of a model that predicts tokens, on any mesh."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn


class TokenTraining:
    """Training steps of a model; a subclass builds it with its optimizer."""

    CLASSES: int
    SHAPE: tuple[int, int]  #: Sequence and batch of all data-parallel ranks
    meshes: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer
    recipe: Any = None
    position = 0

    def steps(self, count: int) -> list[float]:
        """Return losses of training steps on batches that depend on the position in the data alone."""
        return [self._step() for _ in range(count)]

    def _step(self) -> float:
        import transformer_engine.pytorch as te

        generator = torch.Generator().manual_seed(100 + self.position)
        self.position += 1
        torch.manual_seed(self.position)  # NVFP4 rounds gradients at random
        ids = torch.randint(0, self.CLASSES, self.SHAPE, generator=generator).to(harness.device())
        if self.meshes is not None:
            mesh, sizes = self.meshes.device_mesh, self.meshes.size
            place = mesh.get_local_rank("dp_replicate") * sizes("dp_shard") + mesh.get_local_rank("dp_shard")
            ids = ids.tensor_split(sizes("dp_replicate") * sizes("dp_shard"), dim=1)[place].contiguous()
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            logits = self.model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flip(0).flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().double()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        return total.item()
