#!/usr/bin/env bash
# Run te_fsdp's distributed tests, on the CPU, with other versions of torch than the installed one. Run through
# `make torch-versions`.
#
#   usage: scripts/torch_versions.sh PYTHON [VERSION...]     default: 2.11.0, 2.14.1 and 2.15.0
#
#   TESTS=...   what pytest runs (default: tests/pytorch/distributed)
#   ARGS=...    more options for pytest
#   WHERE=...   the folder in which the versions are kept (default: .te_fsdp in the environment)
#
# As many pools of processes run side by side as there are cores (ARGS="-n 0": one). Everything is sent by that torch's
# gloo, nothing through the memory that the tests' workers share.
#
# Each version is installed, with what it depends on, into a folder of its own and put in front of the installed one;
# everything else stays as it is. Where pip knows no CPU build that is 5 GB a version, most of it CUDA's libraries; it
# happens once.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
shift
versions=${*:-2.11.0 2.14.1 2.15.0}
tests=${TESTS:-tests/pytorch/distributed}
folder=${WHERE:-$("$python" -c 'import sys; print(sys.prefix)')/.te_fsdp}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_VISIBLE_DEVICES="" TE_FSDP_TEST_DEVICE=cpu TE_FSDP_TEST_GLOO=1

failed=
summary=
for version in $versions; do
  where=$folder/torch-$version
  if ! [ -d "$where/torch" ]; then
    echo "torch_versions: installing torch $version into $where"
    rm -rf "$where" "$where.part"
    "$python" -m pip install -qq --disable-pip-version-check --only-binary :all: --target "$where.part" "torch==$version"
    mv "$where.part" "$where"
  fi
  found=$(PYTHONPATH="$where" "$python" -W ignore -c 'import torch; print(torch.__version__.partition("+")[0])')
  [ "$found" = "$version" ] || { echo "torch_versions: error: asked for $version, python imports $found" >&2; exit 1; }
  echo "torch_versions: torch $version: $tests"
  log=$(mktemp)
  # shellcheck disable=SC2086
  PYTHONPATH=$where:$PWD "$python" -m pytest -q -n auto $tests ${ARGS:-} 2>&1 | tee "$log" || failed+=" $version"
  summary+="torch_versions: torch $version: $(tail -n 1 "$log")"$'\n'
  rm -f "$log"
done
printf '%s' "$summary"
[ -z "$failed" ] || { echo "torch_versions: failed:$failed" >&2; exit 1; }
echo "torch_versions: passed: $versions"
