"""What te_fsdp knows about one parameter of a TE module before any tensor moves.

Words (see docs/concepts): *original* is the parameter as one process would hold it (tp size 1); *tp-local* is
one tensor-parallel rank's part of it.

    plain                     stacked, two blocks (gated fc1), tp = 2
    original   tp-local 0     original    tp-local 0   tp-local 1
    +-----+    +-----+        +------+    +------+     +------+
    |  0  |    |  0  |        | G_0  |    | G_0  |     | G_1  |
    +-----+    +-----+        | G_1  |    +------+     +------+
    |  1  |                   +------+    | U_0  |     | U_1  |
    +-----+                   | U_0  |    +------+     +------+
                              | U_1  |
                              +------+

A stacked tp-local tensor is not a contiguous slice of the original: ``Shard(0)`` describes it only as long as
the tensor-parallel size does not change. The layout travels with the parameter so that initialisation,
reports and checkpoints can be exact, or refuse.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GROUPED", "PLAIN", "Layout", "ParameterRule"]


@dataclass(frozen=True)
class Layout:
    """How tp-local rows lie in the original tensor.

    Attributes:
        kind: ``"plain"`` (one block), ``"stacked"`` (blocks one under the other along dim 0) or ``"grouped"``
            (one block with a leading dim of experts).
        blocks: For ``"stacked"``: the relative heights of the blocks, for example ``(1, 1)`` for ``[gate;
            up]`` and ``(np, ng, ng)`` for a fused, non-interleaved QKV with ``np`` query heads and ``ng``
            key-value groups.
    """

    kind: str = "plain"
    blocks: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        assert self.kind in ("plain", "stacked", "grouped"), self.kind
        assert len(self.blocks) >= 1 and all(b > 0 for b in self.blocks), self.blocks
        assert (self.kind == "stacked") == (len(self.blocks) > 1), self

    @property
    def is_stacked(self) -> bool:
        """Whether tp-local rows come from several separate ranges of the original."""
        return self.kind == "stacked"

    @property
    def is_grouped(self) -> bool:
        """Whether dim 0 counts experts."""
        return self.kind == "grouped"

    def __str__(self) -> str:
        return self.kind if not self.is_stacked else f"stacked{self.blocks}"


PLAIN = Layout()
GROUPED = Layout("grouped")


@dataclass(frozen=True)
class ParameterRule:
    """Tensor-parallel facts of one parameter.

    Attributes:
        shard_dim: Tensor dim that the ``tp`` axis cuts, or ``None`` for a parameter replicated over ``tp``.
        layout: How the tp-local rows lie in the original.
        partial_grad: Whether each ``tp`` rank computes only its own contribution to the gradient of this
            replicated parameter, so that contributions must be summed over ``tp`` (sequence parallelism, q/k
            norms).
        quantizable: Whether TE may hold this parameter in a quantized format (weights of GEMMs).
    """

    shard_dim: int | None
    layout: Layout = PLAIN
    partial_grad: bool = False
    quantizable: bool = False

    def __post_init__(self) -> None:
        assert not (self.partial_grad and self.shard_dim is not None), "a sharded parameter owns its gradient"
        assert not (self.layout.is_stacked and self.shard_dim not in (0, None)), (
            "blocks are stacked along dim 0"
        )
