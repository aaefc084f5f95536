"""Test named models or optimizers in a checkpoint."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.errors import CheckpointError, TeFsdpError


class Job:
    """An actor and a critic; the actor has two optimizers, the critic one."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.actor = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.critic = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.critic[1] = self.actor[1]  # a module that both share
        self.models = {"actor": self.actor, "critic": self.critic}
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "matrix": torch.optim.SGD([self.actor[0].weight], lr=0.1, momentum=0.9),
            "rest": torch.optim.AdamW([self.actor[0].bias, *self.actor[1].parameters()], lr=0.01),
            "critic": torch.optim.AdamW(self.critic[0].parameters(), lr=0.02),
        }

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            x = torch.linspace(-1, 1, 8).view(2, 4)
            (self.actor(x).square().sum() + self.critic(x).sin().sum()).backward()
            for optimizer in self.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        results = {
            f"{m}.{n}": p.detach().clone()
            for m, item in self.models.items()
            for n, p in item.named_parameters()
        }
        for name, optimizer in self.optimizers.items():
            for index, state in enumerate(optimizer.state.values()):
                results |= {
                    f"{name}.{index}.{key}": v.clone()
                    for key, v in state.items()
                    if isinstance(v, torch.Tensor)
                }
        return results


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name in a.keys() | b.keys()
        if name not in a or name not in b or not torch.equal(a[name], b[name])
    ]


def test_named_models_and_optimizers_resume_exactly(tmp_path: Path) -> None:
    """Cover jobs with several models or optimizers. The next steps equal those of an uninterrupted job."""
    job, other = Job(0), Job(1)
    job.step(3)
    checkpoint.save(tmp_path / "a", job.models, job.optimizers)
    assert len(differing(job.values(), other.values())) > 10, "the control: before the load they differ"
    checkpoint.load(tmp_path / "a", other.models, other.optimizers)
    assert differing(job.values(), other.values()) == []
    assert [o.param_groups[0]["lr"] for o in other.optimizers.values()] == [0.1, 0.01, 0.02]
    job.step(2)
    other.step(2)
    assert differing(job.values(), other.values()) == []
    manifest = Manifest.read(tmp_path / "a")
    assert sorted(manifest.parameters) == [
        "actor.0.bias", "actor.0.weight", "actor.1.bias", "actor.1.weight", "critic.0.bias", "critic.0.weight",
    ]  # fmt: skip
    assert manifest.tied == {"critic.1.weight": "actor.1.weight", "critic.1.bias": "actor.1.bias"}
    assert manifest.optimizer and manifest.optimizer["class"] == "matrix=SGD, rest=AdamW, critic=AdamW"


def test_one_model_with_two_optimizers_round_trips(tmp_path: Path) -> None:
    job, other = Job(0), Job(1)
    job.step(2)
    own = {name: job.optimizers[name] for name in ("matrix", "rest")}
    checkpoint.save(tmp_path / "a", job.actor, own)
    loaded = checkpoint.load(tmp_path / "a", other.actor, {name: other.optimizers[name] for name in own})
    assert loaded.is_complete
    state = other.optimizers["matrix"].state[other.actor[0].weight]
    assert torch.equal(
        state["momentum_buffer"], job.optimizers["matrix"].state[job.actor[0].weight]["momentum_buffer"]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("absent", "optimizer 'rest' is only in the checkpoint"),
        ("more", "optimizer 'more' is not in the checkpoint"),
        ("class", "matrix: optimizer: saved SGD, this one is AdamW"),
        ("unnamed", "optimizer: saved matrix, rest, here one without a name"),
        ("models", "missing in the checkpoint"),
    ],
)
def test_load_differences_name_the_optimizer(tmp_path: Path, change: str, words: str) -> None:
    job, other = Job(0), Job(1)
    job.step()
    checkpoint.save(tmp_path / "a", job.actor, {name: job.optimizers[name] for name in ("matrix", "rest")})
    model: Any = {"actor": other.actor} if change == "models" else other.actor
    given: Any = {name: other.optimizers[name] for name in ("matrix", "rest")}
    if change == "absent":
        del given["rest"]
    elif change == "more":
        given["more"] = torch.optim.SGD([other.actor[1].bias], lr=1.0)
        given["rest"].param_groups[0]["params"].pop()
    elif change == "class":
        given["matrix"] = torch.optim.AdamW([other.actor[0].weight])
    elif change == "unnamed":
        given = given["rest"]
    before = other.values()
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(tmp_path / "a", model, given)
    assert differing(before, other.values()) == [], "nothing has changed"


