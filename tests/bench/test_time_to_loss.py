"""`python -m benchmarks time-to-loss` with tiny models."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import time_to_loss
from benchmarks import time_to_loss as arms
from benchmarks.peers import nanogpt
from benchmarks.peers.anchor import time_anchor
from redline.bench import child
from redline.bench.setting import choose_setting
from redline.errors import UserError
from redline.recipe.load import load

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FIGURES = {"steps", "tokens", "tokens_per_s", "anchor_step_ms", "step_ms", "evaluations", "final_loss", "warmup_s"}


class Here:
    """Runs the benchmark's children within this process, where torch is imported already."""

    def __init__(self) -> None:
        self.trained: list[list[str]] = []
        self.requests: list[tuple[str, Any]] = []

    def ask(self, module: str, request: Any, limit_s: float = 0) -> Any:
        self.requests.append((module, request))
        if module == "benchmarks.peers.anchor":
            return time_anchor(request["device"])
        return nanogpt.measure(request["words"], request["budget_s"], request["step_ms"])

    def train(self, words: list[str], run: Path, environment: Any = None, limit_s: float = 0) -> child.TrainedRun:
        from redline.cli.main import main

        self.trained.append(words)
        before, sys.argv = sys.argv, ["redline", "train", *words, "--run", str(run)]
        quiet = io.StringIO()
        with contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet), contextlib.suppress(SystemExit):
            main()
        sys.argv = before
        return child._read_run(run, 0.0)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    found = Here()
    monkeypatch.setattr(time_to_loss, "ask", found.ask)
    monkeypatch.setattr(time_to_loss, "train", found.train)
    return found


@pytest.fixture
def words(corpus: Path) -> tuple[str, ...]:
    data = (f"data.source={corpus}", "data.tokenizer=bytes")
    return ("time-to-loss", "train.device=cpu", *data, "--budget", "0.3s", "--out", "loss.json")


def test_arms_are_trained_once_and_compared(compare: Any, here: Here, words: Any, tmp_path: Path) -> None:
    answer = compare(*words, "--arm", "nanogpt,pretrain-350m", "--seed", "3", "--json")
    assert answer.code == 0, answer.err
    result = json.loads(answer.out)
    assert json.loads((tmp_path / "loss.json").read_text()) == result
    rows = {row["arm"]: row for row in result["rows"]}
    assert list(rows) == ["nanogpt", "pretrain-350m"]
    for row in rows.values():
        assert set(row) >= FIGURES
        assert row["seed"] == row["lock"]["recipe"]["train"]["seed"] == 3
        assert row["lock"]["recipe"]["train"]["steps"] == row["steps"]
        assert row["final_loss"] == row["evaluations"][-1]["loss"]
        assert row["evaluations"][0]["seconds"] == 0
        assert row["seconds"] == pytest.approx(row["steps"] * row["step_ms"] / 1e3, rel=1e-3)
        assert row["epochs"] > 0
        assert row["lock"]["data"]["fingerprint"]
    assert len({row["lock"]["data"]["fingerprint"] for row in rows.values()}) == 1
    assert len({row["lock"]["recipe"]["eval"]["sequences"] for row in rows.values()}) == 1
    (table,) = result["comparison"]
    assert table["baseline"]["names"] == [rows["nanogpt"]["name"]]
    assert [entry["arm"] for entry in table["entries"]] == ["pretrain-350m"]
    assert "<svg" in (tmp_path / "loss.svg").read_text()
    assert "0.3 s of training" in (tmp_path / "loss.md").read_text()
    anchor, run = here.trained
    assert "train.steps=6" in anchor, "first a short run, then the one that fits"
    assert f"train.steps={rows['pretrain-350m']['steps']}" in run

    again = compare(*words, "--arm", "pretrain-350m,nanogpt", "--seed", "3")
    assert "trains     0 of 2 runs; 2 rows exist" in again.err
    assert len(here.trained) == 2
    assert "the baseline" in again.out

    other = compare(*words, "--arm", "pretrain-350m", "--seed", "3", "train.lr=1e-2")
    assert other.code == 0, other.err
    assert len(here.trained) == 3, "the time of a step is known: only the learning rate is another"
    (trials,) = [table["trials"] for table in json.loads((tmp_path / "loss.json").read_text())["comparison"]]
    assert trials["pretrain-350m"] == {"0.3": 2}
    compare(*words, "--arm", "pretrain-350m", "--seed", "3", "train.lr=1e-2", "--again")
    assert len(here.trained) == 5, "anew, its step timed too"
    assert len(json.loads((tmp_path / "loss.json").read_text())["rows"]) == 3


