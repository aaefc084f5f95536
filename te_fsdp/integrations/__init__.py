"""Integrations of te_fsdp with training frameworks.

  fabric         Lightning Fabric: a strategy
  accelerate     Hugging Face accelerate: an Accelerator
  transformers   Hugging Face transformers: a Trainer
  peft           Hugging Face PEFT: LoRA on TransformerEngine's layers
  torchtitan     torchtitan: base class of models, parallelize function, checkpoint manager

Each module imports its framework and must be imported by its own name. docs/integrations.md has a table of
supported features for each.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import te_fsdp
from te_fsdp.errors import TeFsdpError, message

if TYPE_CHECKING:
    from torch import nn


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Wrap the imports of a framework. If one fails, raise an ImportError that names the pip extra to install."""
    try:
        yield
    except ImportError as error:
        text = message(str(error), fix=f"pip install 'te-fsdp[{extra}]', in a checkout '.[{extra}]'")
        raise type(error)(text, name=error.name) from error


def raising_method(error: type[TeFsdpError], problem: str, **facts: str) -> Any:
    """Return a method that always raises. It replaces a method of a framework class that te_fsdp cannot support."""

    def method(*unused: Any, **also_unused: Any) -> NoReturn:
        raise error(problem, **facts)

    method.__doc__ = f"Refused with ``{error.__name__}``."
    return method


def check_keywords(sharding: Mapping[str, Any]) -> None:
    """Raise TypeError for a keyword that ``te_fsdp.fully_shard`` does not have."""
    inspect.signature(te_fsdp.fully_shard).bind(None, None, **sharding)


def shard(model: nn.Module, meshes: te_fsdp.Meshes, seed: int | None, sharding: Mapping[str, Any]) -> None:
    """Shard a model and initialize its meta tensors. Collective over the world."""
    te_fsdp.fully_shard(model, meshes, **sharding)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        te_fsdp.materialize(model, seed=seed)