def test_load_skips_a_named_optimizer_with_strict_false(tmp_path: Path) -> None:
    job, other = Job(0), Job(1)
    job.step()
    checkpoint.save(tmp_path / "a", job.actor, {name: job.optimizers[name] for name in ("matrix", "rest")})
    loaded = checkpoint.load(
        tmp_path / "a", other.actor, {"matrix": other.optimizers["matrix"]}, strict=False
    )
    assert set(loaded.left) == {f"optimizer.state.{n}" for n in ("0.bias", "1.weight", "1.bias")}
    assert len(other.optimizers["matrix"].state) == 1


@pytest.mark.parametrize(
    ("models", "optimizers", "words"),
    [
        ({"a.b": "actor"}, None, "models by name"),
        ({}, None, "an empty dict"),
        ({"actor": "actor"}, {"one": "matrix", "two": "matrix"}, "is in two optimizers, 'one' and 'two'"),
        ({"actor": "actor"}, {"one": 3}, "optimizer 'one'"),
        ({"actor": 3}, None, "got int"),
    ],
)
def test_save_rejects_invalid_names_of_models_and_optimizers(
    tmp_path: Path, models: Any, optimizers: Any, words: str
) -> None:
    job = Job(0)
    given = {name: job.models.get(item, item) for name, item in models.items()}
    held = optimizers and {name: job.optimizers.get(item, item) for name, item in optimizers.items()}
    with pytest.raises(TeFsdpError, match=words):
        checkpoint.save(tmp_path / "a", given, held)
    assert list(tmp_path.iterdir()) == []


EXTRA: dict[str, Any] = {
    "milestones": collections.Counter({2: 1, 5: 2}),
    "by step": {1: "a", (2, "b"): [3.5], None: True, 2.5: {}},
    "bytes": b"\x00\xff",
    "buffer": bytearray(b"ab"),
    "set": {3, 1, 2},
    "frozen": frozenset({"a", "b"}),
    "numbers": [np.float64(0.1), np.int32(-4), np.float32(1.5), np.bool_(True), np.uint8(7)],
    "complex": 1 + 2j,
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "size": torch.Size([2, 3]),
    "te_fsdp.value": "a reserved name",
    "ordered": collections.OrderedDict(b=1, a=2),
    "layout": torch.sparse_csr,
    "nested": ({"x": {4: (b"", {5})}},),
}


def test_extra_accepts_values_of_weights_only_files(tmp_path: Path) -> None:
    """Values are equal and have the same classes, including tensors in dicts with any keys."""
    numbers = torch.arange(4.0)
    conjugate = torch.complex(numbers, numbers).conj()
    negative = torch.complex(numbers, numbers).conj().imag
    assert conjugate.is_conj() and negative.is_neg()
    tensors = {7: numbers, "c": conjugate, "n": negative, "t": torch.arange(6).view(2, 3).t()}
    schedule = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([numbers], lr=1.0), milestones=[2, 5])
    extra = {**EXTRA, "tensors": tensors, "schedule": schedule.state_dict()}
    checkpoint.save(tmp_path / "a", nn.Linear(2, 2), extra=extra)
    loaded = checkpoint.load(tmp_path / "a", nn.Linear(2, 2))
    for name, value in EXTRA.items():
        assert loaded[name] == value and type(loaded[name]) is type(value), name
    assert [type(n) for n in loaded["numbers"]] == [type(n) for n in EXTRA["numbers"]]
    assert all(torch.equal(loaded["tensors"][key], value) for key, value in tensors.items())
    schedule.load_state_dict(loaded["schedule"])
    assert schedule.milestones == collections.Counter([2, 5])


