"""Every kernel compiles for Hopper and for consumer cards without a GPU, to the instructions it was designed for.

The compiler rejects code that Triton's interpreter accepts. scripts/compile_kernels.py intercepts the launches.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from redline.hardware.compiled_kernels import TABLE, kernels_off

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/compile_kernels.py"
sys.path.append(str(SCRIPT.parent))

import compile_kernels  # noqa: E402 - a script

CORRECTIONS = ("_sums", "_along_inputs", "_along_outputs")  # they read fp8 operands and make none
OWN_TESTS = ("low_rank", "nf4", "cross_entropy._softmax_loss")
Facts = list[dict[str, Any]]


def facts(architecture: str, shapes: tuple[str, ...]) -> Facts:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("the kernels need triton")
    return compile_kernels.run_child(architecture, shapes)


@pytest.fixture(scope="module", params=["350m", pytest.param("all", marks=pytest.mark.soak)])
def every_launch(request: pytest.FixtureRequest) -> Facts:
    return facts("sm_90a", tuple(compile_kernels.SHAPES) if request.param == "all" else ("350m",))


@pytest.fixture
def compiled(every_launch: Facts) -> Facts:
    """The launches without those of the kernels that have tests of their own below."""
    return [launch for launch in every_launch if not name_of(launch).startswith(OWN_TESTS)]


def name_of(launch: dict[str, Any]) -> str:
    return f"{launch['module']}.{launch['kernel']}"


def is_large(launch: dict[str, Any]) -> bool:
    return launch["shape"] in compile_kernels.REAL


def test_every_kernel_compiles(every_launch: Facts) -> None:
    """Each function under @triton.jit whose name begins with an underscore and that is launched somewhere."""
    launched = re.compile(r"^\s+(?:return )?(_\w+)\[", re.MULTILINE)
    kernels = set()
    for path in (ROOT / "src/redline/kernels/triton").glob("*.py"):
        text = path.read_text()
        kernels |= {f"{path.stem}.{name}" for name in launched.findall(text) if f"def {name}(" in text}
    assert len(kernels) > 25
    assert kernels <= {name_of(launch) for launch in every_launch}
    assert not [launch for launch in every_launch if "error" in launch]


def test_large_tensors_move_16_bytes_at_a_time(compiled: Facts) -> None:
    for kernel in compiled:
        name = kernel["kernel"]
        if is_large(kernel) and name != "_times_transposed":  # its loads go to shared memory
            assert re.search(r"ld\.global[\w:.]*\.v4\.b32", kernel["ptx"]), name
            # the eight fp8 codes of a thread are 8 bytes
            stored = ("st.global.v2.b32", "st.global.v4.b32") if kernel["float8"] else ("st.global.v4.b32",)
            wide_stores = any(width in kernel["ptx"] for width in stored)
            stores_little = name in ("_losses_and_lse", *CORRECTIONS)
            assert wide_stores or stores_little, name
            if name != "_losses_and_lse":  # it also loads one logit of a row, the target's
                assert "ld.global.b16" not in kernel["ptx"], name


def test_symmetric_products_feed_the_tensor_cores(compiled: Facts) -> None:
    """Operands are copied to shared memory 16 bytes at a time, and read from there by Hopper's asynchronous matmuls."""
    found = [kernel["ptx"] for kernel in compiled if kernel["kernel"] == "_times_transposed" and is_large(kernel)]
    assert found
    for ptx in found:
        assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" in ptx
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
        assert set(copies) == {"0x10"}
        assert "ld.global" not in ptx
        assert set(re.findall(r"st\.global[\w.]*", ptx)) == {"st.global.v4.b32"}
        assert not re.search(r"\b(atom|red)\.", ptx)


def test_fp8_is_rounded_by_the_hardware(compiled: Facts) -> None:
    for kernel in compiled:
        # the loss' gradient is in e5m2, which keeps infinity
        if kernel["float8"] and kernel["kernel"] not in ("_softmax_gradient8", "_losses_and_lse", *CORRECTIONS):
            assert "cvt.rn.satfinite.e4m3x2.f32" in kernel["ptx"], kernel["kernel"]
            # the compiler has not removed value·0 + value, which turns infinity into NaN
            assert re.search(r"fma\.rn\.f32\s+%\w+, (%\w+), 0f00000000, \1;", kernel["ptx"]), kernel["kernel"]
            assert "relaxed.max" in kernel["ptx"] or not is_large(kernel), kernel["kernel"]


def test_no_instruction_reads_an_unwritten_register(compiled: Facts) -> None:
    """ptxas 12.8 makes such code when a converted pair of fp8 codes is used twice."""
    for kernel in compiled:
        if is_large(kernel):  # at odd sizes ptxas collects predicates in registers bit by bit
            assert not kernel["unwritten"], kernel["kernel"]


