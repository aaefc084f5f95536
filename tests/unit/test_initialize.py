"""Test materialize in one process."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import te_fsdp
from te_fsdp.errors import InitError
from te_fsdp.initialize import fill_with_nan
from te_fsdp.tensor_checksums import checksum
from tests.unit.commands import run_text

INTEGERS = (torch.int8, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.bool)
FLOATS = (torch.float16, torch.bfloat16, torch.float64, torch.complex64)


class Table(nn.Module):
    """A parameter and a buffer of one dtype; `fill` is how reset_parameters initializes the buffer."""

    def __init__(self, dtype: torch.dtype, fill: str, device: str = "meta") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device=device))
        self.register_buffer("table", torch.empty(4, dtype=dtype, device=device))
        self.fill = fill

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.fill == "zeros":
            self.table.zero_()
        elif self.fill == "half":
            self.table[:2] = 1


def unset(model: nn.Module) -> str:
    with pytest.raises(InitError) as caught:
        te_fsdp.materialize(model)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_buffers_of_every_dtype_are_initialized(dtype):
    """Zero is a valid initial value, also of unsigned dtypes."""
    model = te_fsdp.materialize(Table(dtype, "zeros"))
    assert model.table.dtype == dtype and not model.table.is_meta and (model.table == 0).all()
    assert torch.equal(model.weight, torch.ones(3))


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
@pytest.mark.parametrize("fill", ["nothing", "half"])
def test_unset_buffers_are_detected_where_possible(dtype, fill):
    """Floats are detected even if partly unset, signed integers if completely unset, other dtypes never."""
    seen = dtype in FLOATS or (fill == "nothing" and dtype.is_signed)
    if seen:
        assert unset(Table(dtype, fill)) == (
            "1 tensor(s) were not initialized: table: expected an initializer for each, got meta tensors, or "
            "values that reset_parameters left uninitialized. They would contain uninitialized memory. Fix: define "
            "reset_parameters() on the module that owns them, filling every parameter and buffer, "
            "or assign tensors with values before materialize (such as rotary frequencies of the model's own, computed "
            "outside of torch.device('meta'))."
        )
    else:
        te_fsdp.materialize(Table(dtype, fill))


def test_modules_on_the_device_are_unchanged():
    """A NaN written by the user is not reported as missing initialization."""
    model = Table(torch.float32, "nothing")
    model.table = torch.full((4,), float("nan"))
    whole = Table(torch.float32, "nothing", device="cpu")
    nn.init.constant_(whole.weight, 5.0)
    te_fsdp.materialize(nn.ModuleList([model, whole]))
    assert model.table.isnan().all() and (model.weight == 1).all() and (whole.weight == 5).all()


def test_empty_and_none_buffers_are_materialized():
    model = Table(torch.float32, "zeros")
    model.register_buffer("empty", torch.empty(0, 3, device="meta"))
    model.register_buffer("none", None)
    model.register_parameter("off", None)
    te_fsdp.materialize(model)
    assert (
        model.empty.shape == (0, 3) and not model.empty.is_meta and model.none is None and model.off is None
    )


def tree() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8), nn.Sequential(nn.Embedding(5, 8), nn.BatchNorm1d(8))
    )


def test_materialized_values_equal_construction_on_the_device():
    torch.manual_seed(3)
    expected = tree()
    with torch.device("meta"):
        model = tree()
    before = torch.get_rng_state()
    te_fsdp.materialize(model, seed=3)
    assert torch.equal(torch.get_rng_state(), before), "the random state was not put back"
    for (name, value), want in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(value, want), name
    with torch.device("meta"):
        other = tree()
    te_fsdp.materialize(other, seed=4)  # negative control
    assert not torch.equal(other[0].weight, expected[0].weight)


def test_materialize_without_seed_uses_the_current_rng_state():
    with torch.device("meta"):
        models = [tree(), tree()]
    torch.manual_seed(3)
    te_fsdp.materialize(models[0])
    te_fsdp.materialize(models[1])
    assert not torch.equal(models[0][0].weight, models[1][0].weight)
    torch.manual_seed(3)
    assert torch.equal(models[0][0].weight, tree()[0].weight)


def test_all_uninitialized_tensors_are_named_at_once():
    """Cover modules without reset_parameters and one that fills a part. The others are still initialized."""
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Module(), Table(torch.float32, "half"))
    model[1].gain = nn.Parameter(torch.empty(2, device="meta"))
    model[1].register_buffer("shift", torch.empty(2, device="meta"))
    assert unset(model).startswith("3 tensor(s) were not initialized: 1.gain, 1.shift, 2.table: expected")
    assert not model[0].weight.is_meta


def test_reset_parameters_may_write_in_place():
    """TE's ops write to a bias outside of ``no_grad`` if it is not on meta."""

    class InPlace(nn.Linear):
        def reset_parameters(self) -> None:
            if not self.weight.is_meta:
                self.weight.fill_(2.0)
                self.bias.zero_()

    model = InPlace(2, 2, device="meta")
    te_fsdp.materialize(model)
    assert torch.equal(model.weight, torch.full((2, 2), 2.0)) and not model.bias.any()
    assert model.weight.requires_grad


