"""Generation: the loop that sampling, evaluation, chat and the API share, against plain forward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from redline.kernels.attention import Attention, Bound, MaskSpec
from redline.models.adapters import FrozenMatrix, LoraLinear
from redline.models.decoder import Decoder
from redline.models.generate import decode, generate, greedy_answers, sample_token
from redline.planning.shapes import DecoderShape

VOCAB = 60
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "normed": {"qk_norm": True},
    "values": {"value_embeddings": 2},
}


def decoder(dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    fields = {"layers": 2, "d_model": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "d_ff": 48, "vocab": 64}
    model = Decoder(DecoderShape(**{**fields, **changes}), attention=Attention("dense", MaskSpec()), dtype=dtype)
    model.initialise(torch.Generator().manual_seed(1))
    with torch.no_grad():  # larger weights, so that every part of the model matters
        for parameter in model.parameters():
            parameter += 0.5 if not parameter.any() else 2.0 * parameter
    return model.eval()


@torch.no_grad()
def logits_after(model: Decoder, tokens: list[int]) -> torch.Tensor:
    return model.logits(model(torch.tensor([tokens]), Bound()))[0, -1, :VOCAB]


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_prompts_of_different_lengths_are_continued_as_alone(changes: dict[str, Any]) -> None:
    """Nothing sees the padding: every log-probability is that of a pass over the row alone, without a cache."""
    model = decoder(**changes)
    prompts = [[3], [5, 6, 7, 8, 9, 10, 11], [1, 2, 3], [9] * 80]
    rows = [list(prompt) for prompt in prompts]
    seen = 0
    for step in decode(model, prompts, limits=[4, 2, 9, 3], vocab=VOCAB, alternatives=5):
        for row, token, logprob, likeliest in zip(step.rows, step.tokens, step.logprobs, step.likeliest, strict=True):
            expected = logits_after(model, rows[row]).log_softmax(-1)
            assert likeliest[0] == (token, logprob)
            torch.testing.assert_close(torch.tensor(logprob), expected[token], rtol=1e-4, atol=1e-4)
            values = torch.tensor([value for _, value in likeliest])
            torch.testing.assert_close(values, expected.topk(5).values, rtol=1e-4, atol=1e-4)
            rows[row].append(token)
            seen += 1
    assert seen == 4 + 2 + 9 + 3
    assert [len(row) - len(prompt) for row, prompt in zip(rows, prompts, strict=True)] == [4, 2, 9, 3]


def test_sampled_text_equals_that_of_plain_passes_with_the_same_seed() -> None:
    """Each pass draws for all rows, finished or not, so a row's text does not depend on when others finish."""
    model, how = decoder(), {"temperature": 1.3, "top_k": 40, "top_p": 0.98}
    prompt = [1, 2, 3]
    stop = generate(model, prompt, count=3, tokens=9, vocab=VOCAB, seed=5, **how)[1][-1]  # type: ignore[arg-type]
    written = generate(model, prompt, count=3, tokens=30, vocab=VOCAB, seed=5, stop=stop, **how)  # type: ignore[arg-type]
    chance, rows = torch.Generator().manual_seed(5), [list(prompt) for _ in range(3)]
    for _ in range(30):
        logits = torch.stack([logits_after(model, row) for row in rows])
        for row, token in zip(rows, sample_token(logits, chance, **how).tolist(), strict=True):  # type: ignore[arg-type]
            row.append(token)
    texts = [row[3:] for row in rows]
    assert written == [text[: text.index(stop)] if stop in text else text for text in texts]
    assert len({len(text) for text in written}) > 1, "some must end early for this to mean anything"


def test_a_stop_token_ends_its_row_only() -> None:
    model = decoder()
    likely = [int(logits_after(model, [token]).argmax()) for token in (4, 5)]
    assert likely[0] != likely[1]
    steps = list(decode(model, [[4], [5]], limits=[3, 3], vocab=VOCAB, stop={likely[0]}))
    assert (steps[0].rows, steps[0].stopped) == ([0, 1], [True, False])
    assert steps[1].rows == [1]
    assert list(decode(model, [[4]], limits=[0], vocab=VOCAB)) == []
    assert greedy_answers(model, [[4], [5]], tokens=0, vocab=VOCAB, stop=())[0].tokens == []


def test_a_closed_generator_computes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model, passes = decoder(), []
    monkeypatch.setattr(model, "logits", lambda hidden, own=model.logits: passes.append(1) or own(hidden))
    steps = decode(model, [[1, 2]], limits=[50], vocab=VOCAB)
    next(steps)
    next(steps)
    steps.close()
    assert len(passes) == 2
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("quantise", [False, True])
def test_weights_stored_for_inference_keep_the_bits(quantise: bool) -> None:
    model = decoder(torch.bfloat16, d_model=64, d_ff=64)
    linear = model.blocks[0].linear("down")  # type: ignore[operator]
    frozen = FrozenMatrix(linear.weight, quantise=quantise, dtype=torch.bfloat16)
    adapted = LoraLinear(frozen, {"down": 64}, ["down"], 4, 8.0, 0.0)
    adapted.initialise(torch.Generator().manual_seed(3))
    torch.nn.init.normal_(adapted.lora_B["down"], 0.0, 0.1)
    model.set_submodule("blocks.0.mlp.down", adapted)
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before = model.logits(model(tokens, Bound(), model.new_cache()))
        model.store_for_inference(unpack=True)
        after = model.logits(model(tokens, Bound(), model.new_cache()))
    assert torch.equal(before, after)
    assert frozen.plain is not None
    assert model.embedding.weight.dtype == torch.bfloat16
    assert model.norm.weight.dtype == torch.float32
