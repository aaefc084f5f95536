"""The example with experts against one process.

Gradients and losses are compared, also after a resume at a different size of ep.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from example_runs import FOLDER, ROOT, TOLERANCE, example, rows
from parity.runs import RTOL

SCRIPT = FOLDER / "train_moe.py"
SIZES = {
    "layers": 1,
    "hidden": 64,
    "ffn": 64,
    "heads": 4,
    "seq": 32,
    "batch": 8,
    "megabytes": 0.3,
    "lr": 1e-2,
}
HALF, STEPS = 2, 4


def skip_tp_gradient_sum(x: torch.Tensor, tp: Any, placement: Any) -> torch.Tensor:
    """Leave gradients of the tp ranks unsummed, instead of `to_all`."""
    return x


def route_to_two_experts(router: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Route all tokens to experts 0 and 1, instead of `Router.forward`."""
    logits = torch.nn.functional.linear(tokens.float(), router.weight.float())
    favour = 100.0 * (torch.arange(logits.shape[1], device=logits.device) < 2)
    return (logits + favour).softmax(-1)


def gradients(
    mesh: dict[str, int], options: dict[str, Any], summed: bool = True, routed: bool = True
) -> dict[str, torch.Tensor]:
    """Name -> gradient of the first step's loss, in fp32; of experts those of this rank."""
    import te_fsdp

    moe = example("train_moe")
    given = replace(moe.Options(), **SIZES, **options)
    meshes = te_fsdp.Meshes.build(**mesh, device_type=harness.device_type())
    with pytest.MonkeyPatch.context() as patch:
        if not summed:
            patch.setattr(moe, "to_all", skip_tp_gradient_sum)
        if not routed:
            patch.setattr(moe.Router, "forward", route_to_two_experts)
        model = moe.ByteModel(given, meshes, torch.float32)
        te_fsdp.fully_shard(model, meshes, units=[moe.Layer], average_gradients=False)
        te_fsdp.materialize(model, seed=1)
        first, share, places, _ = moe.train.portion(given, meshes)
        tokens = moe.train.Text(given).take(first, share).to(meshes.device)
        logits, balance = model(tokens[places], places)
        targets = tokens[places + 1].flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        # With all tokens at two experts the balance has the same gradient for both, 2: none for the router, but g + 2
        # rounds the gradients g of the loss to 2^-23, some 1e-5 of the router's.
        ((loss + balance * routed) / (given.batch * given.seq)).backward()
    return {name: harness.full(parameter.grad) for name, parameter in model.named_parameters()}


def train(folder: str, options: dict[str, Any], moved: bool = False) -> None:
    """Run the example's main; with ``moved`` every expert's first weight is its neighbour's after a resume."""
    moe = example("train_moe")
    loading = moe.train.resume

    def resume(given: Any, model: Any, *rest: Any) -> Any:
        progress = loading(given, model, *rest)
        up = model.layers[0].moe.experts.up
        weights = [up.get_parameter(f"weight{n}").to_local() for n in range(given.experts)]
        kept = [weight.clone() for weight in weights]
        with torch.no_grad():
            for weight, other in zip(weights, [*kept[1:], kept[0]], strict=True):
                weight.copy_(other)
        return progress

    moe.train.resume = resume if moved else loading
    try:
        paths = {name: Path(options[name]) for name in ("save", "resume") if name in options}
        moe.main(replace(moe.Options(), **SIZES, **options | paths, out=Path(folder)))
    finally:
        moe.train.resume = loading


def losses(pool: Any, ranks: int, folder: Path, options: dict[str, Any], **more: Any) -> list[float]:
    """Return the output of rank 0 for a run on this number of ranks."""
    pool.run(train, ranks, folder=str(folder), options={"steps": STEPS, **options}, **more)
    found = rows(folder)
    assert all(0.9 < row["balance"] < 2 for row in found), found
    return [row["loss"] for row in found]


def relative_differences(
    pool: Any, options: dict[str, Any], expected: dict[str, torch.Tensor], **more: Any
) -> dict[str, float]:
    """Name -> relative difference of the gradients of ep 2 x tp 2 from the expected ones; where these are 0: any."""
    ranks = pool.run(gradients, 4, mesh={"ep": 2, "tp": 2}, options=options, **more)
    found = {name: value for rank in ranks for name, value in rank.items()}
    assert found.keys() == expected.keys()
    assert len(found) > 10
    return {
        name: float((found[name] - e).norm() / (e.norm() if e.any() else 1)) for name, e in expected.items()
    }


@pytest.mark.ranks(4)
def test_gradients_equal_one_process(pool):
    options = {"experts": 5}  # ranks of ep have three and two
    (expected,) = pool.run(gradients, 1, mesh={}, options=options)
    assert (
        max(relative_differences(pool, options, expected).values()) < RTOL
    )  # its origin is written there; measured: 4e-7
    # Each expert has a row for every token, so none is dropped.
    split = options | {"sequence_parallel": True, "capacity_factor": 2.5}
    assert max(relative_differences(pool, split, expected).values()) < RTOL
    assert max(relative_differences(pool, options, expected, summed=False).values()) > 100 * RTOL