def test_exception_in_reset_parameters_is_raised():
    class Broken(nn.Linear):
        def reset_parameters(self) -> None:
            if not self.weight.is_meta:
                raise KeyError("no such table")

    with pytest.raises(KeyError, match="no such table"):
        te_fsdp.materialize(Broken(2, 2, device="meta"))


def test_plain_models_work_without_transformer_engine(python):
    """Plain modules do not require TE. Access to a TE class raises with install instructions."""
    script = """
import sys
sys.modules["transformer_engine"] = None  # as if it were not installed
import torch, te_fsdp
meshes = te_fsdp.Meshes.build(device_type="cpu")
model = torch.nn.Sequential(torch.nn.Linear(4, 4, device="meta"), torch.nn.Linear(4, 2, device="meta"))
te_fsdp.materialize(te_fsdp.fully_shard(model, meshes, units="0"), seed=1)
model(torch.ones(2, 4)).sum().backward()
assert len(te_fsdp.report(model)) == 4
try:
    te_fsdp.Linear
except ImportError as error:
    print(error)
"""
    result = run_text(python, script, env={"PATH": "/usr/bin:/bin"})
    assert result.stdout.startswith("te_fsdp needs TransformerEngine 2.18 to 2.20, whose import failed: ")
    assert result.stdout.strip().endswith(
        "Fix: pip install 'te-fsdp[gpu]' on a machine with an NVIDIA GPU, or pip install 'te-fsdp[emulation]' and "
        "call te_fsdp.emulation.install() before anything imports transformer_engine."
    )


def test_checksums_distinguish_patterns_of_two_values():
    """After Adam's first step, biases are plus or minus the learning rate, so weak checksums collide."""
    patterns = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=12)), dtype=torch.bfloat16) * 0.003
    sums = {int(checksum(pattern)) for pattern in patterns}
    assert len(sums) == len(patterns)
    assert int(checksum(patterns[5])) == int(checksum(patterns[5].clone()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.complex64], ids=str)
def test_checksums_depend_on_every_bit(dtype):
    """Includes signs of 8-byte elements: an even weight shifts the top bit out of the sum."""
    tensor = torch.arange(1, 17, dtype=torch.int32).view(dtype)
    expected = int(checksum(tensor))
    for byte, bit in itertools.product(range(64), range(8)):
        changed = tensor.clone()
        changed.view(torch.uint8)[byte] ^= 1 << bit
        assert int(checksum(changed)) != expected, (byte, bit)


def test_buffers_of_a_module_with_children_are_initialized():
    """Its reset_parameters also initializes children. Zero must differ from the marker of unset integers."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2, device="meta")
            self.register_buffer("steps", torch.zeros((), dtype=torch.long, device="meta"))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            self.steps.zero_()

    assert te_fsdp.materialize(Mixer()).steps.item() == 0


def test_only_memory_of_to_empty_is_filled_with_nan():
    """Check that a conversion by a function of a similar name keeps the values."""

    class Slots(torch.nn.Linear):
        def copy_to_empty_slots(self):
            return self._apply(lambda tensor: tensor.clone())

        def _apply(self, fn, recurse=True):
            super()._apply(fn, recurse)
            self.filled = fill_with_nan(fn, self._parameters.values())
            return self

    layer = Slots(4, 4)
    layer.copy_to_empty_slots()
    assert not layer.filled
    assert not layer.weight.isnan().any()
    layer.to_empty(device="cpu")
    assert layer.filled
    assert layer.weight.isnan().all()
