"""`metacal sweep`: a grid of runs on this machine, several at a time."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from metacal.commands.words import take_config_file, take_count
from metacal.errors import require

__all__ = ["sweep_command"]

USAGE = """usage: metacal sweep [CONFIG.yaml] [jobs=N] [threads=N] key=a,b,c ... [key=value ...]

Runs `metacal train` for every combination of the values, each in a process of its own. Finished runs are kept,
interrupted ones go on; a run that fails does not stop the others. All values are checked before the first run.
  jobs=2                    runs at a time (1)
  threads=1                 of each run; else the cores are shared out among the jobs
  key=a,b,c                 also key=range(first,end,step), key=choice(a,b), group=glob(re*)

Ctrl-C or SIGTERM lets the runs save; the same command goes on with them. On a cluster: metacal train -m.

examples:
  metacal sweep method=cross_entropy,focal,gamma_net seed=0,1,2 jobs=2
  metacal sweep method=focal gamma.value=1,2,3,5 'optimizer.lr=0.05,0.1' 'seed=range(3)' jobs=4 threads=2
"""


def sweep_command(argv: Sequence[str]) -> int:
    """Run `metacal sweep ARGV`; returns the exit status."""
    words = list(argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    config_file = take_config_file(words)
    n_jobs = take_count(words, "jobs")
    threads = take_count(words, "threads")
    for word in words:
        require("=" in word and not word.startswith("-"), f"sweep takes key=value words, got {word!r}")
        require(
            not word.lstrip("+~").startswith(("hydra/", "hydra.")),
            f"sweep runs on this machine, got {word!r}; launchers are for `metacal train -m`",
        )

    from metacal.studies.grid import grid_jobs
    from metacal.studies.runner import fewest_folders, require_all_done, run_missing

    jobs = grid_jobs(words, config_file)
    states = run_missing(jobs, n_jobs or 1, threads)
    done = [s.job for s in states if s.state == "done"]
    if len(done) > 1:
        print("compare them: " + shlex.join(["metacal", "compare", *fewest_folders(done)]))
    require_all_done(states)
    return 0
