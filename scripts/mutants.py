"""Check that the test that guards a line fails if the line is broken: `python scripts/mutants.py`, or `make mutants`.

Every row of `tests/mutants/<area>.toml` is a fault at one place, as a careless change could introduce it:

    [[mutant]]
    fault = "one sentence: what is broken"
    file = "te_fsdp/....py"
    old = '''exact text, which occurs once in the file'''
    new = '''the broken text'''
    tests = ["tests/....py::test_name[parameters]"]     # fail with the fault; few and quick
    survives = "why no test can see it"                 # only where that is so
    needs = "package"                                   # or "package>=version": only where its tests need it to fail

The tests of all rows run once on the unchanged tree, then those of each row on a copy with its fault. A row whose
tests still pass is a survivor. A row whose text or tests no longer exist is stale. Both set the exit status to 1,
except for explained survivors.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

import tyro
from packaging.requirements import Requirement
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "tests" / "mutants"
COPIED = ("te_fsdp", "tests", "examples", "scripts", "docs", "benchmarks", "constraints")
# Exit statuses of pytest (`pytest.ExitCode`).
PASSED, FAILED = 0, 1
KILLED, SURVIVED, EXPLAINED, STALE = "killed", "SURVIVED", "explained", "STALE"
# Seconds; a fault may make ranks wait for each other, which the tests' own timeouts end.
TIMEOUT = 900


@dataclass(frozen=True)
class Mutant:
    """One row of a table.

    Attributes:
        area: Name of its table, without the suffix.
        fault: What is broken, in a sentence.
        file: Path from the repository's root.
        old: Text that occurs once in the file.
        new: The replacement.
        tests: pytest's node ids; at least one of them fails.
        survives: Why no test can see it; empty: one must.
        needs: A requirement ("torch>=2.13") without which its tests are skipped or see nothing, and the row with
            them; empty: none.
    """

    area: str
    fault: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""
    needs: str = ""

    def problem(self, root: Path = ROOT) -> str:
        """Return the problem of the row itself; empty if there is none. Local operation."""
        path = root / self.file
        if not path.is_file():
            return f"no file {self.file}"
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            return f"`old` occurs {text.count(self.old)} times in {self.file}"
        if self.old == self.new:
            return "`new` is `old`"
        try:
            compile(text.replace(self.old, self.new), self.file, "exec")
        except SyntaxError as error:
            return f"`new` does not compile: {error}"
        missing = [test for test in self.tests if not _exists(test, root)]
        return f"no test {', '.join(missing)}" if missing else "" if self.tests else "no tests"

    def line(self, root: Path = ROOT) -> int:
        """Return the line number of the fault, starting at 1."""
        text = (root / self.file).read_text(encoding="utf-8")
        return text[: text.index(self.old)].count("\n") + 1


@dataclass
class Result:
    """Result of a row."""

    mutant: Mutant
    verdict: str
    seconds: float = 0.0
    detail: str = ""


def _exists(test: str, root: Path) -> bool:
    """Return whether a node id's file and function exist. pytest checks the parameters."""
    name, _, rest = test.partition("::")
    path = root / name
    if not rest:
        return path.is_file()
    function = rest.split("::")[-1].split("[")[0]
    return (
        path.is_file()
        and re.search(rf"^\s*def {function}\(", path.read_text(encoding="utf-8"), re.M) is not None
    )


def rows(tables: Iterable[str] = (), folder: Path = TABLES) -> list[Mutant]:
    """Return all rows, or those of some tables, in the order of the tables.

    Raises:
        SystemExit: There is no such table, or a row has other keys than the ones above.
    """
    wanted = list(tables)
    unknown = [area for area in wanted if not (folder / f"{area}.toml").is_file()]
    if unknown:
        raise SystemExit(f"mutants: no table {', '.join(unknown)}; there are {', '.join(_areas(folder))}")
    results = []
    for area in wanted or _areas(folder):
        with (folder / f"{area}.toml").open("rb") as file:
            for row in tomllib.load(file)["mutant"]:
                try:
                    results.append(Mutant(area, **{**row, "tests": tuple(row["tests"])}))
                except (KeyError, TypeError) as error:
                    raise SystemExit(f"mutants: {area}.toml, row {row.get('fault')!r}: {error}") from None
    return results


