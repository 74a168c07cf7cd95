"""`redline train --nodes`: which node a command is, and two machines of which one is lost."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hosts import TwoHosts, why_no_hosts

from redline.errors import EXIT_FAILED, EXIT_PREEMPTED, UsageError
from redline.launch.processes import LOG, ONE_NODE, Nodes, read_nodes
from redline.runs.events import read_events
from redline.training import supervisor
from redline.training.checkpoint import committed_steps
from redline.training.supervisor import LOST, REFUSED

TIMEOUT, STEPS = 10, 2000
RECIPE = f"""
model: {{layers: 2, d_model: 32, heads: 2, d_ff: 64}}
data: {{source: CORPUS, tokenizer: bytes, seq_len: 32, workers: 1}}
train: {{device: cpu, precision: fp32, compile: false, epochs: null, steps: {STEPS}, global_batch: 8, micro_batch: 4}}
eval: {{every: 100000, sequences: 4, samples: 0}}
checkpoint: {{every: 50, keep: 2, best: false}}
monitor: {{log_every: 1}}
parallel: {{timeout: {TIMEOUT}}}
"""


def nodes(count: int | None = 2, rank: int | None = 1, master: str | None = "a:7", **environment: str) -> Nodes:
    return read_nodes(count, rank, master, environment, repeatable=True)


def test_the_place_of_a_node_is_an_option_or_a_variable() -> None:
    variables = {"NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "4000"}
    assert nodes(2, None, None, **variables) == Nodes(2, 1, "node0", 4000)
    assert nodes(2, 0, "other", **variables) == Nodes(2, 0, "other", 4000), "an option takes precedence"
    assert nodes(2, 0, "other:1", **variables) == Nodes(2, 0, "other", 1)
    assert nodes(2, 0, "fe80::1").host == "fe80::1"
    assert nodes(None, None, None, **variables) == nodes(1, None, None, **variables) == ONE_NODE
    assert (ONE_NODE.log, nodes().log) == (LOG, "ranks-1.log"), "the nodes share the folder"


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"rank": 2}, "--node-rank"),
        ({"rank": None}, "--node-rank"),
        ({"rank": None, "NODE_RANK": "x"}, "--node-rank"),
        ({"master": None}, "--master"),
        ({"master": ":7"}, "--master"),
        ({"master": "a:x"}, "--master"),
        ({"master": "a:0"}, "--master"),
        ({"count": 1, "master": None}, None),
        ({"count": None, "rank": None}, None),
    ],
)
def test_a_place_that_is_not_possible_is_refused(options: dict[str, Any], where: str | None) -> None:
    with pytest.raises(UsageError) as refused:
        nodes(**options)
    assert refused.value.where == where


def test_several_nodes_need_a_run_that_each_of_them_can_join() -> None:
    with pytest.raises(UsageError) as refused:
        read_nodes(2, 0, "a", {}, repeatable=False)
    assert "--run DIR --continue" in str(refused.value.fix)


class Ended:
    """An attempt whose torchrun has ended before any rank began."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def poll(self) -> int:
        return EXIT_FAILED

    def end(self, pids: Any) -> None:
        return


@pytest.mark.parametrize(("several", "why"), [(False, REFUSED), (True, LOST)])
def test_nodes_that_do_not_meet_try_again(tmp_path: Path, several: bool, why: str) -> None:
    with supervisor.SignalForwarder() as signals:
        result = supervisor.Watcher(Ended(tmp_path), signals, 1.0, several).run()
    assert (result.why, result.recoverable) == (why, several)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoHosts]:
    if problem := why_no_hosts():
        pytest.skip(problem)
    with TwoHosts(tmp_path) as made:
        yield made


def until(condition: Callable[[], Any], seconds: float, describe: Callable[[], str]) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := condition():
            return answer
        time.sleep(0.05)
    raise AssertionError(f"after {seconds:.0f} s: {describe()}")


@dataclass
class TwoCommands:
    """`redline train --nodes 2` on two hosts."""

    two: TwoHosts
    recipe: Path

    @property
    def run(self) -> Path:
        return self.recipe.with_name("run")

    def start(self, number: int) -> Any:
        words = ["--run", str(self.run), "--continue", "--supervise", "--nodes", "2", "--node-rank", str(number)]
        command = [sys.executable, "-m", "redline", "train", str(self.recipe), *words, "--master", "host0"]
        return self.two.hosts[number].start(command, self.log(number), OMP_NUM_THREADS="1")

    def log(self, number: int) -> Path:
        return self.recipe.with_name(f"log-{number}")

    def committed(self) -> int:
        return max(committed_steps(self.run / "checkpoints"), default=0) if self.run.exists() else 0

    def describe(self) -> str:
        return "\n".join(self.log(number).read_text()[-3000:] for number in range(2))


@pytest.fixture
def commands(two: TwoHosts, corpus: Path, tmp_path: Path) -> TwoCommands:
    recipe = tmp_path / "toy.yaml"
    recipe.write_text(
        RECIPE.replace("CORPUS", str(corpus)).replace("TIMEOUT", str(TIMEOUT)).replace("STEPS", str(STEPS))
    )
    return TwoCommands(two, recipe)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", [0, 1], ids=["the first is lost", "the second is lost"])
def test_a_run_of_two_hosts_survives_one(commands: TwoCommands, say: Any, lost: int) -> None:
    """The cable is cut and everything on one host ends; later it comes back, and its command is started again."""
    processes = [commands.start(number) for number in range(2)]
    until(lambda: commands.committed() >= 100, 180, commands.describe)
    commands.two.hosts[lost].lose()
    before, begin = commands.committed(), time.monotonic()
    until(lambda: "restarting at step" in commands.log(1 - lost).read_text(), 120, commands.describe)
    noticed = time.monotonic() - begin
    stopped = commands.committed()
    assert stopped >= before, "nothing committed is lost"
    assert processes[1 - lost].poll() is None, "the other host waits"
    commands.two.hosts[lost].repair()
    begin = time.monotonic()
    processes[lost] = commands.start(lost)
    until(lambda: commands.committed() > stopped, 180, commands.describe)
    resumed = time.monotonic() - begin
    assert [process.wait(300) for process in processes] == [0, 0], commands.describe()
    steps = [event["step"] for event in read_events(commands.run / "events.jsonl") if event["type"] == "step"]
    assert steps == list(range(1, STEPS + 1)), "none lost, none repeated"
    say(
        f"host {lost} lost: noticed after {noticed:.1f} s (parallel.timeout {TIMEOUT} s); "
        f"the next checkpoint {resumed:.1f} s after it came back"
    )


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_signal_to_one_host_preempts_both(commands: TwoCommands) -> None:
    """As when one machine of a job is drained: both commands save and ask to be resumed."""
    processes = [commands.start(number) for number in range(2)]
    until(lambda: commands.committed() >= 100, 180, commands.describe)
    processes[1].send_signal(signal.SIGTERM)
    assert [process.wait(120) for process in processes] == [EXIT_PREEMPTED] * 2, commands.describe()
    stop = read_events(commands.run / "events.jsonl").stop
    assert stop is not None
    assert (stop["reason"], stop["step"]) == ("preempted", commands.committed()), "nothing is lost"
