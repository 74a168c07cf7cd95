"""A self-test that crashes, hangs or poisons its process does not affect the doctor or the other tests."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from redline.hardware.selftest import run_selftests

CHILD = """
import faulthandler, json, os, signal, sys, time
print("a library's own word")
for name in sys.argv[1:]:
    if name == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hang":
        faulthandler.dump_traceback_later(0.2, exit=True)
        time.sleep(60)
    if name == "exit":
        sys.exit("OSError: libcudart.so is missing")
    if name == "skipped":
        continue
    if name == "poison":
        answer = dict(works=False, detail="CUDA error", whole="CUDA error: an illegal memory access")
        print(json.dumps(dict(test=name, **answer)), flush=True)
        break
    print(json.dumps(dict(test=name, works=True, about=os.getpid())), flush=True)
"""


def answers(*names: str) -> dict[str, dict[str, Any]]:
    return run_selftests(list(names), [sys.executable, "-c", CHILD])


def test_all_tests_run_in_one_process() -> None:
    results = answers("one", "two", "skipped", "three")
    assert [*results] == ["one", "two", "three"]
    assert len({answer["about"] for answer in results.values()}) == 1


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("segfault", "crashed (SIGSEGV)"),
        ("hang", "timed out"),
        ("exit", "OSError: libcudart.so is missing"),
        ("poison", "CUDA error"),
    ],
)
def test_a_failing_test_does_not_affect_the_others(bad: str, says: str) -> None:
    results = answers("one", bad, "two", "three")
    assert results[bad]["works"] is False
    assert results[bad]["detail"] == says
    assert results["one"]["works"]
    assert results["two"]["about"] == results["three"]["about"] != results["one"]["about"]


def test_every_test_fails() -> None:
    results = answers("segfault", "poison", "exit")
    assert [answer["works"] for answer in results.values()] == [False] * 3


def test_a_torch_that_cannot_be_imported_ends_the_tests() -> None:
    broken = [sys.executable, "-c", "raise ImportError('libtorch.so is missing')"]
    results = run_selftests(["torch", "bf16", "flash"], broken)
    assert [*results] == ["torch"]
    assert results["torch"]["detail"] == "ImportError: libtorch.so is missing"


def test_the_real_tests_skip_what_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from redline.hardware.facts import _torch_facts
    from redline.hardware.selftest import CAPABILITIES, SELFTESTS

    assert {*SELFTESTS} == {"torch", "probe", *CAPABILITIES}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    results = run_selftests(["torch", *CAPABILITIES])
    assert [*results] == ["torch"]
    about = _torch_facts(results)
    assert about.version == torch.__version__
    assert not about.available
