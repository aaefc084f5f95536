"""Test limits of `te-fsdp plan`: device support, memory sizes, plan files, experts in one parameter."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from te_fsdp import emulation
from te_fsdp.cli import bytes_of, main
from te_fsdp.errors import CheckpointError, PrecisionError
from te_fsdp.planning import RECIPES, Job, Plan, Sizes, plan, search
from tests.unit.test_planning import CONFIG, FFN, HIDDEN


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_timed_plan_can_be_read(te, folder, capsys):
    """Values that the command adds to a plan file must not make it unreadable."""
    args = ["plan", str(folder), "--gpus", "2", "--sequence", "64", "--arch", "10.0", "--json"]
    printed = []
    for more in ([], ["--tflops", "400"], ["--tflops", "400", "--host-ms", "3"]):
        assert main([*args, *more]) == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert "step" not in printed[0] and printed[1]["step"]["seconds"] > 0
    plain, *timed = [Plan.from_json(value) for value in printed]
    assert all(item == plain for item in timed)
    (folder / "timed.json").write_text(json.dumps(printed[1]))
    assert main(["report", str(folder / "timed.json")]) == 0
    assert "checkpoint:" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="not a plan"):  # the negative control
        Plan.from_json(printed[1] | {"stop": 1})


@pytest.mark.parametrize("text", ["80", " 7.5 ", "0"])
def test_memory_option_requires_a_unit(capsys: pytest.CaptureFixture[str], text: str):
    """Bug class: the unit of a number is guessed. A plan for 80 bytes is useless."""
    assert main(["plan", "config.json", "--memory", text]) == 1
    output = " ".join(capsys.readouterr().err.split())
    assert "expected a size with a unit" in output and f"Fix: --memory {text.strip()}GiB" in output
    assert main(["plan", "config.json", "--gpus", "2", "--search", "--memory", text]) == 1
    assert "expected a size with a unit" in " ".join(capsys.readouterr().err.split())
    assert bytes_of(text, unit=True) is None and bytes_of(f"{text}GiB", unit=True) == bytes_of(f"{text}GiB")


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("arch", ["9.0", "10.0"])
def test_plan_rejects_recipes_that_the_device_does_not_support(te, arch, recipe, quantized):
    """Bug class: a plan of a job that TransformerEngine rejects in its first forward. Every recipe and device."""
    if quantized and recipe == "none":
        return
    emulation.switch_arch(arch)
    try:
        job = Job(CONFIG, recipe=recipe, quantized_weights=quantized, sequence=64, optimizer="sgd")
        calls = (lambda: plan(job, Sizes()), lambda: search(job, gpus=1, memory=2**40))
        for call in calls:
            if recipe in ("mxfp8", "nvfp4") and arch == "9.0":
                with pytest.raises(
                    PrecisionError, match=f"plan: recipe '{recipe}'.*got compute capability 9.0"
                ):
                    call()
            else:
                call()
    finally:
        emulation.switch_arch("10.0")


def test_plan_command_rejects_unsupported_recipes(te, folder, capsys):
    """As above, from the command line. The negative control is the same job on Blackwell."""
    args = ["plan", str(folder), "--recipe", "mxfp8", "--sequence", "64"]
    assert main([*args, "--arch", "9.0"]) == 1
    assert "compute capability 9.0" in " ".join(capsys.readouterr().err.split())
    assert main([*args, "--arch", "10.0"]) == 0


def test_one_parameter_of_all_experts_is_counted_once(te, monkeypatch):
    """The parameter of ``single_grouped_weight=True`` has the elements of all ranks of ``ep``."""
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")

    def plan_of(recipe="none", **options):
        def build(meshes):
            sizes = {"bias": False, "params_dtype": torch.bfloat16, "device": "meta"}
            return nn.Sequential(te.GroupedLinear(4 // meshes.size("ep"), HIDDEN, FFN, **sizes, **options))

        job = Job(build, units=("0",), sequence=64, recipe=recipe, quantized_weights=recipe != "none")
        return plan(job, Sizes(dp_shard=2, ep=2))

    each, one = plan_of(), plan_of(single_grouped_weight=True, use_grouped_tensor=True)
    assert one.parameters == each.parameters == 4 * HIDDEN * FFN
    assert (
        one.checkpoint == each.checkpoint == {"model": 2 * each.parameters, "optimizer": 12 * each.parameters}
    )
    assert one.held == each.held and one.traffic == each.traffic
    (row,) = plan_of("mxfp8", single_grouped_weight=True, use_grouped_tensor=True).report
    assert (row.shape, row.local_shape) == ((4, FFN, HIDDEN), (1, FFN, HIDDEN))
