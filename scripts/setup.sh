#!/usr/bin/env bash
# Makes the virtual environment that the Makefile's targets run in; does nothing when it is already as wanted.
#
#   usage: scripts/setup.sh [EXTRA...]       extras of pyproject.toml beyond what te_fsdp itself needs: example test lint docs
#
#   SETUP=auto   cpu or gpu, by whether there is an NVIDIA driver (the default)
#   SETUP=cpu    torch's CPU build where pip knows one, TransformerEngine's plain wheel (no CUDA parts) for the emulation
#   SETUP=gpu    a CUDA build of torch, real TransformerEngine (its PyTorch bindings are compiled: about ten minutes); needs
#                a C++ compiler, and neither a GPU nor a CUDA toolkit, which pip has for CUDA 13
#   SETUP=none   no environment and no pip: run with the packages that PYTHON has
#   PYTHON=...   the interpreter to begin with (default: the first of python3, python3.14 to 3.10 that fits)
#   VENV=...     where the environment lies (default: .venv)
#
# pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf) decide where packages come from.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'set-up: %3d s: %s\n' "$SECONDS" "$*"; }
fail() { printf 'set-up: error: %s\n' "$*" >&2; exit 1; }

venv=${VENV:-.venv}
setup=${SETUP:-auto}
extras=$(printf '%s\n' "$@" | sort -u | tr '\n' ' ')
extras=${extras%% }

fits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON: no such program."
    fits "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1); te_fsdp needs Python 3.10 to 3.14."
    printf '%s' "$PYTHON"
    return
  fi
  local candidate
  for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if fits "$candidate"; then printf '%s' "$candidate"; return; fi
  done
  fail "no Python 3.10 to 3.14 found (python3 is $(python3 --version 2>&1 || true)). Fix: make ... PYTHON=/path/to/python3.11"
}

has_driver() { [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; }

# Runs pip; a line, with seconds, for each thing that takes time. All that pip says is shown if it fails.
pip_install() {
  local log line
  log=$(mktemp)
  if ! "$venv/bin/python" -m pip install --no-compile --disable-pip-version-check --progress-bar off "$@" 2>&1 |
    tee "$log" | while IFS= read -r line; do
      line=${line#"${line%%[![:space:]]*}"}
      case $line in
        Collecting* | Downloading* | "Building wheel"* | "Running command"*) say "${line:0:100}" ;;
        "Installing build dependencies"* | "Preparing "* | "Getting requirements"*) say "${line:0:100}" ;;
        "Installing collected packages: "*) say "installing $(wc -w <<<"${line#*: }") packages" ;;
        WARNING* | DEPRECATION*) say "$line" ;;
      esac
    done; then
    cat "$log" >&2
    rm -f "$log"
    return 1
  fi
  rm -f "$log"
}

# What pip would compile on one core, on all of them, without thousands of files that nobody imports. Some are no Python of
# this version: whoever imports those sees the error.
compile_packages() {
  say "compiling the packages' Python files"
  local site python
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  python=$("$venv/bin/python" -c 'import sys; print(sys.executable)')
  # From within: the pattern is for paths of packages, not for the folder that this checkout lies in.
  (cd "$site" && "$python" -m compileall -qq -j 0 \
    -x '/tests?/|/transformers/models/|/(fontTools|networkx|pip|pygments)/|/torch/(_inductor|testing)/' .) || true
}

make_venv() {
  if [ -x "$venv/bin/python" ]; then
    fits "$venv/bin/python" || fail "$venv holds $("$venv/bin/python" --version 2>&1), not 3.10 to 3.14. Fix: make clean-venv"
    return
  fi
  local python
  python=$(find_python)
  say "creating $venv with $("$python" --version 2>&1)"
  "$python" -m venv "$venv" || fail "$python -m venv failed (Debian and Ubuntu: install the python3-venv package)."
}

# comma,separated names for pip's brackets
join() { local IFS=,; printf '%s' "$*"; }

install_cpu() {
  local spec
  # shellcheck disable=SC2086
  spec=".[$(join emulation $extras)]"
  say "installing $spec with constraints/cpu.txt (TransformerEngine's Python part only, for the emulation)"
  pip_install -c constraints/cpu.txt -e "$spec"
}

