"""Check rules of the repository that no linter covers: sizes, names, ASCII, private names, import cost.

Each rule is a function from source text to a list of offences, so that the end of this file can show, on
made-up sources, that the rule finds what it is there for.
"""

import ast
import functools
import graphlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from te_fsdp.upstream import patches as _patches
from te_fsdp.upstream.te_formats import FORMATS, SCALE_SOURCES
from tests.unit.commands import run_text

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
STREAMS_OF_ANY_DEVICE = ("torch.accelerator.current_stream",)
# The files that may use private names of TE, torch and FSDP2, and the package that patches both.
NAMES_TORCH_DOORS = (
    "patches torch_dtensor torch_autograd torch_functions torch_mixed_lists torch_dcp torch_redistribution "
    "symmetric_memory fsdp2_state fsdp2_copy_engine fsdp2_gather fsdp2_reduce fsdp2_settled fsdp2_gradients "
    "fsdp2_patches fsdp2_units fsdp2_unused fsdp2_hooks fsdp2_containers fsdp2_fixed_memory unit_graphs"
)
TORCH_DOORS = (
    *(f"te_fsdp/upstream/{name}.py" for name in NAMES_TORCH_DOORS.split(" ")),
    "te_fsdp/boxed_dtensor.py",
    "te_fsdp/state_dict_wrappers.py",
)
NAMES_TE_DOORS = "te te_derived te_formats te_modules patches"
TE_DOORS = tuple(f"te_fsdp/upstream/{name}.py" for name in NAMES_TE_DOORS.split(" "))
EMULATION = "te_fsdp/emulation/"


def sources(*folders: str) -> list[str]:
    """Return paths of the Python files under `folders`, relative to the repository's root."""
    results = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path.relative_to(ROOT).as_posix() for path in results]


EVERYWHERE = sources("te_fsdp", "tests", "examples", "benchmarks", "scripts")
# Text files that are not Python: pages, shell scripts, settings.
PATTERNS = "*.md docs/*.md examples/**/*.md benchmarks/*.md scripts/*.sh *.toml Makefile"
PAGES = [
    path.relative_to(ROOT).as_posix()
    for pattern in PATTERNS.split(" ")
    for path in sorted(ROOT.glob(pattern))
]
HERE = "tests/unit/test_house.py"
LIBRARY = [path for path in sources("te_fsdp") if not path.startswith(EMULATION)]


# -------------------------------------------------------------------------------------------------- the rules


