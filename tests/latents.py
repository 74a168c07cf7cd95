"""Helpers for tests of latent_prefix: tiny frozen models, rows, and runs in the test's own process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from redline.hardware.machine import Machine
from redline.jobs.objective import job_runtime
from redline.recipe.load import load
from redline.recipe.resolve import resolve

CPU = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)
COLOURS = ("red", "blue", "green", "grey")


def write_rows(path: Path, count: int = 40) -> Path:
    """Write texts that name a thing and its colour; the colour is the answer."""
    things = ("stone", "river", "king", "light", "token", "block", "mask", "line", "step", "train")
    rows = [
        {"source": f"The {things[n % 10]} number {n} is {COLOURS[n % 4]}. Which colour?", "answer": COLOURS[n % 4]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def other_base(folder: Path, *, eos: bool = True, seed: int = 1, spread: float = 0.02, vocab: int = 300) -> Path:
    """Save a small random Llama whose width and tokenizer differ from `tiny_base`, with a token before every text.

    With a larger `spread` of its weights, the untrained model answers differently after different prefixes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    learnt.train_from_iterator(["blue green grey red Answer: blue"] * 9, trainer)
    learnt.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    named = {"eos_token": "</s>", "pad_token": "</s>"} if eos else {}
    PreTrainedTokenizerFast(tokenizer_object=learnt, bos_token="<s>", **named).save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rope_theta=5000.0,
        initializer_range=spread,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def piece_vocabulary() -> list[list[Any]]:
    """Return a vocabulary like tok512.json: control pieces, bytes, pieces by falling score, and their characters."""
    made = (" a", " b", " r", "ed", "he", " g", " t", "re", " the", "nd", " red", "blu", "lu", " blu", "gre", " blue")
    characters = " abcdeghklnortuwABQ:.?\n"
    listed = [*made, *(one for one in characters if one != "\n")]
    bytes_ = [[f"<0x{byte:02X}>", 0.0] for byte in range(256)]
    pieces = [[piece, -float(place)] for place, piece in enumerate(listed)]
    return [["<unk>", 0.0], ["\n<s>\n", 0.0], ["\n</s>\n", 0.0], *bytes_, *pieces]


def piece_base(folder: Path, **how: Any) -> Path:
    """Save a small random Llama with a list of pieces instead of a tokenizer."""
    made = other_base(folder, vocab=320, **how)
    for file in (*folder.glob("tokenizer*"), *folder.glob("special_tokens_map.json")):
        file.unlink()
    (folder / "tok320.json").write_text(json.dumps(piece_vocabulary()))
    return made


class Latents:
    """The `world` fixture with a latent_prefix recipe: frozen models, and rows instead of a text."""

    def __init__(self, world: Any, bases: list[Path], rows: Path, folder: Path) -> None:
        self.world, self.bases, self.rows, self.file = world, bases, rows, folder / f"latent-{len(bases)}.yaml"
        first, *others = (str(base) for base in bases)
        recipe = {
            "objective": "latent_prefix",
            "model": {"base": first},
            "latent_prefix": {
                "others": others,
                "d_z": 16,
                "slots": 4,
                "layers": 1,
                "heads": 2,
                "bytes": 64,
                "match_weight": 0.5,
                "words_weight": 0.1,
                "tokens_weight": 0.1,
            },
            "data": {"source": str(rows), "val_fraction": 0.2},
            "train": {
                "device": "cpu",
                "precision": "fp32",
                "compile": False,
                "lr": 3e-3,
                "global_batch": 8,
                "micro_batch": 4,
                "warmup_steps": 1,
                "weight_decay": 0.0,
            },
            "eval": {"every": 1000, "samples": 0},
            "checkpoint": {"every": 1000},
            "monitor": {"log_every": 1},
        }
        self.file.write_text(yaml.safe_dump(recipe))
        world.recipe = self.recipe

    def recipe(self, *overrides: str) -> Any:
        steps = () if any(word.startswith("train.steps") for word in overrides) else ("train.steps=6",)
        return load(str(self.file), [*steps, *overrides]).recipe

    def run(self, path: Path, *overrides: str, **options: Any) -> Any:
        return self.world.run(path, *overrides, **options)

    def objective(self, *overrides: str, teach: bool = True) -> Any:
        runtime = job_runtime("latent_prefix")
        recipe = runtime.complete(self.recipe(*overrides), lambda text: None)
        data = runtime.load_data(recipe)
        objective = runtime.create(resolve(recipe, CPU, data.facts), data)
        objective.build(torch.device("cpu"))
        if teach:
            with objective.dry_run():
                pass
        return objective
