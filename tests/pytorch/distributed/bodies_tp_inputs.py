"""Bodies of models on tp whose ranks get equal or different inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

HIDDEN, FFN, WORDS, ROWS = 16, 32, 40, 4


@dataclass
class Packed:
    """Inputs in an object, as code for packed sequences has them."""

    lengths: torch.Tensor
    note: str = "packed"


class Model(nn.Module):
    """Token ids or features in, features out; what else it is given, it leaves alone."""

    def __init__(
        self, meshes: Any, sequence_parallel: bool = False, marked: bool = False, **other: Any
    ) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN, device="meta")
        self.embedding.weight.sequence_parallel = marked
        options = {"set_parallel_mode": True, "sequence_parallel": sequence_parallel, **other}
        self.mlp = te.LayerNormMLP(HIDDEN, FFN, device="meta", **meshes.te_kwargs(), **options)

    def forward(self, tokens: torch.Tensor, features: Any = None, **more: Any) -> torch.Tensor:
        return self.mlp(self.embedding(tokens) if features is None else features)

    def score(self, tokens: torch.Tensor, features: Any = None) -> torch.Tensor:
        return self(tokens, features)

    def norm(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute without a forward."""
        return self.embedding(tokens).norm()


class Part(nn.Module):
    """A layer without communication before its output. Its inputs are sharded over tp, or not."""

    def __init__(self, meshes: Any, mode: str) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        sizes = (2 * HIDDEN, HIDDEN) if mode == "row" else (HIDDEN, 2 * HIDDEN)
        self.layer = te.Linear(*sizes, parallel_mode=mode, device="meta", **meshes.te_kwargs())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _meshes(dp: int) -> Any:
    import te_fsdp

    return te_fsdp.Meshes.build(dp_shard=dp, tp=2, device_type=harness.device_type())


def _bound(model: nn.Module, meshes: Any, door: str, **options: Any) -> nn.Module:
    import te_fsdp

    if door == "fully_shard":
        te_fsdp.fully_shard(model, meshes, units=[], **options)
    else:
        te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight, **options)
    return te_fsdp.materialize(model, seed=3)


