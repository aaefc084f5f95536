"""Run the distributed tests on this machine's GPUs for the ledger of results.

    python scripts/gpu_tests.py run --commit COMMIT --out results.jsonl     # on the GPU machine
    python scripts/gpu_tests.py merge results.jsonl                         # add the results to tests/gpu_ledger.csv
    python scripts/gpu_tests.py show                                        # counts per file, failures, what is left

`run` starts several pytest processes next to each other, each with a pool of ranks on all GPUs. Every process gets its
share of the test files, longest first by the seconds in the ledger. A result is written as soon as a test ends, so
nothing is lost when the time limit stops a run. `merge` also takes the file `results.jsonl.partial` of a run that was
killed. By default `run` skips the tests with a valid result: same card, same number of GPUs, same code of the test
file. Its comments, docstrings and line breaks may differ.

The ledger has one row per test, card and number of GPUs. A newer result replaces an older one.
"""

from __future__ import annotations

import ast
import csv
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "pytorch" / "distributed"
LEDGER = ROOT / "tests" / "gpu_ledger.csv"
RESULTS_VARIABLE = "TE_FSDP_GPU_RESULTS"
# Estimated seconds of a file and of a test without a result in the ledger.
UNKNOWN_SECONDS, UNKNOWN_TEST_SECONDS = 60.0, 6.0
# Node ids of one file run in one pool as long as they take less, because they share models and process groups.
PIECE_SECONDS = 60.0


@dataclass(frozen=True)
class Result:
    """Outcome of one test on one machine.

    Attributes:
        test: pytest's node id.
        card: Name of the GPU as torch prints it.
        gpus: Number of GPUs of the machine.
        outcome: "passed", "failed", "skipped", or "pending" for a test that the run did not reach.
        commit: Commit that was tested.
        file: Digest of the code of the test file (`code_digest`).
        seconds: Duration of the test.
        reason: First line of the skip reason or of the error; empty for passed tests.
    """

    test: str
    card: str
    gpus: int
    outcome: str
    commit: str
    file: str
    seconds: float
    reason: str


def file_digest(test: str) -> str:
    """Return the digest of the file of a node id; empty if the file does not exist."""
    path = ROOT / test.split("::")[0]
    return code_digest(path.read_text(encoding="utf-8")) if path.is_file() else ""


@functools.cache
def code_digest(text: str) -> str:
    """Return 12 hexadecimal digits of the SHA-256 of a source's syntax tree, without comments and docstrings."""
    return hashlib.sha256(_outline(ast.parse(text)).encode()).hexdigest()[:12]


