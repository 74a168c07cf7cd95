"""cluster.yaml: its path and its errors; SLURM tasks as ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from redline.cli.rank import exit_code, rank_variables
from redline.errors import RecipeError, UsageError
from redline.launch.cluster import Cluster, cluster_file, read_cluster


def test_the_default_path_of_cluster_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert cluster_file() == tmp_path / ".config/redline/cluster.yaml"
    assert read_cluster() == Cluster(), "no file, no lines"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    assert cluster_file() == tmp_path / "own/redline/cluster.yaml"
    cluster_file().parent.mkdir(parents=True)
    cluster_file().write_text("account: physics\nvenv: ~/env\nmodules: cuda\n")
    found = read_cluster()
    assert (found.account, found.venv, found.modules) == ("physics", str(tmp_path / "env"), ("cuda",))
    with pytest.raises(UsageError, match="no such file"):
        read_cluster(tmp_path / "other.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acount: physics", "acount: is not a key of this file. Did you mean 'account'?"),
        ("account: 12345", "12345 is not text"),
        ('partition: "gpu\\n#SBATCH --account=x"', "is not one line of text"),
        ("sbatch: [mem=0]", "write it as --name=value"),
        ("sbatch: [--nodes=3]", "--nodes is set by `redline launch` itself"),
        ("gpu_request: gpus", "is not one of gpus-per-node, gres"),
        ("cpus_per_gpu: none", "cpus_per_gpu"),
        ("environment: {1A: x}", "'1A' is not a valid name"),
        ("environment: {A: [1]}", "A: [1] is not a text or a number"),
        ("environment: NCCL", "is not a mapping of NAME: value"),
        ("container: redline.sif", "container: is a mapping of keys"),
        ("container: {runtime: pyxis}", "container.image: is missing"),
        ("container: {image: a, mount: b}", "container.mount: is not a key of this file. Did you mean 'mounts'?"),
        ("account: [", "line 1"),
        ("", "is empty"),
    ],
)
def test_mistakes_in_cluster_yaml(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        read_cluster(path)
    assert said in error.value.message()
    assert str(path) in error.value.message()


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("account: 1\nqoss: x\nnotice: 0\n")
    with pytest.raises(RecipeError) as error:
        read_cluster(path)
    assert len(error.value.problems) == 3


def test_slurm_tasks_become_ranks() -> None:
    task = {"SLURM_NTASKS": "16", "SLURM_NNODES": "2", "SLURM_PROCID": "11", "SLURM_LOCALID": "3", "SLURM_NODEID": "1"}
    assert rank_variables(task) == {
        "RANK": "11",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "1",
    }
    assert rank_variables({**task, "SLURM_NTASKS": "1"}) == {}, "one task trains alone"
    assert rank_variables({}) == {}


def test_only_rank_0_reports_preemption() -> None:
    """Else srun would kill rank 0 during its save, as soon as another rank exits with an error."""
    assert exit_code(75, {}) == exit_code(75, {"RANK": "0"}) == 75
    assert exit_code(75, {"RANK": "3"}) == 0
    assert [exit_code(code, {"RANK": "3"}) for code in (0, 1, 2, 130)] == [0, 1, 2, 130]
