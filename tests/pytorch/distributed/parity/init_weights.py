"""Bodies: models with their own initialization, compared bit for bit with one process on any mesh."""

from __future__ import annotations

from typing import Any

import harness
import torch
from torch import nn

from parity.initialization import SEED, check_bits
from parity.models import Build


class Base(nn.Module):
    """TE modules and others, a parameter of the model itself, and tied embeddings."""

    def __init__(self, how: Build) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        device, kwargs = how.device, how.kwargs
        self.embedding = nn.Embedding(40, 32, padding_idx=1, device=device)
        self.blocks = nn.ModuleList(
            te.LayerNormMLP(32, 64, activation="swiglu", set_parallel_mode=True, **kwargs) for _ in range(2)
        )
        self.column = te.Linear(32, 32, parallel_mode="column", **kwargs)
        self.positions = nn.Parameter(torch.empty(16, 32, device=device))
        self.norm = nn.LayerNorm(32, device=device)
        self.head = nn.Linear(32, 40, bias=False, device=device)
        self.head.weight = self.embedding.weight


class Applied(Base):
    """Hugging Face and nanoGPT: `_init_weights(module)`, applied to every module."""

    def __init__(self, how: Build) -> None:
        super().__init__(how)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        import transformer_engine.pytorch as te

        if isinstance(module, (nn.Linear, te.Linear)):
            module.weight.data.normal_(0.0, 0.02)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()
        elif isinstance(module, te.LayerNormMLP):
            nn.init.trunc_normal_(module.fc1_weight, std=0.1)
            with torch.no_grad():
                module.fc2_weight.mul_(0.5)  # of TE's own values
        elif module is self:
            nn.init.normal_(self.positions, std=0.3)


class Named(Base):
    """torchtitan: one method that initializes all modules."""

    def __init__(self, how: Build) -> None:
        super().__init__(how)
        self.init_weights()

    def init_weights(self, factor: float = 1.0) -> None:
        view = self.positions.data
        nn.init.trunc_normal_(self.embedding.weight, std=0.02)
        self.norm.reset_parameters()
        for number, block in enumerate(self.blocks):
            nn.init.xavier_uniform_(block.fc1_weight)
            nn.init.constant_(block.fc2_bias, float(number))
        for name, parameter in self.named_parameters():
            if name == "column.weight":
                parameter.data.copy_(torch.eye(*parameter.shape) * factor)
        view.uniform_(-1.0, 1.0)  # through a view that is older than all of these


class Renamed(Applied):
    """The same under the third name, called without arguments."""

    def initialize_weights(self) -> None:
        self.apply(self._init_weights)


class Public(nn.Module):
    """Public recipes: TE's modules are recognized by `__module__`, other norms by name, and a tie drops a weight."""

    _tied_weights_keys = ("head.weight",)

    def __init__(self, how: Build) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.embedding = nn.Embedding(40, 32, device=how.device)
        self.blocks = nn.ModuleList(
            te.LayerNormLinear(32, 32, parallel_mode="column", **how.kwargs) for _ in range(2)
        )
        self.norm = nn.LayerNorm(32, device=how.device)
        self.head = te.Linear(32, 40, bias=False, device=how.device, params_dtype=torch.float32)
        self.post_init()
        self.head.weight = self.embedding.weight
        self.__dict__["_init_weights"] = self._init_weights  # an attribute of the instance stays one

    def post_init(self) -> None:
        self.apply(self._init_weights)

    def is_of_te(self, module: nn.Module) -> bool:
        return str(module.__module__).startswith("transformer_engine.pytorch")

    def _init_weights(self, module: nn.Module) -> None:
        if self.is_of_te(module):
            return
        if "LayerNorm" in type(module).__name__:
            module.weight.data.fill_(2.0)  # type: ignore[operator, union-attr]
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(0.0, 0.2)


class PublicByClass(Public):
    """The same, by the `__module__` of the class."""

    def is_of_te(self, module: nn.Module) -> bool:
        return type(module).__module__.startswith("transformer_engine.pytorch")


class PublicReset(Public):
    """`_init_weights` behind `init_weights`, as in Hugging Face, not on meta; TE's modules are reset."""

    def post_init(self) -> None:
        if not self.head.weight.is_meta:
            self.init_weights()

    def init_weights(self) -> None:
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if self.is_of_te(module):
            module.reset_parameters()  # type: ignore[operator]
        super()._init_weights(module)


class Inner(nn.Module):
    """A model with an initialization inside of a module without one."""

    def __init__(self, how: Build) -> None:
        super().__init__()
        self.model = Applied(how)
        self.extra = nn.Linear(32, 32, device=how.device)


class Stock(nn.Module):
    """Torch's modules whose `_reset_parameters` writes to their children, and a user's module that does so."""

    def __init__(self, how: Build) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, device=how.device)
        self.transformer = nn.Transformer(32, 2, 1, 1, 64, device=how.device)
        self.heads = Heads(how)


class Heads(nn.Module):
    """Projections that `reset_parameters` initializes again, as fairseq's attention does."""

    def __init__(self, how: Build) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(32, device=how.device))
        self.first, self.second = (nn.Linear(32, 32, device=how.device) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.first.weight)
        nn.init.normal_(self.scale)
        self.second.reset_parameters()


