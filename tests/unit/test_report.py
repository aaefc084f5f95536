"""Test ``report`` in one process that simulates one of many ranks."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import te_fsdp
from te_fsdp.mesh import AXES, Meshes

WORLD, ME = 16, 8
NORMS = ("mlp.layer_norm_weight", "mlp.layer_norm_bias")


def meshes_at(shape: tuple[int, int, int], place: int) -> Meshes:
    """Return meshes over consecutive ranks with this process at a given position."""
    ranks = torch.arange(math.prod(shape)).reshape(shape) + ME - place
    return Meshes(DeviceMesh("cpu", ranks, mesh_dim_names=AXES))


class Model(nn.Module):
    """A gated TE module, a module of the user's own, and a tied one."""

    def __init__(self, te, meshes: Meshes, device: str, recipe: object = None, hidden: int = 64) -> None:
        super().__init__()
        with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
            self.mlp = te.LayerNormMLP(
                hidden,
                2 * hidden,
                set_parallel_mode=True,
                activation="swiglu",
                params_dtype=torch.bfloat16,
                device=device,
                **meshes.te_kwargs(),
            )
        self.head = nn.Linear(hidden, 10, bias=False, device=device, dtype=torch.bfloat16)
        self.tied = self.head


def rows(model: nn.Module, column: str) -> dict[str, object]:
    return {row.name: getattr(row, column) for row in te_fsdp.report(model)}


@pytest.fixture
def world(fake_world, te):
    fake_world(WORLD, ME)
    return te


