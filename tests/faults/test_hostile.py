"""R14: malicious files. No code in them runs, nothing is written outside of the run, no socket is opened."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from watched import Watch

from redline.data.chat_template import load_chat_tokenizer
from redline.data.tokenizer import load_tokenizer
from redline.data.tokens import open_tokens
from redline.errors import UserError
from redline.evaluate.opened_run import open_pretrained
from redline.export.folder import export_run
from redline.models.pretrained import open_base
from redline.training.checkpoint import canonical_json, file_digest, find_weights, newest_valid

Action = Callable[[Path], Any]
MOST_S = 60


@pytest.fixture
def harmless(fork: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run an action in an audited process that may write only to `home`; return how it ended."""
    home, outside = tmp_path / "home", tmp_path / "outside"
    home.mkdir(exist_ok=True)
    outside.mkdir(exist_ok=True)
    (outside / "precious").write_text("precious")
    monkeypatch.setenv("REDLINE_CACHE", str(home / "cache"))
    monkeypatch.setenv("TMPDIR", str(home))
    monkeypatch.setenv("MPLCONFIGDIR", str(home / "matplotlib"))
    monkeypatch.chdir(home)
    expected = (UserError, SafetensorError)

    def run(action: Action) -> str:
        def watched(_: Any) -> None:
            import huggingface_hub.constants

            huggingface_hub.constants.HF_HUB_OFFLINE = False  # attempts to use the network must be seen
            sys.dont_write_bytecode = True
            signal.alarm(MOST_S)
            watch = Watch(home)
            sys.addaudithook(watch)
            try:
                action(home)
                ended = "done"
            except expected as error:
                ended = f"refused: {error}"
            except BaseException as error:
                ended = f"failed: {type(error).__name__}: {error}"
            (home / "ended.json").write_text(json.dumps([ended, watch.seen]))

        assert fork(watched).wait() == 0, "it took too long, or died"
        ended, seen = json.loads((home / "ended.json").read_text())
        assert seen == []
        assert [path.name for path in tmp_path.rglob("canary*")] == []
        assert sorted(path.name for path in outside.iterdir()) == ["precious"]
        assert (outside / "precious").read_text() == "precious"
        return str(ended)

    return run


class Bomb:
    """An object whose pickle runs code when it is loaded."""

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(Path.cwd() / "canary"),))


@pytest.fixture
def bomb(harmless: Any) -> bytes:
    return pickle.dumps(Bomb(), protocol=2)


def test_the_audit_sees_every_kind_of_access(harmless: Any, tmp_path: Path, bomb: bytes) -> None:
    """R18: the audit notices each kind of harm."""
    outside = tmp_path / "outside"
    harms: list[Action] = [
        lambda home: pickle.loads(bomb),
        lambda home: (outside / "precious").write_text("gone"),
        lambda home: (outside / "canary").mkdir(),
        lambda home: (outside / "precious").rename(home / "mine"),
        lambda home: os.system("true"),
        lambda home: __import__("socket").create_connection(("127.0.0.1", 9), timeout=1),
        lambda home: __import__("socket").getaddrinfo("localhost", 80),
    ]
    for harm in harms:
        with pytest.raises(AssertionError):
            harmless(harm)
        shutil.rmtree(tmp_path / "home/canary", ignore_errors=True)
        shutil.rmtree(outside)
        outside.mkdir()
        (outside / "precious").write_text("precious")
    assert harmless(lambda home: 1) == "done"


# --- pickles under other names


