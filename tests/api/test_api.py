"""The library: the same runs as the command line makes, and nothing left behind in the program that calls it."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import redline
from redline.api import _words
from redline.vocabulary import Status, StopReason

SHORT = ("train.steps=4", "eval.every=2", "checkpoint.every=2")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def train(corpus: Path, tiny: tuple[str, ...]) -> Callable[..., redline.Run]:
    def run(*words: str, **options: Any) -> redline.Run:
        source = [] if "data" in options or "resume" in options else [f"data.source={corpus}"]
        words = words if "resume" in options else (*tiny, *SHORT, *source, *words)
        return redline.train(None if "resume" in options else "quickstart", *words, show=False, **options)

    return run


# --- the same as the command line


CHANGING = {"time", "seconds", "hours", "tokens_per_s", "samples_per_s", "mfu", "mfu_causal", "step_ms", "eta_s"}
CHANGING |= {"data_wait_ms", "memory_gib", "run_id", "run_dir", "cpu_flops", "measured", "files_verified", "gpu_util"}
CHANGING |= {"cpu_share"}  # of a busy machine
CHANGING |= {"ceiling"}  # by the rates of the CPU, which the first starts measure anew


def _comparable(value: Any) -> Any:
    """Return plain data without what differs between two runs of one recipe: times and names."""
    if isinstance(value, dict):
        changing = CHANGING | ({"message"} if value.get("type") == "warmup" else set())  # "warmed up in 0.1s"
        return {key: _comparable(item) for key, item in value.items() if key not in changing}
    return [_comparable(item) for item in value] if isinstance(value, list) else value


def test_a_recipe_gives_the_same_run_through_both_doors(corpus: Path, tiny: tuple[str, ...]) -> None:
    words = [*tiny, *SHORT, f"data.source={corpus}"]
    command = [sys.executable, "-m", "redline", "train", "quickstart", *words, "--run", "by-command"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = redline.train("quickstart", *words, run="by-library", show=False)
    other = redline.open_run("./by-command")
    for name in ("model", "optimizer"):
        one, two = (load_file(r.path / f"checkpoints/step-00000004/{name}.safetensors") for r in (run, other))
        assert one.keys() == two.keys()
        assert all(np.array_equal(one[key], two[key]) for key in one)
    timed = ("checkpoint", "warmup")  # their messages hold seconds
    events = [[_comparable(event) for event in each.events() if event["type"] not in timed] for each in (run, other)]
    assert events[0] == events[1]
    locks = [_comparable({k: v for k, v in each.lock.items() if k != "created"}) for each in (run, other)]
    assert locks[0] == locks[1]


def test_a_plan_is_that_of_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    plan = redline.plan("pretrain-350m", gpu="h100", price=2.5, train={"global_batch": 64})
    command = [sys.executable, "-m", "redline", "plan", "pretrain-350m", "train.global_batch=64"]
    done = subprocess.run([*command, "--gpu", "h100", "--price", "2.5", "--json"], capture_output=True, text=True)
    assert plan.to_dict() == json.loads(done.stdout)
    assert plan.batch.tokens_per_step == plan.fields["batch"]["tokens_per_step"] == 65536
    assert plan.cost_usd == pytest.approx(2.5 * plan.hours, abs=0.01)
    assert "350.4M parameters" in repr(plan)
    assert "350.4M parameters" in plan._repr_html_()
    with pytest.raises(AttributeError, match="throughput"):
        _ = plan.troughput
    with pytest.raises(redline.UserError, match="impossible"):
        redline.plan("pretrain-350m", gpu="h100", target_tokens_per_s=700_000)
    assert capfd.readouterr().out == ""


def test_overrides_have_three_spellings() -> None:
    by_word = redline.Recipe.load("quickstart", "train.steps=5", "model.tied=true", "train.lr=3e-4")
    by_section = redline.Recipe.load("quickstart", train={"steps": 5, "lr": 3e-4}, model={"tied": True})
    by_key = redline.Recipe.load("quickstart", **{"train.steps": 5, "train.lr": 3e-4, "model.tied": True})
    assert by_word.to_dict() == by_section.to_dict() == by_key.to_dict()
    assert by_word.train.steps == 5
    assert by_word.changed(train={"steps": 6}).train.steps == 6
    assert _words({"eval.prompt": "a: b", "data.source": Path("x y"), "train.hours": None}) == [
        'eval.prompt="a: b"',
        'data.source="x y"',
        "train.hours=null",
    ]
    assert redline.Recipe.load("quickstart", **{"eval.prompt": "true: "}).eval.prompt == "true: "


# --- a run


def test_what_a_run_offers(train: Callable[..., redline.Run]) -> None:
    run = train()
    assert (run.status, run.stop_reason, run.metrics["step"]) == (Status.FINISHED, StopReason.STEPS, 4)
    assert [event["step"] for event in run.events("eval")] == [0, 2, 4]
    assert run.metrics["loss"] == run.events("eval")[-1]["loss"]
    assert run.recipe.train.steps == run.lock["recipe"]["train"]["steps"] == 4
    assert run.evaluate()["step"] == 4
    assert run.at(2).evaluate(sequences=2)["step"] == 2
    assert run.sample("red", tokens=5, temperature=0)[0] == run.sample("red", tokens=5, temperature=0)[0]
    model = run.model()
    assert not model.module.training
    assert all(weight.requires_grad for weight in model.module.parameters()), "it can be trained further"
    assert model.tokenizer.decode(model.tokenizer.encode("red line")) == "red line"
    assert model.sample("red", tokens=5, temperature=0) == [run.sample("red", tokens=5, temperature=0)[0].text]
    assert (run.export("out") / "model.safetensors").is_file()
    assert run.report() == run.path / "report.html"
    assert run.name in repr(run)
    assert "<svg" in run._repr_html_()
    assert redline.open_run("latest").path.resolve() == run.path.resolve()
    more = run.resume("train.steps=6", show=False)
    assert more.metrics["step"] == 6


def test_events_become_a_table(train: Callable[..., redline.Run]) -> None:
    pytest.importorskip("pandas")
    table = train().events("step").to_pandas()
    assert list(table["step"]) == [1, 2, 3, 4]


def test_text_becomes_tokens_for_training(corpus: Path) -> None:
    summary = redline.prepare(corpus, "tokens", tokenizer="bytes")
    assert summary["train"]["tokens"] > 0
    with pytest.raises(redline.UserError, match="not an empty folder"):
        redline.prepare(corpus, "tokens", tokenizer="bytes")


# --- nothing is left behind


def test_two_trainings_leave_nothing_behind(train: Callable[..., redline.Run], capfd: Any) -> None:
    handlers = [signal.getsignal(number) for number in SIGNALS]
    threads = set(threading.enumerate())
    first, second = train(), train()
    assert first.path != second.path
    assert first.metrics["loss"] == second.metrics["loss"]
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert set(threading.enumerate()) <= threads
    assert capfd.readouterr().out == ""


def test_outside_the_main_thread_no_signal_is_handled(train: Callable[..., redline.Run]) -> None:
    runs: list[redline.Run] = []
    seen: list[bool] = []
    before = signal.getsignal(signal.SIGTERM)

    class Watch:
        def on_step(self, event: redline.StepEvent) -> None:
            seen.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=lambda: runs.append(train(callbacks=[Watch()])))
    thread.start()
    thread.join()
    assert runs[0].status is Status.FINISHED
    assert seen == [True] * 4


def test_an_interrupt_saves_and_returns(train: Callable[..., redline.Run]) -> None:
    class Interrupt:
        def on_step(self, event: redline.StepEvent) -> None:
            if event.step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    run = train("checkpoint.every=1000", callbacks=[Interrupt()])
    assert run.stop_reason is StopReason.INTERRUPTED
    assert (run.path / "checkpoints/step-00000002").is_dir()
    assert run.resume(show=False).metrics["step"] == 4


@pytest.fixture
def python_handles_interrupts() -> Iterator[None]:
    """Undo the handler of a command that ran in this process, as tests of the command line do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_interrupt_reaches_the_program(
    train: Callable[..., redline.Run], python_handles_interrupts: None
) -> None:
    class Interrupt:
        def on_step(self, event: redline.StepEvent) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(callbacks=[Interrupt()])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- without torch


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run Python with everything that is installed here except torch and what needs it."""
    import torch

    installed, folder = Path(torch.__file__).parents[1], tmp_path_factory.mktemp("site")
    for entry in installed.iterdir():
        if not entry.name.startswith(("torch", "functorch", "triton", "__editable__", "redline")):
            (folder / entry.name).symlink_to(entry)
    source = Path(redline.__file__).parents[1]

    def run(code: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{folder}"}
        return subprocess.run([sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True)

    return run


def test_planning_and_reading_runs_need_no_torch(
    train: Callable[..., redline.Run], without_torch: Callable[[str], subprocess.CompletedProcess[str]]
) -> None:
    run = train()
    done = without_torch(
        f"""
