#!/usr/bin/env bash
# Sets up once, then runs metacal with the arguments given. Without any: the default method (gamma-net with SECE) on the
# bundled digits, beside a focal loss with fixed gamma and plain cross-entropy on the same splits.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
if [ $# -eq 0 ]; then
    set -- train "baselines=[focal,cross_entropy]"
fi
exec "$root/.venv/bin/metacal" "$@"
