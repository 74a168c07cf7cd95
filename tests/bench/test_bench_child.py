"""The reason that is shown for a failed child process."""

from __future__ import annotations

import sys

import pytest

from redline.bench.child import ChildError, _run

CUDA = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
torch.AcceleratorError: CUDA error: an illegal memory access was encountered
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (CUDA, "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
        ("warning: slow\nredline: train.lr: -1 is not above 0.\n", "train.lr: -1 is not above 0."),
        ("ValueError: of an attempt\nredline: no room.", "no room."),
        ("Killed", "Killed"),
        ("", "exit status 3"),
    ],
    ids=["advice after it", "ours", "ours after another's", "no exception", "silent"],
)
def test_the_line_that_says_why(output: str, message: str) -> None:
    program = "import sys; sys.stderr.write(sys.stdin.read()); sys.exit(3)"
    with pytest.raises(ChildError) as raised:
        _run([sys.executable, "-c", program], output)
    assert str(raised.value) == message
