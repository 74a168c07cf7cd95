"""Every attention path computes what the dense reference computes, and documents never see each other."""

from __future__ import annotations

import pytest
import torch

from redline.errors import UserError
from redline.kernels.attention import Attention, MaskSpec, candidates, select

CUDA = torch.cuda.is_available()
PATHS = [("cpu", "dense"), ("cpu", "flash"), ("cpu", "matmul")] + [
    pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ("cudnn", "flash", "efficient", "flex", "dense")
]
pytestmark = pytest.mark.filterwarnings("ignore")


def inputs(device: str, B: int, H: int, KV: int, T: int, K: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = [(B, H, T, K), (B, KV, T, K), (B, KV, T, K)]
    return tuple(torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes)


def documents(B: int, T: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    starts = torch.rand(B, T, generator=generator) < 0.08
    return starts.int().cumsum(1).int().to(device)


def skip_without_gpu(device: str) -> None:
    if device == "cuda" and not CUDA:
        pytest.skip("needs an NVIDIA GPU")


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@pytest.mark.parametrize(("device", "backend"), PATHS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_equals_the_dense_reference(device: str, backend: str, packed: bool, kv_heads: int) -> None:
    skip_without_gpu(device)
    B, H, T, K = 2, 4, 256 if device == "cuda" else 160, 64 if device == "cuda" else 16  # 160: two tiles of matmul
    spec = MaskSpec(documents=packed)
    ids = documents(B, T, device) if packed else None
    results = []
    for name in (backend, "dense"):
        # the reference computes in float64 from the same rounded inputs
        qkv = inputs(device, B, H, kv_heads, T, K)
        if name == "dense":
            qkv = tuple(x.detach().float().requires_grad_() for x in qkv)
        attention = Attention(name, spec, device, grouped=kv_heads != H)
        out = attention(*qkv, attention.bind(T, ids))
        out.float().square().sum().backward()
        results.append([out, *(x.grad for x in qkv)])
    tolerance = 2e-2 if device == "cuda" else 1e-5
    for got, expected in zip(*results, strict=True):
        assert relative(got, expected) < tolerance


@pytest.mark.parametrize(("device", "backend"), PATHS)
def test_documents_never_see_each_other(device: str, backend: str) -> None:
    """The gradient of one document's outputs reaches no other document, and no later position of its own."""
    skip_without_gpu(device)
    B, H, T, K = 2, 2, 128 if device == "cuda" else 24, 64 if device == "cuda" else 8
    ids = documents(B, T, device)
    attention = Attention(backend, MaskSpec(documents=True), device)
    for row, position in ((0, T // 2), (1, T - 1), (0, 0)):
        q, k, v = inputs(device, B, H, H, T, K)
        out = attention(q, k, v, attention.bind(T, ids))
        out[row, :, position].float().sum().backward()
        here = torch.arange(T, device=device)
        own = (ids[row] == ids[row, position]) & (here <= position)
        for gradient in (k.grad, v.grad):
            assert gradient is not None
            touched = gradient.float().abs().sum((1, 3)) > 0
            assert not touched[1 - row].any()
            assert not touched[row][~own].any()
        assert (v.grad.float().abs().sum((1, 3)) > 0)[row][own].all()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_rows_of_one_document_need_no_cu_seqlens(kv_heads: int) -> None:
    B, H, T, K = 2, 4, 256, 64
    attention = Attention("flash", MaskSpec(documents=True), "cuda", grouped=kv_heads != H)
    results = []
    for ids in (torch.zeros(B, T, dtype=torch.int32, device="cuda"), None):
        qkv = inputs("cuda", B, H, kv_heads, T, K)
        out = attention(*qkv, attention.bind(T, ids))
        out.float().square().sum().backward()
        results.append([out, *(x.grad for x in qkv)])
    for got, expected in zip(*results, strict=True):
        assert relative(got, expected) < 2e-2


def test_dense_mask_by_hand() -> None:
    ids = torch.tensor([[0, 0, 1, 1]])
    mask = MaskSpec(documents=True).dense(4, ids)[0, 0]
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert MaskSpec(causal=False).dense(2)[0, 0].all()


def test_a_backend_that_cannot_run_is_refused_with_the_reason() -> None:
    spec = MaskSpec()
    with pytest.raises(UserError, match="needs a GPU"):
        select("cudnn", spec, device="cpu", dtype=torch.float32, shape=(1, 1, 8, 8))
    assert select("auto", spec, device="cpu", dtype=torch.float32, shape=(1, 1, 8, 8)).backend == "matmul"
    assert select("auto", spec, device="cpu", dtype=torch.float32, shape=(1, 1, 4096, 8)).backend == "flash"
    assert candidates(spec, "cuda", torch.float32, 64)["flash"] == "needs bf16 or fp16"


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("packed", [False, True])
def test_auto_measures_on_a_gpu(packed: bool) -> None:
    chosen = select("auto", MaskSpec(documents=packed), device="cuda", dtype=torch.bfloat16, shape=(8, 8, 512, 64))
    assert chosen.backend in ("cudnn", "flash", "efficient", "flex")
    assert "ms at 8×8×512×64" in chosen.reason
