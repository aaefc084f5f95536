#!/usr/bin/env bash
# Runs the tests in two parts, side by side: the distributed ones, whose ranks often wait for each other, so that two
# pools of them share the cores, and those of one process, which use what is left at a lower priority. Their output comes
# one part after the other.
#
#   usage: scripts/test.sh PYTHON [PYTEST OPTION...]
set -uo pipefail
cd "$(dirname "$0")/.." || exit

python=$1
shift
# One thread a process: the distributed tests run several processes side by side.
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# Containers often set this, and hundreds of processes would each compile te_fsdp.
unset PYTHONDONTWRITEBYTECODE

units=$(mktemp)
unit_tests=
# When a terminal's Ctrl-C or a signal to this script ends it early, the other part ends too, and is shown as far as it came.
finish() {
  if [ -n "$unit_tests" ]; then
    kill -INT "$unit_tests" 2>/dev/null
    wait "$unit_tests"
    cat "$units"
  fi
  rm -f "$units"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Background jobs of a shell ignore SIGINT, perhaps this script too, and pytest would inherit that.
listen='import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])'
# A worker that crashed is not made anew: xdist 3.8 with loadfile then waits for ever for the files that it had.
nice -n 5 "$python" -c "$listen" \
  -m pytest -n auto --maxprocesses 8 --dist loadfile --max-worker-restart 0 tests/unit tests/conformance "$@" >"$units" 2>&1 &
unit_tests=$!
"$python" -c "$listen" -m pytest -n auto tests/pytorch/distributed "$@"
second=$?
echo "== distributed tests: pytest's exit code $second; tests of one process:"
wait "$unit_tests"
first=$?
unit_tests=
cat "$units"
echo "== tests of one process: pytest's exit code $first; distributed tests (above): $second"

# pytest's code 5: none of this part's tests were asked for.
[ $first -eq 5 ] && [ $second -eq 5 ] && exit 5
[ $first -eq 0 ] || [ $first -eq 5 ] || exit $first
[ $second -eq 0 ] || [ $second -eq 5 ] || exit $second