def _draw(seed: int, *shape: int, integer: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if integer:
        return torch.randint(WORDS, shape, generator=generator).to(harness.device())
    return torch.randn(shape, generator=generator).to(harness.device())


def _inputs(what: str, own: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of a forward in which ``what`` differs between ranks with different ``own``."""
    tokens, features = _draw(0, ROWS, integer=True), _draw(1, ROWS, HIDDEN)
    if what == "integer":
        return (_draw(own, ROWS, integer=True),), {}
    if what == "floating":
        return (tokens, _draw(own, ROWS, HIDDEN)), {}
    if what == "one value":
        features[-1, -1] += own
        return (tokens,), {"features": features}
    if what == "mask":
        return (tokens,), {"masks": {"causal": [None, _draw(own, ROWS, HIDDEN) > 0]}}
    if what == "object":
        return (tokens,), {"packed": Packed(_draw(own, 3, integer=True))}
    if what == "shape":
        return (_draw(0, ROWS + own, integer=True),), {}
    if what == "dtype":
        return (tokens.int() if own else tokens,), {}
    if what == "rounding":  # as two orders of a sum differ
        return (tokens, features * (1 + own * torch.finfo(features.dtype).eps)), {}
    if what == "complex":
        return (tokens,), {"rotary": torch.complex(_draw(own, ROWS), _draw(2, ROWS)).conj()}
    assert what == "nothing", what
    return (tokens, features), {"empty": _draw(0, 0, integer=True), "masks": {"causal": [None, tokens > 0]}}


def _error(call: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    import te_fsdp

    try:
        call(*args, **kwargs)
    except te_fsdp.TeFsdpError as error:
        return type(error).__name__, str(error)
    return "", ""


def forward_with_different_inputs(
    door: str, what: str, dp: int, where: str = "tp", **options: Any
) -> tuple[str, str]:
    """Run one forward. Ranks along ``where`` ("tp", "dp", or all: "rank") get different data."""
    meshes = _meshes(dp)
    place = {
        "tp": meshes.device_mesh.get_local_rank("tp"),
        "dp": dist.get_rank() // 2,
        "rank": dist.get_rank(),
    }
    model = _bound(Model(meshes), meshes, door, **options)
    args, kwargs = _inputs(what, place[where])
    return _error(model, *args, **kwargs)


def sharded_inputs(door: str, how: str, what: str) -> tuple[str, str]:
    """Run models whose tp ranks get shards of the inputs."""
    meshes = _meshes(1)
    own = meshes.tp.get_local_rank()
    if how in ("row", "column"):
        model = _bound(Part(meshes, how), meshes, door)
        return _error(model, _draw(own, ROWS, HIDDEN))
    model = Model(meshes, how in ("sequence", "marked"), how == "marked")
    args, kwargs = _inputs(what, own)
    return _error(_bound(model, meshes, door), *args, **kwargs)


@contextlib.contextmanager
def _gathers() -> Iterator[list[int]]:
    """Count object gathers of a comparison."""
    seen, stock = [0], dist.all_gather_object

    def counted(*args: Any, **kwargs: Any) -> None:
        seen[0] += 1
        stock(*args, **kwargs)

    dist.all_gather_object = counted
    try:
        yield seen
    finally:
        dist.all_gather_object = stock


def errors_of_several_forwards(door: str) -> list[tuple[int, str]]:
    """Return comparisons and the error of each of several forwards."""
    meshes = _meshes(1)
    own = meshes.tp.get_local_rank()
    model, results = _bound(Model(meshes), meshes, door), []

    def forward(rows: int, seed: int) -> None:
        with _gathers() as seen:
            kind, _ = _error(model, _draw(seed, rows, integer=True))
        results.append((seen[0], kind))

    forward(4, 0)
    forward(4, 1)
    forward(6, 2 + own)  # new shapes are compared again
    forward(6, 2 + own)  # what was refused is not taken for equal
    forward(6, 3)
    model.eval()
    forward(4, 4 + own)  # evaluation has separate data
    return results


def registered_method() -> list[str]:
    """Run registered methods, one that calls forward and one that does not."""
    import te_fsdp

    meshes = _meshes(1)
    own = meshes.tp.get_local_rank()
    model = _bound(Model(meshes), meshes, "fully_shard")
    te_fsdp.register_forward_method(model, "score")
    te_fsdp.register_forward_method(model, "norm")
    same, other = _draw(0, ROWS, integer=True), _draw(own, ROWS, integer=True)
    calls = (model, same), (model.score, other), (model.norm, other)
    results = [_error(*call) for call in calls]
    return [kind if "tokens (int64" in text or not text else text for kind, text in results]


def recomputed_forward() -> int:
    """Return the comparisons of a model whose forward runs again in backward, with different shapes there."""
    from torch.utils.checkpoint import checkpoint

    meshes = _meshes(1)
    model = _bound(Model(meshes), meshes, "set_device_mesh")

    def part(x: torch.Tensor) -> torch.Tensor:
        # A separate root that is first called in the recomputation.
        return model(tokens, x) if torch.is_grad_enabled() else x * 1

    tokens, x = _draw(0, ROWS, integer=True), _draw(1, ROWS, HIDDEN).requires_grad_()
    with _gathers() as seen:
        checkpoint(part, x, use_reentrant=True).sum().backward()
    return seen[0]


def new_shapes_on_one_rank() -> tuple[str, str]:
    """Call a layer without communication with new shapes on rank 0 only."""
    import te_fsdp

    meshes = _meshes(1)
    te_fsdp.set_collective_timeout(2)
    try:
        model = _bound(Part(meshes, "column"), meshes, "set_device_mesh")
        model(_draw(0, ROWS, HIDDEN))
        return _error(model, _draw(0, ROWS + (dist.get_rank() == 0), HIDDEN))
    finally:
        te_fsdp.set_collective_timeout(1800)


def different_modes() -> tuple[str, str]:
    """Call one rank in evaluation mode and the other in training mode."""
    meshes = _meshes(1)
    model = _bound(Model(meshes), meshes, "set_device_mesh")
    return _error(model.train(dist.get_rank() == 0), _draw(0, ROWS, integer=True))


def check_inputs_of_nested_calls() -> list[str]:
    """Check that set_device_mesh compares inputs; after fully_shard only its switch counts, also for a copy."""
    import copy

    import te_fsdp

    meshes = _meshes(1)
    outer = nn.Sequential(Model(meshes))
    te_fsdp.set_device_mesh(outer[0], meshes.tp, meshes.weight)
    other = copy.deepcopy(outer)
    te_fsdp.fully_shard(outer, meshes, units=[], check_inputs=False)
    results = []
    for model in (outer, other):
        te_fsdp.materialize(model, seed=3)
        results.append(_error(model, _draw(dist.get_rank(), ROWS, integer=True))[0])
    return results
