"""`redline doctor`: the real command on this machine, and on one that is broken."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXPECTED = {
    "python", "torch", "cuda", "nccl", "gpu", "bf16", "fp8", "cuDNN attention", "flash attention",
    "efficient attention", "flex attention", "torch.compile", "memory", "cores", "/dev/shm", "cache disk", "runs disk",
    "bitsandbytes", "torchao", "transformers", "pyarrow", "zstandard", "datasets", "wandb", "tensorboard", "tiktoken",
    "HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE", "REDLINE_CACHE",
}  # fmt: skip


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("clean")
def test_this_machine(inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_never_shown")
    answer = inside("doctor", "--json")
    assert "hf_never_shown" not in answer.out + answer.err
    report = json.loads(answer.out)
    lines = {check["name"]: check for check in report["checks"]}
    assert lines.keys() >= EXPECTED
    assert lines["HF_TOKEN"]["detail"] == "set"
    assert lines["python"]["status"] == lines["torch"]["status"] == "ok"
    assert all(set(check) == {"name", "status", "detail", "fix"} for check in lines.values())
    failed = [check for check in lines.values() if check["status"] == "fail"]
    assert answer.code == (1 if failed else 0)
    assert report["ok"] is not bool(failed)
    assert report["measured"] is None
    extras = {extra["name"]: extra for extra in report["extras"]}
    assert all(
        f"extra {name}" in lines and set(extra) == {"name", "missing", "recipes", "fix"}
        for name, extra in extras.items()
    )
    assert {"lora-8b", "qlora-smollm2"} <= {*extras["finetune"]["recipes"]} & {*extras["data"]["recipes"]}
    assert extras["low-bit"]["recipes"] == ["lora-8b", "qlora-8b"]
    assert all(bool(extra["missing"]) == bool(extra["fix"]) for extra in extras.values())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("clean")
def test_plain_when_piped_and_quick(redline: Any, tmp_path: Path) -> None:
    begin = time.perf_counter()
    answer = redline("doctor", cwd=tmp_path)
    seconds = time.perf_counter() - begin
    assert answer.code == 0, answer.out
    assert "\x1b" not in answer.out
    *lines, counts = answer.out.splitlines()
    columns = [line for line in lines if not line.lstrip().startswith("→")]
    assert {line[:4].strip() for line in columns} <= {"ok", "warn", "fail"}
    assert len(columns) >= len(EXPECTED)
    assert counts.endswith(" 0 fail")
    assert lines[0].index("3.") == next(line for line in columns if " torch " in line).index("2.")
    if "no NVIDIA GPU" in answer.out:
        assert seconds < 8, "four on a quiet machine"


@pytest.mark.usefixtures("clean")
def test_probe_measures_and_keeps(inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    answer = inside("doctor", "--probe", "--json")
    measured = json.loads(answer.out)["measured"]
    assert measured["fp32"] > 1e8
    (entry,) = json.loads((tmp_path / "cache/machine.json").read_text())["entries"].values()
    assert entry["rates"] == measured
    names = [check["name"] for check in json.loads(answer.out)["checks"]]
    assert {"matmul fp32", "matmul bf16", "copy within memory"} <= {*names}


def test_a_failure_is_exit_code_1_with_its_fix(inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.hardware import facts as collected

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(collected.shutil, "disk_usage", lambda _: collected.shutil._ntuple_diskusage(10, 9, 1 << 20))
    answer = inside("doctor")
    assert answer.code == 1
    assert "Traceback" not in answer.err
    assert "fail  cache disk" in answer.out
    assert "set REDLINE_CACHE to another folder" in answer.out


def test_a_broken_torch_is_a_sentence(inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.hardware import trials

    def no_torch(*_: Any) -> tuple[dict[str, Any], str, bool]:
        return {}, "ImportError: libtorch_cpu.so: cannot open shared object file", False

    monkeypatch.setattr(trials, "_run_process", no_torch)
    answer = inside("doctor", "--json")
    assert answer.code == 1
    lines = {check["name"]: check for check in json.loads(answer.out)["checks"]}
    assert lines["torch"]["status"] == "fail"
    assert "libtorch_cpu.so" in lines["torch"]["detail"]
    assert "make setup" in lines["torch"]["fix"]


def test_the_script_of_the_checkout_is_the_same(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/diagnose_gpu.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert "redline doctor" in done.stdout
