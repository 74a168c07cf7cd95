"""Jobs of other launchers than SLURM: a SkyPilot task, and a Kubernetes Job with what belongs to it.

Both run `redline train --continue --supervise` on each node. The supervisors restart what fails; the launcher starts a
pod or a machine again after exit code 75, or after its machine is gone, and `--continue` resumes the run.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from redline.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USAGE, UsageError, UserError
from redline.launch.cluster import Cluster
from redline.launch.processes import DEFAULT_PORT

KUBERNETES, SKYPILOT = "k8s", "skypilot"
_VOLUME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*):(/[^\s:]*)")
_GRACE_S = 300  # for the last save after SIGTERM; the same as cluster.yaml's default notice
_RETRIES = 20  # failures that are neither a preemption nor a lost machine
_NAME_LENGTH = 50  # Kubernetes allows 63 characters; pods add the index and a suffix
_RECIPE_FOLDER = "/etc/redline"  # in a pod: where the recipe's file is mounted
# `onExitCodes` knows no other way to end a Job at once: repeating a wrong recipe would end the same way.
_FINAL_CODES = [EXIT_USAGE, EXIT_INTERRUPTED]


@dataclass(frozen=True)
class Volume:
    """A disk that every node sees: a persistent volume claim, or a volume of SkyPilot."""

    name: str
    path: str


@dataclass(frozen=True)
class CloudJob:
    recipe: tuple[str, ...]  # the recipe and its overrides
    name: str
    folder: Path  # where the command was typed
    cluster: Cluster
    nodes: int = 1
    gpus: int = 1  # on each node; with `on_gpus` false: processes
    on_gpus: bool = True
    cpus: int | None = None  # per rank
    gpu: str | None = None  # the kind, for SkyPilot
    image: str | None = None
    volume: Volume | None = None
    spot: bool = False
    run: str | None = None  # None: runs/NAME on the volume
    mirror: bool = False  # the recipe copies checkpoints to object storage
    file: str | None = None  # the text of the recipe, if it is a file and not a shipped one
    local_data: bool = False  # the recipe reads a folder or a file of this machine

    @property
    def run_path(self) -> str:
        root = "" if self.volume is None else f"{self.volume.path.rstrip('/')}/"
        return self.run or f"{root}runs/{self.name}"

    def words(self, recipe: tuple[str, ...]) -> list[str]:
        """Return the command of each node, without its place among the nodes."""
        options = ["--run", self.run_path, "--continue", "--supervise"]
        return ["redline", "train", *recipe, *options, *(["--gpus", str(self.gpus)] if self.gpus > 1 else [])]

    def check(self) -> None:
        """Raise UsageError if a restarted job would not find its run."""
        if self.volume is not None or self.run is not None:
            return
        if self.nodes > 1:
            what = f"{self.nodes} nodes need a run directory that each of them sees."
            raise UsageError(what, where="--volume", fix="Add --volume NAME:/data, or --run DIR on a disk they share.")
        if not self.mirror:
            what = "a restarted job begins with an empty disk, and the run would be lost."
            fix = "Add checkpoint.mirror=s3://BUCKET/FOLDER or --volume NAME:/data."
            raise UsageError(what, where="--volume", fix=fix)


def parse_volume(text: str) -> Volume:
    match = _VOLUME.fullmatch(text)
    if not match:
        raise UsageError(
            f"{text!r} is not NAME:/PATH.", where="--volume", fix="Use, for example, --volume training:/data."
        )
    return Volume(match[1], match[2])


# ----------------------------------------------------------------------------------------------------
# Kubernetes: an Indexed Job, whose index is the number of the node.


def kubernetes_documents(job: CloudJob) -> list[dict[str, Any]]:
    """Return the Job, and before it the service by which its pods find each other and the recipe's file."""
    image = job.image or job.cluster.kubernetes.image
    if image is None:
        fix = "Add --image REGISTRY/NAME:TAG, or kubernetes: {image: …} to cluster.yaml; the Dockerfile builds one."
        raise UsageError("Kubernetes needs an image in which redline is installed.", where="--image", fix=fix)
    job.check()
    if job.local_data:
        what = "the recipe reads data of this machine, which no pod sees."
        fix = "Copy them to the volume, and set data.source to their path there."
        raise UsageError(what, where="data.source", fix=fix)
    name = kubernetes_name(job.name)
    site = job.cluster.kubernetes
    metadata = {"name": name, **({"namespace": site.namespace} if site.namespace else {})}
    documents: list[dict[str, Any]] = []
    if job.nodes > 1:
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the pods look for each other before they train
            "selector": {"batch.kubernetes.io/job-name": name},
            "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}],
        }
        documents.append({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
    if job.file is not None:
        data = {f"{job.name}.yaml": job.file}
        documents.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    spec = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": _RETRIES,
        "podFailurePolicy": {
            "rules": [
                # A drained or lost machine, and a run that has saved and asks to be resumed: not counted as failures.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [EXIT_PREEMPTED]}},
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": _FINAL_CODES}},
            ]
        },
        "template": {"spec": _pod(job, name, image)},
    }
    return [*documents, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}]


