"""Print the sizes of te_fsdp that have limits. `python scripts/sizes.py [ROOT]`.

The emulation is not counted. The spine is the list of files under "Read these files in this order" in
docs/internals.md, with `__init__.py` and `errors.py`. Imports count wherever they are, also under `TYPE_CHECKING`.
The exit status is 1 if a size is beyond its limit.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Size(NamedTuple):
    """A measured size. `limit` is the largest value, or the smallest if `at_least`."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def is_kept(self) -> bool:
        """Return whether the value is within the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def main(root: Path) -> int:
    """Print a line for each size; return the exit status."""
    files = sources(root)
    sizes = measure(root, files)
    for size in sizes:
        sign = ">=" if size.at_least else "<="
        print(
            f"{size.what:58} {size.value:>9,.5g}  {sign} {size.limit:,g}{'' if size.is_kept else '  beyond'}"
        )
    for circle in circles(files):
        print("circle:", ", ".join(circle))
    return int(not all(size.is_kept for size in sizes))


def sources(root: Path) -> dict[str, str]:
    """Return the text of each module by its dotted name, without the emulation."""
    results = {}
    for path in sorted((root / "te_fsdp").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if "emulation" not in parts:
            results[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return results


def measure(root: Path, files: dict[str, str]) -> list[Size]:
    """Measure a tree."""
    spine = spine_of((root / "docs" / "internals.md").read_text())
    lines = {name: text.count("\n") for name, text in files.items()}
    model, any_fields = fields_of(files["te_fsdp.sharded_model"], "ShardedModel")
    record, _ = fields_of(files["te_fsdp.records"], "ModuleBinding")
    attributes = {name for text in files.values() for name in re.findall(r"\"(_te_fsdp_\w+)\"", text)}
    helpers = helpers_used_once(files)
    return [
        Size("files of the spine", len(spine), 22),
        Size("lines of the spine", sum(lines[name] for name in spine), 7000),
        Size("lines without the emulation", sum(lines.values()), 34000),
        Size("fields of ShardedModel", model, 15),
        Size("fields of ShardedModel typed Any", any_fields, 0),
        Size("fields of ModuleBinding", record, 12),
        Size("attributes _te_fsdp_*", len(attributes), 10),
        Size("private functions used once", len(helpers), 200),
        Size("lines of private functions used once", sum(helpers.values()), 3500),
        Size("circles of imports, annotations counted", len(circles(files)), 0),
        Size("comment lines in percent", 100 * comment_lines(files) / sum(lines.values()), 8, at_least=True),
    ]


def spine_of(page: str) -> list[str]:
    """Return the modules of the spine, from the page's reading order. Names of the private layer do not count."""
    section = page.partition("## Read these files in this order")[2].partition("\n## ")[0]
    listed = re.findall(r"(?m)^\d+\. (.*?):", section)
    named = [name for entry in listed for name in re.findall(r"`([\w/]+)\.py`", entry)]
    return ["te_fsdp", "te_fsdp.errors", *(f"te_fsdp.{name.replace('/', '.')}" for name in named)]


def fields_of(text: str, name: str) -> tuple[int, int]:
    """Return the number of fields of a dataclass, and of those that are typed `Any`."""
    (node,) = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == name]
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
    return len(fields), sum("Any" in ast.unparse(field.annotation) for field in fields)


def helpers_used_once(files: dict[str, str]) -> dict[str, int]:
    """Return the lines of each private function or method whose name occurs once besides its definition."""
    words = Counter(word for text in files.values() for word in re.findall(r"\b_\w+\b", text))
    results = {}
    for module, text in files.items():
        for node in ast.walk(ast.parse(text)):
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            if is_function and re.match(r"_[a-z]", node.name) and words[node.name] == 2:
                results[f"{module}.{node.name}"] = (node.end_lineno or node.lineno) - node.lineno + 1
    return results


def imports_of(module: str, files: dict[str, str]) -> set[str]:
    """Return the modules that a module imports anywhere in its text."""
    results = set()
    for node in ast.walk(ast.parse(files[module])):
        if isinstance(node, ast.Import):
            results |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            results |= names & files.keys() or {node.module}
    return (results & files.keys()) - {module}


def circles(files: dict[str, str]) -> list[list[str]]:
    """Return the sets of modules that import each other: strongly connected components of several modules."""
    imports = {module: imports_of(module, files) for module in files}
    reached = {module: _reachable(module, imports) for module in files}
    results = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in files
        if module in reached[module]
    }
    return [list(circle) for circle in sorted(results)]


def _reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    results: set[str] = set()
    waiting = list(imports[start])
    while waiting:
        module = waiting.pop()
        if module not in results:
            results.add(module)
            waiting += imports[module]
    return results


def comment_lines(files: dict[str, str]) -> int:
    """Count the lines with a comment."""
    return sum(
        token.type == tokenize.COMMENT
        for text in files.values()
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]))
