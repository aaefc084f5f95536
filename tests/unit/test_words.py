"""Check for words that readers of PyTorch's documentation do not expect.

The rule covers comments, docstrings and other texts of all Python files, and pages outside code blocks.
It finds words, not unclear sentences. A comment `words: ok` on the line accepts a word in its ordinary sense.
"""

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Pattern -> what to write instead. Patterns apply to a line of text, without regard to case.
WORDS = {
    r"told|tells? (it|them|that|what|how|whether|apart)": "set, notify, detect, infer, distinguish",
    r"(is|are) asked|asks? (for|of|what|whether|once)": "request, query, check",
    r"lies|lie (in|on|where|apart)|where .{1,30} lies?": "is stored, is located",
    r"beside": "next to, in addition to",
    r"alike": "identical on all ranks",
    r"anew": "again, recomputed",
    r"nobody|somebody|whoever|everybody": "the agent's name",
    r"comes? to rest|at rest|rests": "between steps, is stored",
    r"in earnest|for ever|so many|of before|of (these|them) two": "plain words",
    r"is no (?!longer|more|effect|need|way|such|other|one|guarantee|limit|difference)\w+": "is not a",
    r"looks? at (it|them|what|once|how)|(is|are) looked at": "check, inspect, validate",
    r"rooms?|doors?|tower|the house": "package, module, wrapper",
    r"(a|the) weight's (life|way)|settled step": "lifecycle, steady state",
    r"has its way|hangs? on (it|a|the)|meets? (it|them|others|for)": "plain words",
    r"deals? .{0,20} out|dealt out": "distribute",
    r"shall|must not be let": "must, will",
}
PATTERNS = {re.compile(rf"\b(?:{words})\b", re.IGNORECASE): instead for words, instead in WORDS.items()}
#: Openings of docstrings and comments without a verb.
OPENING = re.compile(r"(What|Who|Whose|Of which|That which|Those that|Which of) ")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of each line of prose of a file, without quoted code."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        is_code = False
        for number, line in enumerate(source.splitlines(), 1):
            if line.lstrip().startswith("```"):
                is_code = not is_code
            elif not is_code:
                yield number, re.sub(r"`[^`]*`", "", line)
        return
    yield from prose_of_python(source)


def prose_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of comments, and of strings with a space in them."""
    accepted = "words: ok"
    # Python 3.12 splits f-strings into tokens, whose text parts have their own type.
    strings = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and accepted not in token.line:
            yield token.start[0], token.string.lstrip("#: ")
        elif token.type in strings and " " in token.string:
            for offset, line in enumerate(token.string.strip("rbufRBUF\"'").splitlines()):
                yield token.start[0] + offset, re.sub(r"`+[^`]*`+", "", line.strip())


def private_words(path: Path) -> list[str]:
    """Return line, word and replacement of every word of a file that the table lists."""
    results = []
    for number, text in prose(path):
        for pattern, instead in PATTERNS.items():
            results += [f"{number}: {hit[0]!r}: write {instead}" for hit in pattern.finditer(text)]
        if OPENING.match(text):
            results.append(f"{number}: {text[:40]!r}: begin with a verb or a noun")
    return results


def files() -> list[Path]:
    """Return files in Git that the rule covers."""
    listed = subprocess.run(
        ["git", "ls-files"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    # This file contains the table.
    return [ROOT / name for name in listed if name.endswith((".py", ".md")) and ROOT / name != Path(__file__)]


def test_no_private_words():
    results = {p.relative_to(ROOT).as_posix(): private_words(p) for p in files()}
    assert {name: hits for name, hits in results.items() if hits} == {}


def test_control_word_rule_detects_private_words(tmp_path):
    """Negative control: words in each kind of prose are found, words in code and accepted lines are not."""
    (tmp_path / "a.py").write_text(
        '"""What is told."""\n# It lies in the buffer.\nn = 1\nx = f"{n} doors are {n}"\n'
        "y = 2  # a door of a room (words: ok)\n"
    )
    hits = private_words(tmp_path / "a.py")
    assert {hit.split(":")[0] for hit in hits} == {"1", "2", "4"}, hits
    assert len(hits) == 4, hits
    (tmp_path / "a.md").write_text("It rests.\n```\nIt rests.\n```\n`told`\n")
    assert [hit.split(":")[0] for hit in private_words(tmp_path / "a.md")] == ["1"]
