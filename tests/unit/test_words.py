"""The language of the project: words that readers of PyTorch's and TransformerEngine's documentation do not know.

The rule covers comments, docstrings and other texts of the package and the examples, and pages outside code blocks.
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

#: Files and folders that are not rewritten yet. Entries are only ever removed.
NOT_YET = (
    "te_fsdp/upstream/fsdp2_state.py",
    "te_fsdp/upstream/fsdp2_copy_engine.py",
    "te_fsdp/upstream/fsdp2_outputs.py",
    "te_fsdp/upstream/fsdp2_patches.py",
    "te_fsdp/upstream/fsdp2_settled.py",
    "te_fsdp/upstream/fsdp2_unused.py",
    "te_fsdp/upstream/patches.py",
    "te_fsdp/upstream/te.py",
    "te_fsdp/upstream/te_formats.py",
    "te_fsdp/upstream/te_modules.py",
    "te_fsdp/upstream/torch_dtensor.py",
    "te_fsdp/upstream/symmetric_memory.py",
    "te_fsdp/checkpoint/async_save.py",
    "te_fsdp/checkpoint/compare.py",
    "te_fsdp/checkpoint/reader.py",
    "te_fsdp/checkpoint/tensor_entries.py",
    "te_fsdp/checkpoint/index.py",
    "te_fsdp/checkpoint/lazy_tensors.py",
    "te_fsdp/checkpoint/loading.py",
    "te_fsdp/checkpoint/manifest.py",
    "te_fsdp/checkpoint/model_state.py",
    "te_fsdp/checkpoint/optimizer_state.py",
    "te_fsdp/checkpoint/portable/convert.py",
    "te_fsdp/checkpoint/portable/huggingface.py",
    "te_fsdp/checkpoint/portable/huggingface_config.py",
    "te_fsdp/checkpoint/portable/huggingface_map.py",
    "te_fsdp/checkpoint/portable/huggingface_model.py",
    "te_fsdp/checkpoint/reading.py",
    "te_fsdp/checkpoint/saving.py",
    "te_fsdp/checkpoint/load_source.py",
    "te_fsdp/checkpoint/state_dicts.py",
    "te_fsdp/checkpoint/shard_files.py",
    "te_fsdp/checkpoint/torch_files.py",
    "te_fsdp/checkpoint/planner.py",
    "te_fsdp/cli/__init__.py",
    "te_fsdp/cli/ckpt.py",
    "te_fsdp/cli/env.py",
    "te_fsdp/cli/env_facts.py",
    "te_fsdp/cli/plan.py",
    "te_fsdp/compat/megatron_fsdp/__init__.py",
    "te_fsdp/compat/megatron_fsdp/arguments.py",
    "te_fsdp/compat/megatron_fsdp/experimental.py",
    "te_fsdp/compat/megatron_fsdp/sharding.py",
    "te_fsdp/emulation/__init__.py",
    "te_fsdp/emulation/__main__.py",
    "te_fsdp/emulation/_loader.py",
    "te_fsdp/emulation/_patches.py",
    "te_fsdp/emulation/_state.py",
    "te_fsdp/emulation/_torch_proxy.py",
    "te_fsdp/emulation/tex/attention.py",
    "te_fsdp/emulation/tex/formats/cast.py",
    "te_fsdp/emulation/tex/formats/mxfp8.py",
    "te_fsdp/emulation/tex/formats/nvfp4.py",
    "te_fsdp/emulation/tex/formats/transform.py",
    "te_fsdp/emulation/tex/grouped.py",
    "te_fsdp/emulation/tex/misc.py",
    "te_fsdp/emulation/tex/softmax.py",
    "te_fsdp/integrations/__init__.py",
    "te_fsdp/integrations/accelerate.py",
    "te_fsdp/integrations/fabric.py",
    "te_fsdp/integrations/peft.py",
    "te_fsdp/integrations/torchtitan.py",
    "te_fsdp/bind_device_mesh.py",
    "te_fsdp/modules/mixin.py",
    "te_fsdp/modules/context_parallel.py",
    "te_fsdp/modules/extra_state.py",
    "te_fsdp/modules/functions.py",
    "te_fsdp/modules/grouped.py",
    "te_fsdp/initialize.py",
    "te_fsdp/modules/plan.py",
    "te_fsdp/modules/rotary.py",
    "te_fsdp/modules/semantics.py",
    "te_fsdp/records.py",
    "te_fsdp/planning/__init__.py",
    "te_fsdp/planning/costs.py",
    "te_fsdp/planning/job.py",
    "te_fsdp/planning/step.py",
    "te_fsdp/quantized/alignment.py",
    "te_fsdp/quantized/fsdp_hooks.py",
    "te_fsdp/quantized/amax.py",
    "te_fsdp/quantized/components.py",
    "te_fsdp/quantized/grouped_weight.py",
    "te_fsdp/quantized/shards.py",
    "te_fsdp/unit_communication.py",
    "te_fsdp/features/clip_grad_norm.py",
    "te_fsdp/features/graph_checks.py",
    "te_fsdp/features/graphed_step.py",
    "te_fsdp/features/main_params.py",
    "te_fsdp/features/main_weights.py",
    "te_fsdp/materialization.py",
    "te_fsdp/features/muon.py",
    "te_fsdp/replicated_params.py",
    "te_fsdp/features/replicated_gradients.py",
    "te_fsdp/features/hfsdp/gradients.py",
    "te_fsdp/features/hfsdp/overlap.py",
    "te_fsdp/features/hfsdp/optimizer_shards.py",
    "te_fsdp/precision.py",
    "te_fsdp/gradient_sync.py",
    "te_fsdp/reporting.py",
    "te_fsdp/plan.py",
    "te_fsdp/sharded_model.py",
    "te_fsdp/optimizer_step.py",
    "te_fsdp/versions.py",
)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, text) of each line of prose of a file, without quoted code."""
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
    """(line number, text) of comments, and of strings with a space in them."""
    accepted = "words: ok"
    # Python 3.12 splits f-strings into tokens, whose text parts have a type of their own.
    strings = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and accepted not in token.line:
            yield token.start[0], token.string.lstrip("#: ")
        elif token.type in strings and " " in token.string:
            for offset, line in enumerate(token.string.strip("rbufRBUF\"'").splitlines()):
                yield token.start[0] + offset, re.sub(r"`+[^`]*`+", "", line.strip())


