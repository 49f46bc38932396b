#!/usr/bin/env bash
# Sets up once, then builds the documentation's site into site/; any warning, such as a broken link, ends it. Arguments
# go to mkdocs: scripts/docs.sh serve shows the site while its pages are being written.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh" docs
cd "$root"
if [ $# -gt 0 ]; then
    exec .venv/bin/mkdocs "$@"
fi
.venv/bin/mkdocs build --strict
echo "the site is in $root/site: open $root/site/index.html"
