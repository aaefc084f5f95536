"""Test the recorded settings of user-defined modules or functions."""

from __future__ import annotations

import enum
import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from te_fsdp import checkpoint
from te_fsdp.errors import CheckpointError
from te_fsdp.modules.semantics import user_settings


class Own(nn.Module):
    """A module with weights whose attributes affect its output."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        for name, value in kwargs.items():
            setattr(self, name, value)


class Other(Own):
    """The same under a different name."""


class Gelu(nn.Module):
    """A function of no attributes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run a module that differs only by class."""
        return F.gelu(x)


class Silu(Gelu):
    """Another one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run a module that differs only by class."""
        return F.silu(x)


class GeluFunction(torch.autograd.Function):
    """Applied by a method that has the same name in all classes."""


class SiluFunction(torch.autograd.Function):
    """Another one."""


class Times:
    """An object whose method is a function of a module."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return x * self.factor

    def other(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        return x + self.factor


class Kind(enum.Enum):
    """A choice."""

    FIRST, SECOND = 1, 2


@dataclass
class Config:
    """Return the record of many modules of a model."""

    scale: float
    layers: int = 2


def loaded(tmp_path: Path, saved: nn.Module, here: nn.Module, **options: Any) -> Any:
    """Return the differences when one model's checkpoint is loaded into the other."""
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    checkpoint.save(path, saved)
    return checkpoint.load(path, here, **options)


FUNCTIONS: dict[str, tuple[Any, Any, str]] = {
    "apply": (GeluFunction.apply, SiluFunction.apply, r"saved function GeluFunction\.apply, model"),
    "method": (Times(2.0).of, Times(3.0).other, r"saved function Times\.of, model has function Times\.other"),
    "list": ([F.gelu, F.silu], [F.silu, F.gelu], r"saved function \['gelu', 'silu'\], model"),
    "none": (None, F.gelu, "saved None, model has function gelu"),
    "class": (Gelu(), Silu(), r"class: saved function Gelu, model has function Silu \(it\)"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_load_rejects_a_different_function(tmp_path: Path, name: str) -> None:
    one, other, text = FUNCTIONS[name]
    assert not loaded(tmp_path, Own(it=one), Own(it=one)).notes
    with pytest.raises(CheckpointError, match=text):
        loaded(tmp_path, Own(it=one), Own(it=other))
    assert loaded(tmp_path, Own(it=one), Own(it=other), strict=False).left


def with_default(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of one name and text, whatever its default."""

    def times(x: torch.Tensor, factor: float = factor) -> torch.Tensor:
        return x * factor

    return times


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (functools.partial(F.gelu, approximate="none"), functools.partial(F.gelu, approximate="tanh")),
        (lambda x: x, lambda x: 2 * x),
        (torch.ops.aten.relu, torch.ops.aten.tanh),
        (Times(2.0).of, Times(3.0).of),
        (with_default(2.0), with_default(3.0)),
    ],
    ids=["partial", "lambda", "operator", "method of one class", "default"],
)
def test_lambdas_and_partials_are_not_compared(tmp_path: Path, one: Any, other: Any) -> None:
    assert not loaded(tmp_path, Own(it=one), Own(it=other)).notes


VALUES: dict[str, tuple[Any, Any, str]] = {
    "number of numpy": (np.float32(0.5), np.float32(0.25), "it: saved 0.5, model has 0.25"),
    "choice": (Kind.FIRST, Kind.SECOND, "it: saved Kind.FIRST, model has Kind.SECOND"),
    "dataclass": (Config(1.0), Config(2.0), "scale: saved 1.0, model has 2.0 (it)"),
    "dict": ({"scale": 1.0}, {"scale": 2.0}, "scale: saved 1.0, model has 2.0 (it)"),
    "namespace": (SimpleNamespace(a=1), SimpleNamespace(a=2), "a: saved 1, model has 2 (it)"),
}


@pytest.mark.parametrize("name", VALUES)
def test_load_logs_a_different_value(tmp_path: Path, name: str) -> None:
    one, other, text = VALUES[name]
    assert not loaded(tmp_path, Own(it=one), Own(it=one)).notes
    assert loaded(tmp_path, Own(it=one), Own(it=other)).notes == [text]


@pytest.mark.parametrize("cls", [nn.Sequential, nn.ModuleDict])
def test_load_rejects_a_different_module_order(tmp_path: Path, cls: type[nn.Module]) -> None:
    """Only modules that both have are compared. A container is not a module with one entry."""
    one, other = (OrderedDict((n, nn.Linear(4, 4)) for n in names) for names in ("abc", "acb"))
    shorter = OrderedDict((n, nn.Linear(4, 4)) for n in "ab")
    text = r"(order|keys): saved \['a', 'b', 'c'\], model has \['a', 'c', 'b'\]"
    for strict in {nn.Sequential: (True, False), nn.ModuleDict: (True,)}[cls]:
        with pytest.raises(CheckpointError, match=text):
            loaded(tmp_path, cls(one), cls(other), strict=strict)
    if cls is nn.ModuleDict:
        assert loaded(tmp_path, cls(one), cls(other), strict=False).left.keys() == {"keys"}
    left = loaded(tmp_path, cls(one), cls(shorter), allow=["c.*"])
    assert left.left.keys() == {"c.weight", "c.bias"} and not left.notes
    numbers = nn.Sequential(*one.values()), nn.Sequential(*other.values())
    assert not loaded(tmp_path, *numbers).notes


def test_long_values_are_compared_completely(tmp_path: Path) -> None:
    long, other = [1.0] * 200, [*[1.0] * 199, 2.0]
    assert not loaded(tmp_path, Own(it=long), Own(it=list(long))).notes
    (note,) = loaded(tmp_path, Own(it=long), Own(it=other)).notes
    assert note.startswith("it: saved [1.0, 1.0, ") and len(note) < 600


def test_load_logs_a_different_module_class(tmp_path: Path) -> None:
    assert loaded(tmp_path, Own(), Other()).notes == ["class: saved Own, model has Other"]


def test_shared_configuration_is_recorded_once() -> None:
    """The first module that references it records it. Large values, such as a vocabulary, are not recorded."""
    config, words = Config(1.0), {str(n): n for n in range(1000)}
    result = user_settings(Own(config=config, part=Own(config=config, words=words)))
    assert result[""].settings == {"class": "Own", "config.scale": 1.0, "config.layers": 2}
    assert result["part"].settings == {"class": "Own"}


@pytest.mark.parametrize("make", [lambda eps: nn.LayerNorm(4, eps=eps), lambda eps: nn.RMSNorm(4, eps=eps)])
def test_numpy_numbers_are_recorded_as_settings(tmp_path: Path, make: Callable[[Any], nn.Module]) -> None:
    assert not loaded(tmp_path, make(np.float32(1e-5)), make(1e-5)).notes
    with pytest.raises(CheckpointError, match="eps: saved 9.99.*e-06, model has 0.1"):
        loaded(tmp_path, make(np.float32(1e-5)), make(np.float64(0.1)), strict=False)


def shared(order: list[int]) -> nn.Module:
    """Return layers of which some are the same."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    return nn.ModuleList(layers[n] for n in order)


def test_load_rejects_differently_shared_layers(tmp_path: Path) -> None:
    """The files contain the same tensors, but repeating a different layer is a different function."""
    assert not loaded(tmp_path, shared([0, 1, 0]), shared([0, 1, 0])).notes
    here = shared([0, 1, 1])
    before = [parameter.detach().clone() for parameter in here.parameters()]
    text = r"tied: saved 0.weight, model has 1.weight \(2.weight\); tied: saved 0.bias, model has 1.bias"
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=text):
            loaded(tmp_path, shared([0, 1, 0]), here, strict=strict)
    assert all(map(torch.equal, before, here.parameters()))
    assert {"2.weight.tied", "2.bias.tied"} == loaded(
        tmp_path, shared([0, 1, 0]), here, allow=["2.*"]
    ).left.keys()
