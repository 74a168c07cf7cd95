"""Latents as bytes: the packed size is the expected one, and unpacking restores the values."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from redline.jobs.latent_prefix.costs import BITS, GROUP, latent_bytes
from redline.jobs.latent_prefix.evaluate import pack_latents, size_against_text, text_bytes, unpack_latents

VALUES = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=2, max_dims=2, max_side=40),
    elements=st.floats(-100, 100, width=32),
)


@pytest.mark.parametrize("kind", BITS)
@given(values=VALUES)
def test_quantisation_error_is_at_most_half_a_step(kind: str, values: np.ndarray) -> None:
    sent = pack_latents(values, kind)
    assert len(sent) == latent_bytes(values.size, kind)
    got = unpack_latents(sent, values.shape, kind)
    flat = np.pad(values.reshape(-1), (0, -values.size % GROUP)).reshape(-1, GROUP)
    largest = np.repeat(np.abs(flat).max(1), GROUP)[: values.size].reshape(values.shape)
    step = largest / (2 ** (BITS[kind] - 1) - 1) if kind != "fp16" else np.abs(values) / 1024
    # half a step, a scale rounded to fp16 (which moves the largest numbers most), and what fp16 cannot tell from zero
    assert (np.abs(got - values) <= 0.5 * step + largest / 1000 + 1e-4).all()


def test_packed_sizes() -> None:
    values = 32 * 256
    assert latent_bytes(values, "fp16") == 16384
    assert latent_bytes(values, "int8") == 8192 + 512
    assert latent_bytes(values, "int4") == 4096 + 512
    assert latent_bytes(5, "int4") == 3 + 2


def test_the_wrong_number_of_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes are not 4 values in int8"):
        unpack_latents(b"1234567", (2, 2), "int8")


def test_sizes_are_compared_with_the_text() -> None:
    text = "Question: who?\nContext: the king.\n" * 9
    sizes = text_bytes(text)
    assert sizes["utf8"] == len(text.encode())
    assert gzip.decompress(gzip.compress(text.encode(), mtime=0)) == text.encode()
    assert sizes["gzip"] < sizes["utf8"]
    assert size_against_text(16384, 1196) == "13.7× larger than the text"
    assert size_against_text(100, 250) == "2.5× smaller than the text"