def without_absent(mutants: Sequence[Mutant]) -> tuple[list[Mutant], list[str]]:
    """Return the rows whose tests can run here, and what the others need."""
    absent = {m.needs for m in mutants if m.needs and not _is_here(Requirement(m.needs))}
    return [m for m in mutants if m.needs not in absent], sorted(absent)


def _is_here(needed: Requirement) -> bool:
    try:
        return needed.specifier.contains(version(needed.name), prereleases=True)
    except PackageNotFoundError:
        return (
            importlib.util.find_spec(needed.name) is not None
        )  # imported under a different name than it is installed under


def _areas(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def run_tests(tree: Path, tests: Sequence[str], *more: str) -> tuple[int, str]:
    """Return the pytest's exit status over some tests of a tree, and the end of what it printed."""
    args = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *more]
    if any("pytorch/distributed" in test for test in tests):
        args += ["--matrix", "full", "--pool-durations", "0"]  # the row names the cases
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = subprocess.run(
            [*args, *tests], cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"no end within {TIMEOUT} s"
    return done.returncode, (done.stdout + done.stderr)[-2000:]


# Imported before the fork, since each row would spend most of its time on that. Nothing of te_fsdp, nor what it
# patches.
_SERVER = """
import json, os, sys
import pytest, hypothesis, torch, torch.distributed.checkpoint, torch.distributed.fsdp, torch.testing

for line in sys.stdin:
    tree, words, output = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for number in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = sys.path[0] = tree
        torch.set_num_threads(torch.get_num_threads())  # a fork's pool of threads: made before threads of autograd ask
        status = int(pytest.main(words))
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Forked:
    """A process that has imported torch and runs pytest in forks of itself: for rows whose tests need no ranks."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        args = [sys.executable, "-c", _SERVER]
        self.process = subprocess.Popen(
            args,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,
        )

    def run(self, tree: Path, tests: Sequence[str]) -> tuple[int, str]:
        """Run as :func:`run_tests`, until the first failure."""
        assert self.process.stdin is not None and self.process.stdout is not None
        output = tree / "output.txt"
        output.unlink(missing_ok=True)
        args = ["-q", "-x", "-p", "no:cacheprovider", *tests]
        self.process.stdin.write(json.dumps([str(tree), args, str(output)]) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], TIMEOUT)[0]:
            self.close()
            self.__init__()
            return FAILED, f"no end within {TIMEOUT} s"
        return int(self.process.stdout.readline()), output.read_text(errors="replace")[-2000:]

    def close(self) -> None:
        """End it, with the fork that it may be waiting for."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def copy_tree(to: Path) -> Path:
    """Return a copy of what tests read, with the changes that are not committed."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, to / path.name)
    return to


def judge(mutant: Mutant, tree: Path, forked: Forked | None = None) -> Result:
    """Break the line in a tree, run the row's tests (without ranks: ``forked``, if given), mend it."""
    problem = mutant.problem()
    if problem:
        return Result(mutant, STALE, detail=problem)
    path, began = tree / mutant.file, time.perf_counter()
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        if forked is None or any("pytorch/distributed" in test for test in mutant.tests):
            status, output = run_tests(tree, mutant.tests, "-x")
        else:
            status, output = forked.run(tree, mutant.tests)
    finally:
        path.write_text(whole, encoding="utf-8")
    seconds = time.perf_counter() - began
    if status == FAILED:
        if mutant.survives:
            return Result(mutant, STALE, seconds, "a row that `survives` was noticed: drop that key")
        return Result(mutant, KILLED, seconds, _reason(output))
    if status == PASSED:
        return Result(mutant, EXPLAINED if mutant.survives else SURVIVED, seconds)
    return Result(mutant, STALE, seconds, f"pytest ended with {status}: {output[-300:]}")


def _reason(output: str) -> str:
    """Return the line of pytest's output with the reason of a failure, to see that the fault caused it."""
    lines = [line.strip() for line in output.splitlines()]
    return next(
        (line for line in lines if line.startswith(("FAILED ", "ERROR "))), lines[-1] if lines else ""
    )


