#!/usr/bin/env bash
# Runs the tests in two parts: those of one process side by side, one worker a core; then the distributed ones, which keep
# all cores busy with workers of their own.
#
#   usage: scripts/test.sh PYTHON [PYTEST OPTION...]
set -uo pipefail
cd "$(dirname "$0")/.."

python=$1
shift
# One thread a process: the distributed tests run several processes side by side.
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$python" -m pytest -n auto --maxprocesses 8 --dist loadfile tests/unit tests/conformance "$@"
first=$?
"$python" -m pytest tests/pytorch/distributed "$@"
second=$?

# pytest's code 5: none of this part's tests were asked for.
[ $first -eq 5 ] && [ $second -eq 5 ] && exit 5
[ $first -eq 0 ] || [ $first -eq 5 ] || exit $first
[ $second -eq 0 ] || [ $second -eq 5 ] || exit $second
