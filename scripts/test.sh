#!/usr/bin/env bash
# Sets up once, then lints and runs the tests; arguments go to pytest (scripts/test.sh -m slow, -k sece, …).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh" test
cd "$root"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# Two processes of one thread each are faster here than one of two threads. Each has one half of the tests, and takes
# over from the other in the end: tests of one file, which share their runs, are seldom parted.
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest -q -n 2 --dist worksteal "$@"