@dataclass
class Options:
    """Break one line after the other and see whether its tests notice."""

    tables: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Tables to take; all by default."""
    k: str = ""
    """Only rows whose fault or file has this text."""
    jobs: int = field(default_factory=lambda: max(1, (os.cpu_count() or 2) // 2))
    """Rows at a time; each starts a few processes."""
    list: bool = False
    """Print the rows and what is wrong with them; run nothing."""
    check_first: bool = True
    """Whether the tests run once on the unchanged tree."""
    json: Path | None = None
    """Also write the results there."""


def main(options: Options) -> int:
    """Run the options; return the exit status."""
    chosen = [m for m in rows(options.tables) if options.k.lower() in f"{m.fault} {m.file}".lower()]
    console = Console()
    if options.list:
        results = [Result(m, STALE if m.problem() else "ok", detail=m.problem()) for m in chosen]
        console.print(_table(results))
        return int(any(result.verdict == STALE for result in results))
    chosen, absent = without_absent(chosen)
    if absent:
        console.print(f"mutants: rows that need {', '.join(absent)} are left out")
    if options.check_first and not _pass_as_it_is(chosen, console):
        return 1
    began, results = time.perf_counter(), _run(chosen, options.jobs, console)
    bad = [result for result in results if result.verdict in (SURVIVED, STALE)]
    console.print(_table([result for result in results if result.verdict != KILLED]))
    counts = {
        verdict: sum(r.verdict == verdict for r in results)
        for verdict in (KILLED, EXPLAINED, SURVIVED, STALE)
    }
    summary = ", ".join(f"{count} {verdict.lower()}" for verdict, count in counts.items())
    console.print(f"mutants: {len(results)} rows in {time.perf_counter() - began:.0f} s: {summary}")
    if options.json is not None:
        options.json.write_text(json.dumps([_plain(result) for result in results], indent=1) + "\n")
    return int(bool(bad))


def _pass_as_it_is(chosen: Sequence[Mutant], console: Console) -> bool:
    """Return whether the tests of all rows pass on the unchanged tree."""
    tests = sorted({test for mutant in chosen if not mutant.problem() for test in mutant.tests})
    console.print(f"mutants: {len(tests)} tests of {len(chosen)} rows, on the tree as it is")
    status, output = run_tests(ROOT, tests) if tests else (PASSED, "")
    if status != PASSED:
        console.print(output, markup=False, highlight=False)
        console.print("mutants: these tests must pass before they can show anything")
    return status == PASSED


def _run(chosen: Sequence[Mutant], jobs: int, console: Console) -> list[Result]:
    """Run all rows, several at a time, each in its own copy of the tree; return the results."""
    trees: SimpleQueue[tuple[Path, Forked]] = SimpleQueue()
    servers = [Forked() for _ in range(jobs)]
    with (
        tempfile.TemporaryDirectory(prefix="te_fsdp_mutants_") as folder,
        Progress(console=console) as progress,
    ):
        for number, server in enumerate(servers):
            trees.put((copy_tree(Path(folder, str(number))), server))
        task = progress.add_task("mutants", total=len(chosen))

        def judge_and_report(mutant: Mutant) -> Result:
            tree, server = trees.get()
            try:
                result = judge(mutant, tree, server)
            finally:
                trees.put((tree, server))
            progress.advance(task)
            if not console.is_terminal:
                console.print(f"{result.verdict} {result.seconds:.0f} s {mutant.fault}", markup=False)
            if result.verdict in (SURVIVED, STALE):
                progress.print(
                    f"{result.verdict}: {mutant.file}: {mutant.fault}", markup=False, highlight=False
                )
            return result

        try:
            with ThreadPoolExecutor(jobs) as pool:
                return list(pool.map(judge_and_report, chosen))
        finally:
            for server in servers:
                server.close()


def _table(results: Sequence[Result]) -> Table:
    table = Table(title="mutants", title_justify="left")
    for header in ("verdict", "area", "where", "fault", "remark"):
        table.add_column(header, overflow="fold")
    for result in results:
        mutant = result.mutant
        where = mutant.file if mutant.problem() else f"{mutant.file}:{mutant.line()}"
        remark = result.detail or mutant.survives
        table.add_row(result.verdict, mutant.area, where, mutant.fault, remark)
    return table


def _plain(result: Result) -> dict[str, Any]:
    mutant = result.mutant
    return {
        "verdict": result.verdict,
        "area": mutant.area,
        "file": mutant.file,
        "fault": mutant.fault,
        "tests": list(mutant.tests),
        "seconds": round(result.seconds, 1),
        "remark": result.detail or mutant.survives,
    }


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
