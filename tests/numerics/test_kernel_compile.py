"""Every block kernel compiles for Hopper, here, without a GPU: the interpreter forgives what the compiler does not.

Launches at real sizes are caught on their way to the device (on meta tensors: no memory) and compiled instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TYPES = {"torch.bfloat16": "*bf16", "torch.float16": "*fp16", "torch.float32": "*fp32"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Facts of each compiled kernel. In a process of its own: Triton interprets or compiles, not both."""
    pytest.importorskip("triton", reason="the kernels need triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_every_kernel_compiles(compiled: list[dict[str, Any]]) -> None:
    names = {(kernel["module"], kernel["kernel"]) for kernel in compiled}
    assert names == {
        ("rms_norm", "_forward"),
        ("rms_norm", "_backward"),
        ("rotary", "_rotate"),
        ("rotary", "_merge"),
        ("swiglu", "_forward"),
        ("swiglu", "_backward"),
    }


def test_large_tensors_move_16_bytes_at_a_time(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        if kernel["large"]:
            assert "ld.global.v4.b32" in kernel["ptx"], kernel["kernel"]
            assert "st.global.v4.b32" in kernel["ptx"], kernel["kernel"]
            assert "ld.global.b16" not in kernel["ptx"], kernel["kernel"]


def test_no_kernel_spills_registers(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        assert ".local" not in kernel["ptx"], kernel["kernel"]
        assert kernel["spilled"] == 0, kernel["kernel"]


def compile_launch(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """As a launch would on a card of capability 9.0: ones are constants, multiples of 16 are known as such."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    named = dict(zip(kernel.arg_names, arguments, strict=False))
    constants = {name: options[name] for name in kernel.arg_names if name in options}
    constants |= {name: value for name, value in named.items() if isinstance(value, int) and value == 1}
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = named.get(name)
        if name in constants:
            signature[name] = "constexpr"
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, int):
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            assert value is not None
            signature[name] = TYPES[str(value.dtype)]
            attributes[(place,)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": options["num_warps"]})


def spilled_bytes(ptx: str) -> int:
    import re
    import tempfile

    import triton

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [str(ptxas), "-v", "-arch=sm_90a", str(file), "-o", str(file.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(number) for number in re.findall(r"(\d+) bytes spill stores", said))


def main() -> None:
    import torch
    from triton.runtime.jit import JITFunction

    from redline.kernels import rms_norm_triton, rotary_triton, swiglu_triton

    found = []
    large = True

    def catch(self: Any, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            ptx = compile_launch(self, arguments, options).asm["ptx"]
            module = self.__module__.rsplit(".", 1)[1].removesuffix("_triton")
            facts = {"module": module, "kernel": self.__name__, "large": large, "ptx": ptx}
            found.append(facts | {"spilled": spilled_bytes(ptx)})

        return launch

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, device="meta", dtype=dtype)

    JITFunction.__getitem__ = catch  # type: ignore[method-assign]
    for n, d, f, length, heads, kv_heads, k in (
        (131072, 1024, 2688, 1024, 16, 16, 64),
        (8192, 4096, 14336, 4096, 32, 8, 128),
        (1, 7, 9, 1, 1, 1, 2),  # what is one becomes a constant
    ):
        large = n > 1
        x, weight, rstd = empty(n, d), empty(d, dtype=torch.float32), empty(n, dtype=torch.float32)
        for other in (x, None):
            rms_norm_triton.add_rms_norm(x, other, weight, 1e-5)
            rms_norm_triton.rms_norm_backward(x, x, rstd, weight, other)
        swiglu_triton.swiglu(empty(n, 2 * f))
        swiglu_triton.swiglu_backward_(empty(n, f), empty(n, 2 * f))
        table = empty(length, k // 2, dtype=torch.float32)
        batch = n // length
        rotary_triton.rotate_qkv_(empty(batch, length, (heads + 2 * kv_heads) * k), table, table, heads, kv_heads, k)
        q, kv = empty(batch, heads, length, k), empty(batch, kv_heads, length, k)
        rotary_triton.merge_rotated_gradients(q, kv, kv, table, table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