@pytest.mark.ranks(4)
def test_rank_without_tokens(pool):
    options = {"experts": 4}
    (expected,) = pool.run(gradients, 1, mesh={}, options=options, routed=False)
    idle = [name for name in expected if re.search(r"experts\.(up|down)\.weight[23]$", name)]
    assert len(idle) == 4
    assert not any(expected[name].any() for name in idle)
    assert max(relative_differences(pool, options, expected, routed=False).values()) < RTOL


@pytest.fixture(scope="module")
def saved_runs() -> dict[str, Any]:
    """Return the tests' common data."""
    return {}


@pytest.fixture
def single_process(pool, saved_runs, tmp_path_factory) -> tuple[list[float], list[float], str]:
    """Return losses of one process and of dp 2 x ep 2, and a checkpoint from the middle of the latter."""
    if not saved_runs:
        folder = tmp_path_factory.mktemp("moe")
        one = losses(pool, 1, folder / "one", {})
        save = {"ep": 2, "save": str(folder / "checkpoints"), "save_every": HALF}
        parted = losses(pool, 4, folder / "parted", save)
        saved_runs["all"] = one, parted, str(folder / f"checkpoints/step-{HALF}")
    return saved_runs["all"]


def compare(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < TOLERANCE, (found, expected)


@pytest.mark.ranks(4)
def test_losses_on_expert_parallel_ranks(single_process):
    one, parted, _ = single_process
    compare(parted, one)
    assert parted != one, "bit-equal: was it really a different mesh?"
    assert one[-1] < one[0] - 0.3


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (4, {"ep": 4}), (4, {"ep": 2, "tp": 2, "single_grouped": True})],
    ids=["one", "ep4", "ep2-tp2-single"],
)
def test_resume_with_a_different_ep_size(pool, single_process, tmp_path, ranks, options, device_type):
    one, _, checkpoint = single_process
    if device_type != "cpu":
        options = {name: value for name, value in options.items() if name != "single_grouped"}
    compare(losses(pool, ranks, tmp_path, {"resume": checkpoint, **options}), one[HALF:])


@pytest.mark.ranks(4)
def test_negative_control_swapped_experts(pool, single_process, tmp_path):
    one, _, checkpoint = single_process
    found = losses(pool, 1, tmp_path, {"resume": checkpoint}, moved=True)
    assert abs(found[-1] - one[-1]) > 2 * TOLERANCE, (found, one)


def memory(mesh: dict[str, int], cases: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return bytes of the experts' weights and states on the fullest rank, per element of an even share."""
    import te_fsdp

    moe = example("train_moe")
    meshes, found = te_fsdp.Meshes.build(**mesh, device_type=harness.device_type()), []
    for case in cases:
        given = replace(moe.Options(), **SIZES | {"hidden": 128, "ffn": 128}, **mesh, **case)
        recipe = moe.RECIPES[given.recipe] and moe.RECIPES[given.recipe]()
        model, optimizer, _ = moe.train.build(moe.ByteModel, moe.Layer, given, meshes, recipe)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        weights, states, share = moe.expert_memory(given, model, optimizer, meshes)
        found.append((weights / share, states / share))
    return found


@pytest.mark.ranks(4)
def test_memory_is_an_even_share(pool, device_type):
    """Check fp32 weights with AdamW's two moments, and bf16 or MXFP8 weights with fp32 main weights."""
    cases = [{}, {"optimizer": "fused_adam"}]
    expected = [(4, 8), (2, 12)]
    if device_type == "cpu":
        cases.append({"optimizer": "fused_adam", "recipe": "mxfp8", "quantized_weights": True})
        expected.append((2 * (1 + 1 / 32), 12))
    for mesh in ({"ep": 2}, {"ep": 2, "tp": 2}):
        for rank in pool.run(memory, 4, mesh=mesh, cases=cases):
            for measured, wanted in zip(rank, expected, strict=True):
                assert measured == pytest.approx(wanted, rel=0.05)


@pytest.mark.ranks(8)
def test_losses_on_eight_ranks(pool, single_process, tmp_path):
    options = {"ep": 2, "tp": 2, "sequence_parallel": True, "steps": 2}
    compare(losses(pool, 8, tmp_path, options), single_process[0][:2])


OPTIONS = [
    "dp_shard",
    "ep",
    "experts",
    "top_k",
    "balance",
    "capacity_factor",
    "single_grouped",
    "hidden",
    "ffn",
    "out",
]


def test_command_line_options_are_stable():
    """Check the options that documentation and scripts use. Announce a renamed or removed option."""
    options = next(
        n for n in ast.parse(SCRIPT.read_text()).body if isinstance(n, ast.ClassDef) and n.name == "Options"
    )
    assert [node.target.id for node in options.body if isinstance(node, ast.AnnAssign)] == OPTIONS


def test_documented_options_exist():
    from test_example import OPTIONS as COMMON

    pages = [SCRIPT, SCRIPT.with_name("README.md"), ROOT / "scripts/train_moe.sh", ROOT / "docs/moe.md"]
    commands = re.findall(r"train_moe\.py .*|^  run .*", "\n".join(page.read_text() for page in pages), re.M)
    named = {name for command in commands for name in re.findall(r"--([a-z][a-z-]+)", command)}
    assert {"ep", "tp", "save", "resume"} <= named
    assert named <= {name.replace("_", "-") for name in OPTIONS + COMMON} | {"help"}
