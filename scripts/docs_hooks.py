"""What mkdocs.yml cannot say: pages in the project's root, anchors and tables as GitHub makes them, links to arXiv."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from pymdownx.slugs import slugify

ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")
"""Shown as pages of the site. Their links lead into docs/, which is the site's root."""


def on_config(config: Any) -> Any:
    config["mdx_configs"]["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    for name in ROOT_PAGES:
        text = (Path(config["config_file_path"]).parent / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name.lower(), content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """In code within a table `\\|` is a bar on GitHub; Python's Markdown would show the backslash."""

    def as_html(span: re.Match[str]) -> str:
        return "<code>" + escape(span[1]).replace("\\|", "&#124;") + "</code>"

    markdown = re.sub(r"`([^`\n]*\\\|[^`\n]*)`", as_html, markdown)
    return re.sub(r"\barXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", markdown)