def too_long(text: str) -> list[str]:
    """Return files and functions beyond the limits."""
    lines = text.count("\n")
    offences = [f"{lines} lines in the file, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []
    for node in nodes(text):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                offences.append(
                    f"line {node.lineno}: {node.name}() has {length} lines, at most {MAX_FUNCTION_LINES}"
                )
    return offences


def joined_subjects(text: str) -> list[str]:
    """Return the first line of a file's docstring, unless it names one subject."""
    first = (ast.get_docstring(nodes(text)[0]) or "").split("\n")[0]
    return [] if not text or (first and not re.search(r"\band\b", first)) else [f"line 1: {first}"]


def not_ascii(text: str) -> list[str]:
    """Return lines with a character outside ASCII."""
    return [f"line {n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if not line.isascii()]


def unfinished(text: str) -> list[str]:
    """Return marks of unfinished work, and functions that only raise NotImplementedError."""
    results = [
        f"line {n}: {line.strip()}"
        for n, line in enumerate(text.splitlines(), 1)
        if re.search(r"#.*\b(TODO|FIXME|XXX|HACK)\b", line)
    ]
    raised = [node for node in nodes(text) if isinstance(node, ast.Raise) and node.exc is not None]
    names = [(node.lineno, dotted(getattr(node.exc, "func", node.exc))) for node in raised]
    return results + [f"line {line}: {name}" for line, name in names if name == "NotImplementedError"]


def paths_of_one_machine(text: str) -> list[str]:
    """Return the absolute paths that only some machine has."""
    return [
        f"line {n}: {line.strip()}"
        for n, line in enumerate(text.splitlines(), 1)
        if re.search(r"(?<![\w.$}/])/(home|root|Users|work|mnt|data|scratch)/\w", line)
    ]


@functools.lru_cache(maxsize=1)
def nodes(text: str) -> list[ast.AST]:
    """Return all nodes of a source. All rules check one source before the next (`offences`)."""
    return [*ast.walk(ast.parse(text))]


def imported(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of each import; `from a import b` gives `a.b`."""
    for node in nodes(text):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def dotted(node: ast.AST) -> str | None:
    """Return `a.b.c` for an attribute chain on a plain name, else None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


def is_private(name: str) -> bool:
    """Return whether a component of the dotted name begins with one underscore (dunders are public)."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_torch_names(text: str) -> list[str]:
    """Return imports of, and attribute chains to, names of torch that it keeps private."""
    used = set(imported(text))
    used |= {(node.lineno, dotted(node) or "") for node in nodes(text) if isinstance(node, ast.Attribute)}
    return [
        f"line {line}: {name}"
        for line, name in sorted(used)
        if name.startswith("torch.") and is_private(name)
    ]


def te_imports(text: str) -> list[str]:
    """Return imports of TransformerEngine, by statement or through importlib."""
    results = [
        (line, name) for line, name in imported(text) if name.split(".")[0].startswith("transformer_engine")
    ]
    functions = ("import_module", "__import__")
    for node in nodes(text):
        if isinstance(node, ast.Call) and (dotted(node.func) or "").split(".")[-1] in functions:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and str(first.value).startswith("transformer_engine"):
                results.append((node.lineno, str(first.value)))
    return [f"line {line}: {name}" for line, name in sorted(results)]


# Attributes of FSDP2's records (`FSDPState`, `FSDPParamGroup`, `FSDPParam`), none of which is public.
FSDP2_NAMES = """
    _all_gather_result _comm_ctx _fsdp_param_group _fsdp_param_groups _get_fsdp_state _init_mp_dtypes _is_root
    _modules_to_run_forward _module_info _orig_dtype _partial_reduce_output _post_forward_indices _post_reduce_event
    _reshard_after_forward _sharded_param_data _sharding_spec _state_ctx _states_to_forward_prefetch _to_sharded
    _training_state _unsharded_inner_tensors _unsharded_param all_gather_outputs all_reduce_grads fsdp_params
    is_unsharded post_backward post_forward_mesh_info reduce_grads reset_sharded_param shard_mesh sharded_param
    to_sharded_dtensor unsharded_accumulated_grad wait_for_unshard
"""
# Attributes of TE's modules, tensors and quantizers that it does not document.
TE_NAMES = """
    _amax_columnwise _amax_rowwise _columnwise_data _columnwise_scale_inv _columnwise_storage _data _fp4_dtype
    _fp8_dtype _get_bias_tensors _get_weight_tensors _high_precision_init_val _hp_data _is_2D_scaled
    _make_grouped_biases _quantizer _rowwise_data _rowwise_scale_inv _rowwise_storage _scale_inv _transpose
    _transpose_invalid _with_gemm_swizzled_scales amax_reduction_group columnwise_quantizer data_transpose fp8_meta
    fp8_scale_inv get_cublasLt_version init_fp8_meta_tensors make_grouped_weights optimize_for_gemm param_init_meta
    preserve_high_precision_init_val rowwise_quantizer wgrad_store with_amax_reduction
"""
TE_CLASSES = {row.tensor for row in FORMATS.values() if row.tensor} | set(SCALE_SOURCES)
# Attributes that te_fsdp replaces: the tables of patches have all of them.
PATCHED_NAMES = {row.attribute for row in (*_patches.PATCHES.values(), *_patches.FSDP2)}
# Optimizers, Hugging Face's models and records of te_fsdp have these names, too.
PATCHED_NAMES -= {"state_dict", "load_state_dict", "copy", "backward"}


def names_of(names: set[str], text: str) -> list[str]:
    """Return where a source reads, writes, defines or quotes (for `getattr`) some names, except on `self`."""
    results = []
    for node in nodes(text):
        if isinstance(node, ast.Attribute) and dotted(node.value) != "self":
            results.append((node.lineno, node.attr))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            results.append((node.lineno, node.value))
        elif isinstance(node, ast.FunctionDef):
            results.append((node.lineno, node.name))
    return [f"line {line}: {name}" for line, name in sorted(results) if name in names]


def fsdp2_names(text: str) -> list[str]:
    """Return uses of names of FSDP2's records."""
    return names_of(set(FSDP2_NAMES.split()), text)


def te_names(text: str) -> list[str]:
    """Return uses of private names of TE."""
    return names_of({*TE_NAMES.split(), *TE_CLASSES}, text)


def patches(text: str) -> list[str]:
    """Return assignments to attributes that te_fsdp replaces in TE or FSDP2."""
    targets = []
    for node in nodes(text):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets += node.targets if isinstance(node, ast.Assign) else [node.target]
        elif isinstance(node, ast.Call) and dotted(node.func) == "setattr" and len(node.args) == 3:
            owner, name, _ = node.args
            if isinstance(name, ast.Constant):
                targets.append(ast.Attribute(owner, name.value, lineno=node.lineno))
    parts = [
        part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])
    ]
    written = [part for part in parts if isinstance(part, ast.Attribute) and dotted(part.value) != "self"]
    return [f"line {part.lineno}: {part.attr}" for part in written if part.attr in PATCHED_NAMES]


def lists_of_names(text: str) -> list[str]:
    """Return uses of `__all__`, which duplicates leading underscores and may contradict them."""
    results = [node for node in nodes(text) if isinstance(node, ast.Name) and node.id == "__all__"]
    return [f"line {node.lineno}: __all__" for node in results]


def names_of_other_files(text: str) -> list[str]:
    """Return imports of private names of another file. A module (`te_fsdp.upstream.torch_dtensor`) is a file."""
    names = [(line, name.split(".")) for line, name in imported(text)]
    return [
        f"line {line}: {'.'.join(parts)}"
        for line, parts in names
        if parts[0] == "te_fsdp" and parts[-1].startswith("_") and len(parts) > 2
    ]


def root_imports(text: str) -> list[str]:
    """Return the absolute imports of te_fsdp other than of its emulation."""
    names = [(line, name) for line, name in imported(text) if name.split(".")[0] == "te_fsdp"]
    return [f"line {line}: {name}" for line, name in names if not f"{name}.".startswith("te_fsdp.emulation.")]


def root_logger_uses(text: str) -> list[str]:
    """Return calls that log through, or configure, the root logger."""
    functions = ("debug", "info", "warning", "error", "exception", "critical", "log", "basicConfig")
    calls = [node for node in nodes(text) if isinstance(node, ast.Call)]
    names = [(node.lineno, dotted(node.func) or "", node.args) for node in calls]
    return [
        f"line {line}: {name}()"
        for line, name, args in names
        if name in {f"logging.{function}" for function in functions}
        or (name == "logging.getLogger" and not args)
    ]


def streams_of_any_device(text: str) -> list[str]:
    """Return uses of streams of torch.accelerator, which do not wait for events of torch.cuda (torch 2.11)."""
    names = [(node.lineno, dotted(node)) for node in nodes(text) if isinstance(node, ast.Attribute)]
    return [f"line {line}: {name}" for line, name in names if name in STREAMS_OF_ANY_DEVICE]


def circle(texts: dict[str, str]) -> list[str]:
    """Return files that import each other, by module names. Imports in functions count, typing imports do not."""

    def names(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from names(child)

    graph = {
        name: {other for other in names(ast.parse(text)) if other in texts and other != name}
        for name, text in texts.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


# --------------------------------------------------------------------------------------------------- the rules


# Which files each rule is for.
PUBLIC = ("__init__.py", "te_fsdp/errors.py", "megatron_fsdp/experimental.py", "portable/huggingface.py")
NO_DOOR = [path for path in LIBRARY if path not in (*TE_DOORS, *TORCH_DOORS)]
RULES = {
    too_long: EVERYWHERE,
    joined_subjects: EVERYWHERE,
    not_ascii: EVERYWHERE + PAGES,
    unfinished: [path for path in EVERYWHERE if not path.startswith(EMULATION) and path != HERE],
    paths_of_one_machine: EVERYWHERE + PAGES,
    private_torch_names: [path for path in LIBRARY if path not in TORCH_DOORS],
    fsdp2_names: NO_DOOR,
    te_imports: [path for path in LIBRARY if path not in TE_DOORS],
    te_names: NO_DOOR,
    patches: NO_DOOR,
    # Packages and public files that users import also have a list of names.
    lists_of_names: [path for path in LIBRARY if not path.endswith(PUBLIC) and "/integrations/" not in path],
    names_of_other_files: LIBRARY,
    root_imports: sources("te_fsdp/emulation"),
    root_logger_uses: sources("te_fsdp"),
    streams_of_any_device: sources("te_fsdp"),
}


@functools.cache
def offences() -> dict[Callable[[str], list[str]], list[str]]:
    """Return the offences of every file, by rule: each source is parsed once."""
    results: dict[Callable[[str], list[str]], list[str]] = {rule: [] for rule in RULES}
    wanted = {rule: {*paths} for rule, paths in RULES.items()}
    for path in EVERYWHERE + PAGES:
        text = (ROOT / path).read_text(encoding="utf-8")
        for rule, paths in wanted.items():
            if path in paths:
                results[rule] += [f"{path}: {offence}" for offence in rule(text)]
    return results


def check(rule) -> None:
    """Fail with all offences of all files, so that one run shows everything."""
    assert not offences()[rule], "\n" + "\n".join(offences()[rule])


def test_rules_cover_the_repository():
    assert "te_fsdp/__init__.py" in LIBRARY
    assert HERE in EVERYWHERE
    assert {"README.md", "docs/concepts.md", "scripts/setup.sh", "pyproject.toml"} <= set(PAGES)


def test_files_and_functions_are_short():
    check(too_long)


def test_files_have_one_subject():
    check(joined_subjects)


def test_no_two_files_import_each_other():
    """`make lint` checks packages. This test checks files."""
    paths = [path for path in LIBRARY if Path(path).name != "__init__.py"]
    names = {path.removesuffix(".py").replace("/", "."): (ROOT / path).read_text() for path in paths}
    assert not circle(names)
    names["te_fsdp.errors"] += "\ndef late():\n    from te_fsdp import mesh\n"
    assert "te_fsdp.errors" in circle(names)


def test_sources_are_ascii():
    check(not_ascii)


def test_no_unfinished_code():
    check(unfinished)


def test_no_machine_specific_paths():
    check(paths_of_one_machine)


def test_no_catch_all_modules():
    paths = [path for path in EVERYWHERE if path != "te_fsdp/emulation/tex/misc.py"]
    assert not [path for path in paths if re.search(r"util|helpers|misc\.py$", path)]


def test_private_torch_names_are_only_in_upstream():
    check(private_torch_names)


def test_fsdp2_state_is_only_read_in_upstream():
    check(fsdp2_names)


def test_transformer_engine_is_only_imported_in_upstream():
    check(te_imports)


def test_private_te_names_are_only_in_upstream():
    check(te_names)


def test_patches_are_in_their_tables():
    check(patches)


def test_private_names_stay_in_their_file_without_all():
    check(lists_of_names)
    check(names_of_other_files)


def test_emulation_does_not_import_the_library():
    check(root_imports)


def test_the_root_logger_is_not_used():
    check(root_logger_uses)


def test_waits_use_streams_of_the_device():
    check(streams_of_any_device)


def test_the_package_is_typed():
    assert (ROOT / "te_fsdp/py.typed").exists()


PROBE = """
import sys
import te_fsdp
from te_fsdp import errors
names = [n for n in sys.modules if n.split(".")[0] in ("transformer_engine", "transformer_engine_torch")]
assert not names, names
assert not any(n.startswith("te_fsdp.emulation") for n in sys.modules), "the emulation was imported"
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized(), "CUDA was initialised"
assert "torch.distributed.fsdp" not in sys.modules, "FSDP was imported"
classes = {n for n in te_fsdp.__all__ if n in te_fsdp._MODULES}  # subclasses of TransformerEngine's: need it
missing = [n for n in te_fsdp.__all__ if n not in classes and not hasattr(te_fsdp, n)]
assert not missing, missing
"""


def test_importing_the_package_does_not_import_te():
    run_text(sys.executable, PROBE, env={**os.environ, "TE_FSDP_EMULATION": ""})


# --------------------------------------------------------------------- the rules find what they are there for

LONG_FUNCTION = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES


@pytest.mark.parametrize(
    ("rule", "text", "count"),
    [
        pytest.param(too_long, "x = 1\n" * (MAX_FILE_LINES + 1), 1, id="long file"),
        pytest.param(too_long, "x = 1\n" * MAX_FILE_LINES, 0, id="longest file"),
        pytest.param(too_long, LONG_FUNCTION, 1, id="long function"),
        pytest.param(too_long, LONG_FUNCTION.replace("    x = 1\n", "", 1), 0, id="longest function"),
        (joined_subjects, '"""Two commands."""\nx = "this and that"\n', 0),
        (joined_subjects, '"""Checks of a forward and a backward.\n\nText.\n"""\n', 1),
        (joined_subjects, "x = 1\n", 1),
        (not_ascii, "x = '\u2192'\n", 1),
        (unfinished, "x = 1  # " + "TODO: more\n", 1),
        (unfinished, "def f():\n    raise NotImplementedError('later')\n", 1),
        (unfinished, "def f():\n    raise NotImplementedError\n", 1),
        (unfinished, "x = 'TODO'\nraise ValueError('x')\n", 0),
        (paths_of_one_machine, "x = '/" + "home/me/file'\n", 1),
        (paths_of_one_machine, "x = ROOT / 'out/home/x'\ny = '/usr/local/cuda'\n", 0),
        (private_torch_names, "from torch.distributed.fsdp._fully_shard import FSDPState\n", 1),
        (private_torch_names, "from torch.distributed.tensor import _dtensor_spec\n", 1),
        (private_torch_names, "import torch\nx = torch.distributed.fsdp._fully_shard.FSDPState\n", 2),
        (private_torch_names, "def f():\n    from torch._C import _x\n", 1),
        (private_torch_names, "import torch\nx = torch.__version__\ny = self._torch\n", 0),
        (lists_of_names, "__all__ = ['f']\n", 1),
        (names_of_other_files, "from te_fsdp.mesh_checks import _check\n", 1),
        (names_of_other_files, "from te_fsdp import _torch\nfrom te_fsdp.upstream.te import kind_of\n", 0),
        (te_imports, "import transformer_engine.pytorch as te\n", 1),
        (te_imports, "def f():\n    from transformer_engine_torch import DType\n", 1),
        (te_imports, "importlib.import_module('transformer_engine.pytorch')\n", 1),
        (te_imports, "x = 'transformer_engine'\n", 0),
        # Leaks that there were.
        (
            fsdp2_names,
            "own = [{id(managed.sharded_param) for managed in g.fsdp_params} for g in groups]\n",
            2,
        ),
        (fsdp2_names, "x = getattr(record, 'unsharded_accumulated_grad', None)\n", 1),
        (fsdp2_names, "def f(self):\n    return self.sharded_param\n", 0),
        (te_names, "_DERIVED = {'mxfp8': ('_rowwise_scale_inv', '_columnwise_scale_inv')}\n", 2),
        (te_names, "quantizer.with_amax_reduction = False\n", 1),
        (te_names, "def _get_weight_tensors(self):\n    return super()._get_weight_tensors()\n", 2),
        (te_names, "x = type(quantizer).__name__ == 'Float8Quantizer'\n", 1),
        (te_names, "x = 'a message of a Float8Quantizer'\n", 0),
        (patches, "group.post_backward = partial(f, group.post_backward)\n", 1),
        (patches, "setattr(local, 'new_zeros', f)\na, local.quantize_impl = 1, f\n", 2),
        (patches, "self.shard_mesh = mesh\nx = local.new_zeros\n", 0),
        (root_imports, "from te_fsdp.mesh import Meshes\n", 1),
        (root_imports, "import te_fsdp\n", 1),
        (root_imports, "from te_fsdp.emulation.tex import enums\nfrom te_fsdp import emulation\n", 0),
        (root_logger_uses, "logging.warning('x')\nlogging.getLogger().info('x')\n", 2),
        (root_logger_uses, "logging.getLogger('te_fsdp').info('x')\n", 0),
        (streams_of_any_device, "torch.accelerator.current_stream().wait_event(event)\n", 1),
    ],
)
def test_control_each_rule_detects_violations(rule, text, count):
    assert len(rule(text)) == count
