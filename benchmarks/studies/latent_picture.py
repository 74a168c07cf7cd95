"""Plot a `latent_prefix` run: the loss with a text's own and with another text's latents, and their cosine similarity.

usage: python -m benchmarks.studies.latent_picture OUT.svg RESULT.json

RESULT.json holds the evaluation events and the lock of a run, as `latent_squad.py` and `latent_facts.py` write them.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.pictures import ACCENT, FAINT, INK, RC, SECOND, headed


def draw(result: dict[str, Any], out: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    result = result.get("wire", result)  # latent_facts.py keeps the reader beside it
    evaluations = [event for event in result["events"] if event["type"] == "eval"]
    steps, lock = [event["step"] for event in evaluations], result["lock"]
    with mpl.rc_context(RC):
        canvas = Figure(figsize=(9.0, 3.6), layout="constrained")
        losses, cosines = canvas.subplots(1, 2)
        losses.plot(
            steps, [e["other_nll_0"] for e in evaluations], "-o", color=SECOND, markersize=3, label="another text's"
        )
        losses.plot(
            steps, [e["nll_0"] for e in evaluations], "-o", color=ACCENT, markersize=3, label="the text's own latents"
        )
        losses.set_title("−log p per token of the answer, held out", loc="left", size=10.5, weight="bold")
        losses.legend(frameon=False, fontsize=9)
        cosines.plot(steps, [e["latent_cosine"] for e in evaluations], "-o", color=INK, markersize=3)
        cosines.axhline(1.0, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
        below = {"xytext": (0, -12), "textcoords": "offset points", "ha": "right"}
        cosines.annotate("1: collapse", (steps[-1], 1.0), color=FAINT, **below)
        cosines.set_title("cosine between latents of different texts", loc="left", size=10.5, weight="bold")
        for ax, top in ((losses, None), (cosines, 1.05)):
            ax.grid(visible=True)
            ax.set_ylim(0, top)
            ax.set_xlabel("steps")
        made = time.strftime("%Y-%m-%d", time.gmtime(lock["created"]))
        about = {"date": made, "versions": lock["versions"], "git": lock["git"]}
        headed(canvas, about, f"A latent prefix on one {lock['machine']['name']}")
        canvas.savefig(out, format="svg", metadata={"Date": None})


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(f"usage:{(__doc__ or '').partition('usage:')[2].splitlines()[0]}")
    try:
        draw(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")), Path(sys.argv[1]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"Cannot plot {sys.argv[2]} ({type(error).__name__})."
        sys.exit(f"{what} RESULT.json is a file that one of these studies wrote.")


if __name__ == "__main__":
    main()
