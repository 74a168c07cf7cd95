"""How pictures look: colours, letters, and what stands above and below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT, GRID, ACCENT, SECOND, CARD = "#1d1b1a", "#6d6763", "#e7e3df", "#c8281f", "#8fa6bd", "#ffffff"
RC: Any = {
    "svg.fonttype": "path",
    "svg.hashsalt": "redline",  # the same result, the same file
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


def headed(canvas: Figure, result: dict[str, Any], title: str) -> None:
    """What it is above, and what it was measured with below."""
    git, versions = result.get("git") or {}, result.get("versions") or {}
    commit = str(git.get("commit") or "")[:7]
    told = [result.get("date"), f"torch {versions['torch']}" if "torch" in versions else "", f"commit {commit}"]
    canvas.suptitle(title, x=0.02, ha="left", size=13.5, weight="bold")
    foot = " · ".join(str(word) for word in told[: 3 if commit else 2] if word)
    canvas.supxlabel(foot, x=0.985, ha="right", size=8.5, color=FAINT)
