"""Test the training runs that `make same-bits` compares."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "same_bits"


def _load(name: str, file: str):
    spec = importlib.util.spec_from_file_location(name, FOLDER / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


cases = _load("cases", "cases.py")
collectives = _load("collectives", "collectives.py")
same_bits = _load("same_bits_main", "__main__.py")


def test_case_names_are_unique():
    names = [str(case) for case in cases.cases()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        pytest.param("module", cases.MODULES, id="module"),
        pytest.param("strategy", cases.STRATEGIES, id="strategy"),
        pytest.param("loop", cases.LOOPS, id="loop"),
        pytest.param("optimizer", cases.OPTIMIZERS, id="optimizer"),
        pytest.param("mesh", cases.MESHES, id="mesh"),
        pytest.param("outer", ("no_shard", "optim"), id="outer"),
        pytest.param("sequence_parallel", (True, False), id="sequence_parallel"),
    ],
)
def test_every_option_value_has_a_case(field, values):
    assert {getattr(case, field) for case in cases.cases()} == set(values)


def test_every_module_has_a_case_in_every_format():
    trained = {(case.module, case.recipe, case.weights) for case in cases.cases()}
    assert {(module, *how) for module in cases.MODULES for how in cases.FORMATS} <= trained


def test_difference_names_the_rank_and_value():
    before = [{"loss 0.0": "a", "gradient 0 x": "b"}, {"loss 0.0": "a", "gradient 0 x": "b"}]
    assert same_bits.difference(before, [dict(seen) for seen in before]) == ""
    changed = [dict(before[0]), {**before[1], "gradient 0 x": "c"}]
    assert same_bits.difference(before, changed) == "rank 1: gradient 0 x: b before, c now"
    fewer = [dict(before[0]), {"loss 0.0": "a"}]
    assert same_bits.difference(before, fewer) == "rank 1: gradient 0 x: b before, None now"


def test_exit_status_ignores_expected_differences(capsys):
    results = {"linear": [{"loss": "a"}], "grouped": [{"error": "MeshError"}]}
    assert same_bits.show({}, "", results) == 0
    assert same_bits.show({"linear": "rank 0: loss"}, "", results) == 1
    assert same_bits.show({"linear": "rank 0: loss"}, "line", results) == 0
    assert "1 of them refused" in capsys.readouterr().out


def test_recorded_results_replace_the_commit_to_compare_with(tmp_path):
    case, other = cases.cases()[:2]
    digests = {str(case): [{"loss 0.0": "a", "collective 0": "allreduce_"}], str(other): [{"loss 0.0": "b"}]}
    file = tmp_path / "recorded.json"
    file.write_text(json.dumps({"before": {}, "now": digests}))
    result = same_bits.recorded(str(file), [case])
    assert result == {str(case): digests[str(case)]}
    now = [{"loss 0.0": "a", "collective 0": "broadcast_"}]
    assert (
        same_bits.difference(result[str(case)], now)
        == "rank 0: collective 0: allreduce_ before, broadcast_ now"
    )


def test_collectives_are_recorded_in_order():
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        seen = {}
        with collectives.RecordCollectives(seen):
            dist.all_reduce(torch.zeros(3))
            DTensor.from_local(torch.zeros(2), init_device_mesh("cpu", (2,)), [Partial()]).full_tensor()
            dist.broadcast(torch.zeros(4, dtype=torch.bfloat16), src=1)
    finally:
        dist.destroy_process_group()
    first, inside_dtensor, last = seen.values()
    assert list(seen) == ["collective 0", "collective 1", "collective 2"]
    assert first.startswith("allreduce_ (float32[3]) over 0,1")
    assert inside_dtensor.startswith("all_reduce float32[2] sum over 0,1")
    assert last.startswith("broadcast_ (bfloat16[4]) over 0,1 1")
