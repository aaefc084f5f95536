#!/usr/bin/env bash
# Try te_fsdp, on the CPU, with other versions of TransformerEngine than the installed one. Run through `make te-versions`.
#
#   usage: scripts/te_versions.sh PYTHON [VERSION...]        default: the oldest supported minor versions, 2.18.0 and 2.19.0
#
#   TESTS=...   what pytest runs (default: the emulation's tests, the conformance tests)
#   STEPS=...   steps of each of the two training runs (default: 4)
#
# Each version's plain wheel (Python alone, no CUDA parts, no dependencies) is unpacked into a folder of its own beside
# the environment, and put in front of the installed one. Everything else stays as it is.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
shift
versions=${*:-2.18.0 2.19.0}
tests=${TESTS:-tests/unit/emulation tests/conformance}
folder=$("$python" -c 'import sys; print(sys.prefix)')/.te_fsdp
export TE_FSDP_EMULATION=${TE_FSDP_EMULATION:-10.0} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_VISIBLE_DEVICES=

failed=
for version in $versions; do
  where=$folder/te-$version
  if ! [ -d "$where/transformer_engine" ]; then
    "$python" -m pip install -qq --disable-pip-version-check --no-deps --only-binary :all: --target "$where" "transformer-engine==$version"
  fi
  export PYTHONPATH=$where
  found=$(PYTHONPATH="$PWD:$where" "$python" -W ignore -c 'import te_fsdp.emulation as e; e.install_from_env()
import transformer_engine; print(transformer_engine.__version__)')
  [ "$found" = "$version" ] || { echo "te_versions: error: asked for $version, python imports $found" >&2; exit 1; }
  echo "te_versions: TransformerEngine $version: tests"
  # shellcheck disable=SC2086
  PYTHONPATH=$PWD:$where "$python" -m pytest -q $tests || failed+=" $version(tests)"
  echo "te_versions: TransformerEngine $version: training on two meshes"
  OUT=out/te-$version STEPS=${STEPS:-4} scripts/train.sh "$python" || failed+=" $version(training)"
done
[ -z "$failed" ] || { echo "te_versions: failed:$failed" >&2; exit 1; }
echo "te_versions: passed: $versions"
