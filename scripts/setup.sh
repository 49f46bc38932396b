#!/usr/bin/env bash
# Makes .venv in the project's root and installs metacal into it, with the extra named (train, test, bench); does nothing
# when that was done before. PYTHON chooses the interpreter; PIP_ARGS goes to pip install (an index with the PyTorch build
# for your machine, for instance). Without it, a Linux machine without a GPU gets PyTorch's much smaller CPU
# build from PyTorch's own index, or, where that cannot be reached, the build that pip finds.
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
has_torch() { "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; }
has_gpu() { [ -e /dev/nvidiactl ] || [ -e /dev/kfd ] || nvidia-smi -L > /dev/null 2>&1; }
if [ -z "${PIP_ARGS:-}" ] && [ "$(uname -s)" = Linux ] && ! has_torch && ! has_gpu; then
    echo "no GPU here: installing the CPU build of PyTorch"
    # from that index alone, whatever pip is configured to use
    PIP_CONFIG_FILE=/dev/null "$venv/bin/python" -m pip --isolated install -qq --retries 0 --timeout 10 \
        --index-url https://download.pytorch.org/whl/cpu torch torchvision 2> /dev/null ||
        echo "download.pytorch.org cannot be reached: taking the build of PyTorch that pip finds"
fi
if ! [ -f "$stamp" ] || [ "$root/setup.cfg" -nt "$stamp" ]; then
    echo "installing metacal${extras:+ with the extra $extras} (PyTorch is large: some minutes the first time)"
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pip install -qq ${PIP_ARGS:-} -e "$root${extras:+[$extras]}"
    touch "$stamp"
fi