PLACEMENTS = {
    (1, 2, 2): ("dp_shard:S(0) tp:R", "dp_shard:_S(0, 2) tp:S(0)", "dp_shard:S(0) tp:S(1)"),
    (1, 4, 1): ("dp_shard:S(0)",) * 3,
    (2, 2, 1): ("dp_replicate:R dp_shard:S(0)",) * 3,
    (1, 1, 4): ("dp_shard:S(0) tp:R", "dp_shard:_S(0, 4) tp:S(0)", "dp_shard:S(0) tp:S(1)"),
    (2, 2, 2): (
        "dp_replicate:R dp_shard:S(0) tp:R",
        "dp_replicate:R dp_shard:_S(0, 2) tp:S(0)",
        "dp_replicate:R dp_shard:S(0) tp:S(1)",
    ),
}


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("shape", PLACEMENTS, ids=lambda shape: "x".join(map(str, shape)))
def test_report_is_correct_on_every_rank(world, shape, device):
    """Logical shapes equal the unsharded module's, local shapes a closed form. The head has uneven shards."""
    copies, first, second = PLACEMENTS[shape]
    shard, tp = shape[1:]
    for place in range(math.prod(shape)):
        meshes = meshes_at(shape, place)
        model = te_fsdp.fully_shard(Model(world, meshes, device), meshes)
        step = -(-10 // shard)
        head = max(0, min(step, 10 - step * (place // tp % shard)))
        expected = {
            **dict.fromkeys(NORMS, ((64,), "plain", copies, (64 // shard,))),
            "mlp.fc1_weight": ((256, 64), "stacked(1, 1)", first, (256 // shard // tp, 64)),
            "mlp.fc1_bias": ((256,), "stacked(1, 1)", first, (256 // shard // tp,)),
            "mlp.fc2_weight": ((64, 128), "plain", second, (64 // shard, 128 // tp)),
            "mlp.fc2_bias": ((64,), "plain", copies, (64 // shard,)),
            "head.weight": ((10, 64), "plain", copies, (head, 64)),
        }
        report = te_fsdp.report(model)
        assert {r.name: (r.shape, r.layout, r.placements, r.local_shape) for r in report} == expected
        for row in report:
            size = math.prod(row.local_shape) * 2
            assert row.bytes == (0 if device == "meta" else size), row
        assert report.total_bytes == sum(row.bytes for row in report)


def recipes() -> dict:
    from transformer_engine.common import recipe

    return {
        "float8": recipe.Float8CurrentScaling(),
        "mxfp8": recipe.MXFP8BlockScaling(),
        "float8-block": recipe.Float8BlockScaling(),
        "nvfp4": recipe.NVFP4BlockScaling(),
    }


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def quantized_bytes(fmt: str, rows: int, columns: int) -> int:
    """Return bytes of a quantized weight on architecture 10.0: data and scales of both directions, scales padded."""
    if fmt == "float8":  # one direction and one fp32 scale: 10.0 multiplies without a transpose
        return rows * columns + 4
    if fmt == "mxfp8":  # a byte of scale per 32 values; padded to 128 x 4
        scales = _up(rows, 128) * _up(columns // 32, 4) + _up(rows // 32, 4) * _up(columns, 128)
        return 2 * rows * columns + scales
    if fmt == "nvfp4":  # half a byte; a byte of scale per 16 values, padded to 128 x 4; two fp32 amaxes
        scales = _up(rows, 128) * _up(columns // 16, 4) + _up(columns, 128) * _up(rows // 16, 4)
        return rows * columns + scales + 8
    # float8-block: fp32 per 128 x 128 values, padded to four columns
    blocks = (rows // 128, columns // 128)
    return 2 * rows * columns + 4 * (blocks[0] * _up(blocks[1], 4) + blocks[1] * _up(blocks[0], 4))


@pytest.mark.parametrize("fmt", ["float8", "mxfp8", "float8-block", "nvfp4"])
def test_report_shows_formats_and_bytes(world, fmt):
    """Check the name and size of a weight's format before and after initialization."""
    hidden = 256 if fmt == "float8-block" else 64
    meshes = meshes_at((1, 2, 2), 1)
    model = te_fsdp.fully_shard(Model(world, meshes, "meta", recipes()[fmt], hidden), meshes)
    weights = ("mlp.fc1_weight", "mlp.fc2_weight")
    dtypes = rows(model, "dtype")
    assert {dtypes[name] for name in weights} == {f"bfloat16, will be {fmt}, on meta"}
    assert (dtypes["mlp.fc1_bias"], dtypes["head.weight"]) == ("bfloat16, on meta", "bfloat16, on meta")
    assert te_fsdp.report(model).total_bytes == 0

    on_device = te_fsdp.fully_shard(Model(world, meshes, "cpu", recipes()[fmt], hidden), meshes)
    dtypes, sizes, shapes = (rows(on_device, column) for column in ("dtype", "bytes", "local_shape"))
    assert {dtypes[name] for name in weights} == {f"{fmt} (bfloat16)"}
    assert (dtypes["mlp.fc1_bias"], dtypes["head.weight"]) == ("bfloat16", "bfloat16")
    assert {name: sizes[name] for name in weights} == {
        name: quantized_bytes(fmt, *shapes[name]) for name in weights
    }


# Rich draws with light and heavy lines.
BOXES = str.maketrans(dict.fromkeys("\u2502\u2503", "|") | dict.fromkeys("\u2500\u2501", "-"))

TABLE = """
parameters on this rank
+-----------------------+----------+-------------------------+-------------+------------------+--------+
| name                  | shape    | sharding                | local shape | format           |  bytes |
+-----------------------+----------+-------------------------+-------------+------------------+--------+
| mlp.layer_norm_weight | 64       | dp_shard:S(0) tp:R      | 32          | bfloat16         |     64 |
| mlp.layer_norm_bias   | 64       | dp_shard:S(0) tp:R      | 32          | bfloat16         |     64 |
| mlp.fc1_weight        | 256 x 64 | dp_shard:S(0) tp:S(0) * | 64 x 64     | mxfp8 (bfloat16) |  9,216 |
| mlp.fc1_bias          | 256      | dp_shard:S(0) tp:S(0) * | 64          | bfloat16         |    128 |
| mlp.fc2_weight        | 64 x 128 | dp_shard:S(0) tp:S(1)   | 32 x 64     | mxfp8 (bfloat16) |  5,120 |
| mlp.fc2_bias          | 64       | dp_shard:S(0) tp:R      | 32          | bfloat16         |     64 |
| head.weight           | 10 x 64  | dp_shard:S(0) tp:R      | 5 x 64      | bfloat16         |    640 |
+-----------------------+----------+-------------------------+-------------+------------------+--------+
| 7 parameters          |          |                         |             |                  | 15,296 |
+-----------------------+----------+-------------------------+-------------+------------------+--------+
S(n): sharded along dim n, over tp before dp_shard. R: replicated.
*: stacked blocks (gate and up; query, key and value), each of which tp shards.
gathers of the root: nccl (transport='auto' uses copy_engine on GPUs)
"""


def in_ascii(table: str) -> str:
    """Return a printed table with its box-drawing characters replaced."""
    return "".join(c if c.isascii() else "+" for c in table.translate(BOXES))


def test_report_table_text(world):
    meshes = meshes_at((1, 2, 2), 1)
    model = te_fsdp.fully_shard(Model(world, meshes, "cpu", recipes()["mxfp8"]), meshes)
    assert in_ascii(str(te_fsdp.report(model))) == TABLE.strip()


def test_report_table_fits_the_terminal(world, monkeypatch):
    """Long names continue on the next line without truncation. In a log file every name is on one line."""
    meshes = meshes_at((1, 2, 2), 1)
    model = te_fsdp.fully_shard(Model(world, meshes, "cpu", recipes()["mxfp8"]), meshes)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setenv("COLUMNS", "90")
    lines = str(te_fsdp.report(model)).splitlines()
    table = [line for line in lines if line and not line[0].isalnum() and line[0] != "*"]
    assert len(table) > 9 and max(map(len, lines)) <= 90
    assert (
        "".join(line.split("\u2502")[1].strip() for line in table if "\u2502" in line).count("fc1_weight")
        == 1
    )


def test_long_names_are_not_truncated(world):
    meshes = meshes_at((2, 2, 2), 0)
    model = te_fsdp.fully_shard(Model(world, meshes, "meta", recipes()["mxfp8"]), meshes)
    name = "decoder." * 30 + "mlp"
    holder = nn.Module()
    for part in reversed(name.split(".")):
        inner, holder = (model if part == "mlp" else holder), nn.Module()
        holder.add_module(part, inner)
    lines = str(te_fsdp.report(holder)).splitlines()
    for end in ("mlp.layer_norm_weight", "head.weight"):
        [line] = [line for line in lines if f"{name}.{end} " in line]
        assert "dp_shard:S(0)" in line and "tp:R" in line


def test_names_with_brackets_are_not_treated_as_markup():
    """Bug class: rich interprets brackets as tags and words between colons as emoji."""
    names = ("head[de]", "end[/b]", "a:smile:")
    lines = str(te_fsdp.report(nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in names})))
    assert all(f" {name}.weight " in lines for name in names)


def test_report_table_is_printed_in_a_notebook(monkeypatch):
    """Bug class: the text depends on the environment. In a notebook, rich displays tables itself."""
    expected = str(te_fsdp.report(nn.Linear(4, 4)))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(te_fsdp.report(nn.Linear(4, 4))) == expected and "local shape" in expected


def test_report_of_an_unsharded_model(world):
    """Cover a plain model with a scalar parameter and a parameter registered twice."""
    model = nn.Sequential(nn.Linear(3, 2, device="meta"), nn.BatchNorm1d(2))
    model.register_parameter("gain", nn.Parameter(torch.ones((), dtype=torch.float64)))
    model.register_parameter("again", model.gain)
    report = te_fsdp.report(model)
    assert [(r.name, r.shape, r.placements, r.dtype, r.bytes) for r in report] == [
        ("gain", (), "-", "float64", 8),
        ("0.weight", (2, 3), "-", "float32, on meta", 0),
        ("0.bias", (2,), "-", "float32, on meta", 0),
        ("1.weight", (2,), "-", "float32", 8),
        ("1.bias", (2,), "-", "float32", 8),
    ]
    assert (len(report), report.total_bytes) == (5, 24)
    assert "| scalar |" in in_ascii(str(report))


def test_report_of_a_mesh_without_axis_names(world):
    model = nn.Linear(4, 4, bias=False)
    te_fsdp.set_device_mesh(model, tp_mesh=DeviceMesh("cpu", [ME, ME + 1]))
    assert rows(model, "placements") == {"weight": "0:R"}
