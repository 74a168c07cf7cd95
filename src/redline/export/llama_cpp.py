"""llama.cpp, through the package xllamacpp: its quantiser for K-quants, and the check of a file that was written.

The check opens the file in llama.cpp and lets it tokenize texts, render chats and continue prompts greedily. The run's
own weights, in float32 and by redline's decoder, then read the same tokens: their log-probabilities are compared, and
the token that each of the two would have chosen.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from redline.errors import UserError, install_hint
from redline.kernels.attention import Attention, Bound, MaskSpec
from redline.models.decoder import Decoder
from redline.models.families import BaseConfig, tensor_names
from redline.planning.shapes import SHAPE_KEYS, DecoderShape

PACKAGE = "xllamacpp"
Quantise = Callable[[npt.NDArray[np.float32], str], npt.NDArray[np.uint8]]

# ----------------------------------------------------------------------------------------------------
# Quantising.


def is_installed() -> bool:
    return find_spec(PACKAGE) is not None


def quantiser(kinds: Iterable[str]) -> Quantise:
    """Return a function that encodes float32 values in a type of GGUF; a UserError names a type that needs llama.cpp.

    The package gguf has the simple types. K-quants are computed by llama.cpp's own `ggml_quantize_chunk`.
    """
    import gguf
    from gguf.quants import quantize

    foreign = sorted(kind for kind in kinds if kind.endswith("_K"))
    chunk = _ggml_quantize_chunk() if foreign else None
    if foreign and chunk is None:
        what = f"{', '.join(foreign)} are quantised by llama.cpp itself, and no package here offers its quantiser."
        fix = f"Install it: {install_hint('gguf')}; or use --quant q8_0, f16, bf16 or f32."
        raise UserError(what, where="--quant", fix=fix)

    def quantise(values: npt.NDArray[np.float32], kind: str) -> npt.NDArray[np.uint8]:
        number = gguf.GGMLQuantizationType[kind]
        if kind not in foreign:
            return np.ascontiguousarray(quantize(values, number)).view(np.uint8)
        assert chunk is not None
        shape = gguf.quant_shape_to_byte_shape(values.shape, number)
        encoded = np.empty(shape, np.uint8)
        rows, columns = values.shape
        written = chunk(int(number), values.ctypes.data, encoded.ctypes.data, 0, rows, columns, None)
        assert written == encoded.nbytes
        return encoded

    return quantise


@cache
def _ggml_quantize_chunk() -> Any:
    """Return the C function, or None if the package is missing or does not export it."""
    spec = find_spec(PACKAGE)
    folders = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    for file in (file for folder in folders for file in sorted(folder.glob("*.so"))):
        try:
            function = ctypes.CDLL(str(file)).ggml_quantize_chunk
        except (OSError, AttributeError):
            continue
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        function.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
        function.restype = ctypes.c_size_t
        return function
    return None


# ----------------------------------------------------------------------------------------------------
# Checking.


TOP = 5  # log-probabilities that are compared at each token
# llama.cpp's keys and values during the check. Its default, f16, would add an error of its own to that of the file.
CACHE = "f32"
_TIE = 1e-3  # two tokens whose log-probabilities are nearer may change places
# Mean difference of log-probabilities. Rounding to 8 bits changes them by a few hundredths; a matrix in the wrong order
# changes them by more than one.
_BROKEN = 0.5
_LOSSY = ("q4_k_m", "q5_k_m", "q6_k")
# Texts that tokenizers split differently: digits, contractions, runs of white space, scripts, emoji, code.
TEXTS = (
    "Hello world",
    "It's 12345 o'clock, isn't it?  WE'LL see:\tyes\n\n\n  indented\r\n",
    "def f(x):\n    return x**2 + 3.14159  # ½ of π²\n\n\n\nprint(f(10_000))",
    "Ünïcödé, 你好，世界! Привет мир; مرحبا 🙂👩‍👩‍👧 ﷽",
    "   leading and trailing   ",
    "http://example.com/a?b=c&d=%20 <tag attr='1'>x</tag> {\"k\": [1, 2.5e-3]}",
)
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "What is 12 plus 30?",
    "Write a sentence about the sea.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "Give me a short recipe for an omelette.",
    "What does a compiler do?",
    "How many legs does a spider have?",
    "Explain gravity to a child.",
    "Which is larger, the Sun or the Moon?",
    "List two animals that fly.",
    "What is the opposite of hot?",
    "Finish the rhyme: roses are red.",
    "When did the Second World War end?",
    "What is the square root of 81?",
    "Describe a forest in autumn.",
    "How do I boil an egg?",
    "What is water made of?",
)
OPENINGS = (
    "Once upon a time",
    "The river ran",
    "In the beginning",
    "She opened the door and",
    "It was a cold day.",
    "The king said",
    "A small dog",
    "There was a",
    "He looked at the",
    "After the war",
    "The history of",
    "One morning",
    "They walked to",
    "Two children",
    "My father",
    "Under the tree",
    "The first",
    "Nobody knew",
    "When the sun",
    "Every year",
)


@dataclass(frozen=True)
class Reading:
    """How the run reads text: what llama.cpp has to agree with."""

    texts: Callable[[str], list[int]]  # without special tokens
    prompts: list[list[int]]
    chats: Sequence[str]  # questions that the prompts ask, if llama.cpp has a chat template to render them
    stops: list[int]
    vocab: int  # ids; the rest of the run's logits only pads them
    token_bytes: Callable[[int], bytes]


@dataclass(frozen=True)
class Check:
    """How a file in llama.cpp compares with the run."""

    package: str
    prompts: int
    tokens: int  # that llama.cpp wrote in all
    greedy_equal: int  # prompts whose continuation is the run's own, up to a tie
    ties: int  # among them, those parted by a tie
    top_tokens: int  # compared at each position
    logprob_difference_mean: float
    logprob_difference_p99: float
    logprob_difference_max: float
    probability_difference_max: float
    ended: int  # continuations that ended by themselves
    ended_by_run: int  # those at whose end the run's most likely token ends, too
    chats_equal: int | None  # prompts that llama.cpp renders as the same tokens; None without a chat template

    def as_dict(self) -> dict[str, Any]:
        return {key: round(value, 6) if isinstance(value, float) else value for key, value in asdict(self).items()}


def check(
    file: Path, model: BaseConfig, tensors: Iterable[tuple[str, Tensor]], reading: Reading, quant: str, tokens: int
) -> Check:
    """Open the file in llama.cpp and compare it with the run; a UserError if it is another model."""
    tokens = max(1, min(tokens, model.context - max(map(len, reading.prompts))))
    request = {
        "file": str(file),
        "context": max(map(len, reading.prompts)) + tokens + 8,
        "threads": torch.get_num_threads(),
        "texts": TEXTS,
        "chats": list(reading.chats),
        "prompts": reading.prompts,
        "tokens": tokens,
        "top": TOP,
        "cache": CACHE,
    }
    reply = _ask(request, file)
    for text, theirs in zip(TEXTS, reply["texts"], strict=True):
        if (ours := reading.texts(text)) != theirs:
            what = f"llama.cpp reads {text[:20]!r} as {theirs[:8]}, the run as {ours[:8]}."
            fix = "Export it for transformers: leave out --format; or write it unchecked with --no-verify."
            raise UserError(what, where=file.name, fix=fix)
    result = _compare(_reference(model, tensors), reading, reply)
    if quant not in _LOSSY and not result.logprob_difference_mean < _BROKEN:
        what = "llama.cpp does not compute what the run computes: log-probabilities differ by "
        what += f"{result.logprob_difference_mean:.2f} on average."
        raise UserError(what, where=file.name, fix="Export it for transformers: leave out --format.")
    return result


def _ask(request: Mapping[str, Any], file: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "redline.export.llama_child"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    reply = json.loads(done.stdout) if done.returncode == 0 and done.stdout else {}
    if done.returncode or "error" in reply:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = reply.get("error") or f"llama.cpp stopped with code {done.returncode}"
        detail = f" ({lines[-1][:200]})" if lines else ""
        fix = "Export it for transformers: leave out --format; or write it unchecked with --no-verify."
        raise UserError(f"{reason}{detail}.", where=file.name, fix=fix)
    return reply


@torch.no_grad()
def _reference(model: BaseConfig, tensors: Iterable[tuple[str, Tensor]]) -> Decoder:
    """Build the run's decoder in float32 from the published tensors."""
    options = model.model
    shape = DecoderShape(**{key: options[key] for key in SHAPE_KEYS if key in options})
    decoder = Decoder(
        shape,
        attention=Attention("flash", MaskSpec(causal=True), "cpu"),
        rope_theta=options["rope_theta"],
        rope_scaling=options["rope_scaling"],
        eps=options["norm_eps"],
    )
    parameters, stream = dict(decoder.named_parameters()), iter(tensors)
    for ours, theirs, _ in tensor_names(shape):
        parts = [next(stream)[1].float().cpu() for _ in theirs]
        parameters[ours].copy_(torch.cat(parts) if len(parts) > 1 else parts[0])
    return decoder.eval()