MODELS = {
    cls.__name__: cls for cls in (Applied, Named, Renamed, Public, PublicByClass, PublicReset, Inner, Stock)
}


class Inline(Base):
    """A constructor that initializes inline: in place, or through `.data`, which torch does not count."""

    def __init__(self, how: Build, through: str = "init") -> None:
        super().__init__(how)
        nn.init.normal_(self.positions)
        if through == "init":
            nn.init.normal_(self.blocks[1].fc1_weight, std=0.02)
            nn.init.zeros_(self.norm.weight)
        elif through == "helper":
            _small(self)
        elif through == "data":
            self.column.weight.data.normal_(0.0, 0.02)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.positions)


def _small(model: Inline) -> None:
    for layer in (model.column, model.embedding):
        nn.init.normal_(layer.weight, std=0.02)


def inline(through: str, route: str, strategy: str = "optim_grads_params") -> list[str]:
    """Materialize a model whose constructor initializes inline; return warnings.

    Args:
        through: of `Inline`; "none": its constructor does no more than its `reset_parameters`.
        route: as in `equals_one_process`, or "alone" without meshes.
        strategy: of `fully_shard`.
    """
    import logging

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    model = Inline(Build("meta"), through)
    if route == "bound":
        te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=meshes.weight)
    elif route == "sharded":
        te_fsdp.fully_shard(model, meshes, strategy=strategy)
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("te_fsdp").addHandler(handler)
    try:
        te_fsdp.materialize(model, seed=SEED)
    finally:
        logging.getLogger("te_fsdp").removeHandler(handler)
    return warnings


def equals_one_process(
    kind: str, axes: dict[str, int], strategy: str, route: str = "sharded"
) -> dict[str, Any]:
    """Compare bits with the model that one process builds.

    Args:
        kind: of `MODELS`.
        axes: mesh sizes.
        strategy: of `fully_shard`.
        route: "sharded", or "bound" for `materialize` before it.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    torch.manual_seed(SEED)
    reference = MODELS[kind](Build(harness.device()))
    model = MODELS[kind](Build("meta", **meshes.te_kwargs()))
    torch.manual_seed(SEED)
    if route == "bound":
        te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=meshes.weight)
        te_fsdp.materialize(model)
    # FSDP2 gives a unit its own class, whose __module__ is torch's.
    units: dict[str, Any] = {"units": ["blocks.0", "blocks.1"]} if kind == "Public" else {}
    te_fsdp.fully_shard(model, meshes, strategy=strategy, **units)
    if route == "sharded":
        te_fsdp.materialize(model)
    if hasattr(model, "embedding"):
        assert model.head.weight is model.embedding.weight
    if isinstance(model, Public):
        assert model.__dict__["_init_weights"] == model._init_weights
    return check_bits(model, reference)


def keeps_loaded_values(strategy: str) -> None:
    """Check that modules with values keep them, though the model's initialization writes to all of them."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    torch.manual_seed(SEED)
    model = Applied(Build("meta"))
    model.column.reset_parameters()
    with torch.no_grad():
        model.column.weight.fill_(3.0)
    te_fsdp.fully_shard(model, meshes, strategy=strategy)
    te_fsdp.materialize(model, seed=SEED)
    for parameter, constant in ((model.column.weight, True), (model.embedding.weight, False)):
        value = parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert bool((value == 3.0).all()) is constant


class NeedsArguments(Base):
    """Its initialization cannot be called."""

    def init_weights(self, std: float, device: str) -> None:
        """Do nothing: never called."""


class AssignsParameters(Base):
    """Its initialization makes new parameters."""

    def init_weights(self) -> None:
        self.head.weight = nn.Parameter(torch.zeros(40, 32, device=harness.device()))


def error_of_init(kind: str) -> None:
    """Raise on every rank."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    model = {"NeedsArguments": NeedsArguments, "AssignsParameters": AssignsParameters}[kind](Build("meta"))
    te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=SEED)


class MaterializesItself(nn.Sequential):
    """A model of torchtitan: its initialization is `te_fsdp.materialize`."""

    def init_weights(self) -> None:
        import te_fsdp

        te_fsdp.materialize(self)


def forward_of_materialized() -> None:
    """Run a forward after the model has materialized itself."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    model = MaterializesItself(nn.Linear(32, 32, device="meta"))
    te_fsdp.fully_shard(model, meshes)
    model.init_weights()
    assert model(torch.ones(2, 32, device=harness.device())).isfinite().all()


def huggingface(name: str, strategy: str) -> dict[str, Any]:
    """Compare a Hugging Face model from meta bit for bit with `from_config` in one process."""
    import transformers

    import te_fsdp
    from tests.unit.huggingface_models import MODELS as CONFIGS

    kind, settings = CONFIGS[name]
    config = getattr(transformers, kind)(**settings)
    torch.manual_seed(SEED)
    reference = transformers.AutoModelForCausalLM.from_config(config).to(harness.device())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    te_fsdp.fully_shard(model, meshes, strategy=strategy)
    te_fsdp.materialize(model, seed=SEED)
    assert abs(float(reference.get_input_embeddings().weight.std()) - config.initializer_range) < 0.005
    return check_bits(model, reference)
