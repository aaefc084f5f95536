"""Check the order of everything that te_fsdp attaches or runs, as documented."""

from __future__ import annotations

import inspect
import itertools
import re
from pathlib import Path

import pytest

from te_fsdp import bind_device_mesh, components
from te_fsdp.check_points import LEVELS
from te_fsdp.checks import CHECKS
from te_fsdp.component import Component, Components
from te_fsdp.features import main_weights

ROOT = Path(__file__).resolve().parents[2]
LISTS = {
    "before": (bind_device_mesh.BEFORE_STEP, main_weights.BEFORE_STEP, components.BEFORE_STEP),
    "after": (bind_device_mesh.AFTER_STEP, main_weights.AFTER_STEP, components.AFTER_STEP),
}


def _names(functions):
    return [function.__name__ for function in functions]


def test_step_functions_are_in_the_documented_order():
    assert _names(components.BEFORE_STEP) == [
        "record_stepping_optimizer",
        "wait_for_gradients",
        "settle_kept_weights",
        "run_checks",  # of complete gradients, before anything changes
        "check_gradients",
        "wrap_closure",  # which does the last three again after the closure's backward
        "update_written_main_weights",
        "sync_tp_replicas",  # of complete gradients, in the dtype in which they were summed
        "prepare_components",
        "allow_mixed_parameters",
        # last: its hook of the optimizer's own runs next, and takes gradients as they are now
        "use_fused_adam_master_weights",
    ]
    assert _names(components.AFTER_STEP) == [
        "refresh_quantized",
        "increment_versions",
        "record_weight_versions",  # after that has counted
        "reshard_units",
        "undo_preparations",
        "finish_components",
        "release_weights",
    ]


@pytest.mark.parametrize("when", LISTS)
def test_step_functions_of_a_bound_model_are_a_subsequence(when):
    for shorter, longer in itertools.pairwise(LISTS[when]):
        assert shorter == tuple(function for function in longer if function in shorter)
        assert len(shorter) < len(longer)


def _does(documented):
    """Return first sentence of a docstring, as the page prints it."""
    does = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", (documented.__doc__ or "").splitlines()[0])
    return re.split(r"(?<=\.) |\.$| \(\[Note", does.replace("``", "`"))[0].rstrip(".")


def _file_of(item):
    return Path(inspect.getfile(item)).relative_to(ROOT / "te_fsdp")


def listed(functions, *shorter):
    """Format the order only. The functions' docstrings describe them."""
    # The shortest list first: a function gets the mark of the first list that contains it.
    marks = {
        function: next(
            (mark for mark, part in zip(("*", "**"), shorter, strict=False) if function in part), ""
        )
        for function in functions
    }
    rows = enumerate(marks.items(), 1)
    conditions = {f: f" (`{f.runs_if}`)" for f in functions if hasattr(f, "runs_if")}
    return "\n".join(
        f"{number}. `{f.__name__}` of `{_file_of(f)}`{mark}{conditions.get(f, '')}"
        for number, (f, mark) in rows
    )


def setup_list():
    return listed(components.SETUP)


def step_list(when):
    """Mark functions that `set_device_mesh` or `main_weights` also register."""
    *shorter, every = LISTS[when]
    return listed(every, *shorter)


def phase_table():
    rows = ["| phase | components | does |", "| --- | --- | --- |"]
    for phase, method in vars(Component).items():
        if not phase.startswith("_"):
            taking_part = [kind for kind in components.COMPONENTS if phase in vars(kind)]
            rows.append(
                f"| `{phase}` | {', '.join(f'`{k.__name__}`' for k in taking_part)} | {_does(method)} |"
            )
    return "\n".join(rows)


@pytest.mark.parametrize("when", LISTS)
def test_internals_page_lists_the_step_functions(when):
    assert f"{when} a step:\n\n{step_list(when)}\n\n" in (ROOT / "docs/internals.md").read_text(), step_list(
        when
    )


@pytest.mark.parametrize("table", [setup_list, phase_table])
def test_internals_page_lists_setup_and_phases(table):
    assert f"\n\n{table()}\n\n" in (ROOT / "docs/internals.md").read_text(), table()


def test_every_phase_has_a_component():
    """A phase that no component overrides is dead code."""
    phases = [name for name in vars(Component) if not name.startswith("_")]
    taken = {name for kind in components.COMPONENTS for name in vars(kind)}
    assert [phase for phase in phases if phase not in taken] == []


def test_phases_run_the_overridden_methods_in_the_order_of_attachment():
    seen = []

    class First(Component):
        def drop_unreduced(self):
            seen.append("first")

    class Second(Component):
        def drop_unreduced(self):
            seen.append("second")

        def unreduced(self):
            return ["a"]

    first, second = First(), Second()
    attached = Components([first])
    attached.attach(second)
    for drop in attached.drop_unreduced:
        drop()
    assert seen == ["first", "second"]
    assert [names() for names in attached.unreduced] == [["a"]]
    assert attached.settle == () and attached.get(Second) is second
    attached.detach(second)
    assert attached.unreduced == () and attached.get(Second) is None


def test_names_on_the_internals_page_exist():
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


def check_list():
    """Return one line for each level and error: its checks, with the ranks that communicate."""
    results = {}
    for level in LEVELS:
        for check in CHECKS:
            if check.level == level:
                error = "a warning in the log" if check.error is None else f"`{check.error.__name__}`"
                name = f"{check.name} ({check.mesh})" if check.mesh else check.name
                results.setdefault((level, error), {})[name] = None
    return "\n".join(f"- `{level}`, {error}: {'; '.join(names)}" for (level, error), names in results.items())


def test_checks_page_lists_every_check():
    assert check_list() in (ROOT / "docs/checks.md").read_text(), check_list()
