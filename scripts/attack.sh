#!/usr/bin/env bash
# Sets up once, then attacks metacal with random cases from fresh seeds for so many minutes (10): networks, optimizers
# and engines against steps written plainly, curvature, measures and losses against loops, configurations, runs. Prints
# a count for each attack and every failure with its seed; exits non-zero if there was one.
#
#   scripts/attack.sh [MINUTES] [pytest's arguments, e.g. -k hypergradients]
#
# FUZZ_SEED is the first seed (the clock's, unless given).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
minutes=${1:-10}
shift || true
[[ $minutes =~ ^[0-9]+(\.[0-9]+)?$ ]] || { echo "attack.sh: MINUTES must be a number, got $minutes" >&2; exit 2; }
"$root/scripts/setup.sh" test
cd "$root"
python=.venv/bin/python
attacks=$("$python" -m pytest -m slow --collect-only -q tests/fuzz "$@" | grep -c '::') ||
    { echo "attack.sh: no attack is chosen by $*" >&2; exit 2; }
export OMP_NUM_THREADS=1 FUZZ_SEED=${FUZZ_SEED:-$(date +%s)}
FUZZ_MINUTES=$("$python" -c "print($minutes / $attacks)")
export FUZZ_MINUTES
echo "attack.sh: $attacks attacks of $FUZZ_MINUTES minutes from seed $FUZZ_SEED"
exec "$python" -m pytest -m slow -q -s --tb=line tests/fuzz "$@"