def test_no_kernel_spills_registers(compiled: Facts) -> None:
    for kernel in compiled:
        assert ".local" not in kernel["ptx"], kernel["kernel"]
        assert kernel["spilled"] == 0 or not is_large(kernel), kernel["kernel"]


# ----------------------------------------------------------------------------------------------------
# The kernels of adapters and of the loss.


@pytest.fixture
def low_rank(every_launch: Facts) -> Facts:
    return [launch for launch in every_launch if launch["module"] == "low_rank"]


def test_wide_operands_go_through_shared_memory_to_the_tensor_cores(low_rank: Facts) -> None:
    for kernel in low_rank:
        ptx = kernel["ptx"]
        assert not re.search(r"\b(atom|red)\.", ptx), kernel["kernel"]  # sums have one order
        assert "div.u32" not in ptx or kernel["kernel"] == "_input_gradient"
        if is_large(kernel):
            assert "wgmma.mma_async" in ptx, kernel["kernel"]
            if kernel["kernel"] == "_input_gradient":
                assert "ld.global.v4.b32" in ptx
                assert "st.global.v4.b32" in ptx
            else:  # 16 bytes at a time, while others are multiplied
                copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
                assert set(copies) == {"0x10"}, kernel["kernel"]


def test_registers_and_shared_memory_of_adapters_suffice(low_rank: Facts) -> None:
    """Two programs fit on a Hopper SM, which has 227 KiB; one fits on that of a consumer card, which has 99."""
    for kernel in low_rank:
        assert kernel["spilled"] == 0, kernel["kernel"]
        assert kernel["shared"] <= 99 * 1024, kernel["kernel"]


def test_a_word_is_drawn_for_two_values(low_rank: Facts) -> None:
    """Of 64×128 values each of 256 threads has 32: sixteen words of two products each, and a few for the rows."""
    for kernel in low_rank:
        if is_large(kernel):
            drawn = len(re.findall(r"mul\.lo\.s32\s+%\w+, %\w+, -2048144789", kernel["ptx"]))
            rows = drawn - 16 if kernel["drops"] else drawn
            assert 0 < rows <= 8 if kernel["drops"] else rows == 0, kernel["kernel"]


def test_the_loss_has_wide_loads_however_many_columns_are_classes(every_launch: Facts) -> None:
    found = [launch for launch in every_launch if launch["kernel"] == "_softmax_loss" and is_large(launch)]
    assert {launch["limited"] for launch in found} == {True, False}
    for launch in found:
        wide = [line for line in launch["ptx"].splitlines() if "global" in line and ".v4.b32" in line]
        assert len([line for line in wide if "ld.global" in line]) == 8, "two of 16 bytes in each sweep, and before it"
        assert len([line for line in wide if "st.global" in line]) == 4


def test_nf4_is_dequantised_without_fma(every_launch: Facts) -> None:
    """bitsandbytes rounds the product of a scale before it adds the mean."""
    found = [launch for launch in every_launch if launch["module"] == "nf4"]
    assert len(found) >= 5
    for launch in found:
        assert "fma.rn.f32" not in launch["ptx"]
        assert ".local" not in launch["ptx"]
        if is_large(launch):  # 16 bytes at a time
            assert "ld.global.v4.b32" in launch["ptx"]
            assert "st.global.v4.b32" in launch["ptx"]


# ----------------------------------------------------------------------------------------------------
# The table, by which kernels are switched off.


def test_the_table_is_what_the_kernels_compile_to(every_launch: Facts) -> None:
    _compare(every_launch, "sm_90a")


def test_the_kernels_compile_for_consumer_cards() -> None:
    _compare(facts("sm_120", ("350m",)), "sm_120")
    assert "muon._times_transposed" in kernels_off((12, 0))
    assert "rms_norm._forward" not in kernels_off((12, 0))


def _compare(found: Facts, architecture: str) -> None:
    """Compare with the rows of the installed version of Triton. They are maxima over more shapes than `found` has."""
    import triton

    real = [launch for launch in found if is_large(launch)]
    rows, table = compile_kernels.table_rows(real), json.loads(TABLE.read_text())
    if triton.__version__ not in table:
        pytest.skip(f"the table has no rows of triton {triton.__version__}")
    committed = table[triton.__version__][architecture]
    assert rows.keys() == committed.keys(), "run `make kernels`"
    for kernel, row in rows.items():
        for key, most in committed[kernel].items():
            assert row[key] <= most, f"{kernel}: run `make kernels`"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_whole_table_is_current() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
