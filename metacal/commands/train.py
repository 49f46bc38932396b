"""`metacal train`: words of the command line → one run, a run with baselines, or a sweep."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metacal.errors import InputError, require

if TYPE_CHECKING:
    from metacal.config import Config

__all__ = ["train_command"]


def train_command(argv: Sequence[str]) -> int:
    """Run `metacal train ARGV`; returns the exit status."""
    words = list(argv)
    config_file = None
    if words and words[0].endswith((".yaml", ".yml")) and ("=" not in words[0] or Path(words[0]).is_file()):
        config_file = words.pop(0)
    if any(word.startswith("-") for word in words):
        return _with_hydra(words, config_file)

    from metacal.compose import compose

    config = compose(words, config_file)
    for method in config.baselines:  # a typo in the last baseline must not surface after the first run
        compose(_with_method(words, method), config_file)
    if config.resume is not None:
        return _resume(config, words)
    if not config.baselines:
        return _run(config, words, config_file)
    return _run_beside_baselines(config, words, config_file)


def _run(config: Config, words: Sequence[str], config_file: str | None) -> int:
    """One run: a finished one is refused, an interrupted one goes on."""
    from metacal.training.folder import folder_of
    from metacal.training.run import run

    folder = folder_of(config, words, config_file)
    if folder.finished and not config.overwrite:
        raise InputError(
            f"{folder.path} holds a finished run; look at it with `metacal evaluate {folder.path}`, start over "
            "with overwrite=true, or choose another seed=… or name=…"
        )
    return run(config, folder, words).show()


def _resume(config: Config, words: Sequence[str]) -> int:
    """`resume=RUN`: go on under the run's own config.

    Other words may repeat what the run was started with, or say where it runs now (device, threads, progress).
    """
    from metacal.compose import compose
    from metacal.training.folder import NOT_IN_NAME, check_run
    from metacal.training.run import run

    folder = check_run(config.resume or "")
    require(not folder.finished, f"{folder.path} is finished: there is nothing to resume")
    require(folder.last.is_file(), f"{folder.path} has no checkpoint yet: run its command again instead")
    require(not config.overwrite, "resume=RUN goes on and overwrite=true starts over: give one of them")
    own = compose([], folder.config)
    for key in (word.lstrip("+~").split("=", 1)[0] for word in words):
        if key in NOT_IN_NAME - {"method", "seed"}:
            setattr(own, key, getattr(config, key))
            continue
        was, given = _value(own, key), _value(config, key)
        require(
            was == given,
            f"{key}={given} differs from {was} in {folder.path}: a resumed run keeps its config; leave the key "
            "out, or start a new run",
        )
    own.run_dir, own.resume = str(folder.path), None
    return run(own, folder, words).show()


def _value(config: Config, key: str) -> Any:
    """The value of a dotted key; for a group, the name of the choice."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return getattr(value, "name", getattr(value, "objective", value))


def _with_method(words: Sequence[str], method: str) -> list[str]:
    kept = [w for w in words if w.split("=", 1)[0] not in ("method", "baselines", "run_dir")]
    return [*kept, f"method={method}"]


def _run_beside_baselines(config: Config, words: list[str], config_file: str | None) -> int:
    """The run, then each method of `config.baselines` with the same other keys; ends with one table of all.

    Finished runs are reused, so the command can be given again.
    """
    from metacal.compose import compose
    from metacal.training.folder import folder_of, require_same_config
    from metacal.training.run import Outcome, run, show_together

    own_words = [w for w in words if not w.startswith("baselines=")]
    jobs = [(config, own_words)]
    require(
        config.run_dir is None, f"run_dir is one run's folder, and baselines make several, got run_dir={config.run_dir}"
    )
    for method in config.baselines:
        jobs.append((compose(_with_method(words, method), config_file), _with_method(words, method)))
    outcomes = []
    for job, job_words in jobs:
        folder = folder_of(job, job_words, config_file)
        if folder.finished and not job.overwrite:
            require_same_config(job, folder)
            print(f"{job.method}: already finished in {folder.path}, reused (overwrite=true starts over)")
            outcomes.append(Outcome(folder, folder.read_summary(), status=0))
            continue
        outcome = run(job, folder, job_words)
        if outcome.status:
            return outcome.show()
        outcomes.append(outcome)
    return show_together(outcomes)


def _check_sweep(words: Sequence[str], config_file: str | None) -> None:
    """Compose every value of every swept key once, so that a bad one surfaces before the first run."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from metacal.compose import compose, explain

    try:
        parsed = OverridesParser.create().parse_overrides(list(words))
    except HydraException as error:
        raise InputError(explain(error)) from None
    swept = {
        o.get_key_element(): list(o.sweep_string_iterator()) for o in parsed if o.is_sweep_override() and o.value()
    }
    fixed = [o.input_line or "" for o in parsed if not o.is_sweep_override()]
    first = {key: values[0] for key, values in swept.items()}
    for key, values in swept.items() or [("", [""])]:
        for value in values:
            chosen = first | ({key: value} if key else {})
            config = compose([*fixed, *(f"{k}={v}" for k, v in chosen.items())], config_file)
            require(
                config.resume is None and not config.baselines and config.run_dir is None,
                "resume, baselines and run_dir are for one run; a sweep (-m) goes on with interrupted runs by itself",
            )


def _with_hydra(words: list[str], config_file: str | None) -> int:
    """Sweeps (-m), --help, --cfg and Hydra's other flags."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import DictConfig
    from omegaconf.errors import OmegaConfBaseException

    from metacal.compose import config_dir, explain, from_dictionary, register_schema

    register_schema()
    path = Path(config_file).resolve() if config_file else config_dir() / "train.yaml"
    require(path.is_file(), f"config file {config_file} does not exist")
    statuses: list[int] = []

    if any(word in ("-m", "--multirun") for word in words):
        _check_sweep([word for word in words if not word.startswith("-")], config_file)

    def task(node: DictConfig) -> None:
        from metacal.training.folder import folder_of, require_same_config
        from metacal.training.run import run

        config = from_dictionary(node)
        overrides = list(HydraConfig.get().overrides.task)
        folder = folder_of(config, overrides, config_file)
        if folder.finished and not config.overwrite:
            require_same_config(config, folder)
            print(f"{folder.path}: already finished, skipped")
            return
        statuses.append(run(config, folder, overrides).show())
        if statuses[-1] == 130:  # Ctrl-C is meant for the whole sweep
            raise KeyboardInterrupt

    # Hydra's parser wants the overrides in one piece, wherever its flags stand.
    words.sort(key=lambda word: word.startswith("-") or "=" not in word)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us whole; we print one line of them
    argv, sys.argv = sys.argv, ["metacal train", *words]
    try:
        hydra.main(version_base="1.3", config_path=str(path.parent), config_name=path.stem)(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(explain(error)) from None
    except SystemExit as stop:  # --help and its like
        return int(stop.code or 0)
    finally:
        sys.argv = argv
    return max(statuses, default=0)
