"""What several commands read alike from their words."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NoReturn

from metacal.errors import InputError, require, require_choice

__all__ = ["Parser", "check_out", "take_config_file", "take_count", "take_scaling"]


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line, like every other bad input's."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def take_config_file(words: list[str]) -> str | None:
    """Take the first of `words` out if it is a config file; None if it is not."""
    if words and words[0].endswith((".yaml", ".yml")) and ("=" not in words[0] or Path(words[0]).is_file()):
        return words.pop(0)
    return None


def take_count(words: list[str], key: str) -> int | None:
    """Take ``key=N`` out of `words`; None where it is not there.

    Raises:
        InputError: when N is no integer >= 1.
    """
    given = [word for word in words if word.startswith(f"{key}=")]
    for word in given:
        words.remove(word)
    if not given:
        return None
    text = given[-1].partition("=")[2]
    require(text.isdigit() and int(text) >= 1, f"{key} must be an integer >= 1, got {text!r}")
    return int(text)


def check_out(path: str, *suffixes: str) -> Path:
    """The file to write, `--out`, in a folder that is there and can be written.

    Raises:
        InputError: for another suffix than these (any, if there are none), a folder, and what cannot be written.
    """
    out = Path(path)
    require(not suffixes or out.suffix in suffixes, f"--out must end in {' or '.join(suffixes)}, got {str(out)!r}")
    require(not out.is_dir(), f"--out must be a file, got the folder {out}")
    require(out.parent.is_dir(), f"--out {out}: the folder {out.parent} does not exist")
    require(os.access(out.parent, os.W_OK), f"--out {out}: the folder {out.parent} cannot be written")
    return out


def take_scaling(word: str, option: str = "--scaling") -> str:
    """The name of a post-hoc map, or "auto". Raises InputError for another."""
    from metacal.calibration.choice import AUTO, SCALINGS

    require_choice(option, word, [AUTO, *SCALINGS])
    return word
