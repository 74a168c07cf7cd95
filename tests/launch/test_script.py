"""The SLURM script: its options, the environment of the ranks, and what it does when they end."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redline.errors import UsageError
from redline.launch.cluster import Cluster
from redline.launch.slurm import clock, job_name, parse_time

# everything that bash and sbatch give a meaning to, and what is beyond ASCII
NASTY = st.text(st.sampled_from("ab=é☃ \t\n'\"\\$`!*?[]{}()<>|&;#~%^,.-"), max_size=20)
SITE = Cluster.model_validate(
    {
        "account": "physics",
        "partition": "gpu",
        "gpu_type": "h100",
        "cpus_per_gpu": 12,
        "modules": ["cuda/12.6", "gcc 13"],
        "environment": {"NCCL_SOCKET_IFNAME": "ib0", "ODD": "a $HOME 'b' \"c\""},
        "setup": ["ulimit -c 0"],
        "sbatch": ["--mem=0", "--exclusive"],
    }
)


def asked(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


def test_the_sbatch_options(job: Any, tmp_path: Path) -> None:
    lines = asked(job(nodes=2, ranks_per_node=8, seconds=43_200, cluster=SITE).script())
    assert lines == [
        "--job-name=toy",
        "--account=physics",
        "--partition=gpu",
        "--nodes=2",
        "--ntasks-per-node=8",
        "--gpus-per-node=h100:8",
        "--cpus-per-task=12",
        "--time=12:00:00",
        "--signal=B:USR1@300",
        "--open-mode=append",
        f"--chdir={tmp_path}",
        "--output=%x-%j.log",
        "--requeue",
        "--mem=0",
        "--exclusive",
    ]


def test_no_site_settings_are_assumed(job: Any) -> None:
    script = job(nodes=2, ranks_per_node=8).script()
    for word in ("account", "partition", "qos", "IFNAME", "module", "eth0", "--time"):
        assert word not in script


def test_gres_requests_and_none_on_a_cpu(job: Any) -> None:
    gres = job(cluster=SITE.model_copy(update={"gpu_request": "gres"}), ranks_per_node=4)
    assert "--gres=gpu:h100:4" in asked(gres.script())
    cpu = job(ranks_per_node=2, on_gpus=False).script()
    assert "--cpus-per-task=1" in asked(cpu)
    assert "--cpus-per-task=5" in asked(job(cpus=5, on_gpus=False).script())
    assert "gpu" not in cpu.lower()
    assert "NCCL" not in cpu


@pytest.mark.parametrize(("seconds", "notice"), [(None, 300), (43_200, 300), (600, 150)])
def test_the_notice_is_at_most_a_quarter_of_the_time(job: Any, seconds: int | None, notice: int) -> None:
    assert f"--signal=B:USR1@{notice}" in asked(job(seconds=seconds).script())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nodes": 4, "ranks_per_node": 8, "seconds": 7200, "run": "a run $(x)"},
        {"cluster": SITE, "nodes": 2},
        {"cluster": SITE.model_copy(update={"venv": "/shared/my env"}), "on_gpus": False, "ranks_per_node": 2},
        {"cluster": Cluster.model_validate({"container": {"image": "a b.sif", "mounts": ["/data"]}})},
        {"cluster": Cluster.model_validate({"container": {"image": "r#x", "runtime": "pyxis", "mounts": "/d"}})},
    ],
    ids=["plain", "large", "site", "venv", "apptainer", "pyxis"],
)
def test_shellcheck_accepts_the_script(job: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "script.sh"
    path.write_text(job("toy", "eval.prompt=it's $HOME & `x`", **options).script())
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    if shutil.which("shellcheck") is None:
        pytest.skip("bash -n passed; there is no shellcheck here")
    done = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(override=NASTY, run=NASTY.filter(lambda text: text.isprintable() and text.strip("./ ")), value=NASTY)
def test_words_arrive_unchanged(node: Any, job: Any, override: str, run: str, value: str) -> None:
    """Recipe, run and the site's variables pass through bash unchanged, whatever they contain."""
    site = Cluster.model_validate({"environment": {"ODD": " ".join(value.split())}})
    made = job("a recipe.yaml", f"eval.prompt={override}", run=run, cluster=site, nodes=2)
    done = node.run(made.script(), {"code": 0}, watch=("ODD",))
    assert done.returncode == 0, done.stderr
    assert node.trained() == [["a recipe.yaml", f"eval.prompt={override}", "--run", run, "--continue"]]
    assert node.environment()["ODD"] == " ".join(value.split())
    assert sorted(path.name for path in node.folder.iterdir()) == [], "nothing else was run"


