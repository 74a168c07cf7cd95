"""`redline plan --gpus N --nodes M` as it is typed: the table, the figure, and what they must not claim."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.dom import minidom

import pytest

H100 = ("pretrain-350m", "--gpu", "h100", "--gpus", "8", "--nodes", "4", "--price", "2.5")


def redline(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "redline", "plan", *words], capture_output=True, text=True)


def planned(*words: str) -> dict[str, Any]:
    done = redline(*words, "--json")
    assert done.returncode == 0, done.stderr
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def test_the_json_has_a_row_for_each_world_and_says_that_it_is_an_estimate() -> None:
    plan = planned(*H100)
    table = plan["scaling"]
    assert table["estimate"] is True
    assert [row["world"] for row in table["rows"]] == [1, 2, 4, 8, 16, 32]
    last = table["rows"][-1]
    assert last["tokens_per_s"] == plan["throughput"]["tokens_per_s"]
    assert (last["hours"], last["cost_usd"]) == (plan["hours"], plan["cost_usd"])
    assert last["exposed_ms"] == plan["communication"]["exposed_ms"]
    assert plan["communication"]["estimate"] is True
    assert plan["communication"]["all_reduced_bytes"] == 4 * 350_405_632
    assert "estimate" in plan["throughput"]["source"]
    assert table["pays_up_to"] in [row["world"] for row in table["rows"]]
    assert any("400 Gbit/s" in assumed for assumed in table["assumptions"])


def test_one_card_has_no_table() -> None:
    plan = planned("pretrain-350m", "--gpu", "h100")
    assert (plan["scaling"], plan["communication"]) == (None, None)


def test_text_output_has_table_verdict_and_assumptions() -> None:
    done = redline(*H100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:1] == ["cards"])
    rows = [line.split() for line in lines[head + 1 : head + 7]]
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16", "32"]
    assert all(row[-1].startswith("$") for row in rows)
    assert "by estimate" in lines[head + 7]
    assert lines[head + 8].strip().startswith("estimates, not measurements")
    assert "the speed of several cards is an estimate" in done.stdout


def test_the_figure_is_an_svg_that_stands_by_itself(tmp_path: Path) -> None:
    out = tmp_path / "scaling.svg"
    done = redline(*H100, "--figure", str(out))
    assert done.returncode == 0, done.stderr
    document = minidom.parse(str(out)).documentElement
    assert document is not None
    assert (document.tagName, document.getAttribute("xmlns")) == ("svg", "http://www.w3.org/2000/svg")
    text = out.read_text(encoding="utf-8")
    assert "var(--" not in text, "outside of the report nothing defines its colours"
    words = [node.firstChild.data for node in document.getElementsByTagName("text")]
    for word in ("tokens/s", "hours", "dollars", "GPUs", "32", "pretrain-350m on h100: estimates, not measurements"):
        assert word in words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*H100, "--figure", "scaling.png"), "ends in .svg"),
        (("pretrain-350m", "--gpu", "h100", "--figure", "a.svg"), "Add --gpus N"),
        ((*H100, "--figure", "no/such/folder/a.svg"), "cannot be written"),
        ((*H100, "parallel.network_gbps=0"), "network_gbps"),
        (("quickstart", "--gpu", "cpu", "--gpus", "2", "--figure", "a.svg"), "nothing to draw"),
    ],
)
def test_a_mistake_is_a_sentence(words: tuple[str, ...], said: str) -> None:
    done = redline(*words)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_world_size_that_does_not_fit_is_not_the_reference() -> None:
    words = ("model.layers=96", "model.d_model=8192", "model.heads=64", "model.d_ff=22016", "--gpu", "h100", "--gpus")
    nowhere = planned("pretrain-350m", *words, "8")["scaling"]
    assert not any(row["fits"] for row in nowhere["rows"])
    assert nowhere["pays_up_to"] is None
    there = planned("pretrain-350m", *words, "64")["scaling"]
    first = next(row for row in there["rows"] if row["fits"])
    assert first["efficiency"] == 1.0
    assert [row["efficiency"] for row in there["rows"] if not row["fits"]] == [None] * there["rows"].index(first)
    assert there["pays_up_to"] >= first["world"] > 1


def test_cpu_ranks_get_no_invented_figures() -> None:
    plan = planned("quickstart", "--gpu", "cpu", "--gpus", "2")
    assert plan["throughput"]["tokens_per_s"] is None
    assert plan["scaling"]["pays_up_to"] is None


def test_a_probe_times_one_cards_share_of_a_step() -> None:
    tiny = ("model.size=1m", "data.seq_len=64", "train.global_batch=4", "train.micro_batch=2", "train.precision=fp32")
    plan = planned("quickstart", *tiny, "--gpu", "cpu", "--gpus", "2", "--probe")
    assert plan["measured"]["step_ms"] > 0
    assert plan["throughput"]["source"] == "measured on one card; between cards unknown"
    assert plan["throughput"]["tokens_per_s"] is None