def test_pickles(harmless: Any, bomb: bytes, tiny_base: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(tiny_base, home / "base")
    openers: dict[str, Action] = {
        "tokenizer.json": lambda home: load_tokenizer(str(home / "base/tokenizer.json")),
        "tokenizer_config.json": lambda home: load_chat_tokenizer(home / "base"),
        "model.safetensors": lambda home: open_base(str(home / "base")),
        "config.json": lambda home: open_base(str(home / "base")),
        "train.bin": lambda home: open_tokens(home / "base/train.bin", "gpt2"),
        "meta.json": lambda home: open_tokens(home / "base/meta.json", "gpt2"),
    }
    for name, opener in openers.items():
        before = (home / "base" / name).read_bytes() if (home / "base" / name).exists() else None
        (home / "base" / name).write_bytes(bomb)
        ended = harmless(opener)
        assert ended.startswith("refused") or (name == "train.bin" and ended == "done"), ended
        (home / "base" / name).write_bytes(before) if before else (home / "base" / name).unlink()
    (home / "base/model.safetensors").unlink()
    (home / "base/pytorch_model.bin").write_bytes(bomb)
    assert "pickled weights only" in harmless(openers["model.safetensors"])
    (home / "base/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "."}))
    (home / "base/adapter_model.bin").write_bytes(bomb)
    assert "can run any code" in harmless(lambda home: open_pretrained(str(home / "base"), writes_only=True))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_checkpoint_with_a_pickle_in_it(harmless: Any, bomb: bytes, tiny: Any, tmp_path: Path, name: str) -> None:
    """Its manifest is right, as it would be in a forged checkpoint."""
    from redline.training.checkpoint import commit, read_manifest, read_state, read_tensors

    (tmp_path / "home/run").mkdir(parents=True)
    path = commit(tmp_path / "home/run/checkpoints", tiny(3)).path
    (path / name).write_bytes(bomb)
    body = {key: value for key, value in read_manifest(path).items() if key != "digest"}
    body["files"][name] = {"bytes": len(bomb), "sha256": file_digest(path / name)}
    signed = {**body, "digest": hashlib.sha256(canonical_json(body)).hexdigest()}
    (path / "manifest.json").write_bytes(canonical_json(signed))
    assert newest_valid(path.parent) is None, "it is passed over"
    readers: dict[str, Action] = {
        "model.safetensors": lambda home: find_weights(home / "run").tensors(),
        "optimizer.safetensors": lambda home: read_tensors(path, "optimizer"),
        "state.json": lambda home: read_state(path),
    }
    assert harmless(readers[name]) != "done"


# --- code beside the weights


CODE = "import os\nos.mkdir({canary!r})\nclass Model: pass\nConfig = Tokenizer = Model\n"


@pytest.mark.parametrize("also", [{}, {"tokenizer_class": "Tokenizer"}, {"tokenizer_class": "TransfoXLTokenizer"}])
def test_code_shipped_with_a_model_does_not_run(
    harmless: Any, tiny_base: Path, tmp_path: Path, also: dict[str, Any]
) -> None:
    folder = tmp_path / "home/base"
    shutil.copytree(tiny_base, folder)
    for name in ("modeling_evil.py", "__init__.py", "tokenization_evil.py", "setup.py", "conftest.py"):
        (folder / name).write_text(CODE.format(canary=str(tmp_path / "home/canary")))
    own = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    tokenizer = {"AutoTokenizer": ["tokenization_evil.Tokenizer", "tokenization_evil.Tokenizer"]}
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        more = {"auto_map": own | tokenizer, "trust_remote_code": True, **also}
        (folder / name).write_text(json.dumps({**content, **more}))
    (folder / "README.md").write_text("---\na: !!python/object/apply:os.mkdir [canary]\n---\n")
    (folder / "generation_config.json").write_text('{"trust_remote_code": true, "custom_generate": "evil/code"}')
    assert harmless(lambda home: open_base(str(home / "base"))) == "done"
    ended = harmless(lambda home: load_chat_tokenizer(home / "base"))
    assert ended == "done" or ended.startswith("refused"), ended


TEMPLATES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.mkdir('CANARY') }}",
    "lipsum": "{{ lipsum.__globals__['os'].mkdir('CANARY') }}",
    "our function": "{{ raise_exception.__globals__['__builtins__']['open']('CANARY', 'w') }}",
    "the day": "{{ strftime_now.__self__.__class__.__subclasses__() }}",
    "attr": "{{ (messages|attr('__class__'))|attr('__base__') }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "map": "{{ messages|map(attribute='__class__')|list }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.mkdir('CANARY') }}",
    "config": "{{ self.__init__.__globals__ }}",
    "changes": "{{ messages.append(messages) }}{{ messages.clear() }}",
    "raises": "{{ raise_exception('no') }}",
    "memory": "{{ 'x' * (10 ** 14) }}",
    "a long range": "{{ range(10 ** 12)|list|length }}",
    "broken": "{% for m in messages %}",
    "for ever": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macro": "{% macro a(n) %}{{ a(n) }}{% endmacro %}{{ a(1) }}",
}


def test_templates(harmless: Any, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Any) -> None:
    monkeypatch.setattr("redline.data.chat_template._MAX_SECONDS", 0.5)
    template = tmp_path / "home/evil.jinja"
    for name, text in TEMPLATES.items():
        template.write_text(text.replace("CANARY", str(tmp_path / "home/canary")))
        ended = harmless(lambda home: load_chat_tokenizer(tiny_base, str(template)))
        assert ended.startswith("refused") or (name == "attr" and ended == "done"), ended  # which gives it nothing
        assert name != "for ever" or "0.5 s" in ended
    say(f"R14: {len(TEMPLATES)} hostile templates: 0 executions, 0 writes outside, 0 sockets")


# --- numbers that lie