# Sets CUDA_HOME: the machine's toolkit, or nvcc and headers from pip beside the libraries that torch brought.
find_toolkit() {
  local cuda=$1 site=$2 version
  command -v c++ >/dev/null || command -v g++ >/dev/null || fail "no C++ compiler. Fix: a compiler and Python's headers (Debian and Ubuntu: g++ python3-dev)"
  CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
  if [ ! -x "$CUDA_HOME/bin/nvcc" ] && command -v nvcc >/dev/null; then
    CUDA_HOME=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
  fi
  export CUDA_HOME
  [ -x "$CUDA_HOME/bin/nvcc" ] && return
  version=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("cuda-toolkit"))' 2>/dev/null) ||
    fail "no CUDA toolkit, and this torch for CUDA $cuda names none that pip has. Fix: a CUDA $cuda toolkit, and CUDA_HOME"
  say "no CUDA toolkit on this machine: nvcc and headers of $version from pip"
  pip_install "cuda-toolkit[nvcc,cccl]==$version"
  export CUDA_HOME=$site/nvidia/cu$cuda
}

install_gpu() {
  say "installing torch with constraints/gpu.txt"
  pip_install -c constraints/gpu.txt torch numpy packaging "setuptools<82" wheel ninja pybind11 nvidia-cudnn-frontend
  local cuda site
  cuda=$("$venv/bin/python" -c 'import torch; print((torch.version.cuda or "").split(".")[0])')
  [ -n "$cuda" ] || fail "pip chose a CPU build of torch. Fix: make ... SETUP=cpu, or give pip a CUDA build."
  if ! has_driver; then
    say "no NVIDIA driver here: everything is compiled and installed, which needs none, and nothing of it can run"
  elif ! "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    fail "torch is built for CUDA $cuda but the driver does not run it ($(nvidia-smi 2>/dev/null | grep -o 'CUDA Version: [0-9.]*' || echo 'nvidia-smi says nothing')). Fix: a newer driver, or a build for the driver's CUDA version through PIP_EXTRA_INDEX_URL."
  fi
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  find_toolkit "$cuda" "$site"
  # The headers of cuDNN and NCCL come with torch's own packages; the compiler does not look there by itself.
  export CPATH="$site/nvidia/cudnn/include:$site/nvidia/nccl/include:$site/nvidia/cu$cuda/include:$CUDA_HOME/include/cccl${CPATH:+:$CPATH}"
  # NCCL_EP needs a newer NCCL than torch brings, and expert-parallel kernels are not used here.
  export NVTE_FRAMEWORK=pytorch NVTE_WITH_NCCL_EP="${NVTE_WITH_NCCL_EP:-0}" MAX_JOBS="${MAX_JOBS:-$(nproc)}"
  say "compiling TransformerEngine's PyTorch bindings for CUDA $cuda (about ten minutes)"
  # Without isolation, or they would be compiled against another torch than the one installed.
  pip_install --no-build-isolation -c constraints/gpu.txt "transformer-engine[core_cu$cuda,pytorch]"
  local names
  # shellcheck disable=SC2086
  names=$(join $extras)
  pip_install -c constraints/gpu.txt -e ".${names:+[$names]}"
}

case $setup in
  none)
    python=$(find_python)
    needed="torch transformer_engine rich"
    for extra in $extras; do
      case $extra in
        example) needed+=" tyro tqdm matplotlib" ;;
        test) needed+=" pytest" ;;
      esac
    done
    # shellcheck disable=SC2086
    missing=$("$python" -c 'import sys
from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if find_spec(name) is None])' $needed)
    [ -z "$missing" ] || fail "SETUP=none, but $python lacks: $missing. Fix: install it, or leave SETUP=none out."
    say "SETUP=none: using $python as it is"
    exit 0 ;;
  auto) if has_driver; then setup=gpu; else setup=cpu; fi ;;
  cpu | gpu) ;;
  *) fail "SETUP=$setup: expected auto, cpu, gpu or none." ;;
esac

# One stamp for each set of extras; it holds a digest of everything that decides what gets installed. The stamp of a
# larger set is valid for each of its subsets.
digest=$(cat pyproject.toml "constraints/$setup.txt" constraints/tools.txt scripts/setup.sh | sha256sum | cut -c1-16)
stamp="$venv/.te_fsdp/$setup-${extras// /+}"
if [ -x "$venv/bin/python" ]; then
  for made in "$venv/.te_fsdp/$setup-"*; do
    [ "$(cat "$made" 2>/dev/null)" = "$digest" ] || continue
    missing=
    for extra in $extras; do
      [[ +${made##*/"$setup-"}+ == *"+$extra+"* ]] || missing=$extra
    done
    [ -n "$missing" ] || exit 0
  done
fi

make_venv
start=$SECONDS
"install_$setup"
compile_packages
mkdir -p "$(dirname "$stamp")"
printf '%s' "$digest" >"$stamp"
say "done in $((SECONDS - start)) s"