def _outline(value: object) -> str:
    """Return a syntax tree as text that is the same in Python 3.10 to 3.14.

    `ast.dump` and `ast.unparse` differ between versions. Fields without a value are left out, because a newer Python
    has more of them.
    """
    if isinstance(value, list):
        return f"[{','.join(_outline(item) for item in value)}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    named = {name: field for name, field in ast.iter_fields(value) if field is not None and field != []}
    if isinstance(value, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        named["body"] = value.body[ast.get_docstring(value, clean=False) is not None :]
    if isinstance(value, ast.JoinedStr):  # Python 3.12 adds empty strings
        named["values"] = [part for part in value.values if getattr(part, "value", None) != ""]
    fields = ",".join(f"{name}={_outline(field)}" for name, field in named.items())
    return f"{type(value).__name__}({fields})"


def read_ledger(path: Path = LEDGER) -> list[Result]:
    """Return the rows of a ledger; an absent file has none."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return [
            Result(**{**row, "gpus": int(row["gpus"]), "seconds": float(row["seconds"])})
            for row in csv.DictReader(stream)
        ]


def merge_results(rows: list[Result], new: list[Result]) -> list[Result]:
    """Return the rows with the new results in place of older ones of the same test, card and number of GPUs.

    A test that a run did not reach keeps its older result if the test file is the same. Results of an earlier version
    of a test file go as soon as there is one of today's: tests that it no longer has would stay forever.
    """
    merged = {(row.test, row.card, row.gpus): row for row in rows}
    for row in new:
        older = merged.get((row.test, row.card, row.gpus))
        if row.outcome != "pending" or older is None or older.file != row.file:
            merged[row.test, row.card, row.gpus] = row
    run = {(row.test.split("::")[0], row.card, row.gpus): row.file for row in new}
    return [
        row
        for key, row in sorted(merged.items())
        if run.get((row.test.split("::")[0], row.card, row.gpus), row.file) == row.file
    ]


def write_ledger(rows: list[Result], path: Path = LEDGER) -> None:
    """Write the rows to a ledger."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, [field.name for field in fields(Result)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def needed_tests(files: list[str], rows: list[Result], card: str, gpus: int) -> dict[str, list[str]]:
    """Return what must run, by file: the file itself, or the node ids that failed or were not reached.

    A file runs as a whole if it has no result yet, or if it changed since its last result. Results of earlier versions
    of the file do not count.
    """
    by_file: defaultdict[str, list[Result]] = defaultdict(list)
    for row in rows:
        name = row.test.split("::")[0]
        if (row.card, row.gpus, row.file) == (card, gpus, file_digest(name)):
            by_file[name].append(row)
    needed = {}
    for name in files:
        if not by_file[name]:
            needed[name] = [name]
        elif left := [row.test for row in by_file[name] if row.outcome in ("failed", "pending")]:
            needed[name] = left
    return needed


def split_tests(needed: dict[str, list[str]], rows: list[Result], pools: int) -> list[list[str]]:
    """Divide files and node ids among the pools so that each pool has about the same number of seconds.

    The node ids of a long file go to several pools. Each pool runs what is short first, so that a time limit stops
    as few tests as possible.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        for name in {row.test, row.test.split("::")[0]}:
            seconds[name] += row.seconds
    pieces: list[tuple[float, list[str]]] = []
    for name, tests in needed.items():
        piece: list[str] = []
        cost = 0.0
        for test in tests:
            piece.append(test)
            cost += seconds[test] or (UNKNOWN_SECONDS if test == name else UNKNOWN_TEST_SECONDS)
            if cost >= PIECE_SECONDS:
                pieces.append((cost, piece))
                piece, cost = [], 0.0
        if piece:
            pieces.append((cost, piece))
    shares: list[list[tuple[float, list[str]]]] = [[] for _ in range(pools)]
    for cost, piece in sorted(pieces, key=lambda one: -one[0]):
        min(shares, key=lambda share: sum(cost for cost, _ in share)).append((cost, piece))
    return [[test for _, piece in reversed(share) for test in piece] for share in shares if share]


def pytest_collection_finish(session) -> None:  # noqa: ANN001
    """Write down which tests are about to run (this file is a plugin of the pytest processes)."""
    if path := os.environ.get(RESULTS_VARIABLE):
        with open(path, "a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(_record(item.nodeid, "pending")) + "\n" for item in session.items)


def pytest_runtest_logreport(report) -> None:  # noqa: ANN001
    """Append the result of a test to the results file."""
    path = os.environ.get(RESULTS_VARIABLE)
    if not path or (report.when != "call" and not (report.when == "setup" and report.outcome != "passed")):
        return
    reason = ""
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else str(report.longrepr)
    lines = reason.strip().splitlines() or [""]
    with open(path, "a", encoding="utf-8") as stream:
        record = _record(report.nodeid, report.outcome, round(report.duration, 2), lines[0][:200])
        stream.write(json.dumps(record) + "\n")
    if report.failed:
        with open(f"{path}.failures", "a", encoding="utf-8") as stream:
            stream.write(f"== {report.nodeid}\n{report.longreprtext}\n")


def _record(test: str, outcome: str, seconds: float = 0.0, reason: str = "") -> dict[str, str | float]:
    return {"test": test, "outcome": outcome, "seconds": seconds, "reason": reason}


def _start(share: list[str], number: int, out: Path, options: list[str]) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        RESULTS_VARIABLE: f"{out}.partial",  # of all processes: a line is written at once
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "gpu_tests",
        "-v",
        "--tb=short",
        "-p",
        "no:cacheprovider",
    ]
    logs = out.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with open(logs / f"{number}.log", "wb") as log:
        return subprocess.Popen(
            [*command, *options, *share],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _collect(partial: Path, commit: str, card: str, gpus: int) -> list[Result]:
    results: dict[str, Result] = {}
    for line in partial.read_text(encoding="utf-8").splitlines() if partial.exists() else []:
        record = json.loads(line)
        test = record["test"]
        results[test] = Result(card=card, gpus=gpus, commit=commit, file=file_digest(test), **record)
    return list(results.values())


def run(
    commit: str,
    out: Path,
    pools: int = 5,
    limit: float = 540.0,
    everything: bool = False,
    seed: int = 0,
    tests: Annotated[tuple[str, ...], "files or node ids; default: all that need a run"] = (),
) -> int:
    """Run tests and write their results to a file; return 1 if one failed.

    Args:
        commit: Commit that is tested; the GPU machine has no repository to ask.
        out: File for the results, a JSON object per line. Results so far are in a file with the suffix `.partial`,
            texts of failures in `.partial.failures`, logs in the folder `logs`.
        pools: Number of pytest processes.
        limit: Seconds after which running processes are stopped; results up to then are kept.
        everything: Also run files whose results are still valid.
        seed: Value of `--matrix-seed`, which selects the cases of tests with the mark `covering`.
        tests: Files or node ids to run in place of the selection.
    """
    import torch

    card, gpus = torch.cuda.get_device_name(0), torch.cuda.device_count()
    rows = read_ledger()
    files = [str(path.relative_to(ROOT)) for path in sorted(TESTS.glob("test_*.py"))]
    if tests or everything:
        chosen = {name: [name] for name in tests or files}
    else:
        chosen = needed_tests(files, rows, card, gpus)
    shares = split_tests(chosen, rows, pools)
    print(f"{len(chosen)} files in {len(shares)} pools on {gpus} x {card}", flush=True)
    options = ["--device", "cuda", "--matrix-seed", str(seed), "--timeout", "240"]
    started = time.monotonic()
    processes = [_start(share, number, out, options) for number, share in enumerate(shares)]
    while any(process.poll() is None for process in processes) and time.monotonic() - started < limit:
        time.sleep(1)
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    results = _collect(Path(f"{out}.partial"), commit, card, gpus)
    out.write_text("".join(json.dumps(asdict(result)) + "\n" for result in results), encoding="utf-8")
    counts = Counter(result.outcome for result in results)
    print(f"{dict(counts)} in {time.monotonic() - started:.0f} s")
    for result in results:
        if result.outcome == "failed":
            print(f"FAILED {result.test}: {result.reason}")
    return int(counts["failed"] > 0)


def merge(
    results: Annotated[Path, tyro.conf.Positional], commit: str = "", card: str = "", gpus: int = 0
) -> int:
    """Add the results of a run to the ledger, then write docs/support.md from it.

    A `.partial` file needs the commit, the card and the number of GPUs.
    """
    if results.suffix == ".partial":
        new = _collect(results, commit, card, gpus)
    else:
        new = [Result(**json.loads(line)) for line in results.read_text(encoding="utf-8").splitlines()]
    write_ledger(merge_results(read_ledger(), new))
    subprocess.run([sys.executable, str(ROOT / "scripts" / "support_table.py")], check=True)
    return 0


def show() -> int:
    """Print counts per machine and file, failures, and files without a valid result."""
    from rich.console import Console
    from rich.table import Table

    rows = read_ledger()
    console = Console()
    for card, gpus in sorted({(row.card, row.gpus) for row in rows}):
        mine = [row for row in rows if (row.card, row.gpus) == (card, gpus)]
        table = Table("file", "passed", "skipped", "failed", "pending", "commits", title=f"{gpus} x {card}")
        by_file: defaultdict[str, list[Result]] = defaultdict(list)
        for row in mine:
            by_file[row.test.split("::")[0]].append(row)
        for name, results in sorted(by_file.items()):
            counts = Counter(result.outcome for result in results)
            commits = ", ".join(sorted({result.commit[:7] for result in results}))
            table.add_row(
                Path(name).name,
                *(str(counts[word]) for word in ("passed", "skipped", "failed", "pending")),
                commits,
            )
        console.print(table)
        for row in mine:
            if row.outcome == "failed":
                console.print(f"failed: {row.test}: {row.reason}")
        files = [str(path.relative_to(ROOT)) for path in sorted(TESTS.glob("test_*.py"))]
        console.print("to run: " + (", ".join(needed_tests(files, rows, card, gpus)) or "nothing"))
    return 0


def main() -> int:
    """Run the subcommand that the command line names."""
    return tyro.extras.subcommand_cli_from_dict({"run": run, "merge": merge, "show": show})


if __name__ == "__main__":
    sys.exit(main())
