#!/usr/bin/env bash
# Runs the quick part of the tests with another Python and with the lowest or the newest versions that setup.cfg allows,
# in a virtual environment of its own that is deleted afterwards (several GB while it is there).
#
#   scripts/try_versions.sh lowest|newest [PYTHON] [NAME==VERSION ...]
#
#   scripts/try_versions.sh lowest python3.10                    every lower bound of setup.cfg at once
#   scripts/try_versions.sh newest python3.13                    what pip chooses today
#   scripts/try_versions.sh newest python3.13 torch==2.5.0 torchvision==0.20.0
#
# PIP_ARGS goes to pip install, TMPDIR says where the environment is made, TESTS which tests are run.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bound=${1:-}
python=${2:-python3}
[[ $bound == lowest || $bound == newest ]] || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }
shift; shift || true
tests=${TESTS:-tests/bilevel tests/calibration tests/curvature tests/training/test_fit.py tests/test_cli.py}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
venv="$folder/venv/bin/python"
pins="$folder/pins.txt"
printf '%s\n' "$@" > "$pins"
if [[ $bound == lowest ]]; then
    "$venv" - "$root/setup.cfg" >> "$pins" <<'PINS'
import configparser
import re
import sys

config = configparser.ConfigParser()
config.read(sys.argv[1])
extras = config["options.extras_require"]
lines = [config["options"]["install_requires"], extras["train"], extras["sklearn"], extras["higher"]]
bounds = re.findall(r"^([\w-]+)>=([\w.]+)", "\n".join(lines), flags=re.MULTILINE)
for name, version in dict(bounds).items():  # of two bounds the later one, which is the higher
    print(f"{name}=={version}")
PINS
fi
# shellcheck disable=SC2086
"$venv" -m pip install -q ${PIP_ARGS:-} -c "$pins" -e "$root[test]"
"$venv" -m pip list --format=freeze | grep -iE '^(torch|torchvision|numpy|scipy|scikit-learn|matplotlib|tensorboard|hydra-core|rich)=='
cd "$root"
# shellcheck disable=SC2086
OMP_NUM_THREADS=1 "$venv" -m pytest -q -p no:cacheprovider -n 2 $tests
