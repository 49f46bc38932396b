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
    """What GitHub reads otherwise than Python's Markdown, which would show the backslash of `\\<` and, in code within a
    table, of `\\|`; and cells such as `1.23 ± 0.04`, which may break before the ± alone.
    """

    def as_html(span: re.Match[str]) -> str:
        return "<code>" + escape(span[1]).replace("\\|", "&#124;") + "</code>"

    markdown = re.sub(r"`([^`\n]*\\\|[^`\n]*)`", as_html, markdown)
    markdown = markdown.replace("\\<", "&lt;")
    markdown = re.sub(r"(?<=\d) ± (?=\d)", " ±\u00a0", markdown)
    return re.sub(r"\barXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", markdown)


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    """Links where a docstring names a page by its file, as in `docs/data.md`."""

    def link(match: re.Match[str]) -> str:
        file = files.get_file_from_path(match[1])
        return f'<a href="{file.url_relative_to(page.file)}">{match[0]}</a>' if file else match[0]

    return re.sub(r"(?<![\w/])docs/([a-z_/]+\.md)(?![^<]*</(?:a|pre)>)", link, html)
