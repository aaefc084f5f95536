"""The example with a vocabulary-parallel head against one process with a plain loss.

Losses and gradients are compared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import harness
import pytest
import torch
from example_runs import TOLERANCE, example, rows
from parity.runs import RTOL

SIZES = {"layers": 1, "hidden": 64, "ffn": 64, "heads": 4, "seq": 32, "batch": 8, "megabytes": 0.3}


def gradients(
    mesh: dict[str, int], options: dict[str, Any], how: str, checks: str | None = None
) -> dict[str, Any]:
    """Return the first step's loss and gradients in fp32; with ``how`` "plain" of one rank's part of the logits."""
    import te_fsdp

    vocabulary = example("train_vocabulary")
    given = replace(vocabulary.Options(), **SIZES, **options)
    meshes = te_fsdp.Meshes.build(**mesh, device_type=harness.device_type())
    model = vocabulary.ByteModel(given, meshes, torch.float32)
    units = [vocabulary.te.TransformerLayer]
    te_fsdp.fully_shard(model, meshes, units=units, average_gradients=False, checks=checks)
    te_fsdp.materialize(model, seed=1)
    first, share, places, _ = vocabulary.train.portion(given, meshes)
    tokens = vocabulary.train.Text(given).take(first, share).to(meshes.device)
    assert int(tokens.max()) < 128, "all labels are indices of each rank's part"
    logits = model(tokens[places], places)
    with vocabulary.loss_parallel():
        if how == "plain":
            flat = logits.flatten(0, 1).float()
            loss = torch.nn.functional.cross_entropy(flat, tokens[1:].flatten(), reduction="sum")
        else:
            loss = vocabulary.summed_loss(how, logits, tokens[1:], meshes.tp)
        (loss / (given.batch * given.seq)).backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    found = {name: harness.full(parameter.grad) for name, parameter in model.named_parameters()}
    return {"loss": total / meshes.size("tp"), **found}


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest relative difference."""
    assert found.keys() == expected.keys() and len(found) > 8
    pairs = [(found[name].cpu(), value.cpu()) for name, value in expected.items()]
    return max(float((one - value).norm() / value.norm()) for one, value in pairs)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("split", [False, True], ids=["full", "sequence_parallel"])
@pytest.mark.parametrize("how", ["torch", "te"])
def test_losses_and_gradients_equal_one_process(pool, how, split):
    (expected,) = pool.run(gradients, 1, mesh={}, options={}, how="plain")
    options = {"sequence_parallel": split}
    for found in pool.run(gradients, 4, mesh={"tp": 2}, options=options, how=how):
        assert largest_difference(found, expected) < RTOL  # its origin is written there


@pytest.mark.ranks(4)
def test_loss_over_local_logits_raises(pool):
    """Check a loss over each rank's logits. The text has small labels only, so torch raises no error."""
    arguments = {"mesh": {"tp": 2}, "options": {}, "how": "plain"}
    for raised in pool.run_expect_error(gradients, 4, **arguments):
        assert raised.type_name == "GradientError" and "head: a loss over one" in raised.message
    (expected,) = pool.run(gradients, 1, mesh={}, options={}, how="plain")
    for found in pool.run(gradients, 4, checks="setup", **arguments):
        assert largest_difference(found, expected) > 100 * RTOL


def train(words: list[str]) -> None:
    """Run the example's main."""
    import tyro

    vocabulary = example("train_vocabulary")
    vocabulary.main(tyro.cli(vocabulary.Options, args=words, console_outputs=False))


@pytest.mark.ranks(4)
def test_losses_over_tp_equal_one_process(pool, tmp_path):
    """Check losses of dp 2 x tp 2 for each implementation."""
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    found = {}
    for name, ranks, options in (
        ("one", 1, []),
        ("torch", 4, ["--tp", "2", "--loss", "torch"]),
        ("te", 4, ["--tp", "2", "--loss", "te", "--sequence-parallel"]),
    ):
        given = [*sizes, "--steps", "3", "--lr", "1e-2", "--out", str(tmp_path / name), *options]
        pool.run(train, ranks, words=given)
        found[name] = [row["loss"] for row in rows(tmp_path / name)]
    one = found.pop("one")
    assert len(one) == 3 and one[-1] < one[0] - 0.3
    for losses in found.values():
        assert max(abs(a - b) for a, b in zip(losses, one, strict=True)) < TOLERANCE, (losses, one)
        assert losses != one, "bit-equal: was it really a different mesh?"
