"""Compare plans with closed forms."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import te_fsdp
from te_fsdp.cli import bytes_of, main
from te_fsdp.errors import CheckpointError, OrderError, PlacementError
from te_fsdp.planning import Job, Plan, Sizes, plan, search
from tests.unit import documented
from tests.unit.commands import ROOT, python_path, start

HIDDEN, FFN, LAYERS, HEADS, GROUPS, VOCABULARY = 256, 512, 3, 8, 4, 1024
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "intermediate_size": FFN,
    "vocab_size": VOCABULARY,
}
MIXTRAL = {**CONFIG, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
WIDTH = HIDDEN // HEADS
LAYER = HIDDEN * WIDTH * (HEADS + 2 * GROUPS) + HIDDEN * HIDDEN + 3 * HIDDEN * FFN  # weights of products
OUTSIDE = VOCABULARY * HIDDEN + HIDDEN
ALL = LAYERS * (LAYER + 2 * HIDDEN) + OUTSIDE + VOCABULARY * HIDDEN


def traffic(found: Plan) -> dict[tuple[str, str], int]:
    return {(row.what, row.collective): row.bytes for row in found.traffic}


def test_plan_matches_closed_forms(te):
    """Use bf16, four ranks and two microbatches, with sizes that divide evenly."""
    job = Job(CONFIG, sequence=64, microbatches=2)
    result = plan(job, Sizes(dp_shard=4))
    assert result.parameters == ALL
    assert result.report.total_bytes == result.held["weights, 16 bits"] == 2 * ALL // 4
    assert result.held == {
        "weights, 16 bits": ALL // 2,
        "optimizer states": 8 * ALL // 4,
        "main weights in the optimizer": ALL,
    }
    assert result.gradients == 2 * ALL // 4 and result.largest_unit == 2 * (LAYER + 2 * HIDDEN)
    assert result.checkpoint == {"model": 2 * ALL, "optimizer": 12 * ALL}
    # Two gathers and one reduction a microbatch, three quarters of each from other ranks.
    assert traffic(result) == {
        ("weights", "all-gather"): 2 * 2 * 2 * ALL * 3 // 4,
        ("gradients", "reduce-scatter"): 2 * 2 * ALL * 3 // 4,
    }
    kept = LAYERS * (8 * HIDDEN + 8 + 2 * WIDTH * 2 * (HEADS + GROUPS) + 4 * HEADS + 6 * FFN)
    outside = 8 + 2 * HIDDEN + 4 + 2 * HIDDEN + 4 * VOCABULARY
    assert result.activations == 64 * (kept + outside)
    assert result.peak.bytes == sum(result.peak.parts.values()) > result.held_bytes and not result.notes


@pytest.mark.parametrize(
    ("changes", "gathers", "reductions"),
    [({"strategy": "optim"}, 1, 1), ({"strategy": "optim_grads"}, 1, 3), ({}, 6, 3)],
    ids=["optim", "optim_grads", "optim_grads_params"],
)
def test_communication_of_each_strategy_matches_closed_forms(te, changes, gathers, reductions):
    """Count all-gathers and reductions in a step of three microbatches, as in docs/strategies.md."""
    result = plan(Job(CONFIG, sequence=64, microbatches=3, **changes), Sizes(dp_shard=2))
    assert traffic(result) == {
        ("weights", "all-gather"): gathers * ALL,
        ("gradients", "reduce-scatter"): reductions * ALL,
    }


def test_replicated_and_outer_sharded_state_matches_closed_forms(te):
    """HSDP all-reduces over replicas, HFSDP shards optimizer state over them, no_shard replicates everything."""
    sizes = Sizes(dp_replicate=2, dp_shard=2)
    hsdp, hfsdp = (
        plan(Job(CONFIG, sequence=64, outer_strategy=outer), sizes) for outer in ("no_shard", "optim")
    )
    assert traffic(hsdp)["gradients", "all-reduce"] == 2 * (2 * ALL // 2) // 2
    assert hfsdp.held["optimizer states"] == hsdp.held["optimizer states"] // 2 == 8 * ALL // 4
    assert hfsdp.report.total_bytes == hsdp.report.total_bytes == ALL
    assert hfsdp.sent()["dp_replicate"] == 2 * ALL // 2
    whole = plan(Job(CONFIG, sequence=64, strategy="no_shard"), sizes)
    assert whole.report.total_bytes == 2 * ALL and whole.sent() == {"dp": 2 * 2 * ALL * 3 // 4}


def test_tensor_parallel_mxfp8_plan_matches_closed_forms(te):
    """Each weight has two bytes and two scales per 32 elements. Also counts a layer's collectives over tp."""
    job = Job(CONFIG, recipe="mxfp8", quantized_weights=True, optimizer="fused-adam", sequence=64, batch=2)
    result = plan(job, Sizes(dp_shard=2, tp=2))
    assert result.held["weights, mxfp8"] == pytest.approx(
        LAYERS * LAYER // 4 * 2 * (1 + 1 / 32), rel=0.05
    )  # padding
    row = {row.name: row for row in result.report}["layers.0.layernorm_mlp.fc1_weight"]
    assert (row.shape, row.local_shape) == ((2 * FFN, HIDDEN), (FFN // 2, HIDDEN))
    assert row.dtype == "mxfp8 (bfloat16)" and row.placements == "dp_shard:_S(0, 2) tp:S(0)"
    tokens, byte = 128, 1 + 1 / 32
    # A layer has two products by columns, and two by rows.
    gathers = LAYERS * 2 * HIDDEN * (2 * byte + byte)
    assert traffic(result)["activations", "all-gather"] == pytest.approx(tokens * gathers / 2, abs=LAYERS * 4)
    assert traffic(result)["activations", "reduce-scatter"] == tokens * LAYERS * 2 * HIDDEN * 2 * 2 / 2
    assert result.checkpoint["model"] == pytest.approx(2 * (ALL - LAYERS * LAYER) + 2 * byte * LAYERS * LAYER)


def test_expert_parallel_plan_matches_closed_forms(te):
    result = plan(Job(MIXTRAL, sequence=64), Sizes(dp_shard=2, ep=2))
    rows = {row.name: row for row in result.report}
    assert rows["layers.0.experts_fc1.weight"].shape == (4, 2 * FFN, HIDDEN)
    assert rows["layers.0.experts_fc1.weight"].local_shape == (2, FFN, HIDDEN)
    assert result.parameters == ALL - LAYERS * 3 * HIDDEN * FFN + LAYERS * (4 * 3 * HIDDEN * FFN + 4 * HIDDEN)
    # Two experts for each token, there and back, forward and backward, half of them on the other rank.
    assert traffic(result)["tokens", "all-to-all"] == LAYERS * 64 * 2 * HIDDEN * 2 * 4 // 2
    assert "experts as the first one" in result.notes[0]
    attention = 4 * HIDDEN + 4 + 2 * WIDTH * 2 * (HEADS + GROUPS) + 4 * HEADS
    # Norm and router; for each of two experts the inputs of its products, the intermediate, and the output.
    experts = 2 * HIDDEN + 4 + 2 * HIDDEN + 2 * (2 * HIDDEN + 2 * 3 * FFN + 2 * HIDDEN + 2 * FFN)
    outside = 8 + 2 * HIDDEN + 4 + 2 * HIDDEN + 4 * VOCABULARY
    assert result.activations == 64 * (LAYERS * (attention + experts) + outside)


def test_context_parallel_plan_matches_closed_forms(te):
    """A rank has half of each sequence. Keys and values are sent once in forward, twice in backward."""
    sizes = Sizes(dp_shard=2), Sizes(dp_shard=1, cp=2)
    whole, half = (plan(Job(CONFIG, sequence=64), item) for item in sizes)
    assert half.activations == whole.activations // 2 and half.held == whole.held
    assert half.sent()["cp"] == LAYERS * 32 * 2 * GROUPS * WIDTH * 2 * 3
    assert half.sent()["dp_shard"] == whole.sent()["dp_shard"]


def test_plan_accepts_a_strategy_per_unit(te):
    result = plan(Job(CONFIG, sequence=64, strategy={"": "optim", "head": "no_shard"}), Sizes(dp_shard=2))
    assert result.job["strategy"] == {"": "optim", "head": "no_shard"} and json.dumps(result.as_json())
    head = {row.name: row for row in result.report}["head.weight"]
    assert head.local_shape == head.shape and result.sent()["dp"] == 2 * 2 * VOCABULARY * HIDDEN // 2


WIDE = {"hidden_size": 16384, "num_attention_heads": 128, "num_key_value_heads": 8}
WIDE = {**CONFIG, **WIDE, "intermediate_size": 53248, "vocab_size": 128256}


def test_plan_of_1024_ranks_scales_with_the_shard_size(te):
    """Only one rank is computed, so any number of ranks is possible."""
    small, large = (plan(Job(WIDE, optimizer="fused-adam"), Sizes(dp_shard=n, tp=8)) for n in (16, 128))
    assert math.isclose(small.held_bytes, 8 * large.held_bytes, rel_tol=0.001)
    assert small.activations == large.activations and large.sizes.ranks == 1024


def test_plan_of_405b_parameters_on_1024_ranks_is_fast(tmp_path):
    """The limit is one minute on one core and 2 GiB, including torch's import. Measured: 5 s, 0.4 GiB."""
    (tmp_path / "config.json").write_text(json.dumps({**WIDE, "num_hidden_layers": 126}))
    args = [
        "plan",
        ".",
        "--gpus",
        "1024",
        "--tp",
        "8",
        "--recipe",
        "current",
        "--sequence",
        "8192",
        "--json",
    ]
    env = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "plan.json").open("w") as out:
        planning = subprocess.Popen(
            [sys.executable, "-m", "te_fsdp.cli", *args], cwd=tmp_path, env=env, stdout=out
        )
        _, status, used = os.wait4(planning.pid, 0)  # ru_maxrss: KiB
        planning.returncode = os.waitstatus_to_exitcode(status)
    assert planning.returncode == 0 and used.ru_utime + used.ru_stime < 60 and used.ru_maxrss < 2 * 2**20
    result = json.loads((tmp_path / "plan.json").read_text())
    assert result["parameters"] == pytest.approx(405.85e9, rel=1e-4)


MY_MODEL = """
import torch
import transformer_engine.pytorch as te

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = te.TransformerLayer(256, 512, 8, fuse_qkv_params=True, device="meta")

    def forward(self, x):
        return self.layer(x)

def build():
    return Model()
"""


class Own(nn.Module):
    """A user-defined model. 96 rows are not a multiple of 32 per rank on four ranks."""

    def __init__(self, meshes):
        super().__init__()
        import transformer_engine.pytorch as te

        self.linear = te.Linear(96, 96, bias=False, device="meta", params_dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(4, device="meta"))

    def forward(self, x):
        return self.linear(x)


def on_the_cpu():
    return nn.Linear(4, 4)


def needs_a_width(meshes, width):
    return Own(meshes)


def returns_nothing(meshes):
    Own(meshes)


REFUSED = {
    "sizes": (lambda: Sizes(tp=0), PlacementError, "plan: tp: expected 1 or more, got 0"),
    "logits": (lambda: Job(CONFIG, vocabulary=-1), PlacementError, "vocabulary: expected 0 or more, got -1"),
    "arguments": (
        lambda: plan(Job(needs_a_width), Sizes()),
        PlacementError,
        "expected a function that takes te_fsdp.Meshes .* got one that needs meshes, width",
    ),
    "nothing": (lambda: plan(Job(returns_nothing), Sizes()), PlacementError, "got one that returns NoneType"),
    "no function": (
        lambda: plan(Job(nn.Linear(1, 1)), Sizes()),
        PlacementError,
        "got a Linear. Fix: def build",
    ),
    "file": (
        lambda: plan(Job("./my_model.py:build"), Sizes()),
        PlacementError,
        "Fix: my_model:build, in the folder of my_model.py",
    ),
    "hub": (
        lambda: plan(Job("meta-llama/Llama"), Sizes()),
        CheckpointError,
        "Fix: pass the folder of a model, .* hf download",
    ),
    "fixed": (
        lambda: search(Job(CONFIG), gpus=8, memory=1, fixed={"tp": 3}),
        PlacementError,
        "search: meshes of 8 GPUs with tp=3: expected sizes whose product divides the GPUs",
    ),
    "recipe": (
        lambda: Job(CONFIG, recipe="fp8"),
        PlacementError,
        "plan: recipe: expected one of none, delayed",
    ),
    "batch": (lambda: Job(CONFIG, batch=0), PlacementError, "plan: batch: expected 1 or more, got 0"),
    "weights": (
        lambda: Job(CONFIG, quantized_weights=True),
        PlacementError,
        "quantized weights: expected a recipe",
    ),
    "blocks": (
        lambda: plan(Job(Own, recipe="mxfp8", quantized_weights=True), Sizes(dp_shard=4)),
        PlacementError,
        "linear.weight: mxfp8 weight of tp-local shape .* use the mesh dp_replicate=4",
    ),
    "device": (
        lambda: plan(Job(on_the_cpu), Sizes()),
        PlacementError,
        "a model on meta, got 2 parameters on a device",
    ),
    "name": (
        lambda: plan(Job("no_such_module:f"), Sizes()),
        PlacementError,
        "ModuleNotFoundError.*PYTHONPATH",
    ),
    "folder": (lambda: plan(Job("no-such-folder"), Sizes()), CheckpointError, "not a readable config.json"),
    "heads": (
        lambda: plan(Job(CONFIG), Sizes(tp=3)),
        PlacementError,
        "llama model over tp=3: expected model sizes divisible by tp",
    ),
    "gpus": (
        lambda: search(Job(CONFIG), gpus=0, memory=1),
        PlacementError,
        "search: expected positive numbers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plan_rejects_invalid_jobs(te, case):
    call, kind, text = REFUSED[case]
    with pytest.raises(kind, match=text):
        call()
    assert not torch.distributed.is_initialized()


def test_plan_raises_in_a_distributed_process(te, fake_world):
    fake_world(2)
    with pytest.raises(OrderError, match=r"torch.distributed is initialized.*te-fsdp plan"):
        plan(Job(CONFIG), Sizes(dp_shard=2))


def test_plan_accepts_a_user_defined_model(te):
    result = plan(
        Job(f"{__name__}:Own" if __name__ != "__main__" else Own, vocabulary=None), Sizes(dp_shard=2)
    )
    assert result.parameters == 96 * 96 + 4 and result.notes == ()
    assert result.report.rows[0].name == "scale"


def test_search_orders_meshes_by_cost(te):
    """Meshes that fit are listed first, ordered by cost. The others have a reason."""
    job = Job(MIXTRAL, sequence=64)
    result = search(job, gpus=4, memory=2**40, node=2)
    assert {str(item.sizes) for item in result} >= {
        "dp_shard=4",
        "dp_replicate=4",
        "dp_shard=2 x tp=2",
        "dp_shard=2 x ep=2",
    }
    costs = [item.cost for item in result]
    assert (
        costs == sorted(costs)
        and not any(item.reason for item in result)
        and all(item.sizes.tp <= 2 for item in result)
    )
    one = next(item for item in result if str(item.sizes) == "dp_shard=2 x tp=2")
    assert one.plan is not None and (one.within, one.between) == (
        one.plan.sent()["tp"],
        one.plan.sent()["dp_shard"],
    )
    assert one.tokens == 32
    peaks = sorted(item.plan.peak.bytes for item in result)
    tight = search(job, gpus=4, memory=peaks[1], node=2)
    assert [bool(item.reason) for item in tight] == sorted(bool(one.reason) for one in tight)
    large = [item for item in tight if item.plan is not None and item.plan.peak.bytes > peaks[1]]
    assert large and all("GiB over the limit" in item.reason for item in large)


def test_planned_peaks_match_h200_measurements(hopper, monkeypatch):
    """Compare with jobs on two H200s: the allocator's peak within 3 %, and the memory between steps."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plan_memory

    recorded = json.loads((ROOT / "benchmarks/results/plan-h200x2.json").read_text())
    for row, result in zip(plan_memory.ROWS, recorded["rows"], strict=True):
        planned = plan(plan_memory.job_of(row, True)[0], Sizes(dp_shard=2))
        real = {name: result[name]["measured"] for name in ("report", "held", "peak")}
        assert planned.report.total_bytes == real["report"], row
        # Workspaces of cuBLAS, up to 64 MiB, in addition to the model.
        assert planned.held_bytes == pytest.approx(real["held"], abs=2**26 + 2**20), row
        assert planned.peak.bytes == pytest.approx(real["peak"], rel=0.03), (row, planned.peak)


def test_transposes_are_planned_without_all_gathers(hopper):
    """A single rank does not all-gather, but Hopper still keeps transposes of float8 weights."""
    job = Job(
        CONFIG, recipe="current", quantized_weights=True, optimizer="fused-adam", sequence=512, vocabulary=0
    )
    result = plan(job, Sizes())
    assert result.largest_unit == 0 and not any(result.sent().values()), result.sent()
    assert "gathered weights" not in result.peak.parts and min(result.peak.parts.values()) > 0
    assert 0 < result.peak.parts["transposes of gathered weights"] <= LAYER, result.peak


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_plan_command_prints_and_reads_json(te, folder, capsys):
    args = ["plan", str(folder), "--gpus", "8", "--tp", "2", "--arch", "10.0", "--sequence", "64"]
    args += ["--main-grads", "float32", "--grad-comm", "bfloat16", "--main-params", "model"]
    assert main([*args, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    result = Plan.from_json(printed)
    assert result.sizes == Sizes(dp_shard=4, tp=2) and json.loads(json.dumps(result.as_json())) == printed
    assert result.gradients == 2 * result.report.total_bytes  # fp32 gradients of bf16 weights
    (folder / "plan.json").write_text(json.dumps(printed))
    assert main(["report", str(folder / "plan.json")]) == 0
    shown = capsys.readouterr().out
    assert "layers.2.layernorm_mlp.fc2_weight" in shown and "checkpoint:" in shown and "fits" not in shown
    assert main([*args, "--memory", "1MiB"]) == 1
    assert "does NOT fit into 0.00 GiB" in capsys.readouterr().out
    assert main([*args, "--dp-shard", "2"]) == 1 and main(["plan", str(folder), "--search"]) == 1
    output = capsys.readouterr().err
    assert (
        "sizes whose product is --gpus 8, got dp_shard=2 x tp=2"
    ) in output and "add --gpus with the number of GPUs" in output
    for wrong, text in (
        (["--dp-shard", "0"], "plan: dp_shard: expected 1 or more, got 0"),
        (["--gpus", "0"], "plan: gpus: expected 1 or more, got 0"),
        (["--within", "100"], "plan: speeds of the machine: expected --tflops"),
    ):
        assert main(["plan", str(folder), *wrong]) == 1 and text in capsys.readouterr().err
    assert main(["plan", str(folder), "--search", "--gpus", "2", "--sequence", "64", "--json"]) == 0
    meshes = json.loads(capsys.readouterr().out)["candidates"]
    assert [item["sizes"]["tp"] for item in meshes].count(2) == 1 and all(one["fits"] for one in meshes)
    assert main(["plan", str(folder), "--search", "--gpus", "2", "--sequence", "64", "--tp", "2"]) == 0
    assert "tp=2" in (shown := capsys.readouterr().out) and "dp_shard=2" not in shown
    assert main(["plan", str(folder), "--search", "--gpus", "2", "--sequence", "64"]) == 0
    assert "best first" in capsys.readouterr().out
    timed = [
        "plan",
        str(folder),
        "--search",
        "--gpus",
        "2",
        "--sequence",
        "64",
        "--tflops",
        "1",
        "--within",
        "0.1",
    ]
    assert main([*timed, "--json"]) == 0
    by_time = [item["seconds"] / item["tokens"] for item in json.loads(capsys.readouterr().out)["candidates"]]
    assert by_time == sorted(by_time) and len(set(by_time)) == len(by_time) == 3
    assert main(timed) == 0 and " ms " in capsys.readouterr().out


def test_report_rejects_invalid_plan_files(te, folder, capsys):
    (folder / "other.json").write_text('{"te_fsdp_plan": 99}')
    assert main(["report", str(folder / "other.json"), "--json"]) == 1
    assert "not a plan: expected te_fsdp_plan: 1, got 99" in json.loads(capsys.readouterr().out)["error"]
    (folder / "broken.json").write_text("{")
    assert main(["report", str(folder / "broken.json")]) == 1
    assert (
        "not valid JSON" in (output := capsys.readouterr().err)
        and "Fix: a file of te-fsdp plan --json" in output
    )
    with pytest.raises(CheckpointError, match="not a plan"):
        Plan.from_json({"te_fsdp_plan": 1})


def test_plan_page_commands_run(te, folder, capsys, monkeypatch):
    """The commands of docs/plan.md, in a folder with a model, and its block of Python."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "my-llama").mkdir()
    (folder / "config.json").rename(folder / "my-llama/config.json")
    (folder / "my_model.py").write_text(MY_MODEL)
    (shell,) = documented.to_run("docs/plan.md")
    for line in shell:
        program, *words = documented.words(line)
        assert program == "te-fsdp" and main(words) == 0, line
        printed = capsys.readouterr().out
        if "--json" in words:
            (folder / "plan.json").write_text(printed)
    (code,) = documented.blocks("docs/plan.md", "python")
    exec(compile(code, "docs/plan.md", "exec"), {})
    assert "layers.0.layernorm_mlp.fc1_weight" in capsys.readouterr().out


def test_memory_sizes_with_units_are_parsed(capsys: pytest.CaptureFixture[str]):
    assert [bytes_of(text) for text in ("80GiB", "141GB", "1.5 ki", "7")] == [
        80 * 2**30,
        141 * 10**9,
        1536,
        7,
    ]
    assert bytes_of("much") is None and bytes_of("9" * 400 + "TB") > 10**400
    assert main(["plan", "config.json", "--memory", "much"]) == 1
    assert "a size with a unit, such as 80GiB" in capsys.readouterr().err


def test_planning_package_exports_plan():
    assert te_fsdp.planning.plan is plan


def test_shell_completion_covers_each_command(python, tmp_path):
    """tyro completes each command. ``te-fsdp completion`` combines them."""
    done = start(python, "te_fsdp.cli", ["completion", "bash"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--quantized-weights" in done.stdout and "verify" in done.stdout
    wrong = start(python, "te_fsdp.cli", ["completion", "csh"], tmp_path)
    assert wrong.returncode == 2 and "bash or zsh" in wrong.stderr
    usage = start(python, "te_fsdp.cli", ["completion", "--help"], tmp_path)
    assert usage.returncode == 0 and "completion bash|zsh" in usage.stdout and not usage.stderr