def test_a_diverged_run_is_not_repeated(compare: Any, here: Here, words: Any, tmp_path: Path) -> None:
    compare(*words, "--arm", "nanogpt")
    answer = compare(*words, "--arm", "nanogpt", "train.lr=1e30")
    assert answer.code == 1
    assert "failed: it diverged" in answer.out
    requests = len(here.requests)
    compare(*words, "--arm", "nanogpt", "train.lr=1e30")
    assert [module for module, _ in here.requests[requests:]] == [], "it would diverge again"
    (table,) = json.loads((tmp_path / "loss.json").read_text())["comparison"]
    assert table["trials"] == {"nanogpt": {"0.3": 2}}


def test_the_children_are_processes(compare: Any, words: Any) -> None:
    answer = compare(*words, "--arm", "nanogpt", "--seed", "1", "--json")
    assert answer.code == 0, answer.err
    (row,) = json.loads(answer.out)["rows"]
    assert row["card_anchor_ms"] > 0
    assert row["final_loss"] < 6


def test_a_failed_run_has_its_reason(compare: Any, here: Here, words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: Any, **__: Any) -> Any:
        raise child.ChildError("no room.")

    monkeypatch.setattr(time_to_loss, "train", train)
    answer = compare(*words, "--arm", "nanogpt,pretrain-350m")
    assert answer.code == 1
    assert "pretrain-350m" in answer.out
    assert "failed: no room." in answer.out
    assert "the baseline" in answer.out, "the other went on"


def test_only_complete_rows_of_the_same_text_are_continued(
    compare: Any, here: Here, words: Any, tmp_path: Path, corpus: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(file.read_text() for file in sorted(corpus.iterdir())))
    words = [word if not word.startswith("data.source") else f"data.source={text}" for word in words]
    compare(*words, "--arm", "nanogpt")
    kept = (tmp_path / "loss.json").read_text()
    for spoil in (
        lambda row: row["lock"].pop("data"),
        lambda row: row.pop("steps"),
        lambda row: row.update(seconds=0),
        lambda row: row.update(evaluations=3),
    ):
        torn = json.loads(kept)
        spoil(torn["rows"][0])
        (tmp_path / "loss.json").write_text(json.dumps(torn))
        answer = compare(*words, "--arm", "nanogpt", "--seed", "7")
        assert (answer.code, "its rows are not whole" in answer.message) == (2, True), answer.message
    (tmp_path / "loss.json").write_text(kept)
    text.write_text(text.read_text()[::-1])
    answer = compare(*words, "--arm", "nanogpt", "--seed", "7")
    assert (answer.code, "has runs on another text" in answer.message) == (2, True), answer.message
    assert json.loads((tmp_path / "loss.json").read_text()) == json.loads(kept)


def test_a_signal_ends_the_run_that_is_timed(words: Any, tmp_path: Path) -> None:
    requests = [word if word != "0.3s" else "60s" for word in words]
    command = [sys.executable, "-m", "benchmarks", *requests, "--arm", "nanogpt", "--allow-dirty"]
    bench = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        timed = _wait_for(lambda: _children(bench.pid, "benchmarks.peers.nanogpt"))
        bench.terminate()
        assert bench.wait(30) == 128 + signal.SIGTERM
        assert _wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in timed))
    finally:
        bench.kill()


def _children(pid: int, word: str) -> list[int]:
    told = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in told if word in Path(f"/proc/{one}/cmdline").read_text()]


def _wait_for(found: Callable[[], Any]) -> Any:
    for _ in range(600):
        if result := found():
            return result
        time.sleep(0.1)
    raise AssertionError("it did not come")


def test_a_batch_that_would_make_the_baseline_slow_is_refused(corpus: Path) -> None:
    words = [*arms.words_for("nanogpt", [f"data.source={corpus}", "data.tokenizer=bytes"], "cpu"), "train.device=cpu"]
    odd = [word for word in words if not word.startswith("train.global_batch")] + ["train.global_batch=37"]
    with pytest.raises(UserError, match="37 has no divisor from 8 to 32"):
        nanogpt.measure(odd, 0.01, 10.0)
    assert nanogpt.measure([*odd, "train.micro_batch=1"], 0.01, 10.0)["steps"] == 1


