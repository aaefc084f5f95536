"""Test ``collective_call`` in one process."""

from __future__ import annotations

import subprocess

import pytest

import te_fsdp
from te_fsdp.collectives import rendezvous


def test_collective_call_returns_at_once_in_one_process():
    with rendezvous.collective_call("checkpoint.save"):
        pass


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_collective_timeout_must_be_positive(seconds):
    with pytest.raises(te_fsdp.CollectiveError, match="seconds: expected a positive number"):
        te_fsdp.set_collective_timeout(seconds)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1, 2, 5], "ranks 0-2, 5"),
        (list(range(0, 40, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14, ..."),
    ],
)
def test_ranks_are_formatted_as_ranges(ranks, text):
    assert rendezvous.format_ranks(ranks) == text


def test_warnings_are_printed_without_logging_configuration(python):
    """Python's last-resort handler prints warnings unless a library has installed a handler."""
    program = "import logging, te_fsdp; logging.getLogger('te_fsdp').warning('rank 1 has not come')"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    assert "rank 1 has not come" in done.stderr
