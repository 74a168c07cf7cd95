"""Block diffusion's mask: its definition, every attention back-end, and that no noisy block sees its clean copy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.errors import UserError
from redline.kernels import attention as module
from redline.kernels.attention import Attention, Bound, MaskSpec, candidates, select
from redline.models.decoder import Decoder
from redline.planning.layout import Layout, Segment, uniform
from redline.planning.shapes import DecoderShape

CUDA = torch.cuda.is_available()
ON_GPU = [
    pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ("cudnn", "efficient", "flex", "split", "dense")
]
PATHS = [("cpu", "dense"), ("cpu", "flash"), ("cpu", "matmul"), ("cpu", "split"), *ON_GPU]
LAYOUTS = {
    "uniform": uniform(48, 8),
    "one by one": uniform(6, 1),
    "one block": uniform(16, 16),
    "plan": Layout((Segment("q", 6, 6, given=True), Segment("p", 8, 8), Segment("e", 12, 4))),
    "given in the middle": Layout((Segment("a", 6, 3), Segment("b", 5, 5, given=True), Segment("c", 6, 2))),
}
pytestmark = pytest.mark.filterwarnings("ignore")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Of one to four segments, the last of which is noised."""
    count = draw(st.integers(1, 4))
    segments = []
    for i in range(count):
        block, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        given_ = i < count - 1 and draw(st.booleans())
        segments.append(Segment(str(i), block * blocks, block, given_))
    return Layout(tuple(segments))


def defined(layout: Layout) -> torch.Tensor:
    """Return the mask pair by pair, as the paper defines it."""
    read = [(layout.block_of[i], True) for i in layout.noisy] + [(layout.block_of[i], False) for i in layout.clean]
    rows = []
    for block_q, noisy_q in read:
        row = []
        for block_k, noisy_k in read:
            own = block_q == block_k and noisy_q and noisy_k
            before = block_q > block_k and noisy_q and not noisy_k
            causal = block_q >= block_k and not noisy_q and not noisy_k
            row.append(own or before or causal)
        rows.append(row)
    return torch.tensor(rows)


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_the_mask_is_the_definition(layout: Layout) -> None:
    spec = MaskSpec.of_layout(layout)
    mask = spec.dense(layout.read)
    assert mask.shape == (1, 1, layout.read, layout.read)
    assert torch.equal(mask[0, 0], defined(layout))
    assert int(mask.sum()) == layout.pairs
    place = torch.arange(layout.read)
    assert torch.equal(spec.allows(place[:, None], place[None, :], None), mask[0, 0])


def test_the_mask_by_hand() -> None:
    mask = MaskSpec.of_layout(uniform(4, 2)).dense(8)[0, 0].int()
    assert mask.tolist() == [
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 1],
        [0, 0, 0, 0, 1, 1, 1, 1],
    ]


def test_it_is_a_key_and_never_a_long_name() -> None:
    specs = [MaskSpec.of_layout(layout) for layout in (uniform(1024, 16), uniform(1024, 8), LAYOUTS["plan"])]
    assert len({*specs, MaskSpec.of_layout(uniform(1024, 16))}) == 3
    assert len({str(spec) for spec in specs}) == 3
    assert all(len(str(spec)) < 80 for spec in specs)
    assert str(MaskSpec()) == "MaskSpec(causal=True, documents=False)"


def test_masks_without_a_meaning_are_refused() -> None:
    with pytest.raises(AssertionError, match="one document"):
        MaskSpec(documents=True, noisy=(0, 0), clean=(0, 0))
    with pytest.raises(AssertionError, match="must not decrease"):
        MaskSpec(noisy=(0, 1, 0))
    with pytest.raises(AssertionError, match="a noisy and a clean copy"):
        MaskSpec.of_layout(uniform(8, 4)).dense(8)
    with pytest.raises(AssertionError, match="a noisy and a clean copy"):
        Attention("flash", MaskSpec.of_layout(uniform(8, 4))).bind(8)


def inputs(layout: Layout, kv_heads: int, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    K = 64 if device == "cuda" else 8
    shapes = [(2, heads, layout.read, K) for heads in (4, kv_heads, kv_heads)]
    return tuple((2 * torch.randn(s, generator=generator)).to(device, dtype).requires_grad_() for s in shapes)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def check(layout: Layout, device: str, backend: str, dtype: torch.dtype, kv_heads: int, tolerance: float) -> None:
    """Values and gradients against the dense reference in float32 from the same rounded inputs."""
    spec, results = MaskSpec.of_layout(layout), []
    for name in (backend, "dense"):
        qkv = inputs(layout, kv_heads, dtype, device)
        if name == "dense":
            qkv = tuple(x.detach().float().requires_grad_() for x in qkv)
        attention = Attention(name, spec, device)
        out = attention(*qkv, attention.bind(layout.read))
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(device, out.dtype))
        results.append([out, *(x.grad for x in qkv)])
    for got, expected in zip(*results, strict=True):
        assert relative(got, expected) < tolerance


