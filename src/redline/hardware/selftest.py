"""Test what torch can do on this machine: `python -m redline.hardware.selftest NAME …`.

Each test computes with a tiny tensor. The tests run in a child process, because a driver that does not fit torch can
crash or hang the process. `run_selftests` starts that child and survives whatever happens to it; this module imports
torch in the child only. The child writes one line of JSON for each test, as soon as the test has ended.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.cache import cache_dir

if TYPE_CHECKING:
    import torch

# test name → {"works": bool, "about": result} or {"works": False, "detail": first line, "whole": whole error}
Answers = dict[str, dict[str, Any]]

CAPABILITIES = ("bf16", "fp8", "cudnn", "flash", "efficient", "flex", "compile")  # these need a GPU
_SECONDS = {"torch": 60, "flex": 120, "compile": 120, "probe": 120}  # time limits; the other tests take milliseconds
_DEFAULT_SECONDS = 30
_PROCESS_SECONDS = 300.0  # the child enforces the limits above; this one is for a child that cannot even do that
_CUDA_ERROR = "CUDA error"  # after one, every further CUDA call in the same process fails


# --- the parent


def run_selftests(names: list[str], command: list[str] | None = None) -> Answers:
    """Run the named tests and return the answer of each.

    If a test kills its process, run the remaining ones in a new process. A test that needs a GPU has no answer on a
    machine without one.
    """
    command = command or [sys.executable, "-P", "-m", "redline.hardware.selftest"]
    answers: Answers = {}
    waiting = list(names)
    while waiting:
        given, failure, finished = _run_process(command, waiting)
        answers |= given
        if finished:
            break
        waiting = [name for name in waiting if name not in answers]
        if failure and waiting:
            # The first test without an answer is the one that killed the process.
            killer = waiting.pop(0)
            answers[killer] = {"works": False, "detail": failure, "whole": failure}
            if killer == "torch":  # torch cannot be imported, so no other test can run either
                break
    return answers


def _run_process(command: list[str], names: list[str]) -> tuple[Answers, str, bool]:
    """Run one child. Return its answers, why it died (empty if it did not), and whether all tests were run."""
    process = subprocess.Popen(
        [*command, *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_child_environment(),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=_PROCESS_SECONDS)
        timed_out = "Timeout (" in err  # written by faulthandler
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        (out, err), timed_out = process.communicate(), True
    answers = dict(answer for line in out.splitlines() if (answer := _parse_answer(line)))
    if timed_out:
        return answers, "timed out", False
    if process.returncode < 0:
        return answers, f"crashed ({signal.Signals(-process.returncode).name})", False
    if process.returncode:
        last = [line for line in err.splitlines() if line.strip()][-1:]
        return answers, last[0].strip()[:160] if last else f"exited with code {process.returncode}", False
    # After a CUDA error the child ends early, so that the remaining tests run in a new process.
    return answers, "", not any(_CUDA_ERROR in str(answer.get("whole")) for answer in answers.values())


def _parse_answer(line: str) -> tuple[str, dict[str, Any]] | None:
    try:
        answer = json.loads(line)
        return str(answer.pop("test")), answer
    except (ValueError, KeyError, AttributeError, TypeError):
        return None  # a line that some library printed


def _child_environment() -> dict[str, str]:
    source = str(Path(__file__).parents[2])
    path = [source, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir() / "compile"),  # the same folder as in training
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of compile workers could outlive the test
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
    }


# --- the child


def _describe_torch() -> dict[str, Any]:
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "available": available,
        "architectures": torch.cuda.get_arch_list() if available else [],
        "error": str(caught[-1].message).splitlines()[0] if caught else "",
    }


def _test_bf16() -> None:
    import torch

    a = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    _check_finite(a @ a)


def _test_fp8() -> None:
    import torch

    a, b = (torch.randn(64, 64, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    _check_finite(torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16))


def _test_sdpa(backend: str) -> Callable[[], None]:
    def test() -> None:
        import torch.nn.functional as F
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = _attention_inputs()
        with sdpa_kernel(getattr(SDPBackend, backend)):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            out.sum().backward()
        _check_finite(q.grad)

    return test


def _test_flex() -> None:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = _attention_inputs()
    blocks = create_block_mask(lambda b, h, query, key: query >= key, None, None, 128, 128, device="cuda")
    out: Any = torch.compile(flex_attention, dynamic=False)(q, k, v, block_mask=blocks)
    out.sum().backward()
    _check_finite(q.grad)


def _test_compile() -> None:
    import torch

    x = torch.randn(256, device="cuda", requires_grad=True)
    torch.compile(lambda x: (x.sin() * x).sum())(x).backward()
    _check_finite(x.grad)


def _measure_rates() -> dict[str, Any]:
    import torch

    from redline.hardware.probe import measure_and_store

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {"device": device, "rates": measure_and_store(device)}


SELFTESTS: dict[str, Callable[[], dict[str, Any] | None]] = {
    "torch": _describe_torch,
    "bf16": _test_bf16,
    "fp8": _test_fp8,
    "cudnn": _test_sdpa("CUDNN_ATTENTION"),
    "flash": _test_sdpa("FLASH_ATTENTION"),
    "efficient": _test_sdpa("EFFICIENT_ATTENTION"),
    "flex": _test_flex,
    "compile": _test_compile,
    "probe": _measure_rates,
}


def _attention_inputs() -> list[torch.Tensor]:
    import torch

    shape = (1, 2, 128, 64)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def _check_finite(out: torch.Tensor | None) -> None:
    if out is None or not bool(out.isfinite().all()):
        raise ArithmeticError("the result is not finite")


def main(names: list[str]) -> None:
    import torch  # here, so that an import error ends the process and not each test on its own

    for name in names:
        if name in CAPABILITIES and not torch.cuda.is_available():
            continue
        # faulthandler ends the process even if a driver call hangs, which no Python exception could interrupt.
        faulthandler.dump_traceback_later(_SECONDS.get(name, _DEFAULT_SECONDS), exit=True)
        answer: dict[str, Any]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer = {"works": True, "about": SELFTESTS[name]()}
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            answer = {"works": False, "detail": lines[0][:160] if lines else type(error).__name__, "whole": str(error)}
        print(json.dumps({"test": name, **answer}), flush=True)
        if _CUDA_ERROR in str(answer.get("whole")):
            break
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1:])
