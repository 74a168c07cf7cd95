"""Every kernel of the blocks compiles for Hopper, without a GPU: the compiler rejects code that the interpreter takes.

Launches at real sizes, on meta tensors that need no memory, are intercepted and compiled instead of run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

SHAPES = (  # tokens, d_model, d_ff, sequence length, heads, kv_heads, head_dim
    (131072, 1024, 2688, 1024, 16, 16, 64),
    (8192, 4096, 14336, 4096, 32, 8, 128),
    (1001, 769, 2689, 7, 6, 2, 80),  # odd sizes: no wide loads or stores anywhere
    (1, 7, 9, 1, 1, 1, 2),  # Triton makes constants of arguments that are 1
)
CORRECTIONS = ("_sums", "_along_inputs", "_along_outputs")  # they read fp8 operands and make none
TYPES = {
    "torch.bfloat16": "*bf16",
    "torch.float16": "*fp16",
    "torch.float32": "*fp32",
    "torch.float8_e4m3fn": "*fp8e4nv",
    "torch.float8_e5m2": "*fp8e5",
    "torch.int32": "*i32",
    "torch.int64": "*i64",
}


@pytest.fixture(scope="module", params=["usual", pytest.param("all", marks=pytest.mark.soak)])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return facts about each compiled kernel, from a child process: Triton interprets or compiles, not both."""
    pytest.importorskip("triton", reason="the kernels need triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, __file__, request.param]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
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
        ("rotary", "_merge_float8"),
        ("activations", "_swiglu"),
        ("activations", "_swiglu_backward"),
        ("activations", "_swiglu8"),
        ("activations", "_swiglu_backward8"),
        ("activations", "_relu2"),
        ("activations", "_relu2_backward"),
        ("activations", "_relu2_8"),
        ("qk_norm", "_forward"),
        ("qk_norm", "_backward"),
        ("skip", "_forward"),
        ("skip", "_backward"),
        ("float8", "_quantise"),
        ("float8", "_transpose"),
        ("float8", "_sums"),
        ("float8", "_along_inputs"),
        ("float8", "_along_outputs"),
        ("cross_entropy", "_losses_and_lse"),
        ("cross_entropy", "_softmax_gradient8"),
        ("muon", "_nesterov"),
        ("muon", "_descend"),
        ("muon", "_times_transposed"),
    }


