"""What te_fsdp does around a step of an optimizer: the lists, and the page that prints them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from te_fsdp import bind_device_mesh, optimizer_step
from te_fsdp.checks import CHECKS

ROOT = Path(__file__).resolve().parents[2]
LISTS = {
    "before": (bind_device_mesh.BEFORE_STEP, optimizer_step.BEFORE_STEP),
    "after": (bind_device_mesh.AFTER_STEP, optimizer_step.AFTER_STEP),
}


def _names(functions):
    return [function.__name__ for function in functions]


def test_the_order():
    assert (
        _names(optimizer_step.BEFORE_STEP)
        == [
            "restore_optimizer_params",  # first: until then the groups may contain main weights, which have no record
            "record_stepping_optimizer",
            "wait_for_gradients",
            "run_checks",  # of complete gradients, before anything changes
            "check_nan_report",
            "wrap_closure",  # which does the last three again after the closure's backward
            "sync_tp_replicas",  # of complete gradients, in the dtype in which they were summed
            "cast_gradients",
            "allow_mixed_parameters",
            # last: its hook of the optimizer's own runs next, and takes gradients as they are now
            "use_fused_adam_master_weights",
        ]
    )
    assert _names(optimizer_step.AFTER_STEP) == [
        "refresh_quantized",
        "count_versions",
        "run_checks_after_step",  # after that has counted
        "undo_casts",
        "reset_nan_report",
        "release_weights",
    ]


@pytest.mark.parametrize("when", LISTS)
def test_a_bound_model_has_a_part_of_it_in_the_same_order(when):
    bound, every = LISTS[when]
    assert bound == tuple(function for function in every if function in bound)


@pytest.mark.parametrize("when", LISTS)
def test_the_page_has_the_list(when):
    bound, every = LISTS[when]
    expected = [
        f"| {when} a step | where | bound models | does |",
        "| --- | --- | --- | --- |",
    ]
    for function in every:
        file = Path(inspect.getfile(function)).relative_to(ROOT / "te_fsdp")
        does = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", (function.__doc__ or "").splitlines()[0])
        does = does.replace("``", "`")
        expected.append(
            f"| `{function.__name__}` | `{file}` | {'yes' if function in bound else ''} | {does} |"
        )
    assert "\n".join(expected) in (ROOT / "docs/internals.md").read_text(), "\n".join(expected)


def test_names_on_the_page_exist():
    """`name` | `file.py` in a row, and `name` of `file.py` in the text."""
    page = (ROOT / "docs/internals.md").read_text()
    named = re.findall(r"(?m)^\| [^|`]+ \| `(\w+)` \| `([\w/]+\.py)`", page) + re.findall(
        r"`(\w+)` (?:of|in) `(?:te_fsdp/)?([\w/]+\.py)`", page
    )
    assert len(named) > 15
    missing = [
        f"{name} in {file}"
        for name, file in named
        if not re.search(
            rf"^\s*(def|class) {name}\b|^{name}\b.*=", (ROOT / "te_fsdp" / file).read_text(), re.M
        )
    ]
    assert not missing
    files = set(re.findall(r"`(?:te_fsdp/)?([\w/]+\.py)`", page))
    assert [
        file for file in sorted(files) if not (ROOT / "te_fsdp" / file).exists() and "tests/" not in file
    ] == []


def test_the_page_has_every_check():
    expected = [
        "| check | level | point | ranks | error | function |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for check in CHECKS:
        file = Path(inspect.getfile(check.value)).relative_to(ROOT / "te_fsdp")
        error = "a warning in the log" if check.error is None else f"`{check.error.__name__}`"
        cells = [check.name, f"`{check.when.level}`", f"`{check.when.point}`", check.mesh, error]
        expected.append(f"| {' | '.join(cells)} | `{check.value.__name__}` of `{file}` |")
    assert "\n".join(expected) in (ROOT / "docs/checks.md").read_text(), "\n".join(expected)
