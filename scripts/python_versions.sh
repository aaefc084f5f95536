#!/usr/bin/env bash
# Run te_fsdp's checkpoint tests with the oldest and the newest patch release of Python 3.10 to 3.14 that this machine
# has, then let each release read what each release has written. Run through `make python-versions`.
#
#   usage: scripts/python_versions.sh [PYTHON...]     default: the oldest and newest release of each minor version
#
#   TESTS=...   what pytest runs (default: the checkpoint tests, of one process and distributed)
#   ARGS=...    more options for pytest
#   WHERE=...   the folder of the environments, one for each release (default: .venv/.te_fsdp)
#
# Interpreters are searched in PATH, /usr/bin, /usr/local/bin, and in the folders of pyenv, uv and conda. The patch
# release matters: Python 3.11.0 to 3.11.4 pickle enums by name, all others by value (te_fsdp/unpickling.py).
set -euo pipefail
cd "$(dirname "$0")/.."

where=${WHERE:-${VENV:-.venv}/.te_fsdp}
tests=${TESTS:-tests/unit/test_checkpoint*.py tests/unit/test_cli_ckpt*.py tests/pytorch/distributed/test_checkpoint*.py}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# "3.11.2 /usr/bin/python3.11" for each release, sorted; of equal releases the first one found.
releases() {
  local candidate
  {
    IFS=: read -ra folders <<<"$PATH:/usr/bin:/usr/local/bin"
    for candidate in "${folders[@]/%//python3}" "${folders[@]/%//python3.10}" "${folders[@]/%//python3.11}" \
      "${folders[@]/%//python3.12}" "${folders[@]/%//python3.13}" "${folders[@]/%//python3.14}" \
      "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3 \
      "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/*/bin/python3 "$HOME"/*conda*/envs/*/bin/python3; do
      [ -x "$candidate" ] || continue
      # Environments are skipped: their interpreter is found by itself.
      "$candidate" -c 'import sys
if (3, 10) <= sys.version_info[:2] <= (3, 14) and sys.prefix == sys.base_prefix:
    print(".".join(map(str, sys.version_info[:3])), sys.argv[1])' "$candidate" 2>/dev/null || true
    done
  } | sort -u -V -k1,1
}

pythons=("$@")
if [ $# -eq 0 ]; then
  found=$(releases)
  for minor in 3.10 3.11 3.12 3.13 3.14; do
    own=$(grep "^$minor\." <<<"$found" || true)
    if [ -z "$own" ]; then echo "python_versions: no Python $minor on this machine"; continue; fi
    while read -r _ path; do pythons+=("$path"); done < <({ head -n 1 <<<"$own"; tail -n 1 <<<"$own"; } | uniq)
  done
fi
[ ${#pythons[@]} -gt 0 ] || { echo "python_versions: error: no Python 3.10 to 3.14 found" >&2; exit 1; }

write='import pathlib, sys, torch, torch.distributed.checkpoint as dcp
from te_fsdp import checkpoint
torch.manual_seed(0)
checkpoint.save(sys.argv[1] + "/te_fsdp", torch.nn.Linear(3, 4))
dcp.save({"weight": torch.arange(6.0).view(2, 3)}, checkpoint_id=pathlib.Path(sys.argv[1]) / "dcp", no_dist=True)'
read='import sys, torch
from te_fsdp import checkpoint
from te_fsdp.checkpoint.portable.convert import open_any
torch.manual_seed(0)
for path in sys.argv[1:]:
    expected, model = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    torch.manual_seed(0)
    torch.nn.init.zeros_(model.weight)
    checkpoint.load(path + "/te_fsdp", model)
    assert torch.equal(model.weight, torch.nn.Linear(3, 4).weight), path
    torch.manual_seed(0)
    contents = open_any(path + "/dcp")
    assert torch.equal(contents.value("weight").rows(0, 2), torch.arange(6.0).view(2, 3)), path'

failed=
summary=
written=()
for python in "${pythons[@]}"; do
  version=$("$python" -c 'import sys; print(".".join(map(str, sys.version_info[:3])))')
  export VENV=$where/python-$version
  mkdir -p "$where"
  PYTHON=$python scripts/setup.sh test
  echo "python_versions: Python $version ($python): $tests"
  log=$(mktemp)
  # shellcheck disable=SC2086
  PYTHONPATH=$PWD "$VENV/bin/python" -m pytest -q -n auto $tests ${ARGS:-} 2>&1 | tee "$log" || failed+=" $version"
  summary+="python_versions: Python $version: $(tail -n 1 "$log")"$'\n'
  rm -rf "$log" "out/python-$version"
  PYTHONPATH=$PWD "$VENV/bin/python" -W ignore -c "$write" "out/python-$version"
  written+=("out/python-$version")
done
for folder in "${written[@]}"; do
  PYTHONPATH=$PWD "$where/${folder#out/}/bin/python" -W ignore -c "$read" "${written[@]}" || failed+=" reading(${folder#out/})"
done
printf '%s' "$summary"
[ -z "$failed" ] || { echo "python_versions: failed:$failed" >&2; exit 1; }
echo "python_versions: passed, and each release read what each has written: ${written[*]#out/python-}"
