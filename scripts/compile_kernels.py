"""Compile every Triton kernel for the GPUs that redline may meet, without a GPU, and keep a table of what they need.

    make kernels                                            all architectures, by both versions of Triton
    make kernels ARGS=--check                               compare with the table instead of writing it
    make kernels ARGS="--only sm_120 --triton 3.6.0"        a part of it

The table, src/redline/hardware/compiled_kernels.json, holds the registers, the spilled bytes and the shared memory of
each kernel. `redline.hardware.compiled_kernels` reads it and switches off, on each architecture, the kernels that do
not compile there, need more shared memory than there is, or spill registers that the measured binaries do not spill.

A kernel is launched by its own function, with real sizes on meta tensors, which need no memory; the launch is
intercepted and compiled. Each version of Triton is installed into a folder of its own in .kernels/, where the results
are cached, too: by the sources of the kernels, the version and the architecture.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from redline.hardware.compiled_kernels import ARCHITECTURES as CARDS
from redline.hardware.compiled_kernels import TABLE

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".kernels"
TRITONS = ("3.6.0", "3.7.1")  # of torch 2.11's CUDA build, with which everything was measured, and of torch 2.13's
ARCHITECTURES = tuple(architecture for architecture, _ in CARDS.values())

SHAPES = {  # tokens, d_model, d_ff, sequence length, heads, kv_heads, head_dim
    "350m": (131072, 1024, 2688, 1024, 16, 16, 64),
    "8b": (8192, 4096, 14336, 4096, 32, 8, 128),
    "odd": (1001, 769, 2689, 7, 6, 2, 80),  # no wide loads or stores anywhere
    "one": (1, 7, 9, 1, 1, 1, 2),  # Triton makes constants of arguments that are 1
}
REAL = ("350m", "8b")  # the table is of these
TYPES = {
    "torch.bfloat16": "*bf16",
    "torch.float16": "*fp16",
    "torch.float32": "*fp32",
    "torch.float8_e4m3fn": "*fp8e4nv",
    "torch.float8_e5m2": "*fp8e5",
    "torch.uint8": "*u8",
    "torch.int32": "*i32",
    "torch.int64": "*i64",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="compare with the table; write nothing, exit 1 if it differs"
    )
    parser.add_argument("--only", default=",".join(ARCHITECTURES), metavar="SM,SM", help="these architectures")
    parser.add_argument("--triton", default=",".join(TRITONS), metavar="V,V", help="these versions of Triton")
    parser.add_argument("--child", nargs=2, metavar=("ARCHITECTURE", "SHAPES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        architecture, shapes = options.child
        with contextlib.redirect_stdout(sys.stderr):  # Triton prints the errors of ptxas
            facts = compile_all(architecture, shapes.split(","))
        print(json.dumps(facts))
        return
    architectures, versions = options.only.split(","), options.triton.split(",")
    if unknown := [name for name in architectures if name not in ARCHITECTURES]:
        parser.error(f"{unknown[0]} is not a known architecture. Choose from {', '.join(ARCHITECTURES)}.")
    table: dict[str, dict[str, Any]] = {}
    for version in versions:
        for architecture in architectures:
            rows = compiled_rows(version, architecture)
            table.setdefault(version, {})[architecture] = rows
            failed = sum("error" in row for row in rows.values())
            print(f"triton {version}, {architecture}: {len(rows) - failed} compile, {failed} do not", flush=True)
    print(f"\n{markdown(table)}")
    if not options.check:
        write_table(table)
        print(f"\nwritten to {TABLE}")
    elif differences := compare(json.loads(TABLE.read_text()), table):
        print(
            "\nThe table is not what the kernels compile to; run `make kernels` and commit it:",
            *differences,
            sep="\n  ",
        )
        sys.exit(1)


def write_table(table: dict[str, dict[str, Any]]) -> None:
    """Write the table with a line for each kernel; what was not compiled this time keeps its rows."""
    merged = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for version, of_version in table.items():
        merged[version] = {**merged.get(version, {}), **of_version}
    text = re.sub(r"\{\s+((?:\"(?:registers|spilled|shared|error)\"[^{}]*))\}", _one_line, json.dumps(merged, indent=1))
    TABLE.write_text(text + "\n")


def _one_line(row: re.Match[str]) -> str:
    return "{" + " ".join(row[1].split()) + "}"


def compare(committed: dict[str, Any], found: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each row of `found` that the committed table does not have."""
    differences = []
    for version, of_version in found.items():
        for architecture, rows in of_version.items():
            before = committed.get(version, {}).get(architecture, {})
            differences += [
                f"triton {version}, {architecture}, {kernel}: {before.get(kernel)} in the table, {rows.get(kernel)} now"
                for kernel in sorted({*before, *rows})
                if before.get(kernel) != rows.get(kernel)
            ]
    return differences


