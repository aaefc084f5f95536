"""Two gloo processes: tensor and sequence parallelism, FSDP2, distributed checkpoints."""

import math

import pytest
import torch

from tests.unit.emulation import reference as ref
from tests.unit.emulation import two_processes

EVERYWHERE = ["none", "Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling"]
CASES = [(arch, name) for arch in ("9.0", "10.0") for name in EVERYWHERE]
CASES += [("10.0", "MXFP8BlockScaling"), ("10.0", "NVFP4BlockScaling")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("two"))
    torch.multiprocessing.spawn(two_processes.work, args=(folder,), nprocs=2)
    return [torch.load(f"{folder}/{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("arch,name", CASES)
def test_tensor_parallel_is_the_single_process_layer(results, arch, name, sequence_parallel):
    # fp32: eight chained products, sums split over two ranks. Quantized: where a rank scales its own part the same value is
    # rounded on another grid, so that both sides carry the error of one product of the backward; NVFP4 rounds stochastically.
    bound = ref.fp32_bound(two_processes.FFN, 8)
    if name != "none":
        bound = math.sqrt(2) * ref.stage(ref.E4M3_EPS, ref.E5M2_EPS)
    if name == "NVFP4BlockScaling":
        bound = math.sqrt(2) * 2 * math.hypot(0.1 * math.sqrt(2), ref.E4M3_EPS / math.sqrt(3))
    for rank in results:
        assert rank["tp", arch, name, sequence_parallel] <= bound


@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("arch,name", CASES)
def test_fsdp2_trains_like_one_process(results, arch, name, primary):
    if name == "none" and primary:
        pytest.skip("there are no quantized weights without a recipe")
    # Both ranks hold the same batch, so the averaged gradients are the single process's, up to rounding to bf16 in the reduction.
    # The loss is about 2 and falls by a few percent: a per-tensor scale of a shard instead of the weight moves a weight by at most
    # E4M3_EPS, as does an optimizer step; what that does to a loss is bounded by the measured 3e-2 of block primary weights.
    tolerance = {"none": 1e-5}.get(name, 5e-2 if primary or name == "NVFP4BlockScaling" else 5e-3)
    for rank in results:
        alone, together, kind = rank["fsdp", arch, name, primary]
        assert together[0] == pytest.approx(alone[0], abs=tolerance)
        assert together == pytest.approx(alone, abs=tolerance)
        assert together[-1] < together[0] - 1e-3
        if primary and name in ("Float8CurrentScaling", "DelayedScaling"):
            assert kind == "Float8Tensor"
        if primary and name == "MXFP8BlockScaling":
            assert kind == "MXFP8Tensor"


@pytest.mark.parametrize("arch", ["9.0", "10.0"])
def test_meta_init_then_fully_shard_then_reset_parameters(results, arch):
    for rank in results:
        losses, kind = rank["meta", arch]
        assert kind == "Float8BlockwiseQTensor" and losses[-1] < losses[0] - 1e-3


@pytest.mark.parametrize("arch,name", [case for case in CASES if case[1] not in ("DelayedScaling", "NVFP4BlockScaling")])
def test_checkpoint_round_trip_is_exact(results, arch, name):
    for rank in results:
        before, after = rank["dcp", arch, name]
        assert before > 1e-3 and after == 0.0