def test_extra_accepts_tensors_that_are_not_strided(tmp_path: Path) -> None:
    """Cover sparse tensors of every layout and torch's quantized tensors, in a dict and per rank."""
    eye = torch.eye(4)
    uncoalesced = torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 3), check_invariants=True)
    values = [
        uncoalesced,
        eye.to_sparse(),
        eye.to_sparse_csr(),
        eye.to_sparse_csc(),
        eye.to_sparse_bsr((2, 2)),
    ]
    values += [eye.to_sparse_bsc((2, 2)), torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8)]
    extra = {"all": values, "own": checkpoint.PerRank({1: uncoalesced})}
    checkpoint.save(tmp_path / "a", nn.Linear(2, 2), extra=extra)
    loaded = checkpoint.load(tmp_path / "a", nn.Linear(2, 2))
    for one, other in zip([*values, uncoalesced], [*loaded["all"], loaded["own"][1]], strict=True):
        assert one.layout == other.layout and one.dtype == other.dtype
        if one.is_sparse:
            assert one.is_coalesced() == other.is_coalesced()
        equal = (t.dequantize() if t.is_quantized else t.to_dense() for t in (one, other))
        assert torch.equal(*equal)


def test_optimizer_options_may_be_tensors_and_load_in_place(tmp_path: Path) -> None:
    """Options are loaded in place, because captured graphs refer to them. A tensor of a different size is rejected."""

    def job() -> tuple[nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        betas = torch.tensor(0.5), torch.tensor(0.75)
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), betas=betas)

    (model, optimizer), (other, fresh) = job(), job()
    for beta in (*optimizer.param_groups[0]["betas"], optimizer.param_groups[0]["lr"]):
        beta.mul_(0.5)
    checkpoint.save(tmp_path / "a", model, optimizer)
    group = fresh.param_groups[0]
    before = [*group["betas"], group["lr"]]
    checkpoint.load(tmp_path / "a", other, fresh)
    assert all(one is two for one, two in zip(before, [*group["betas"], group["lr"]], strict=True))
    assert [float(one) for one in before] == [0.25, 0.375, pytest.approx(0.05)]
    optimizer.param_groups[0]["mask"] = [torch.ones(3)]
    with pytest.raises(CheckpointError, match=r"param_groups\[0\]/mask/0: a tensor of shape \[3\]"):
        checkpoint.save(tmp_path / "b", model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        pytest.param(object(), "object", id="object"),
        pytest.param(np.arange(3), "ndarray", id="array"),
        pytest.param(np.longdouble(1), "longdouble", id="longdouble"),
        pytest.param(lambda: None, "function", id="function"),
        pytest.param(slice(1), "slice", id="slice"),
        pytest.param(Path("a"), "PosixPath", id="path"),
        pytest.param(nn.Linear(1, 1), "Linear", id="module"),
    ],
)
def test_save_errors_name_the_rejected_extra_value(tmp_path: Path, value: Any, name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"extra/a/0/3: cannot be stored: expected .*got {name}"):
        checkpoint.save(tmp_path / "a", nn.Linear(2, 2), extra={"a": [{1: 0, 2: 1, 3: 2, 4: value}]})
    assert list(tmp_path.iterdir()) == []


def test_save_plan_of_several_stages_on_one_rank_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also covers named models. The joined module is new in each call, but the cached plan is reused."""
    from te_fsdp.checkpoint import saving

    calls: list[int] = []
    real = saving.plan_entries
    monkeypatch.setattr(saving, "plan_entries", lambda *a: calls.append(1) or real(*a))
    job = Job(0)
    names = [nn.ModuleDict({"first": nn.Linear(2, 2)}), nn.ModuleDict({"second": nn.Linear(2, 2)})]
    for number in range(3):
        checkpoint.save(tmp_path / f"stages-{number}", names)
        checkpoint.save(tmp_path / f"named-{number}", job.models)
    assert len(calls) == 2
    job.critic.add_module("more", nn.Linear(2, 2))
    checkpoint.save(tmp_path / "changed", job.models)
    assert len(calls) == 3, "the control: a different model has a different plan"
