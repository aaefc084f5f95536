"""Compare the emulation with results that real TransformerEngine gave on a GPU, case by case.

`golden.xz` is made by `tests.conformance.record` on an H200. Where a case has no bound it is equal bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conformance import golden
from tests.conformance.case import KINDS, Bound, Case, every_case, run_case
from tests.conformance.check import difference, differences
from tests.conformance.inputs import Env

ARCH = "9.0"
GOLDEN = Path(__file__).with_name("golden.xz")
#: Cases added after the recording, which the next one brings.
LATER = 0


@pytest.fixture(scope="module")
def recorded():
    about, cases = golden.read(GOLDEN)
    assert about["emulated"] is None and about["capability"] == [9, 0], "not recorded on a Hopper GPU"
    return cases


@pytest.mark.parametrize("kind", KINDS)
def test_emulation_matches_recorded_gpu_results(env, recorded, kind):
    wrong, count = [], 0
    for case in every_case():
        if case.kind != kind:
            continue
        wanted = recorded.get(case.name)
        if wanted is None:
            continue  # added after the last recording
        count += 1
        if "raised" in wanted:
            wrong += _must_raise(case, env)
        else:
            wrong += differences(case, *run_case(case, env), wanted)
    assert count and not wrong, f"{len(wrong)} differences in {count} cases:\n" + "\n".join(wrong[:40])


def _must_raise(case: Case, env: Env) -> list[str]:
    try:
        run_case(case, env)
    except (RuntimeError, ValueError, TypeError):
        return []
    return [f"{case.name}: raised on the GPU, not here"]


def test_every_recorded_result_has_a_case(recorded):
    names = {case.name for case in every_case()}
    assert set(recorded) <= names
    # Exactly, so that no case drops out of the comparison unseen.
    assert len(names - set(recorded)) == LATER, sorted(names - set(recorded))


def _flipped(tensor: torch.Tensor) -> torch.Tensor:
    """Flip one bit of the tensor's middle value, the lowest one that does not only change a NaN."""
    other = tensor.clone()
    raw = other.view(-1).view(torch.uint8)
    raw[(other.numel() // 2) * other.element_size()] ^= 1
    return other


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_comparison_detects_one_flipped_bit(tmp_path, dtype):
    tensor = torch.arange(1000).to(dtype)
    cases = {"a/b": {"inputs": "", "outputs": {"short": tensor[:64], "long": tensor}}}
    golden.write(tmp_path / "file", {}, golden.pack(cases, lambda case, key: True))
    outputs = golden.read(tmp_path / "file")[1]["a/b"]["outputs"]
    for key, value in {"short": tensor[:64], "long": tensor}.items():
        assert difference(value, outputs[key], Bound()) is None
        assert "differ" in difference(_flipped(value), outputs[key], Bound())


def test_comparison_detects_a_value_out_of_bounds(tmp_path):
    tensor = torch.linspace(-3, 3, 4000).reshape(50, 80)
    bound = Bound(relative=2**-20, absolute=2**-22)
    cases = {"a/b": {"inputs": "", "outputs": {"y": tensor}}}
    golden.write(tmp_path / "file", {}, golden.pack(cases, lambda case, key: False))
    kept = golden.read(tmp_path / "file")[1]["a/b"]["outputs"]["y"]
    assert "sample" in kept and difference(tensor * (1 + 2**-21), kept, bound) is None
    assert "out of bound" in difference(tensor * (1 + 2**-17), kept, bound)
    hole = tensor.clone()
    hole[0, 0] = float("nan")
    assert "NaN" in difference(hole, kept, bound)
    assert "recorded" in difference(tensor.reshape(80, 50), kept, bound)


def test_comparison_detects_codes_out_of_bounds():
    codes = torch.arange(256, dtype=torch.uint8)
    bound = Bound(steps=1, share=0.01)
    assert difference(codes, codes, bound) is None
    one, far = codes.clone(), codes.clone()
    one[7], far[7] = 8, 9
    assert difference(one, codes, bound) is None
    assert "2 steps" in difference(far, codes, bound)
    one[20:40] += 1
    assert "codes differ" in difference(one, codes, bound)


@pytest.mark.parametrize("kind", KINDS)
def test_comparison_detects_a_changed_recorded_result(env, recorded, kind):
    """Changing one value in the middle of any recorded output makes the case fail."""
    case = next(
        item for item in every_case() if item.kind == kind and "outputs" in recorded.get(item.name, {})
    )
    outputs, inputs = run_case(case, env)
    expected = recorded[case.name]
    assert differences(case, outputs, inputs, expected) == []
    for key, value in expected["outputs"].items():
        changed = {**expected, "outputs": {**expected["outputs"], key: _changed(value)}}
        lines = differences(case, outputs, inputs, changed)
        assert len(lines) == 1 and key in lines[0], f"{case.name} {key}: {lines}"


def _changed(value):
    if isinstance(value, dict):
        return {key: _changed(one) if key in ("sample", "digest") else one for key, one in value.items()}
    if isinstance(value, str):
        return value[::-1]
    if value.dtype == torch.uint8:
        return value ^ 0x81
    other = value.clone()
    other.view(-1)[value.numel() // 2] += (
        2 * value.abs().max().clamp_min(1) if value.is_floating_point() else 9
    )
    return other


def test_comparison_detects_different_inputs(env):
    case = next(every_case())
    outputs, inputs = run_case(case, env)
    assert differences(case, outputs, inputs, {"inputs": inputs, "outputs": outputs}) == []
    assert "not those" in differences(case, outputs, "another", {"inputs": inputs, "outputs": outputs})[0]
