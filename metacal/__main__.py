"""`python -m metacal` is the `metacal` command."""

from metacal.cli import main

raise SystemExit(main())