@pytest.mark.parametrize("reason", ["nonfinite", "interrupted"])
def test_a_recipe_that_stops_being_finite_has_diverged(
    reason: str, compare: Any, words: Any, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaves(command: list[str], *_: Any) -> str:
        run = Path(command[-1])
        run.mkdir(parents=True)
        (run / "events.jsonl").write_text(json.dumps({"type": "stop", "reason": reason}) + "\n")
        (run / "lock.json").write_text(json.dumps({key: {} for key in time_to_loss._LOCKED}))
        raise child.ChildError("next  redline train --resume")

    monkeypatch.setattr(time_to_loss, "train", child.train)
    monkeypatch.setattr(child, "_run", leaves)
    answer = compare(*words, "--arm", "pretrain-350m", "--json")
    assert answer.code == 1
    (row,) = json.loads(answer.out)["rows"]
    assert row.get("diverged", False) == (reason == "nonfinite")
    assert ("not finite" in row["error"]) == (reason == "nonfinite")


@pytest.mark.parametrize(("own", "expected"), [(1000, "train.warmup_steps=12"), (8, None), ("auto", None)])
def test_a_recipes_warm_up_is_no_longer_than_the_budget_allows(own: Any, expected: str | None) -> None:
    trial = time_to_loss.Trial("pretrain-350m", (), 120.0, 1)
    found = time_to_loss._warmup(trial, [f"train.warmup_steps={own}"], 240)
    assert found == ([expected] if expected else [])
    requests = time_to_loss.Trial("pretrain-350m", ("train.warmup_steps=100",), 120.0, 1)
    assert time_to_loss._warmup(requests, ["train.warmup_steps=100"], 240) == []


def test_overrides_in_another_order_are_the_same_trial() -> None:
    assert arms.in_order(["train.lr=1", "eval.sequences=8", "train.lr=2"]) == ("eval.sequences=8", "train.lr=2")
    assert arms.in_order(["train.micro_batch_size=4", "train.micro_batch=8"]) == ("train.micro_batch=8",)
    assert arms.in_order(["learning_rate=1e-3"]) == arms.in_order(["train.lr=0.001"]) == ("train.lr=0.001",)
    row = {"arm": "nanogpt", "overrides": ["train.lr=1e-3"], "budget_s": 2.0, "seed": 1, "name": "as it was typed"}
    assert time_to_loss.is_there(time_to_loss.Trial("nanogpt", ("train.lr=0.001",), 2.0, 1), [row])


def test_an_alias_replaces_a_default() -> None:
    assert nanogpt.recipe_of(["learning_rate=1e-3", "max_seq_len=32"]).train.lr == 1e-3
    setting = choose_setting(None, ["max_seq_len=32", "train.device=cpu"], {"cpu": ("train.steps=3",)})
    assert setting.recipe.data.seq_len == 32


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_arm_has_a_recipe(device: str) -> None:
    for arm in arms.choose_arms(None):
        words = arms.words_for(arm, [], device)
        recipe = nanogpt.recipe_of(words) if arm == arms.BASELINE else load(arms.RECIPES[arm], words).recipe
        assert recipe.eval.sequences == (256 if device == "cuda" else 16), "the same for all"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--arm", "nanogtp"), "Did you mean 'nanogpt'?"),
        (("--arm", ","), "names no arm"),
        (("--budget", "0"), "leaves no time to train"),
        (("--budget", "0.0001s"), "leaves no time to train"),
        (("--budget", "1000h"), "is longer than a week"),
        (("--budget", "soon"), "'soon' is no time"),
        (("--budget", ""), "is no time"),
        (("--seed", "x"), "is no list of whole numbers"),
        (("pretrain-350m",), "Name an arm with --arm."),
        (("train.steps=100",), "Use --budget."),
        (("train.seed=1",), "Use --seed."),
        (("--arm", "nanogpt", "train.optimizer=muon"), "nanogpt does not read this"),
        (("--arm", "pretrain-350m", "train.muonlr=1"), "Did you mean 'train.muon_lr'?"),
        (("--out", "other.json"), "not a result of time-to-loss"),
        (("--out", "damaged.json"), "not a result of time-to-loss"),
        (("--out", "loss.txt"), "ends in .json"),
    ],
)
def test_a_mistake_is_one_sentence(words: tuple[str, ...], expected: str, compare: Any, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"benchmark": "throughput", "machine": {"name": "x"}, "rows": []}')
    damaged = {"benchmark": "time-to-loss", "machine": {"name": "x"}, "rows": [{"name": "a row that lost its arm"}]}
    (tmp_path / "damaged.json").write_text(json.dumps(damaged))
    answer = compare("time-to-loss", "train.device=cpu", *words)
    assert answer.code == 2
    assert expected in answer.message


