"""Build the documentation as a site: `make docs`, or python scripts/site_builder.py [--check] with the extra `docs`.

The site is `build/site/index.html`. It needs no server and no network: search, fonts and scripts are in the folder.
mkdocs.yml holds the settings and the order of the pages; mkdocs also loads this file for the functions `on_…`, which
add what pages link to outside docs/ (the changelog, result files) and the list of decisions.

`--check` builds into a temporary folder and keeps nothing. A link that leads nowhere, a page that is missing from the
navigation, an output that its command no longer prints, or a request to another host ends the build with exit code 1.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
OUTSIDE = "repository"  # the site's folder for files that lie outside docs/
# Search results: answers first, reasons last.
BOOST = {"how-do-i.md": 4.0, "decisions": 0.3, OUTSIDE: 0.3, "recipe.md": 0.5, "seeds.md": 0.5, "claims.md": 0.5}
LINK = re.compile(r"(?<=\]\()(?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# Elements that a browser loads by itself. A link that a reader may follow is no request.
REQUESTS = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*?\bsrc=["']?(?P<src>(?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?![^>]*rel=["']?(?:canonical|next|prev))[^>]*?\bhref=["']?(?P<href>(?:https?:)?//[^"'\s>]+)"""
    r"""|url\(["']?(?P<url>(?:https?:)?//[^"')]+)|@import\s+["'](?P<style>(?:https?:)?//[^"']+)"""
)


# --- links that leave docs/


def in_repository(page: str, link: str) -> str | None:
    """Return the path in the repository to which a page's link leads; None if there is no such file."""
    path = Path(os.path.normpath(ROOT / PurePosixPath(page).parent / link))
    path = path / "README.md" if path.is_dir() else path
    return path.relative_to(ROOT).as_posix() if path.is_file() and path.is_relative_to(ROOT) else None


def in_site(path: str) -> str:
    """Return the place in the site of a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"


def from_site(place: str) -> str:
    """Return the file of the repository that has this place in the site."""
    return place.removeprefix(f"{OUTSIDE}/") if place.startswith(f"{OUTSIDE}/") else f"docs/{place}"


def links(page: str) -> list[str]:
    """Return the files of the repository to which a page links, outside of its blocks of code."""
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    found = (in_repository(page, match["path"]) for match in LINK.finditer(text))
    return [path for path in found if path is not None]


def with_links_of_the_site(text: str, page: str) -> str:
    """Return the page's text with links to files outside docs/ replaced by their places in the site."""

    def place(match: re.Match[str]) -> str:
        path = in_repository(page, match["path"])
        if path is None:
            return match[0]  # mkdocs reports it
        return os.path.relpath(in_site(path), PurePosixPath(in_site(page)).parent) + (match["anchor"] or "")

    return LINK.sub(place, text)


def outside(pages: list[str]) -> list[str]:
    """Return the files outside docs/ that the pages link to, and those that these link to in turn."""
    found: dict[str, None] = {}
    waiting = list(pages)
    while waiting:
        for path in links(waiting.pop()):
            if not path.startswith("docs/") and path not in found:
                found[path] = None
                waiting += [path] if path.endswith(".md") else []
    return sorted(found)


def for_mkdocs(text: str) -> str:
    """Return the text as mkdocs wants it where a forge differs.

    It needs a blank line before each list and table, and shows the backslash of `a\\|b` in a table's code.
    """
    lines, fenced = [""], False
    for line in text.splitlines():
        before = lines[-1]
        item, row = (re.compile(pattern).match for pattern in (r"(?:[-*]|\d+\.) ", r"\|"))
        begins = (item(line) and not item(before) and not before.startswith("  ")) or (row(line) and not row(before))
        if begins and before and not fenced:
            lines.append("")
        fenced ^= line.startswith("```")
        if row(line) and not fenced:
            line = re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), line)
        lines.append(line)
    return "\n".join(lines[1:]) + "\n"


# --- what mkdocs calls


def on_config(config: Any) -> Any:
    from pymdownx.slugs import slugify

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")  # the anchors that a forge makes
    decisions = sorted(path.name for path in (ROOT / "docs/decisions").glob("0*.md"))
    (section,) = [entry for entry in config.nav if "Decisions" in entry]
    section["Decisions"] = ["decisions/README.md", *(f"decisions/{name}" for name in decisions)]
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File, InclusionLevel

    sources = [from_site(file.src_uri) for file in files.documentation_pages()]
    listed = re.findall(rf"{OUTSIDE}/([\w./-]+)", str(config.nav))
    for path in sorted({*outside([*sources, *listed]), *listed}):
        file = File.generated(config, in_site(path), abs_src_path=str(ROOT / path))
        if path not in listed:
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    boost = BOOST.get(PurePosixPath(page.file.src_uri).parts[0])
    if boost is not None:
        page.meta["search"] = {"boost": boost}
    return for_mkdocs(with_links_of_the_site(markdown, from_site(page.file.src_uri)))


# --- the build


def requests(site: Path) -> list[str]:
    """Return what a browser would ask other hosts for."""
    found = []
    for path in sorted([*site.rglob("*.html"), *site.rglob("*.css")]):
        if path.is_relative_to(site / OUTSIDE) and path.suffix == ".css":
            continue
        for match in REQUESTS.finditer(path.read_text(encoding="utf-8")):
            found.append(f"{path.relative_to(site)} loads {next(filter(None, match.groups()))}")
    return found


def build(site: Path) -> list[str]:
    """Build the site in strict mode; return the problems."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--site-dir", str(site)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    problems: list[str] = []
    for line in lines:
        if message := re.match(r"(?:WARNING|ERROR) +- +(.+)", line):
            problems.append(message[1])
        elif line.startswith("- ") and problems:  # the files of which the line before speaks
            problems[-1] += line.removeprefix("-")
    if done.returncode and not problems:
        problems = lines[-5:] or ["mkdocs ended without a message."]
    return problems or requests(site)


def main() -> int:
    missing = [name for name in ("mkdocs", "material") if find_spec(name) is None]
    if missing:
        print(
            f"docs: the site needs mkdocs-material, and {missing[0]} is not installed in this environment. "
            "Run `make docs`, which installs the extra `docs`.",
            file=sys.stderr,
        )
        return 1
    if subprocess.run([sys.executable, str(ROOT / "scripts/docs.py"), "--check"]).returncode:
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site" if "--check" in sys.argv[1:] else SITE
        problems = build(site)
        for problem in problems:
            print(f"docs: {problem}", file=sys.stderr)
        if problems:
            print(
                "docs: the site was not built. Correct these pages or mkdocs.yml, and run `make docs`.", file=sys.stderr
            )
            return 1
        print(f"{sum(1 for _ in site.rglob('*.html'))} pages" + ("" if site != SITE else f": {SITE}/index.html"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
