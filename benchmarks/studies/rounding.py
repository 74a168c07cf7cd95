"""What the number types of a GGUF file cost a model by themselves: its decoder, rounded as llama.cpp rounds it.

llama.cpp multiplies a matrix in the type of the file, and rounds the other operand to that type or to q8_0. Here
redline's decoder does both in float32: its weights are rounded to the type and back, and the input of each matrix
likewise. No export and no llama.cpp take part, so the difference from the unrounded decoder is what the type costs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from redline.data.chat_template import load_chat_tokenizer
from redline.export.llama_cpp import QUESTIONS, TOP
from redline.kernels.attention import Attention, Bound, MaskSpec
from redline.models.decoder import Decoder, Linear
from redline.models.generate import greedy_answers
from redline.models.pretrained import load_base, open_base

TYPES = ("f16", "bf16", "q8_0", "q5_1")
_INPUTS = {"q5_1": "q8_0"}  # for the other types, the input of a matrix is rounded as the matrix is
_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


@torch.no_grad()
def measure_rounding(folder: Path, tokens: int, kinds: Sequence[str] = TYPES) -> list[dict[str, Any]]:
    """Return a row per type and per rounded part: the differences of the top log-probabilities at the greedy answers.

    `folder` holds a chat model for transformers.
    """
    base, chat = open_base(str(folder)), load_chat_tokenizer(folder)
    attention = Attention("flash", MaskSpec(causal=True), "cpu")
    options = base.model
    exact = Decoder(
        base.shape,
        attention=attention,
        rope_theta=options["rope_theta"],
        rope_scaling=options["rope_scaling"],
        eps=options["norm_eps"],
    ).eval()
    load_base(exact, base)
    prompts = [chat.encode(question) for question in QUESTIONS]
    written = greedy_answers(exact, prompts, tokens=tokens, vocab=base.shape.vocab, stop=chat.eos_ids)
    texts = [(prompt, [*prompt, *answer.tokens]) for prompt, answer in zip(prompts, written, strict=True)]
    reference = [_logprobs(exact, prompt, text) for prompt, text in texts]
    rows = []
    for kind in kinds:
        for part in ("weights", "activations", "both"):
            rounded = _rounded(exact, kind, part)
            differences, equal = [], 0
            for (prompt, text), own in zip(texts, reference, strict=True):
                theirs = _logprobs(rounded, prompt, text)
                ids = theirs.topk(TOP).indices
                differences.append((theirs.gather(1, ids) - own.gather(1, ids)).abs().flatten())
                equal += bool((theirs.argmax(-1) == own.argmax(-1)).all())
            every = torch.cat(differences)
            figures = {"mean": every.mean(), "p99": every.quantile(0.99), "max": every.max()}
            found = {name: round(float(value), 6) for name, value in figures.items()}
            rows.append({"type": kind, "rounded": part, "greedy_equal": equal, "prompts": len(texts), **found})
    return rows


def _logprobs(decoder: Decoder, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
    """Return the log-probabilities [T, V] of each token after the prompt."""
    hidden = decoder(torch.tensor([list(text)]), Bound())[:, len(prompt) - 1 :]
    return decoder.logits(hidden)[0].float().log_softmax(-1)


def _rounded(exact: Decoder, kind: str, part: str) -> Decoder:
    """Return a copy of the decoder whose matrices, or their inputs, are rounded."""
    found, inputs_kind = copy.deepcopy(exact), _INPUTS.get(kind, kind)
    if part != "activations":
        for parameter in found.parameters():
            if parameter.dim() > 1:
                parameter.copy_(round_to(parameter, kind))
    if part != "weights":
        for module in found.modules():
            if isinstance(module, Linear):
                module.register_forward_pre_hook(lambda module, inputs: (round_to(inputs[0], inputs_kind),))
        logits = found.logits
        found.logits = lambda hidden: logits(round_to(hidden, inputs_kind))  # type: ignore[method-assign]
    return found


def round_to(values: Tensor, kind: str) -> Tensor:
    """Return the values in float32 as the type stores them."""
    if kind in _DTYPES:
        return values.to(_DTYPES[kind]).float()
    number = gguf.GGMLQuantizationType[kind.upper()]
    flat = values.detach().reshape(-1, values.shape[-1]).contiguous().numpy()
    back = gguf.quants.dequantize(gguf.quants.quantize(flat, number), number)
    return torch.from_numpy(np.ascontiguousarray(back)).reshape(values.shape)
