"""The breakdown of a profile: kinds of kernels, shares, ceilings and advice, and the holders of memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.runs.breakdown import KINDS, Span, breakdown, kind_of, memory_history
from redline.runs.roofline import limits_ms


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTN", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<...>>", "matmul"),
        ("aten::addmm", "matmul"),
        ("aten::bmm", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("_norm_forward", "memory-bound"),
        ("triton_poi_fused_mul_silu_3", "memory-bound"),
        ("aten::_log_softmax", "memory-bound"),
    ],
)
def test_the_kind_of_a_kernel_follows_from_its_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def parts_of(
    *spans: Span, steps: int = 2, seconds: float = 1.0, data_wait: float = 0.0, gpu: bool = True, **best: float
):
    busy = sum(span.end - span.start for span in spans)
    given_best = {name.replace("_", "-"): ms for name, ms in best.items()}
    found = breakdown(spans, steps=steps, seconds=seconds, busy=busy, data_wait=data_wait, best=given_best, gpu=gpu)
    return found, {part.kind: part for part in found.parts}


def test_the_parts_add_up_to_the_step() -> None:
    found, parts = parts_of(
        Span("nvjet_a", 0.0, 0.4),
        Span("sdpa", 0.4, 0.5),
        Span("nvjet_b", 0.5, 0.6, updating=True),
        Span("_norm_forward", 0.6, 0.8),
        matmul=180.0,
        memory_bound=50.0,
    )
    assert found.step_ms == 500.0
    assert {kind: part.ms for kind, part in parts.items()} == pytest.approx(
        {"matmul": 200, "attention": 50, "optimizer": 50, "memory-bound": 100, "idle": 100}
    )
    assert sum(part.share for part in found.parts) == pytest.approx(1.0)
    assert parts["matmul"].of_best == pytest.approx(0.9)
    assert "only less work" in parts["matmul"].advice, "it is near the best known rate"
    assert parts["attention"].of_best is None, "no ceiling, no share of it"
    together = parts["memory-bound"].best_ms, parts["optimizer"].best_ms
    assert sum(ms or 0.0 for ms in together) == pytest.approx(50.0), "they share one ceiling"
    assert parts["memory-bound"].of_best == pytest.approx(parts["optimizer"].of_best)
    assert [one.name for one in found.longest[:2]] == ["nvjet_a", "_norm_forward"]


def test_idle_time_has_advice_by_its_cause() -> None:
    _, parts = parts_of(Span("nvjet_a", 0.0, 0.5), data_wait=0.4)
    assert "40% of a step is waiting for data" in parts["idle"].advice
    _, parts = parts_of(Span("nvjet_a", 0.0, 0.5))
    assert "train.graph" in parts["idle"].advice
    _, parts = parts_of(Span("aten::mm", 0.0, 0.5), gpu=False)
    assert "Python" in parts["idle"].advice
    assert "GPU" in parts["matmul"].advice


@given(
    st.lists(
        st.tuples(st.sampled_from(["nvjet", "sdpa", "nccl_x", "Memcpy", "other"]), st.floats(1e-6, 1.0)), min_size=1
    ),
    st.booleans(),
)
def test_every_moment_has_one_kind(kernels: list[tuple[str, float]], updating: bool) -> None:
    spans, now = [], 0.0
    for name, seconds in kernels:
        spans.append(Span(name, now, now + seconds, updating))
        now += seconds
    found, parts = parts_of(*spans, steps=1, seconds=now * 1.25)
    assert set(parts) <= set(KINDS)
    assert sum(part.ms for part in found.parts) == pytest.approx(found.step_ms, rel=1e-6)
    assert all(part.advice for part in found.parts)


def test_the_ceilings_come_from_the_plan() -> None:
    limits = [{"part": "matmul", "ms_per_step": 12.5, "ms_at_peak": 9.0}, {"part": "attention", "ms_per_step": None}]
    assert limits_ms({"type": "plan", "ceiling": {"limits": limits}}, "ms_per_step") == {"matmul": 12.5}
    assert limits_ms({"type": "plan", "ceiling": {"limits": None}}, "ms_per_step") == {}


def frames(*lines: str) -> list[dict[str, object]]:
    return [{"filename": file, "line": 7, "name": "f"} for file in lines]


def test_memory_at_its_peak() -> None:
    weights, kept = frames("/x/torch/nn/linear.py", "/x/src/redline/models/layers.py"), frames("/x/torch/functional.py")
    trace = [
        {"action": "segment_alloc", "addr": 0, "size": 999},
        {"action": "alloc", "addr": 1, "size": 100, "frames": weights},
        {"action": "alloc", "addr": 2, "size": 50, "frames": kept},
        {"action": "alloc", "addr": 3, "size": 60, "frames": kept},
        {"action": "free_requested", "addr": 3, "size": 60},
        {"action": "free_completed", "addr": 3, "size": 60},
        {"action": "alloc", "addr": 3, "size": 10, "frames": weights},
        {"action": "free_completed", "addr": 77, "size": 5},  # allocated before the record began
    ]
    found = memory_history(trace)
    assert found.peak_bytes == 210
    assert [(one.where, one.bytes, one.tensors) for one in found.holders] == [
        ("torch/functional.py:7 f", 110, 2),
        ("redline/models/layers.py:7 f", 100, 1),
    ]
    assert found.curve == [100, 150, 210, 150, 160, 155]
    assert memory_history([]).peak_bytes == 0


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=3000))
def test_a_long_curve_keeps_its_peak(sizes: list[int]) -> None:
    trace = [{"action": "alloc", "addr": i, "size": size, "frames": []} for i, size in enumerate(sizes)]
    found = memory_history(trace)
    assert max(found.curve) == found.peak_bytes == sum(sizes)
    assert len(found.curve) <= 500
    assert sum(one.bytes for one in found.holders) + found.rest_bytes == sum(sizes)