def test_an_arm_without_a_recipe_is_left_out(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "shipped", lambda: {"pretrain-350m": Path()})
    assert arms.choose_arms(None) == ["nanogpt", "pretrain-350m", "pretrain-350m-adamw"]
    answer = compare("time-to-loss", "--arm", "speedrun-50m")
    assert answer.code == 2
    assert "'speedrun-50m' has no recipe in this version. There are nanogpt, pretrain-350m" in answer.message


def test_an_arm_is_known_by_its_older_name() -> None:
    assert arms.choose_arms("speedrun-350m,nanogpt") == ["speedrun-50m", "nanogpt"]
    committed = json.loads((RESULTS / "race-h200-20261118.json").read_text(encoding="utf-8"))
    rows = arms.with_current_names(committed["rows"])
    assert {row["arm"] for row in rows} == {"nanogpt", "pretrain-350m", "speedrun-50m"}
    assert all(row["name"].startswith(row["arm"]) for row in rows)
    again = json.dumps(arms.compare(rows)).replace("speedrun-50m", "speedrun-350m")
    assert json.loads(again) == committed["comparison"], "the figures of the committed race are the same"


def test_the_adamw_arm_is_the_recipe_with_adamw_in_bf16(compare: Any, here: Here, words: Any) -> None:
    betas = ("train.betas=[0.8,0.99]", "train.schedule=wsd", "train.decay_fraction=0.6")
    answer = compare(*words, "--arm", "nanogpt,pretrain-350m-adamw", *betas, "--json")
    assert answer.code == 0, answer.err
    baseline, ours = json.loads(answer.out)["rows"]
    assert (baseline["arm"], ours["arm"]) == ("nanogpt", "pretrain-350m-adamw")
    for row in (baseline, ours):
        train = row["lock"]["recipe"]["train"]
        assert (train["optimizer"], train["betas"], train["schedule"]) == ("adamw", [0.8, 0.99], "wsd")
    assert ours["lock"]["recipe"]["train"]["precision"] == "bf16"
    assert ours["lock"]["recipe"]["model"]["mlp"] == "swiglu"
    assert here.trained[0][0] == "pretrain-350m", "the recipe that the arm trains"
    for word in ("train.optimizer=muon", "train.precision=fp8"):
        refused = compare(*words, "--arm", "pretrain-350m-adamw", word)
        assert refused.code == 2
        assert word in refused.message


def test_the_baselines_lock_has_its_true_shape(compare: Any, here: Here, words: Any) -> None:
    answer = compare(*words, "--arm", "nanogpt", "model.d_model=32", "model.heads=4", "--json")
    (row,) = json.loads(answer.out)["rows"]
    shape, counts = row["lock"]["recipe"]["model"], row["lock"]["parameters"]
    assert (shape["architecture"], shape["mlp"], shape["norm"]) == ("gpt2", "gelu", "layernorm")
    assert (shape["d_model"], shape["heads"], shape["head_dim"], shape["d_ff"]) == (32, 4, 8, 128)
    assert shape["positions"] == "learned"
    layer = 12 * 32**2
    assert counts["matmul"] == shape["layers"] * layer + shape["vocab"] * 32


def test_a_race_needs_committed_code(
    compare: Any, here: Here, words: Any, tree: dict[str, Any], tmp_path: Path
) -> None:
    tree["dirty"] = True
    refused = compare(*words, "--arm", "nanogpt")
    assert (refused.code, here.requests) == (2, [])
    assert "--allow-dirty" in refused.message
    marked = compare(*words, "--arm", "nanogpt", "--allow-dirty", "--json")
    (row,) = json.loads(marked.out)["rows"]
    assert row["dirty"] is row["lock"]["git"]["dirty"] is True
    assert time_to_loss.UNCOMMITTED in row["warnings"]
    assert time_to_loss.UNCOMMITTED in (tmp_path / "loss.md").read_text()
    tree["dirty"] = False
    refused = compare(*words, "--arm", "nanogpt", "--seed", "2")
    assert refused.code == 2, "a comparison with a row whose code is not known"
    assert "loss.json" in refused.message
    accepted = compare(*words, "--arm", "nanogpt", "--seed", "2", "--allow-dirty", "--json")
    assert ["dirty" in row for row in json.loads(accepted.out)["rows"]] == [True, False]


def test_a_gpu_needs_a_text_of_the_users() -> None:
    from redline.errors import UsageError
    from redline.hardware.machine import Machine

    card = Machine("cuda", "NVIDIA H200", 150 << 30, 16, (9, 0), fast_bf16=True)
    with pytest.raises(UsageError, match=r"data\.source=\./tokens"):
        time_to_loss.check_data(["train.lr=1"], card)
    time_to_loss.check_data(["data.source=./tokens"], card)