import importlib.util
assert importlib.util.find_spec("torch") is None
import redline
assert redline.plan("pretrain-350m", gpu="h100").batch["global"] == 128
run = redline.open_run({str(run.path)!r})
assert run.status == "finished" and len(run.events("step")) == 4
print(run, run.report("page.html"), run._repr_html_()[:5], run.recipe.train.steps)
"""
    )
    assert done.returncode == 0, done.stderr
    assert "finished, step 4" in done.stdout


def test_importing_the_library_is_quick_and_prints_nothing() -> None:
    code = "import time; t = time.process_time(); import redline, sys; dir(redline)\n"
    code += "assert not {'torch', 'pydantic', 'redline.api'} & set(sys.modules); assert time.process_time() - t < 0.1"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_function_stays_one_after_every_submodule_is_imported() -> None:
    for module in pkgutil.walk_packages(redline.__path__, "redline."):
        if "__main__" not in module.name and ".triton" not in module.name:
            importlib.import_module(module.name)
    for name in redline.__all__:
        assert callable(getattr(redline, name)), name


# --- mistakes


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: redline.train("quickstart", resume="latest"), "resume= takes no recipe"),
        (lambda: redline.train(resume="latest", run="x"), "resume= one that exists"),
        (lambda: redline.train("quickstart", trian={"steps": 1}), "train"),
        (lambda: redline.train("quickstart", **{"train.steps": object()}), "no recipe key takes"),
        (lambda: redline.train("quickstart", data=3), "no path and no iterable"),
        (lambda: redline.train("quickstart", data="notes", fingerprint="x"), "rows from Python"),
        (lambda: redline.train("quickstart", callbacks="abc"), "not a list of callbacks"),
        (lambda: redline.open_run("nowhere"), "nowhere"),
        (lambda: redline.Recipe.load("quickstart", "train.stepz=1", "train.lrr=2"), "2 problems"),
        (lambda: redline.Recipe.load("qickstart"), "quickstart"),
        (lambda: redline.register_job("job"), "is not a job"),
        (lambda: redline.Run("nowhere").evaluate(), "moved or removed"),
        (lambda: redline.Run("nowhere").stop(), "moved or removed"),
    ],
)
def test_a_mistake_is_an_error_with_its_fix(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(redline.UserError, match=words) as caught:
        call()
    assert caught.value.what
    assert caught.value.fix or "problems" in vars(caught.value)
    assert not list(Path().iterdir()), "nothing is written"


def test_an_error_of_a_recipe_has_every_problem_and_fix() -> None:
    with pytest.raises(redline.RecipeError) as caught:
        redline.plan("quickstart", train={"stepz": 1, "lrr": 2})
    assert [problem.key for problem in caught.value.problems] == ["train.stepz", "train.lrr"]
    assert caught.value.fix == "Did you mean 'train.steps'? Did you mean 'train.lr'?"
    assert caught.value.where == "quickstart"


def test_a_misspelt_section_of_a_recipe_is_answered() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'train'"):
        _ = redline.Recipe.load("quickstart").trian


def test_a_run_at_an_older_checkpoint_is_not_resumed(train: Callable[..., redline.Run]) -> None:
    run = train()
    with pytest.raises(redline.UserError, match="newest checkpoint"):
        run.at(2).resume("train.steps=6", show=False)
    assert run.metrics["step"] == 4


def test_an_unknown_option_of_an_evaluation_is_refused(train: Callable[..., redline.Run]) -> None:
    with pytest.raises(redline.UserError, match="'answers'"):
        train().evaluate(answer="match")


# --- rows from Python


ROWS = [{"text": f"red line {number * number} token block {number}. " * 4} for number in range(120)]


def test_rows_from_python_are_trained_on_and_resumed(train: Callable[..., redline.Run], tmp_path: Path) -> None:
    class Stop:
        def on_step(self, event: redline.StepEvent) -> None:
            if event.step == 2:
                raise redline.StopTraining

    run = train(data=iter(ROWS), fingerprint="squares", callbacks=[Stop()])
    assert (run.metrics["step"], run.lock["python"]) == (2, {"data": "squares"})
    whole = train(data=iter(ROWS), fingerprint="squares")

    def never() -> Iterator[dict[str, str]]:
        raise AssertionError("rows that are known by their fingerprint are not read again")
        yield {}

    more = train(resume=run, data=never(), fingerprint="squares")
    weights = [load_file(r.path / "checkpoints/step-00000004/model.safetensors") for r in (more, whole)]
    assert all(np.array_equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert more.evaluate(sequences=4)["loss"] == pytest.approx(more.metrics["loss"])


def test_a_dict_for_data_is_the_section_of_the_recipe(train: Callable[..., redline.Run], corpus: Path) -> None:
    run = train(data={"source": str(corpus), "val_fraction": 0.2})
    assert (run.recipe.data.source, run.recipe.data.val_fraction) == (str(corpus), 0.2)
    assert run.lock.get("python") is None
    with pytest.raises(redline.UserError, match=r"data\.sauce"):
        train(data={"sauce": str(corpus)})


def test_a_run_is_evaluated_on_rows_from_python(train: Callable[..., redline.Run], tmp_path: Path) -> None:
    run = train(f"data.source={tmp_path / 'rows.jsonl'}", data=ROWS)
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:40]))
    by_rows, by_file = run.evaluate(data=ROWS[:40]), run.evaluate(data="same.jsonl")
    assert by_rows["loss"] == by_file["loss"]
    assert run.evaluate(data=[row["text"] for row in ROWS[:40]])["loss"] == by_file["loss"]
    with pytest.raises(redline.UserError, match="no rows"):
        run.evaluate(data=[])


def test_the_command_line_refuses_a_run_that_needs_python(train: Callable[..., redline.Run], capsys: Any) -> None:
    run = train(data=[row["text"] for row in ROWS], metrics={"one": lambda model: 1.0})
    assert run.metrics["one"] == 1.0
    done = subprocess.run(
        [sys.executable, "-m", "redline", "train", "--resume", str(run.path), "train.steps=6"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "redline.train(resume=" in done.stderr
    assert run.lock["python"]["data"] in done.stderr
    with pytest.raises(redline.UserError, match="metrics"):
        train(resume=run)
    other = [row["text"].upper() for row in ROWS]
    with pytest.raises(redline.UserError, match="fingerprint"):
        train(resume=run, data=other, metrics={"one": lambda model: 1.0})
    assert len(run.events("start")) == 1


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no rows"),
        ([{"text": "a"}, 3], "row 2 is a int"),
        ([{"text": "a"}, "b"], "row 2 is a str"),
        ([{"text": {1, 2}}], "row 1 cannot be written as JSON"),
    ],
)
def test_rows_that_cannot_be_read_are_named(train: Callable[..., redline.Run], rows: list[Any], words: str) -> None:
    with pytest.raises(redline.UserError, match=words):
        train(data=rows)
    assert not Path("runs").exists()
