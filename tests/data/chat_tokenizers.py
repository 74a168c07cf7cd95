"""Tiny tokenizers with chat templates of every habit, as folders that transformers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redline.data.chat import Conversation, Message

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
TEXTS = [
    "The answer is yes, and yes again; no means no.\n#### 72\n",
    "user\nassistant\nsystem\nHow many clips did she sell altogether? 48/2 = <<48/2=24>>24 clips.\n",
    "    spaces,\ttabs, naïve café – 日本語 🙂\n\n",
] * 5

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# A mark at the beginning, content trimmed, the end of text behind each answer, and no header to ask with.
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[Q] ' + m['content'] | trim + ' [A]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
# Thoughts of earlier turns are left out.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# It asks for a thought that it does not write.
UNFAITHFUL = CHATML.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")
DATED = "{{ strftime_now('%d %b %Y') + '\\n' }}" + CHATML
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
)


def tokenizer_folder(folder: Path, template: str | None, *, adds_bos: bool = False, special: Any = SPECIAL) -> Path:
    """A byte-level BPE that moves offsets behind spaces, as Llama's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    steps = [processors.ByteLevel(trim_offsets=True)]
    if adds_bos:
        steps.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", special.index("<s>"))]))
    backend.post_processor = processors.Sequence(steps)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", bos_token="<s>")
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    return folder


def chat(*turns: str) -> Conversation:
    """The user and the assistant by turns."""
    messages = tuple(Message(("user", "assistant")[n % 2], text) for n, text in enumerate(turns))
    return Conversation("chat.jsonl:1", messages, is_pair=len(turns) == 2)
