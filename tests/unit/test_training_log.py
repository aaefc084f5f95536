"""Numbers of training steps: which steps are told, what is told, and what writers do with it."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest
import torch

from te_fsdp.integrations import training_log
from te_fsdp.integrations.training_log import JsonLines, TrainingLog, WandB


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def write(self, step: int, values: Any) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"Fix: pip install 'te-fsdp\[wandb\]'"):
        WandB(project="x")


def test_numbers_are_told_to_the_last_bit():
    told = TrainingLog(every=1).step(0, rate=0.003, steps=2**40 + 1, loss=torch.tensor(0.1))
    assert told is not None
    assert (told["rate"], told["steps"], told["loss"]) == (0.003, 2**40 + 1, torch.tensor(0.1).item())


def test_a_text_is_no_number():
    with pytest.raises(
        ValueError, match="TrainingLog.step: loss: expected a number, or a tensor of one element"
    ):
        TrainingLog(every=1).step(0, loss="0.5")


def test_logging_steps_have_everything(tmp_path, monkeypatch):
    clock = iter([10.0, 14.0, 22.0])
    monkeypatch.setattr(training_log.time, "perf_counter", lambda: next(clock))
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": 0.5}], lr=0.1)
    optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)], "lr": torch.tensor(0.25)})
    kept = Kept()
    path = tmp_path / "new" / "metrics.jsonl"
    lines = JsonLines(path, {"mesh": "dp_shard=2"})
    log = TrainingLog([kept, lines], every=2, optimizer=optimizer, tokens_per_step=100)
    assert log.step(1, loss=torch.tensor(3.0)) is None
    third = torch.tensor(1 / 3, dtype=torch.float64)
    told = log.step(2, loss=third, grad_norm=torch.tensor([2.0], requires_grad=True), epoch=1)
    numbers = {"loss": 1 / 3, "grad_norm": 2.0, "epoch": 1.0, "lr": 0.5, "lr_1": 0.25}
    assert told == {**numbers, "step_s": 2.0, "tokens_per_s": 50.0}
    log.step(3, loss=0.5)
    log.step(4, loss=0.5)
    log.close()
    assert [row[0] for row in kept.rows] == [2, 4] and kept.rows[0][1] == told and kept.closed
    assert kept.rows[1][1]["step_s"] == 4.0, "8 seconds, two steps"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == {"step": 2, **told, "mesh": "dp_shard=2"}, "floats to the bit"
    assert len(rows) == 2


def test_nothing_is_fetched_between_logging_steps():
    class Untouched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("the device is asked")

    log = TrainingLog(every=10)
    assert log.step(9, loss=torch.zeros(()).as_subclass(Untouched)) is None
    with pytest.raises(AssertionError, match="asked"):
        log.step(10, loss=torch.zeros(()).as_subclass(Untouched))


def test_a_writer_that_fails_is_left_out(caplog):
    class Full(Kept):
        def write(self, step: int, values: Any) -> None:
            raise OSError("disk full")

    kept = Kept()
    log = TrainingLog([Full(), kept], every=1)
    with caplog.at_level(logging.ERROR, "te_fsdp"):
        log.step(1)
        log.step(2)
    assert [row[0] for row in kept.rows] == [1, 2]
    assert [record.getMessage() for record in caplog.records] == ["TrainingLog: Full is left out from now on"]


def test_mistakes():
    with pytest.raises(ValueError, match="expected at least 1, got 0"):
        TrainingLog(every=0)
    with pytest.raises(ValueError, match="loss: expected one number, got a tensor of several elements"):
        TrainingLog(every=1).step(1, loss=torch.zeros(2))


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TrainingLog([training_log.TensorBoard(tmp_path)], every=1)
    log.step(7, loss=0.5)
    log.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(7, 0.5)]


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    writer = training_log.WandB(project="test", mode="offline", dir=str(tmp_path))
    log = TrainingLog([writer], every=1)
    log.step(7, loss=0.5)
    # At once: neither held back until the next logging step, nor lost with a job that is killed before it.
    assert writer._run.summary["loss"] == 0.5 and writer._run.summary["_step"] == 7
    log.close()
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1
