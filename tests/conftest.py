"""Shared fixtures: a small corpus, a tiny recipe, and a trainer for them."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may wait for a network
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, by whichever package is first

import pytest
from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it puts into the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# where a test does not say how many; HYPOTHESIS_PROFILE=default: 100
settings.register_profile("quick", max_examples=25)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

TINY = (
    "model.size=null",
    "model.layers=2",
    "model.d_model=32",
    "model.heads=2",
    "model.d_ff=64",
    "data.tokenizer=bytes",
    "data.seq_len=32",
    "data.workers=2",
    "train.device=cpu",
    "train.precision=fp32",
    "train.compile=false",
    "train.hours=null",
    "train.epochs=null",
    "train.global_batch=8",
    "train.micro_batch=4",
    "train.warmup_steps=2",
    "eval.every=1000",
    "eval.sequences=4",
    "eval.samples=0",
    "checkpoint.every=1000",
    "monitor.log_every=1",
)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("REDLINE_CACHE")
    os.environ["REDLINE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["REDLINE_CACHE"]
    else:
        os.environ["REDLINE_CACHE"] = before


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eighty short documents, so that every sequence has many document boundaries."""
    folder = tmp_path_factory.mktemp("corpus")
    chance = random.Random(5)
    words = ["red", "line", "train", "token", "block", "mask", "loss", "step", "king", "river", "stone", "light"]
    for number in range(80):
        lengths = [chance.randint(3, 9) for _ in range(chance.randint(1, 9))]
        sentences = [" ".join(chance.choices(words, k=length)) + ".\n" for length in lengths]
        (folder / f"{number:03d}.txt").write_text("".join(sentences))
    return folder


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """Return the overrides that make quickstart a model that trains in a second."""
    return TINY


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the figures of the report, which take longer than a tiny run."""
    monkeypatch.setattr("redline.runs.report.figures._drawn", lambda draw, inches: "<svg></svg>")


Hook = Callable[[int], Any]


class RecordingView:
    """A view that records the events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def tick(self, step: int, progress: float | None = None, eta_s: float | None = None) -> None:
        pass

    def close(self) -> None:
        pass


class StepHooks:
    """A trainer's step with hooks before and after it."""

    def __init__(self, step: Any, before: Hook | None = None, after: Hook | None = None) -> None:
        self.step, self.before, self.after = step, before, after

    def __call__(self, number: int, *rest: Any) -> Any:
        if self.before:
            self.before(number)
        result = self.step(number, *rest)
        if self.after:
            self.after(number)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)


class World:
    """Does what `redline train` does, within the test process."""

    tiny = TINY

    def __init__(self, corpus: Path) -> None:
        self.corpus = corpus

    def recipe(self, *overrides: str) -> Any:
        from redline.recipe.load import load

        stops = any(o.startswith(("train.steps", "train.hours=", "train.tokens")) for o in overrides)
        steps = () if stops else ("train.steps=6",)
        return load("quickstart", [*TINY, f"data.source={self.corpus}", *steps, *overrides]).recipe

    def trainer(self, run: Any, *overrides: str, checkpoint: Path | None = None, **options: Any) -> Any:
        from redline.hardware.machine import Machine
        from redline.jobs.objective import job_runtime
        from redline.recipe.resolve import resolve
        from redline.runs.events import EventLog
        from redline.runs.monitor import Monitor
        from redline.training.trainer import Trainer

        recipe = self.recipe(*overrides)
        runtime = job_runtime(recipe.objective)
        recipe = runtime.complete(recipe, lambda text: None)
        data = runtime.load_data(recipe)
        machine = options.pop("machine", Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11))
        resolved = resolve(recipe, machine, data.facts, gpus=options["ranks"].size if "ranks" in options else 1)
        monitor = Monitor(EventLog(run.path / "events.jsonl"), options.pop("view", RecordingView()))
        objective = runtime.create(resolved, data)
        identity = {"data": data.facts.fingerprint, "tokenizer": data.facts.tokenizer_fingerprint}
        trainer = Trainer(
            resolved,
            objective,
            run,
            monitor,
            horizon_steps=resolved.horizon_steps,
            identity={**identity, **objective.identity()},
            **options,
        )
        trainer.build(checkpoint)
        return trainer

    def around(self, trainer: Any, **hooks: Any) -> None:
        trainer.train_step = StepHooks(trainer.train_step, **hooks)

    def run(self, path: Path, *overrides: str, resume: bool = False, stop_at: int | None = None, **options: Any) -> Any:
        """Train a run. With `stop_at`, SIGTERM arrives while that step is computed."""
        from redline.training.checkpoint import newest_valid
        from redline.training.control import RunDirectory

        with RunDirectory(path) as run:
            checkpoint = newest_valid(run.checkpoints) if resume else None
            trainer = self.trainer(run, *overrides, checkpoint=checkpoint, **options)
            if stop_at is not None:
                self.around(trainer, before=lambda n: n == stop_at - 1 and os.kill(os.getpid(), signal.SIGTERM))
            trainer.outcome = trainer.run()
            trainer.monitor.log.close()
        return trainer


@pytest.fixture
def world(corpus: Path) -> World:
    return World(corpus)


@pytest.fixture
def tensors_of() -> Callable[[Path], dict[str, Any]]:
    from redline.training.checkpoint import read_tensors

    def read(checkpoint: Path) -> dict[str, Any]:
        stems = sorted(p.stem for p in checkpoint.glob("*.safetensors"))
        return {f"{stem}/{name}": t for stem in stems for name, t in read_tensors(checkpoint, stem).items()}

    return read


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer and a chat template, as transformers saves it."""
    pytest.importorskip("transformers", reason="a base is made by transformers")
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("base")
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.decoder = decoders.ByteLevel()
    marks = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learnt.train_from_iterator(
        ["What is the colour of the stone? It is red."] * 9,
        trainers.BpeTrainer(vocab_size=320, special_tokens=marks, initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=learnt, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty questions whose answers follow a rule."""
    path = tmp_path_factory.mktemp("answers") / "rows.jsonl"
    things = ("stone", "river", "king", "light", "token", "block", "mask", "line", "step", "train")
    colours = ("red", "blue", "green", "grey")
    rows = [
        {"prompt": f"What is the colour of the {thing} number {number}?", "completion": f"It is {colours[number]}."}
        for thing in things
        for number in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def fp8_tried_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the trials of fp8 matmuls in this process, where tests can replace the measurement."""
    from redline.hardware.trials import Answers, answer_of
    from redline.kernels import float8_choice

    def try_here(backend: str, shapes: float8_choice.Shapes, *, learns: bool) -> Answers:
        trials = float8_choice.linear_trials(backend, shapes, learns=learns)
        return {name: answer_of(trial) for name, trial in trials.items()}

    monkeypatch.setattr(float8_choice, "try_linears", try_here)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print figures even if the test passes."""

    def write(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")

    return write