def private_words(path: Path) -> list[str]:
    """Line, word and replacement of every word of a file that the table lists."""
    found = []
    for number, text in prose(path):
        for pattern, instead in PATTERNS.items():
            found += [f"{number}: {hit[0]!r}: write {instead}" for hit in pattern.finditer(text)]
        if OPENING.match(text):
            found.append(f"{number}: {text[:40]!r}: begin with a verb or a noun")
    return found


def files() -> list[Path]:
    """Files in Git that the rule covers."""
    listed = subprocess.run(
        ["git", "ls-files", "te_fsdp", "examples", "docs", "README.md", "CONTRIBUTING.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [ROOT / name for name in listed if name.endswith((".py", ".md"))]


def is_excluded(path: Path) -> bool:
    """Whether a file or a folder above it is in `NOT_YET`."""
    name = path.relative_to(ROOT).as_posix()
    return any(name == one or (one.endswith("/") and name.startswith(one)) for one in NOT_YET)


def test_plain_words():
    found = {p.relative_to(ROOT).as_posix(): private_words(p) for p in files() if not is_excluded(p)}
    assert {name: hits for name, hits in found.items() if hits} == {}


def test_the_rule_finds_words(tmp_path):
    """The negative control: words in each kind of prose are found, and those in code and accepted lines are not."""
    (tmp_path / "a.py").write_text(
        '"""What is told."""\n# It lies in the buffer.\nn = 1\nx = f"{n} doors are {n}"\n'
        "y = 2  # a door of a room (words: ok)\n"
    )
    hits = private_words(tmp_path / "a.py")
    assert {hit.split(":")[0] for hit in hits} == {"1", "2", "4"}, hits
    assert len(hits) == 4, hits
    (tmp_path / "a.md").write_text("It rests.\n```\nIt rests.\n```\n`told`\n")
    assert [hit.split(":")[0] for hit in private_words(tmp_path / "a.md")] == ["1"]