def test_large_tensors_move_16_bytes_at_a_time(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        name = kernel["kernel"]
        if kernel["large"] and name != "_times_transposed":  # its loads go to shared memory
            assert re.search(r"ld\.global[\w:.]*\.v4\.b32", kernel["ptx"]), name
            # the eight fp8 codes of a thread are 8 bytes
            stored = ("st.global.v2.b32", "st.global.v4.b32") if kernel["float8"] else ("st.global.v4.b32",)
            wide_stores = any(width in kernel["ptx"] for width in stored)
            stores_little = name in ("_losses_and_lse", *CORRECTIONS)
            assert wide_stores or stores_little, name
            if name != "_losses_and_lse":  # it also loads one logit of a row, the target's
                assert "ld.global.b16" not in kernel["ptx"], name


def test_symmetric_products_feed_the_tensor_cores(compiled: list[dict[str, Any]]) -> None:
    """Operands are copied to shared memory 16 bytes at a time, and read from there by Hopper's asynchronous matmuls."""
    found = [kernel["ptx"] for kernel in compiled if kernel["kernel"] == "_times_transposed" and kernel["large"]]
    assert found
    for ptx in found:
        assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" in ptx
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
        assert set(copies) == {"0x10"}
        assert "ld.global" not in ptx
        assert set(re.findall(r"st\.global[\w.]*", ptx)) == {"st.global.v4.b32"}
        assert not re.search(r"\b(atom|red)\.", ptx)


def test_fp8_is_rounded_by_the_hardware(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        # the loss' gradient is in e5m2, which keeps infinity
        if kernel["float8"] and kernel["kernel"] not in ("_softmax_gradient8", "_losses_and_lse", *CORRECTIONS):
            assert "cvt.rn.satfinite.e4m3x2.f32" in kernel["ptx"], kernel["kernel"]
            # the compiler has not removed value·0 + value, which turns infinity into NaN
            assert re.search(r"fma\.rn\.f32\s+%\w+, (%\w+), 0f00000000, \1;", kernel["ptx"]), kernel["kernel"]
            assert "relaxed.max" in kernel["ptx"] or not kernel["large"], kernel["kernel"]


def test_no_instruction_reads_an_unwritten_register(compiled: list[dict[str, Any]]) -> None:
    """ptxas 12.8 makes such code when a converted pair of fp8 codes is used twice."""
    for kernel in compiled:
        if not kernel["odd"]:  # at odd sizes ptxas collects predicates in registers bit by bit
            assert not kernel["unwritten"], kernel["kernel"]


def test_no_kernel_spills_registers(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        assert ".local" not in kernel["ptx"], kernel["kernel"]
        assert kernel["spilled"] == 0 or kernel["odd"], kernel["kernel"]


def compile_launch(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Compile as a launch on a GPU of capability 9.0 would: arguments that are 1 become constants, and multiples of 16
    are marked as such.
    """
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
    chosen = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=chosen)


def assembled(ptx: str) -> dict[str, Any]:
    """Return the bytes of spilled registers, and the instructions that read unwritten registers, after ptxas."""
    import tempfile

    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        log = output([str(tools / "ptxas"), "-v", "-arch=sm_90a", str(source), "-o", str(binary)])
        code = output([str(tools / "cuobjdump"), "--dump-sass", str(binary)])
    spills = re.findall(r"(\d+) bytes spill stores", log)
    return {"spilled": sum(int(number) for number in spills), "unwritten": unwritten(code)}


def output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def unwritten(code: str) -> list[str]:
    """Return the instructions that read a register which no earlier one wrote. PRMT may: it can ignore an operand."""
    written: set[int] = set()
    found = []
    for line in code.splitlines():
        match = re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)\s*(.*?);", line)
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", match[2])] if match else []
        if not match or not registers:
            continue
        kind = match[1]
        reads_all = kind.startswith(("ST", "RED", "BRA", "EXIT", "ISETP", "FSETP", "PLOP3", "R2UR", "BAR"))
        if not kind.startswith("PRMT"):
            found += [line.strip() for number in registers[not reads_all :] if number not in written]
        if not reads_all:
            double = "WIDE" in kind or kind.startswith("CS2R") or (kind.startswith("LD") and ".64" in kind)
            size = 4 if ".128" in kind else 2 if double else 1
            written.update(range(registers[0], registers[0] + size))
    return found


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def launch_blocks(n: int, d: int, f: int, length: int, heads: int, kv_heads: int, k: int) -> None:
    """Launch the kernels of a fused block in half precision."""
    from redline.kernels.triton import activations, qk_norm, rms_norm, rotary, skip

    x, weight, rstd = empty(n, d), empty(d, dtype=torch.float32), empty(n, dtype=torch.float32)
    for other in (x, None):
        rms_norm.add_rms_norm(x, other, weight, 1e-5)
        rms_norm.rms_norm_backward(x, x, rstd, weight, other)
    activations.swiglu(empty(n, 2 * f))
    activations.swiglu_backward_(empty(n, f), empty(n, 2 * f))
    activations.relu2(empty(n, f))
    activations.relu2_backward_(empty(n, f), empty(n, f))
    skip_weight = empty(dtype=torch.float32)
    skip.add_skip(x, x, x, skip_weight)
    skip.add_skip_backward(x, x, skip_weight)
    table, batch = empty(length, k // 2, dtype=torch.float32), n // length
    rotary.rotate_qkv_(empty(batch, length, (heads + 2 * kv_heads) * k), table, table, heads, kv_heads, k)
    q, kv = empty(batch, heads, length, k), empty(batch, kv_heads, length, k)
    rotary.merge_rotated_gradients(q, kv, kv, table, table)
    qkv, norm_weight = empty(batch, length, (heads + 2 * kv_heads) * k), empty(k, dtype=torch.float32)
    _, head_rstd = qk_norm.norm_rotate_qkv(qkv, norm_weight, norm_weight, table, table, heads, kv_heads, 1e-5)
    qk_norm.norm_rotate_backward(q, kv, kv, qkv, head_rstd, norm_weight, norm_weight, table, table)


def launch_float8(n: int, d: int, f: int, length: int, heads: int, kv_heads: int, k: int, *, with_amax: bool) -> None:
    """Launch the kernels that make fp8 operands; `with_amax`: and measure their magnitude."""
    from redline.kernels.float8 import Scale
    from redline.kernels.triton import activations, cross_entropy, float8, rms_norm, rotary

    x, weight, one = empty(n, d), empty(d, dtype=torch.float32), empty(dtype=torch.float32)
    scale = Scale(one, one, one if with_amax else None)
    float8.quantise(x, scale)
    float8.quantise(x.float(), scale)
    operand, matrix = (float8.quantise(empty(rows, d), scale) for rows in (n, f))
    float8.mean_correction(operand, matrix, empty(f, d, dtype=torch.float32))
    gradient = float8.quantise(empty(n, f), scale)
    float8.mean_gradient_correction(gradient, matrix, empty(f, d, dtype=torch.float32))
    activations.swiglu8(empty(n, 2 * f), scale)
    activations.swiglu_backward8(empty(n, f), empty(n, 2 * f), scale)
    activations.relu2_8(empty(n, f), scale)
    activations.relu2_backward8(empty(n, f), empty(n, f), scale)
    table, batch = empty(length, k // 2, dtype=torch.float32), n // length
    q, kv = empty(batch, heads, length, k), empty(batch, kv_heads, length, k)
    rotary.merge_rotated_gradients8(q, kv, kv, table, table, scale)
    for other in (x, None) if d == 1024 else (x,):
        rms_norm.add_rms_norm8(x, other, weight, 1e-5, scale)
    cross_entropy.softmax_loss8(empty(n, f), empty(n, dtype=torch.int64), scale)


def launch_muon(d: int, f: int) -> None:
    from redline.kernels.triton import muon

    one, matrices = empty(dtype=torch.float32), [empty(f, d, dtype=torch.float32)] * 3
    muon.nesterov_(matrices, empty(3, f, d, dtype=torch.float32), one, one, 0.95)
    for scales in (empty(3, f, dtype=torch.float32), None):
        muon.descend_(matrices, empty(3, f, d), scales, one, rate=0.02, decay=0.1, cautious=scales is None)


def launch_symmetric(d: int, f: int, spans: Sequence[int]) -> None:
    from redline.kernels.triton import muon

    for tall in (False, True):
        for span in spans:
            muon.gram(empty(3, f, d), tall=tall, diagonal=0.5, tile=replace(muon.TILE, span=span))


def main() -> None:
    from triton.runtime.jit import JITFunction

    found = []
    large, odd = True, False

    def catch(self: Any, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            ptx = compile_launch(self, arguments, options).asm["ptx"]
            module = self.__module__.rsplit(".", 1)[1]
            float8 = any("float8" in str(getattr(argument, "dtype", "")) for argument in arguments)
            facts = {"module": module, "kernel": self.__name__, "large": large, "odd": odd, "float8": float8}
            found.append(facts | {"ptx": ptx} | assembled(ptx))

        return launch

    JITFunction.__getitem__ = catch  # type: ignore[method-assign]
    for n, d, f, *heads in SHAPES if sys.argv[1] == "all" else SHAPES[:1]:
        large, odd = n % 16 == 0, n > 1 and n % 16 > 0
        launch_blocks(n, d, f, *heads)
        launch_float8(n, d, f, *heads, with_amax=large)
        launch_muon(d, f)
        if d != 4096:  # the code for it is the same as for 1024
            odd = d % 16 > 0  # values are loaded one by one
            launch_symmetric(d, f, (1, 2) if large else (1,))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
