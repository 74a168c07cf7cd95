"""`redline launch --to k8s` and `--to skypilot`: valid files, commands that run, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from schemas import KEPT, derive

from redline.cli.main import run as run_command
from redline.errors import UsageError
from redline.launch.cloud import CloudJob, kubernetes_documents, kubernetes_name, parse_volume, render, skypilot_task
from redline.launch.cluster import Cluster
from redline.launch.processes import Nodes, read_nodes

SITE = Cluster.model_validate(
    {
        "gpu_type": "h100",
        "environment": {"NCCL_SOCKET_IFNAME": "eth0"},
        "setup": ["pip install ./redline.whl"],
        "kubernetes": {
            "namespace": "training",
            "secret": "bucket",
            "service_account": "trainer",
            "node_selector": {"gpu": "h100"},
        },
        "skypilot": {"infra": "aws/us-east-1"},
    }
)
SMALL = CloudJob(("toy", "checkpoint.mirror=s3://b/x"), "toy", Path("/work"), Cluster(), image="redline:1", mirror=True)
LARGE = CloudJob(
    recipe=("my toy.yaml", "eval.prompt=it's $HOME"),
    name="my-toy",
    folder=Path("/work"),
    cluster=SITE,
    nodes=2,
    gpus=8,
    image="redline:1",
    volume=parse_volume("disk:/data"),
    spot=True,
    file="train:\n  steps: 3\n",
)
ON_CPUS = replace(LARGE, on_gpus=False, file=None, gpus=1)


def every_job() -> list[list[dict[str, Any]]]:
    return [kubernetes_documents(job) for job in (SMALL, LARGE, ON_CPUS)]


def every_task() -> list[dict[str, Any]]:
    return [skypilot_task(job) for job in (replace(SMALL, gpu="h100"), LARGE, ON_CPUS)]


def test_files_follow_the_schemas() -> None:
    """As text, which is what kubectl and sky read."""
    kept = json.loads(KEPT.read_text())
    for job in (SMALL, LARGE, ON_CPUS):
        for document in yaml.safe_load_all(render(job, "k8s")):
            jsonschema.validate(document, kept[document["kind"]])
    for job in (replace(SMALL, gpu="h100"), LARGE, ON_CPUS):
        task = yaml.safe_load(render(job, "skypilot"))
        jsonschema.validate(task, kept["task"])
        jsonschema.validate(task["resources"], kept["resources"])


def test_the_kept_schemas_refuse_what_is_wrong() -> None:
    kept = json.loads(KEPT.read_text())
    job, task = kubernetes_documents(SMALL)[-1], skypilot_task(LARGE)
    job["spec"]["backofLimit"] = 3
    task["num_nodes"] = "2"
    for kind, wrong in (("Job", job), ("task", task)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, kept[kind])


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_kept_schemas_are_those_of_the_packages() -> None:
    """Kubernetes' OpenAPI (strict) and SkyPilot's own parser judge the files as well."""
    assert derive(every_job(), every_task()) == json.loads(KEPT.read_text())


def test_pods_that_were_preempted_or_lost_are_replaced() -> None:
    *others, job = kubernetes_documents(LARGE)
    assert [document["kind"] for document in others] == ["Service", "ConfigMap"]
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    rules = {rule["action"]: [] for rule in spec["podFailurePolicy"]["rules"]}
    for rule in spec["podFailurePolicy"]["rules"]:
        rules[rule["action"]] += rule.get("onExitCodes", {}).get("values", ["DisruptionTarget"])
    assert rules == {"Ignore": ["DisruptionTarget", 75], "FailJob": [2, 130]}
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy has no effect with another"
    service = others[0]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"], "or the pods have no names"
    assert service["spec"]["publishNotReadyAddresses"]


def test_the_place_of_a_pod_is_read_by_train() -> None:
    container = kubernetes_documents(LARGE)[-1]["spec"]["template"]["spec"]["containers"][0]
    given = {entry["name"]: entry.get("value", "1") for entry in container["env"]}
    assert read_nodes(2, None, None, given, repeatable=True) == Nodes(2, 1, "my-toy-0.my-toy", 29500)
    assert container["args"] == [
        *("train", "/etc/redline/my-toy.yaml", "eval.prompt=it's $HOME", "--run", "/data/runs/my-toy"),
        *("--continue", "--supervise", "--gpus", "8", "--nodes", "2"),
    ]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert "limits" not in kubernetes_documents(ON_CPUS)[-1]["spec"]["template"]["spec"]["containers"][0]["resources"]


def test_the_run_script_of_a_skypilot_node(tmp_path: Path) -> None:
    """bash runs it, with a `redline` that writes down its words."""
    (tmp_path / "redline").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "redline").chmod(0o755)
    node = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6"}
    environment = {**os.environ, **node, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", skypilot_task(LARGE)["run"]], env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [
        *("train", "my toy.yaml", "eval.prompt=it's $HOME", "--run", "/data/runs/my-toy", "--continue", "--supervise"),
        *("--gpus", "8", "--nodes", "2", "--node-rank", "1", "--master", "10.0.0.5"),
    ]


def test_a_preempted_skypilot_job_is_recovered() -> None:
    task = skypilot_task(LARGE)
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert task["resources"]["use_spot"]
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["workdir"] == "/work", "the recipe is a file"
    assert "workdir" not in skypilot_task(replace(SMALL, gpu="h100"))


@pytest.mark.parametrize(
    ("make", "job", "where"),
    [
        (kubernetes_documents, replace(SMALL, image=None), "--image"),
        (kubernetes_documents, replace(SMALL, mirror=False), "--volume"),
        (kubernetes_documents, replace(SMALL, nodes=2), "--volume"),
        (kubernetes_documents, replace(SMALL, local_data=True), "data.source"),
        (skypilot_task, replace(SMALL, image=None), "--image"),
        (skypilot_task, SMALL, "--gpu"),
        (skypilot_task, replace(SMALL, gpu="h100", mirror=False), "--volume"),
    ],
)
def test_jobs_that_could_not_run_or_resume_are_refused(make: Any, job: CloudJob, where: str) -> None:
    with pytest.raises(UsageError) as refused:
        make(job)
    assert refused.value.where == where
    assert refused.value.fix


@pytest.mark.parametrize("text", ["data", "data:path", ":/data", "a b:/data", "data:/a:b"])
def test_a_volume_needs_a_name_and_a_path(text: str) -> None:
    with pytest.raises(UsageError, match="--volume"):
        parse_volume(text)


def test_names_for_kubernetes() -> None:
    assert kubernetes_name("My_recipe.v2") == "my-recipe-v2"
    assert len(kubernetes_name("a" * 90)) == 50
    assert kubernetes_name("…") == "redline"
    assert kubernetes_name("350m") == "run-350m", "the name of a service begins with a letter"


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Run `redline launch` in a folder with a recipe; return the exit code and both outputs."""
    (tmp_path / "toy.yaml").write_text("model: {layers: 1, d_model: 32, heads: 2, d_ff: 64}\ntrain: {steps: 3}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def type_command(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["redline", "launch", "toy.yaml", "train.device=cpu", *words])
        code = run_command()
        return (code, *capfd.readouterr())

    return type_command


def test_the_command_prints_or_writes_the_file(typed: Any, tmp_path: Path) -> None:
    words = ("--to", "k8s", "--image", "redline:1", "--volume", "disk:/data")
    code, printed, _ = typed(*words)
    assert code == 0
    assert [document["kind"] for document in yaml.safe_load_all(printed)] == ["ConfigMap", "Job"]
    code, out, err = typed(*words, "--out", "job.yaml")
    assert (code, out) == (0, "")
    assert (tmp_path / "job.yaml").read_text() == printed
    assert "kubectl apply --filename job.yaml" in err


@pytest.mark.parametrize(("to", "tool"), [("k8s", "kubectl"), ("skypilot", "sky")])
def test_submitting_without_the_tool_names_the_command(typed: Any, tmp_path: Path, to: str, tool: str) -> None:
    words = ("--to", to, "--image", "redline:1", "--volume", "disk:/data", "--submit")
    code, _, err = typed(*words)
    assert code == 1
    assert f"{tool} is not installed on this machine." in err
    file = tmp_path / f"toy.{to}.yaml"
    assert file.name in err.splitlines()[-1], "the command to type elsewhere"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / tool).write_text('#!/bin/sh\necho "$@" >asked\n')
    (tmp_path / "bin" / tool).chmod(0o755)
    assert typed(*words)[0] == 0
    assert (tmp_path / "asked").read_text().split()[-1] == file.name


@pytest.mark.parametrize(
    "words",
    [
        ("--to", "k8s"),
        ("--to", "k8s", "--image", "a", "checkpoint.mirror=file:///tmp"),
        ("--to", "k8s", "--image", "a", "--volume", "a:/b", "--time", "3h"),
        ("--to", "k8s", "--image", "a", "--volume", "a:/b", "--spot"),
        ("--to", "skypilot", "--image", "a", "--volume", "a:/b", "--partition", "p"),
        ("--image", "a"),
        ("--to", "docker"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_sentence(typed: Any, words: tuple[str, ...]) -> None:
    code, out, err = typed(*words)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1


def test_a_recipe_outside_of_the_folder_is_refused(typed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    (tmp_path / "inner" / "toy.yaml").symlink_to(tmp_path / "toy.yaml")
    code, _, err = typed("--to", "k8s", "--image", "a", "--volume", "a:/b")
    assert code == 2
    assert str(tmp_path) in err