@torch.no_grad()
def _compare(decoder: Decoder, reading: Reading, reply: Mapping[str, Any]) -> Check:
    differences: list[Tensor] = []
    of_probabilities = 0.0
    equal = ties = ended = ended_by_run = written = 0
    for prompt, given in zip(reading.prompts, reply["continuations"], strict=True):
        tokens, measured = given["tokens"], _measured(given, reading.token_bytes)
        written += len(tokens)
        row = torch.tensor([[*prompt, *tokens[:-1]]])
        hidden = decoder(row, Bound())[:, len(prompt) - 1 :]
        own = decoder.logits(hidden)[0, :, : reading.vocab].float().log_softmax(-1)
        chosen = torch.tensor(tokens)
        parts = (own.argmax(-1) != chosen).nonzero().flatten().tolist()
        if parts:
            gap = float(own[parts[0]].max() - own[parts[0], chosen[parts[0]]])
            ties += gap < _TIE
            equal += gap < _TIE
        else:
            equal += 1
        for position, step in measured:
            ids, theirs = torch.tensor([entry[0] for entry in step[1:]]), torch.tensor([entry[1] for entry in step[1:]])
            differences.append((own[position, ids] - theirs).abs())
            of_probabilities = max(of_probabilities, float((own[position, ids].exp() - theirs.exp()).abs().max()))
        ended += given["ended"]
        ended_by_run += bool(given["ended"] and int(own[-1].argmax()) in reading.stops)
    if not differences:
        what = "llama.cpp reports no log-probability of a token that it wrote, so the file cannot be compared."
        raise UserError(what, where=PACKAGE, fix="Install another release of it, or write the file with --no-verify.")
    every = torch.cat(differences)
    return Check(
        package=f"{PACKAGE} {reply['version']}",
        prompts=len(reading.prompts),
        tokens=written,
        greedy_equal=equal,
        ties=ties,
        top_tokens=TOP,
        logprob_difference_mean=float(every.mean()),
        logprob_difference_p99=float(every.quantile(0.99)),
        logprob_difference_max=float(every.max()),
        probability_difference_max=of_probabilities,
        ended=ended,
        ended_by_run=ended_by_run,
        chats_equal=sum(ours == theirs for ours, theirs in zip(reading.prompts, reply["chats"], strict=True))
        if reading.chats
        else None,
    )


def _measured(given: Mapping[str, Any], token_bytes: Callable[[int], bytes]) -> list[tuple[int, Any]]:
    """Return (position, log-probabilities) of the tokens that llama.cpp reports.

    It leaves out a token at whose end the text stops inside of a character.
    """
    text, positions = b"", []
    for position, token in enumerate(given["tokens"]):
        text = (text + token_bytes(token))[-4:]
        if not _stops_inside(text):
            positions.append(position)
    reported = zip(positions, given["steps"], strict=False)
    return [(position, step) for position, step in reported if step[0][0] == given["tokens"][position]]


def _stops_inside(text: bytes) -> bool:
    """Whether the last bytes begin a character of UTF-8 that has more bytes."""
    lengths = ((0xE0, 0xC0, 2), (0xF0, 0xE0, 3), (0xF8, 0xF0, 4))
    return any(
        byte & mask == lead and back < length
        for back, byte in enumerate(reversed(text), 1)
        for mask, lead, length in lengths
    )