def _pod(job: CloudJob, name: str, image: str) -> dict[str, Any]:
    site = job.cluster.kubernetes
    recipe = job.recipe if job.file is None else (f"{_RECIPE_FOLDER}/{job.name}.yaml", *job.recipe[1:])
    words, environment = job.words(recipe), dict(job.cluster.environment)
    index: list[dict[str, Any]] = []
    if job.nodes > 1:
        words += ["--nodes", str(job.nodes)]
        environment |= {"MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": str(DEFAULT_PORT)}
        source = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        index = [{"name": "NODE_RANK", "valueFrom": source}]
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    if job.volume is not None:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": job.volume.name}})
        mounts.append({"name": "data", "mountPath": job.volume.path})
    if job.file is not None:
        volumes.append({"name": "recipe", "configMap": {"name": name}})
        mounts.append({"name": "recipe", "mountPath": _RECIPE_FOLDER, "readOnly": True})
    if job.on_gpus and job.gpus > 1:  # NCCL's segments do not fit into the 64 MiB that a container has by default
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    cpus = (job.cpus or (job.cluster.cpus_per_gpu if job.on_gpus else 1)) * job.gpus
    resources: dict[str, Any] = {"requests": {"cpu": str(cpus)}}
    if job.on_gpus:
        resources["limits"] = {"nvidia.com/gpu": str(job.gpus)}
    container = {
        "name": "train",
        "image": image,
        "command": words[:1],
        "args": words[1:],
        "env": [*index, *({"name": key, "value": value} for key, value in environment.items())],
        **({"envFrom": [{"secretRef": {"name": site.secret}}]} if site.secret else {}),
        "resources": resources,
        "volumeMounts": mounts,
    }
    return {
        **({"subdomain": name} if job.nodes > 1 else {}),
        "restartPolicy": "Never",  # podFailurePolicy needs it; the Job itself replaces the pod
        "terminationGracePeriodSeconds": _GRACE_S,
        **({"serviceAccountName": site.service_account} if site.service_account else {}),
        **({"nodeSelector": dict(site.node_selector)} if site.node_selector else {}),
        "containers": [container],
        "volumes": volumes,
    }


def kubernetes_name(name: str) -> str:
    """Return the name as Kubernetes allows it: lower-case letters, digits and hyphens, a letter first."""
    allowed = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "redline"
    return (allowed if allowed[0].isalpha() else f"run-{allowed}")[:_NAME_LENGTH].strip("-")


# ----------------------------------------------------------------------------------------------------
# SkyPilot: a managed job, which gets new machines after a preemption.


_PLACE = '--nodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK" --master "${SKYPILOT_NODE_IPS%%$\'\\n\'*}"'


def skypilot_task(job: CloudJob) -> dict[str, Any]:
    site = job.cluster.skypilot
    image = job.image or site.image
    if image is None and not job.cluster.setup:
        fix = "Add --image NAME:TAG, or to cluster.yaml skypilot: {image: …} or setup: [commands that install redline]."
        raise UsageError("SkyPilot needs an image or commands that install redline.", where="--image", fix=fix)
    gpu = job.gpu or job.cluster.gpu_type
    if job.on_gpus and gpu is None:
        raise UsageError("SkyPilot needs the kind of GPU.", where="--gpu", fix="Add, for example, --gpu h100.")
    job.check()
    cpus = (job.cpus or (job.cluster.cpus_per_gpu if job.on_gpus else 1)) * job.gpus
    resources: dict[str, Any] = {
        **({"infra": site.infra} if site.infra else {}),
        **({"accelerators": f"{gpu.upper()}:{job.gpus}"} if job.on_gpus and gpu else {}),
        "cpus": f"{cpus}+",
        "use_spot": job.spot,
        **({"image_id": f"docker:{image}"} if image else {}),
        "job_recovery": {"max_restarts_on_errors": _RETRIES, "recover_on_exit_codes": [EXIT_PREEMPTED]},
    }
    command = shlex.join(job.words(job.recipe))
    return {
        "name": kubernetes_name(job.name),
        "num_nodes": job.nodes,
        "resources": resources,
        **({"workdir": str(job.folder)} if job.file is not None or job.local_data else {}),
        **({"volumes": {job.volume.path: job.volume.name}} if job.volume else {}),
        **({"envs": dict(job.cluster.environment)} if job.cluster.environment else {}),
        **({"setup": "\n".join(job.cluster.setup) + "\n"} if job.cluster.setup else {}),
        "run": f"exec {command} {_PLACE}\n" if job.nodes > 1 else f"exec {command}\n",
    }


# ----------------------------------------------------------------------------------------------------
# Text and submission.


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and nothing as a reference to another part."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def render(job: CloudJob, target: str) -> str:
    """Return the file for kubectl or sky."""
    documents = kubernetes_documents(job) if target == KUBERNETES else [skypilot_task(job)]
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return f"# Written by `redline launch --to {target}`; see docs/launchers.md.\n{text}"


def submission(target: str, file: str) -> list[str]:
    """Return the command that submits the file."""
    if target == KUBERNETES:
        return ["kubectl", "apply", "--filename", file]
    return ["sky", "jobs", "launch", "--yes", "--detach-run", file]


def submit(target: str, file: Path) -> None:
    """Submit the file. Raise UserError if the tool is missing or refuses."""
    words = submission(target, str(file))
    if shutil.which(words[0]) is None:
        fix = f"Where it is installed, type: {shlex.join(words)}"
        raise UserError(f"{words[0]} is not installed on this machine.", where="--submit", fix=fix)
    if code := subprocess.run(words, check=False).returncode:
        fix = f"Correct what it says above, then type: {shlex.join(words)}"
        raise UserError(f"{words[0]} ended with exit code {code}.", where="--submit", fix=fix)
