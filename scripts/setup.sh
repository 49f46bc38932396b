#!/usr/bin/env bash
# Makes .venv in the project's root and installs metacal into it, with the extra named (test, bench); does nothing when
# that was done before. PYTHON chooses the interpreter; PIP_ARGS goes to pip install (an index with the PyTorch build
# for your machine, for instance).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extras=${1:-}
venv="$root/.venv"
stamp="$venv/.metacal${extras:+-$extras}"
python=${PYTHON:-python3}

if ! [ -x "$venv/bin/python" ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        { echo "metacal needs Python 3.10 or newer, $("$python" --version) found; set PYTHON=…" >&2; exit 2; }
    echo "making the virtual environment $venv"
    "$python" -m venv "$venv"
fi
if ! [ -f "$stamp" ] || [ "$root/setup.cfg" -nt "$stamp" ]; then
    echo "installing metacal${extras:+ with the extra $extras} (PyTorch is large: some minutes the first time)"
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pip install -qq ${PIP_ARGS:-} -e "$root${extras:+[$extras]}"
    touch "$stamp"
fi
