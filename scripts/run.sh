#!/usr/bin/env bash
# Sets up once, then runs metacal with the arguments given. Without any: the default method (focal loss with one learned gamma,
# margin tail) on the bundled digits, beside the published gamma-net, a focal loss with fixed gamma and plain
# cross-entropy on the same splits.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh" train
if [ $# -eq 0 ]; then
    set -- train "baselines=[gamma_net,focal,cross_entropy]"
fi
exec "$root/.venv/bin/metacal" "$@"