def markdown(table: dict[str, dict[str, Any]]) -> str:
    """Return the table for people: registers · spilled bytes · KiB of shared memory, the larger of the versions."""
    architectures = list(next(iter(table.values())))
    kernels = sorted({name for of_version in table.values() for rows in of_version.values() for name in rows})
    lines = [f"| kernel | {' | '.join(architectures)} |", "|---|" + "---:|" * len(architectures)]
    for kernel in kernels:
        cells = []
        for architecture in architectures:
            rows = [of_version[architecture].get(kernel, {"error": "–"}) for of_version in table.values()]
            if any("error" in row for row in rows):
                cells.append("does not compile")
            else:
                registers, spilled, shared = (
                    max(row[key] for row in rows) for key in ("registers", "spilled", "shared")
                )
                cells.append(f"{registers} · {spilled} · {shared / 1024:.1f}")
        lines.append(f"| `{kernel}` | {' | '.join(cells)} |")
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------
# The parent: one child for each version of Triton and architecture.


def compiled_rows(version: str, architecture: str) -> dict[str, dict[str, Any]]:
    """Return the rows of the table for this version and architecture, from the cache if the kernels are the same."""
    cached = CACHE / f"{version}-{architecture}-{sources_digest()}.json"
    if cached.exists():
        rows: dict[str, dict[str, Any]] = json.loads(cached.read_text())
        return rows
    facts = run_child(architecture, REAL, triton_folder(version))
    rows = table_rows(facts)
    CACHE.mkdir(exist_ok=True)
    cached.write_text(json.dumps(rows))
    return rows


