"""The low-rank kernels compile for Hopper, without a GPU, to the instructions that they were designed for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.kernels.low_rank import Dropout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Compile in a child process: Triton interprets or compiles, not both."""
    pytest.importorskip("triton", reason="the kernels need triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_wide_operands_go_through_shared_memory_to_the_tensor_cores(compiled: list[dict[str, Any]]) -> None:
    assert {kernel["name"] for kernel in compiled} == {"_project_down", "_weight_gradient", "_input_gradient"}
    for kernel in compiled:
        ptx = kernel["ptx"]
        assert not re.search(r"\b(atom|red)\.", ptx), kernel["name"]  # sums have one order
        assert "div.u32" not in ptx or kernel["name"] == "_input_gradient"
        if kernel["aligned"]:
            assert "wgmma.mma_async" in ptx, kernel["name"]
            if kernel["name"] == "_input_gradient":
                assert "ld.global.v4.b32" in ptx
                assert "st.global.v4.b32" in ptx
            else:  # 16 bytes at a time, while others are multiplied
                copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
                assert set(copies) == {"0x10"}, kernel["name"]


def test_registers_and_shared_memory_suffice(compiled: list[dict[str, Any]]) -> None:
    """Two programs fit on a Hopper SM, which has 227 KiB; one fits on that of a consumer card, which has 99."""
    for kernel in compiled:
        assert kernel["spilled"] == 0, kernel["name"]
        assert kernel["shared"] <= 99 * 1024, kernel["name"]


def test_a_word_is_drawn_for_two_values(compiled: list[dict[str, Any]]) -> None:
    """Of 64×128 values each of 256 threads has 32: sixteen words of two products each, and a few for the rows."""
    for kernel in compiled:
        if kernel["aligned"]:
            drawn = len(re.findall(r"mul\.lo\.s32\s+%\w+, %\w+, -2048144789", kernel["ptx"]))
            rows = drawn - 16 if kernel["drops"] else drawn
            assert 0 < rows <= 8 if kernel["drops"] else rows == 0, kernel["name"]


def main() -> None:
    from test_kernel_compile import assembled, compile_launch
    from triton.runtime.jit import JITFunction

    from redline.kernels.triton import low_rank as low_rank_triton

    found: list[dict[str, Any]] = []

    def catch(self: Any, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            kernel = compile_launch(self, arguments, options)
            facts = {
                "name": self.__name__,
                "ptx": kernel.asm["ptx"],
                "shared": kernel.metadata.shared,
                "aligned": arguments[0].shape[0] % 16 == 0,
                "drops": options["DROPOUT"],
            }
            found.append(facts | assembled(kernel.asm["ptx"]))

        return launch

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, device="meta", dtype=dtype)

    JITFunction.__getitem__ = catch  # type: ignore[method-assign]
    low_rank_triton.sm_count = lambda device: 132
    some, one, eight = Dropout(0.05, 2**61 + 3), empty((), dtype=torch.float32), torch.float8_e4m3fn
    for n, width, rank, dtype, dropout in (
        (16384, 14336, 16, torch.bfloat16, some),
        (16384, 4096, 48, torch.bfloat16, None),
        (16384, 14336, 48, eight, some),
        (1001, 769, 9, torch.bfloat16, some),  # no vectors anywhere
    ):
        x, a, grad = empty(n, width, dtype=dtype), empty(rank, width), empty(n, rank)
        unscale = one if dtype == eight else None
        low_rank_triton.project_down(x, a, dropout, unscale)
        low_rank_triton.project_down_weight_gradient(grad, x, dropout, unscale)
        if dtype != eight:
            low_rank_triton.project_down_input_gradient(grad, a, dropout, empty(n, width) if dropout else None)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
