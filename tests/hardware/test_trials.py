"""Whatever a trial does to its process, the doctor lives and the other trials are made."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from redline.hardware.collect import run_trials

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
        print(json.dumps(dict(trial=name, **answer)), flush=True)
        break
    print(json.dumps(dict(trial=name, works=True, about=os.getpid())), flush=True)
"""


def answers(*names: str) -> dict[str, dict[str, Any]]:
    return run_trials(list(names), [sys.executable, "-c", CHILD])


def test_all_is_well_in_one_process() -> None:
    given = answers("one", "two", "skipped", "three")
    assert [*given] == ["one", "two", "three"]
    assert len({answer["about"] for answer in given.values()}) == 1


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("segfault", "crashed (SIGSEGV)"),
        ("hang", "did not answer in time"),
        ("exit", "OSError: libcudart.so is missing"),
        ("poison", "CUDA error"),
    ],
)
def test_one_bad_trial_spoils_no_other(bad: str, says: str) -> None:
    given = answers("one", bad, "two", "three")
    assert given[bad]["works"] is False
    assert given[bad]["detail"] == says
    assert given["one"]["works"]
    assert given["two"]["about"] == given["three"]["about"] != given["one"]["about"]


def test_everything_bad() -> None:
    given = answers("segfault", "poison", "exit")
    assert [answer["works"] for answer in given.values()] == [False] * 3


def test_a_torch_that_cannot_be_imported_is_not_tried_again() -> None:
    broken = [sys.executable, "-c", "raise ImportError('libtorch.so is missing')"]
    given = run_trials(["torch", "bf16", "flash"], broken)
    assert [*given] == ["torch"]
    assert given["torch"]["detail"] == "ImportError: libtorch.so is missing"


def test_the_real_trials_have_nothing_to_try_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from redline.hardware.collect import TRIED, _torch
    from redline.hardware.trial import TRIALS

    assert {*TRIALS} == {"torch", "probe", *TRIED}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    given = run_trials(["torch", *TRIED])
    assert [*given] == ["torch"]
    about = _torch(given)
    assert about.version == torch.__version__
    assert not about.available