def text_of(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(tensors: int, keys: int, *parts: bytes) -> bytes:
    architecture = text_of("general.architecture") + struct.pack("<I", 8) + text_of("llama")
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + architecture + b"".join(parts) + bytes(64)


GGUF = {
    "keys": gguf(0, 2**62),
    "tensors": gguf(2**62, 1),
    "an array": gguf(0, 2, text_of("tokenizer.ggml.scores"), struct.pack("<IIQ", 9, 0, 2**60)),
    "texts": gguf(0, 2, text_of("tokenizer.ggml.tokens"), struct.pack("<IIQ", 9, 8, 2**60)),
    "arrays of arrays": gguf(0, 2, text_of("a"), struct.pack("<I", 9), struct.pack("<IQ", 9, 2**60) * 50),
    "a key": gguf(0, 2, struct.pack("<Q", 2**63)),
    "sides": gguf(1, 1, text_of("token_embd.weight"), struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)),
    "a place": gguf(1, 1, text_of("token_embd.weight"), struct.pack("<IQQIQ", 2, 4, 4, 0, 2**62)),
    "no tensors": gguf(0, 1),
    "layers": gguf(0, 2, text_of("llama.block_count"), struct.pack("<II", 4, 2**31)),
    "nothing": b"GGUF",
    "a pickle": b"GGUF" + pickle.dumps(Bomb, protocol=2),
}


def test_gguf_files_with_false_headers(harmless: Any, say: Any) -> None:
    pytest.importorskip("gguf")

    def each(home: Path) -> None:
        """All files in one process, because the import of transformers takes seconds."""
        for name, content in GGUF.items():
            (home / f"{name}.gguf").write_bytes(content)
            with pytest.raises(UserError):
                open_base(str(home / f"{name}.gguf"))

    assert harmless(each) == "done"
    say(f"R14: {len(GGUF)} GGUF files and {len(HEADERS)} headers of tensors that lie: all refused")


def tensor(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


HEADERS: dict[str, bytes | dict[str, Any]] = {
    "beyond the end": {"a": tensor([2**61], 0, 2**63)},
    "before the beginning": {"a": tensor([2], -8, 0)},
    "over each other": {"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)},
    "backwards": {"a": tensor([2], 8, 0)},
    "sides that overflow": {"a": tensor([2**40, 2**40], 0, 8)},
    "a negative side": {"a": tensor([-2], 0, 8)},
    "levels": b'{"a":' + b"[" * 50_000,
    "a list": b"[]",
    "no JSON": b"\xff\xfe",
}


@pytest.mark.parametrize("length", [None, 0, 2**62])
def test_safetensors_with_false_headers(harmless: Any, tiny_base: Path, length: int | None) -> None:
    def each(home: Path) -> None:
        shutil.copytree(tiny_base, home / "base")
        for header in HEADERS.values():
            content = header if isinstance(header, bytes) else json.dumps(header).encode()
            start = struct.pack("<Q", len(content) if length is None else length)
            (home / "base/model.safetensors").write_bytes(start + content + bytes(12))
            with pytest.raises(UserError):
                open_base(str(home / "base"))

    assert harmless(each) == "done"


# --- runs that point elsewhere


@pytest.fixture
def trained(world: Any, tmp_path: Path) -> Path:
    import matplotlib.font_manager  # noqa: F401, which asks the system for its fonts when it is imported

    from redline.recipe.lock import make_lock, write_lock

    path = tmp_path / "trained"
    trainer = world.run(path, "train.steps=2")
    write_lock(path, make_lock("toy", "id", trainer.resolved, trainer.objective.data.facts))
    return path


def command(*words: str) -> Action:
    def act(home: Path) -> None:
        from redline.cli.main import main

        sys.argv = ["redline", *words]
        with open(os.devnull, "w") as quiet:
            sys.stdout = sys.stderr = quiet
            try:
                main()
            except SystemExit as leave:
                if leave.code:
                    raise UserError("left") from None

    return act


FILES = (".lock", "events.jsonl", "lock.json", "report.html", "stop-requested", "tokenizer.json")


def test_links_in_a_run(harmless: Any, trained: Path, tmp_path: Path, say: Any) -> None:
    outside = tmp_path / "outside"
    for number, name in enumerate([*FILES, "checkpoints", "tensorboard"]):
        run = tmp_path / f"home/runs/{number}"
        shutil.copytree(trained, run)
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / "precious" if name in FILES else outside)
        for words in (("train", "--resume", str(run), "train.steps=4"), ("report", str(run)), ("stop", str(run))):
            assert harmless(command(*words)) == "refused: left", (name, words)
    shutil.copytree(trained, tmp_path / "home/whole")
    assert harmless(command("train", "--resume", "whole", "train.steps=4")) == "done"
    say(f"R14: {len(FILES) + 2} links out of a run: 0 writes outside")


def test_names_in_a_run(harmless: Any, trained: Path, tmp_path: Path) -> None:
    """Names in a lock must not decide where files are written."""
    for number, name in enumerate(["../../escaped", "a\0b", "x" * 5000]):
        run = tmp_path / f"home/runs/{number}"
        shutil.copytree(trained, run)
        lock = json.loads((run / "lock.json").read_text()) | {"recipe_name": name, "run_id": name}
        lock["data"]["tokenizer"] = name
        (run / "lock.json").write_text(json.dumps(lock))
        harmless(command("train", "--resume", str(run), "train.steps=4"))
        ended = harmless(lambda home, run=run, number=number: export_run(run, None, home / f"out{number}"))
        assert ended == "done" or ended.startswith("refused"), ended