def test_the_environment_of_every_rank(node: Any, job: Any) -> None:
    node.run(job(nodes=2).script(), {"code": 0})
    seen = node.environment()
    assert seen["OMP_NUM_THREADS"] == "3"
    assert seen["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert seen["MASTER_ADDR"] == "first"
    assert seen["REDLINE_SUPERVISED"] == "1", "the task watches its rank, the script begins again"
    assert 10_000 <= int(seen["MASTER_PORT"]) < 30_000
    assert int(seen["REDLINE_DEADLINE"]) == 2_000_000_000 - 30, "squeue's end of the job"
    node.run(job(nodes=2).script(), {"code": 0}, SLURM_JOB_END_TIME="1900000000", NCCL_DEBUG="INFO")
    assert int(node.environment()["REDLINE_DEADLINE"]) == 1_900_000_000 - 30
    assert node.environment()["NCCL_DEBUG"] == "INFO", "a variable that is already set stays"


def test_one_task_for_each_rank(node: Any, job: Any) -> None:
    node.run(job(nodes=2, ranks_per_node=8).script(), {"code": 0})
    words = node.called("srun")[0]
    assert {"--kill-on-bad-exit=1", "--wait=0", "--cpus-per-task=3", "--gpu-bind=none", "--label"} <= set(words)


def test_containers(node: Any, job: Any, tmp_path: Path) -> None:
    box = {"image": "/img/a b.sif", "mounts": ["/data", "/x:/y"]}
    node.run(job(cluster=Cluster.model_validate({"container": box})).script(), {"code": 0})
    command = ["apptainer", "exec", "--nv", "--bind", "/data", "--bind", "/x:/y", "/img/a b.sif", "python3"]
    assert shlex.join(command) in shlex.join(node.called("srun")[0])
    pyxis = Cluster.model_validate({"container": {**box, "runtime": "pyxis"}})
    node.run(job(cluster=pyxis).script(), {"code": 0})
    mounts = f"--container-mounts={tmp_path}:{tmp_path},/data:/data,/x:/y"
    assert {"--container-image=/img/a b.sif", mounts} <= set(node.called("srun")[0])


def test_a_preempted_job_is_requeued_and_continues(node: Any, job: Any) -> None:
    script = job("toy", "train.steps=9").script()
    done = node.run(script, {"code": 75, "makes": ["lock.json", "checkpoints/step-00000004/x"]})
    assert node.called("scontrol")[-1] == ["requeue", "7"]
    assert "requeueing the job" in done.stderr
    node.run(script, {"code": 0})
    words = ["toy", "train.steps=9", "--run", "runs/toy-7", "--continue"]
    assert node.trained() == [words], "the same directory; --continue decides between start and resume"


def test_the_notice_signal_is_forwarded(node: Any, job: Any) -> None:
    """The job is requeued even if the signal kills ranks that have no handler yet."""
    for code in (75, 138):
        node.run(job().script(), {"code": code, "signal": True})
        assert node.called("scontrol")[-1] == ["requeue", "7"]
        assert len(node.called("srun")) == 1


@pytest.mark.parametrize("code", [0, 2, 130])
def test_some_exit_codes_are_final(node: Any, job: Any, code: int) -> None:
    assert node.run(job().script(), {"code": code}).returncode == code
    assert [words[0] for words in node.called("scontrol")] == ["show"]


def test_a_cancelled_job_stays_cancelled(node: Any, job: Any) -> None:
    assert node.run(job().script(), {"code": 75, "state": "COMPLETING"}).returncode == 75
    assert [words[0] for words in node.called("scontrol")] == ["show"]


def test_a_lost_rank_is_restarted_in_the_same_job(node: Any, job: Any) -> None:
    turns = [{"code": 137, "makes": ["lock.json", f"checkpoints/step-{n:08d}/x"]} for n in range(4)]
    done = node.run(job().script(), *turns, {"code": 0})
    assert done.returncode == 0
    assert node.trained() == [["toy", "--run", "runs/toy-7", "--continue"]] * 5
    assert "the ranks exited with 137" in done.stderr
    why = [seen.get("REDLINE_RECOVERY") for name, _, seen in node.calls if name == "srun"]
    assert why == [None, *["the ranks exited with 137"] * 4], "an event of the run"
    ports = [seen["MASTER_PORT"] for name, _, seen in node.calls if name == "srun"]
    assert len(set(ports)) == 5, "the last ones may still be held"
    assert node.called("sleep") == [["10"], ["20"], ["30"], ["40"]]


def test_the_notice_between_two_attempts_requeues(node: Any, job: Any) -> None:
    done = node.run(job().script(), {"code": 137, "woken": True}, {"code": 0})
    assert node.called("scontrol")[-1] == ["requeue", "7"]
    assert len(node.called("srun")) == 1, "no further step is started"
    assert "requeueing the job" in done.stderr


def test_a_controller_that_does_not_answer_is_ignored(node: Any, job: Any) -> None:
    (node.place / "bin" / "squeue").write_text("#!/bin/sh\nexit 1\n")
    assert node.run(job().script(), {"code": 137, "makes": ["lock.json"]}, {"code": 0}).returncode == 0
    assert len(node.called("srun")) == 2


def test_a_job_without_progress_gives_up(node: Any, job: Any) -> None:
    done = node.run(job().script(), *[{"code": 1, "makes": ["checkpoints/step-00000004/x"]}] * 9)
    assert done.returncode == 1
    assert len(node.called("srun")) == 3
    assert "giving up" in done.stderr


def test_a_new_failure_record_counts_as_progress(node: Any, job: Any) -> None:
    """Out of memory: each attempt records it, and the next one uses a smaller micro-batch."""
    turns = [{"code": 1, "notes": ["trouble/rank-0.jsonl"]} for _ in range(5)]
    assert node.run(job().script(), *turns, {"code": 0}).returncode == 0
    assert len(node.called("srun")) == 6


def test_a_job_without_progress_is_not_requeued_for_ever(node: Any, job: Any) -> None:
    answers = [node.run(job().script(), {"code": 75}) for _ in range(3)]
    assert [bool("giving up" in done.stderr) for done in answers] == [False, False, True]
    assert not (node.folder / "runs/toy-7/.ends").exists(), "submitting the job again starts the count again"
    assert [words[0] for words in node.called("scontrol")] == ["show"]


def test_a_site_that_refuses_to_requeue(node: Any, job: Any) -> None:
    done = node.run(job().script(), {"code": 75}, requeues=False)
    assert done.returncode == 75
    assert "redline train --resume runs/toy-7" in done.stderr


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("12:00:00", 43_200), ("1-12:30:00", 131_400), ("90m", 5400), ("12h", 43_200), ("2d", 172_800), ("1.5h", 5400)],
)
def test_times(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds
    assert parse_time(clock(seconds)) == seconds


@pytest.mark.parametrize("text", ["12", "12:00", "", "soon", "-5h", "1-12", "60s", "0h", "12;rm"])
def test_ambiguous_times_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--time"):
        parse_time(text)


def test_job_names() -> None:
    assert job_name("my recipe; rm -rf $HOME\n#SBATCH") == "my-recipe-rm--rf-HOME-SBATCH"
    assert job_name("…") == "redline"


def test_a_folder_with_a_line_break_is_refused(job: Any) -> None:
    with pytest.raises(UsageError, match="cannot be written into a script"):
        job(run="a\n#SBATCH --account=other").script()