def sources_digest() -> str:
    """Return a digest of everything that decides what is compiled."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted((ROOT / "src/redline/kernels").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def triton_folder(version: str) -> Path | None:
    """Return a folder that holds this version of Triton, installed if it is not there; None if the environment does."""
    from importlib import metadata

    if any(package.version == version for package in metadata.distributions(name="triton")):
        return None
    folder = CACHE / f"triton-{version}"
    if not (folder / "triton").exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as fresh:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            try:
                subprocess.run([*command, "--target", f"{fresh}/new", f"triton=={version}"], check=True)
            except subprocess.CalledProcessError:
                sys.exit(f"triton {version} could not be installed into {folder}. Install it there with pip --target.")
            Path(f"{fresh}/new").rename(folder)
    return folder


def run_child(architecture: str, shapes: Sequence[str], triton: Path | None = None) -> list[dict[str, Any]]:
    """Compile in a child process, because Triton either interprets or compiles, and return the facts of each launch."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = [*([str(triton)] if triton else []), str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    with tempfile.TemporaryDirectory() as folder:
        environment["TRITON_CACHE_DIR"] = folder
        command = [sys.executable, __file__, "--child", architecture, ",".join(shapes)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the kernels could not be compiled for {architecture}: {done.stderr[-2000:]}")
    facts: list[dict[str, Any]] = json.loads(done.stdout)
    return facts


def table_rows(facts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return a row for each kernel: the most that any of its launches needs."""
    rows: dict[str, dict[str, Any]] = {}
    for launch in facts:
        name = f"{launch['module']}.{launch['kernel']}" + " on fp8" * launch["float8"]
        if "error" in launch or "error" in rows.get(name, {}):
            rows[name] = {"error": rows.get(name, launch).get("error", launch.get("error"))}
            continue
        row = rows.setdefault(name, {"registers": 0, "spilled": 0, "shared": 0})
        for key in row:
            row[key] = max(row[key], launch[key])
    return dict(sorted(rows.items()))


# ----------------------------------------------------------------------------------------------------
# The child: intercept the launches, and compile each.


def compile_all(architecture: str, shapes: Sequence[str]) -> list[dict[str, Any]]:
    """Compile every launch at these shapes. Return facts about each, its PTX among them, or the compiler's error."""
    from triton.runtime.jit import JITFunction

    import redline.kernels.triton.low_rank as low_rank

    found: list[dict[str, Any]] = []
    shape = ""

    def catch(self: Any, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            float8 = any("float8" in str(getattr(argument, "dtype", "")) for argument in arguments)
            facts = {
                "module": self.__module__.rsplit(".", 1)[1],
                "kernel": self.__name__,
                "shape": shape,
                "float8": float8,
            }
            facts |= {"drops": bool(options.get("DROPOUT")), "limited": bool(options.get("LIMITED"))}
            try:
                kernel = compile_launch(self, arguments, options, architecture)
                found.append(facts | {"ptx": kernel.asm["ptx"], "shared": kernel.metadata.shared})
                found[-1] |= assembled(kernel, architecture)
            except Exception as error:
                found.append(facts | {"error": compiler_error(error)})

        return launch

    JITFunction.__getitem__ = catch  # type: ignore[method-assign]
    low_rank.sm_count = lambda device: 132
    for shape in shapes:
        launch_all(shape)
    return found


def compiler_error(error: Exception) -> str:
    """Return what the compiler says, without the source around it and without temporary paths, which always differ."""
    text = str(error.__cause__ or error)
    if assembler := re.search(r"ptxas [^\n]*?(?:error|fatal)\s*: ([^\n]+)", text):
        return f"ptxas: {assembler[1]}"[:160]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = re.sub(r"\s+", " ", lines[-1] if lines else type(error).__name__)
    return re.sub(r"""^\w+\((["'])(.*)\1\)$""", r"\2", last)[:160]


def compile_launch(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], architecture: str) -> Any:
    """Compile as a launch on the GPU would: arguments that are 1 become constants, and multiples of 16 are marked."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    named = dict(zip(kernel.arg_names, arguments, strict=False))
    named |= {name: options[name] for name in kernel.arg_names if name in options and name not in named}
    declared = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    skipped = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    signature, attributes, constants = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name not in named:
            default = kernel.params[place].default
            constants[name], signature[name] = default, "constexpr"
            continue
        value = named[name]
        if name in declared or (isinstance(value, int) and value == 1 and name not in skipped):
            constants[name], signature[name] = value, "constexpr"
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and name not in skipped:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = TYPES[str(value.dtype)]
            attributes[(place,)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    names = ("num_warps", "num_stages", "enable_fp_fusion")
    chosen = {name: options[name] for name in names if name in options}
    capability = int(re.sub(r"\D", "", architecture))
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=chosen)


def assembled(kernel: Any, architecture: str) -> dict[str, Any]:
    """Return a kernel's registers and spilled bytes, and the instructions of it that read registers never written."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    modern = tools / "ptxas-blackwell"  # what Triton itself runs from sm_100 on
    ptxas = modern if modern.exists() and int(re.sub(r"\D", "", architecture)) >= 100 else tools / "ptxas"
    target = re.search(r"^\.target (\w+)", kernel.asm["ptx"], re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(kernel.asm["ptx"])
        command = [str(ptxas), "-v", f"-arch={target[1] if target else architecture}", str(source), "-o", str(binary)]
        if "enable_fp_fusion" in kernel.metadata._fields and not kernel.metadata.enable_fp_fusion:
            command.append("--fmad=false")
        log = _output(command)
        code = _output([str(tools / "cuobjdump"), "--dump-sass", str(binary)]) if architecture == "sm_90a" else ""
    return {
        "registers": max(int(number) for number in re.findall(r"Used (\d+) registers", log)),
        "spilled": sum(int(number) for number in re.findall(r"(\d+) bytes spill stores", log)),
        "unwritten": unwritten(code),
    }


def _output(command: list[str]) -> str:
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


# ----------------------------------------------------------------------------------------------------
# The launches.


def launch_all(shape: str) -> None:
    """Launch every kernel at a shape."""
    import torch

    n, d, f, *heads = SHAPES[shape]
    launch_blocks(n, d, f, *heads)
    launch_float8(n, d, f, *heads, with_amax=n % 16 == 0)
    launch_loss(n, 50304 if n % 16 == 0 else f)
    launch_muon(d, f)
    if shape != "8b":  # the code for it is the same as for 350m
        launch_symmetric(d, f, (1, 2) if n % 16 == 0 else (1,))
    if n > 1:
        launch_low_rank(n, f, d)
        launch_nf4(f, d, torch.bfloat16 if n % 16 == 0 else torch.float32)


def empty(*shape: int, dtype: Any = None) -> Any:
    import torch

    return torch.empty(shape, device="meta", dtype=dtype or torch.bfloat16)


def launch_blocks(n: int, d: int, f: int, length: int, heads: int, kv_heads: int, k: int) -> None:
    """Launch the kernels of a fused block in half precision."""
    import torch

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
    import torch

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


def launch_loss(n: int, vocab: int) -> None:
    """Launch the softmax loss of a chunk of tokens: of all columns, and of weighted rows with padding columns."""
    import torch

    from redline.kernels.triton import cross_entropy

    rows = min(n, 4096)
    logits, target, weight = empty(rows, vocab), empty(rows, dtype=torch.int64), empty(rows, dtype=torch.float32)
    cross_entropy.softmax_loss(logits, target, softcap=30.0)
    cross_entropy.softmax_loss(logits, target, softcap=30.0, weight_N=weight, classes=vocab - 3)


def launch_muon(d: int, f: int) -> None:
    import torch

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


def launch_low_rank(n: int, f: int, d: int) -> None:
    """Launch the kernels of adapters: with dropout, without it and with an input in fp8."""
    import torch

    from redline.kernels.low_rank import Dropout
    from redline.kernels.triton import low_rank

    some, eight = Dropout(0.05, 2**61 + 3), torch.float8_e4m3fn
    cases: list[tuple[int, int, Any, Any]]
    if n % 16:
        cases = [(d, 9, torch.bfloat16, some)]
    else:
        cases = [(f, 16, torch.bfloat16, some), (d, 48, torch.bfloat16, None), (f, 48, eight, some)]
    for width, rank, dtype, dropout in cases:
        x, a, grad = empty(n, width, dtype=dtype), empty(rank, width), empty(n, rank)
        unscale = empty(dtype=torch.float32) if dtype == eight else None
        low_rank.project_down(x, a, dropout, unscale)
        low_rank.project_down_weight_gradient(grad, x, dropout, unscale)
        if dtype != eight:
            low_rank.project_down_input_gradient(grad, a, dropout, empty(n, width) if dropout else None)


def launch_nf4(rows: int, columns: int, dtype: Any) -> None:
    """Launch the dequantisation of a matrix: doubly quantised and not, contiguous and with strided rows, to fp8."""
    import torch

    from redline.kernels.nf4 import BLOCK, NESTED_BLOCK, NF4
    from redline.kernels.triton import nf4

    blocks = -(-rows * columns // BLOCK)
    codes = empty(-(-rows * columns // 2), dtype=torch.uint8)
    table, largest, mean = (empty(*size, dtype=torch.float32) for size in ((256,), (-(-blocks // NESTED_BLOCK),), ()))
    single = NF4(codes, empty(blocks, dtype=torch.float32), None, (rows, columns))
    double = NF4(codes, empty(blocks, dtype=torch.uint8), (table, largest, mean), (rows, columns))
    for matrix in (single, double):
        for width in (columns, columns + 16):
            nf4.dequantise_into(matrix, empty(rows, width, dtype=dtype)[:, :columns])
    nf4.dequantise_into(double, empty(rows, columns, dtype=torch.float8_e4m3fn), empty(dtype=torch.float32))


if __name__ == "__main__":
    main()