@pytest.mark.parametrize(("device", "backend"), PATHS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_dense_reference(
    device: str, backend: str, layout: Layout, kv_heads: int, dtype: torch.dtype
) -> None:
    if device == "cuda" and not CUDA:
        pytest.skip("needs an NVIDIA GPU")
    spec = MaskSpec.of_layout(layout)
    if why := candidates(spec, device, dtype, 64 if device == "cuda" else 8)[backend]:
        pytest.skip(why)
    exact = 1e-5 if device == "cpu" else 2e-3  # a GPU's kernels may use TF32
    check(layout, device, backend, dtype, kv_heads, exact if dtype == torch.float32 else 2e-2)


@settings(max_examples=30, deadline=None)
@given(layouts(), st.sampled_from([1, 2, 4]))
def test_any_layout_splits(layout: Layout, kv_heads: int) -> None:
    if layout.clean:
        check(layout, "cpu", "split", torch.float32, kv_heads, 1e-5)


def test_scores_far_apart_are_joined_without_overflow() -> None:
    """The exponential of either part's scores alone would be infinite or zero."""
    layout = uniform(8, 4)
    spec = MaskSpec.of_layout(layout)
    for lift in (8.0, -8.0):
        q, k, v = (x.detach() for x in inputs(layout, 4, torch.float32, "cpu"))
        q, k = q.abs() + 1, k.abs() + 1
        k[:, :, :8] *= lift
        outs = []
        for name in ("split", "dense"):
            attention = Attention(name, spec)
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = attention(*leaves, attention.bind(16))
            out.square().sum().backward()
            outs.append([out, *(x.grad for x in leaves)])
        for got, expected in zip(*outs, strict=True):
            assert got.isfinite().all()
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["uniform", "plan", "given in the middle"])
@pytest.mark.parametrize("backend", ["flex", "split"])
def test_flex_masks_are_the_same_mask(name: str, backend: str) -> None:
    """As on a GPU, without its kernels: what flex computes there is written out here."""
    layout = LAYOUTS[name]
    spec = MaskSpec.of_layout(layout)
    keys_from = len(spec.noisy) if backend == "split" else 0
    block_mask = module._block_mask(spec, layout.read, None, "cpu", keys_from)
    bound = Bound(block_mask=block_mask, own_blocks=tuple(spec.own_blocks))
    q, k, v = (x.detach() for x in inputs(layout, 2, torch.float32, "cpu"))
    output = Attention(backend, spec)(q, k, v, bound)
    reference = Attention("dense", spec)
    torch.testing.assert_close(output, reference(q, k, v, reference.bind(layout.read)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["dense", "flash", "flex", "split"])
def test_the_mask_is_made_once(backend: str) -> None:
    attention = Attention(backend, MaskSpec.of_layout(uniform(16, 4)))
    assert attention.bind(32) is attention.bind(32)


def test_which_backends_can_run() -> None:
    spec = MaskSpec.of_layout(uniform(16, 4))
    on_gpu = candidates(spec, "cuda", torch.bfloat16, 64)
    assert on_gpu["flash"] == "takes no mask of blocks"
    assert [on_gpu[name] for name in ("efficient", "flex", "split", "dense")] == [""] * 4
    assert candidates(MaskSpec.of_layout(uniform(16, 16)), "cuda", torch.bfloat16, 64)["flash"] == ""
    how = {"device": "cpu", "dtype": torch.float32, "shape": (1, 1, 32, 8)}
    assert select("auto", spec, **how).backend == "matmul"
    assert select("split", spec, **how).backend == "split"
    with pytest.raises(UserError, match="a noisy and a clean copy"):
        select("split", MaskSpec(), **how)


def decoder(layout: Layout, backend: str) -> Decoder:
    shape = DecoderShape(layers=2, d_model=32, heads=4, kv_heads=2, head_dim=8, d_ff=48, vocab=64)
    model = Decoder(shape, attention=Attention(backend, MaskSpec.of_layout(layout)))
    model.initialise(torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 2.0 * parameter
    return model.eval()


@settings(max_examples=25, deadline=None)
@given(layouts(), st.data())
@pytest.mark.parametrize("backend", ["dense", "flash", "matmul", "split"])
def test_no_noisy_block_sees_itself_clean(backend: str, layout: Layout, data: st.DataObject) -> None:
    """Nor does it see a later one; the blocks after it do see it."""
    if not layout.clean:
        return
    block = data.draw(st.integers(0, len(layout.sizes) - 1))
    model, noisy = decoder(layout, backend), len(layout.noisy)
    places = torch.tensor([*layout.noisy, *layout.clean])
    tokens = torch.randint(0, 64, (2, layout.read), generator=torch.Generator().manual_seed(3))
    block_of = torch.tensor([layout.block_of[place] for place in places])
    changed = tokens.clone()
    changed[:, noisy:][:, block_of[noisy:] >= block] += 1
    changed %= 64
    with torch.no_grad():
        before, after = (model(t, model.attention.bind(layout.read), positions_T=places) for t in (tokens, changed))
    early, later = block_of[:noisy] <= block, block_of[:noisy] > block
    if backend == "dense":
        assert torch.equal(before[:, :noisy][:, early], after[:, :noisy][:, early])
    torch.testing.assert_close(before[:, :noisy][:, early], after[:, :noisy][:, early], rtol=1e-5, atol=1e-6)
    moved = (before - after)[:, :noisy][:, later].abs().amax(-1)
    assert (moved > 1e-4).all()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
def test_auto_measures_on_a_gpu() -> None:
    spec = MaskSpec.of_layout(uniform(256, 16))
    chosen = select("auto", spec, device="cuda", dtype=torch.bfloat16, shape=(8, 8, 512, 64))
    assert chosen.backend in ("cudnn", "efficient", "flex", "split")
    assert "ms at 8×8×512×64" in chosen.reason
    assert "flash: takes no mask of blocks" in chosen.reason
