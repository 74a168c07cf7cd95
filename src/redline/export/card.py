"""The model card of an export: what the model is, its data, its quality, and how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from redline.errors import redact_all
from redline.runs.events import History, number, read_events, section
from redline.units import format_count, format_seconds
from redline.vocabulary import EVENTS_FILE

CARD = "README.md"
_GENERATES = "ForCausalLM"  # the end of the names of transformers' classes that generate text
_PIPELINES = {_GENERATES: "text-generation", "ForSequenceClassification": "text-classification"}


def auto_class(architecture: str) -> str:
    """Return the class of transformers that opens a model of this class, such as AutoModelForCausalLM."""
    return f"AutoModelFor{architecture.partition('For')[2]}"


def model_card(run: Path, lock: Mapping[str, Any], exported: Mapping[str, Any], *, tokenizer: bool) -> str:
    """Return README.md, with the front matter that model hubs read. `exported` is the content of redline.json."""
    events, architecture = read_events(run / EVENTS_FILE), str(exported["class"])
    pipeline = next((task for end, task in _PIPELINES.items() if architecture.endswith(end)), None)
    front = {
        "library_name": _library(exported, "transformers"),
        **({"pipeline_tag": pipeline} if pipeline else {}),
        "tags": ["redline", str(exported["objective"]), str(exported["model_type"])],
    }
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {lock['recipe_name']}, step {exported['step']:,}",
        _what(lock, exported),
        "## How to load it\n" + (_gguf_loading(exported) or _loading(architecture, tokenizer)),
        "## Training data\n" + bullets(data_facts(events, lock, exported["step"])),
        "## Quality\n" + quality(events, exported),
        "## Limits\n" + _limits(lock, generates=architecture.endswith(_GENERATES)),
        "## How it was made\n" + bullets(making(events, lock, exported)),
        f"The recipe, as it was resolved:\n\n```yaml\n{resolved_recipe(lock)}```",
    ]
    return "\n\n".join(parts) + "\n"


def code_card(run: Path, lock: Mapping[str, Any], exported: Mapping[str, Any], usage: str, code: str) -> str:
    """Return README.md for a model that comes with its own code."""
    events = read_events(run / EVENTS_FILE)
    tags = ["redline", "custom_code", str(exported["objective"]), str(exported["model_type"])]
    front = {"library_name": "transformers", "tags": tags}
    kind = {"ema": "the moving average of the weights", "raw": "the weights"}[str(exported["weights"])]
    what = (
        f"A model of objective {exported['objective']}. This folder holds {kind} {_stored(exported)}, and `{code}`, "
        "which computes it. transformers runs that file only with `trust_remote_code=True`; read it first."
    )
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {lock['recipe_name']}, step {exported['step']:,}",
        what,
        f"## How to use it\n```python\n{usage}```",
        "## Training data\n" + bullets(data_facts(events, lock, exported["step"])),
        "## Quality\n" + quality(events, exported),
        "## Limits\n" + _limits(lock, generates=False),
        "## How it was made\n" + bullets(making(events, lock, exported)),
        f"The recipe, as it was resolved:\n\n```yaml\n{resolved_recipe(lock)}```",
    ]
    return "\n\n".join(parts) + "\n"


def _what(lock: Mapping[str, Any], exported: Mapping[str, Any]) -> str:
    total = number(section(lock, "parameters"), "total") or 0
    model = section(section(lock, "recipe"), "model")
    shape = f"{model.get('layers')} layers, width {model.get('d_model')}, {model.get('heads')} heads"
    kind = {"ema": "the moving average of the weights", "raw": "the weights"}[str(exported["weights"])]
    origin = section(lock, "init_from")
    start = f"the weights of run {origin.get('run_id')} at step {origin.get('step')}" if origin else "scratch"
    generates = str(exported["class"]).endswith(_GENERATES)
    task = "to predict the next token" if generates else f"with objective {exported['objective']}"
    return (
        f"A decoder-only {'language ' if generates else ''}model with {format_count(total)} parameters ({shape}), "
        f"trained from {start} {task}. This folder holds {kind} {_stored(exported)}."
    )


def _library(exported: Mapping[str, Any], usual: str) -> str:
    return "gguf" if exported.get("gguf") else usual


def _stored(exported: Mapping[str, Any]) -> str:
    if gguf := exported.get("gguf"):
        return f"in {gguf['quant']} as the GGUF file `{gguf['file']}`"
    return f"in {exported['dtype']} as `{exported['class']}`"


def _gguf_loading(exported: Mapping[str, Any]) -> str:
    """Return how a GGUF file is loaded, and what llama.cpp computes from it; "" for an export of another format."""
    gguf = exported.get("gguf")
    if not gguf:
        return ""
    text = f"```console\nllama-server -m {gguf['file']}\nollama create my-model -f Modelfile\n```\n\n"
    if not (found := gguf["verified"]):
        return text + "The file was not compared with the run."
    return text + (
        f"The file was opened in llama.cpp ({found['package']}) and compared with the weights that were trained, in "
        f"float32. After {found['prompts']} prompts the greedy text was the same for {found['greedy_equal']}. Over "
        f"{found['tokens']} tokens the {found['top_tokens']} highest log-probabilities differed by "
        f"{found['logprob_difference_mean']:.2g} on average and by {found['logprob_difference_max']:.2g} at most."
    )


def _loading(architecture: str, tokenizer: bool) -> str:
    opener = auto_class(architecture)
    if not tokenizer:
        return (
            f"```python\nfrom transformers import {opener}\n\n"
            f'model = {opener}.from_pretrained("PATH-OF-THIS-FOLDER")\n```\n\n'
            "The tokenizer's files were missing when this was exported; add them before using text."
        )
    use = (
        "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=100)[0], skip_special_tokens=True))\n"
        if architecture.endswith(_GENERATES)
        else "print(model(**prompt).logits)\n"
    )
    return (
        f"```python\nfrom transformers import {opener}, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("PATH-OF-THIS-FOLDER")\n'
        f'model = {opener}.from_pretrained("PATH-OF-THIS-FOLDER")\n'
        'prompt = tokenizer("The ", return_tensors="pt", return_token_type_ids=False)\n'
        f"{use}```\n\n"
        "The tokenizer puts the end-of-text token before a text, since every document had it there in training."
    )


def data_facts(events: History, lock: Mapping[str, Any], step: int) -> dict[str, Any]:
    data, recipe = section(lock, "data"), section(lock, "recipe")
    tokens = events.until(step).last_number("tokens", "step", "eval", "stop")
    return {
        "source": f"`{json.dumps(section(recipe, 'data').get('source'), ensure_ascii=False)}`",
        "fingerprint of the tokens": f"`{data.get('fingerprint')}`",
        "tokenizer": f"{data.get('tokenizer')}, {data.get('vocab_size')} entries",
        "fingerprint of the tokenizer": f"`{data.get('tokenizer_fingerprint')}`",
        "training tokens": f"{number(data, 'train_tokens') or 0:,.0f}",
        "tokens seen": "unknown" if tokens is None else f"{int(tokens):,}",
        "updates": f"{step:,}",
    }


def quality(events: History, exported: Mapping[str, Any]) -> str:
    step = exported["step"]
    evals = events.until(step).of_type("eval")
    if not evals or number(evals[-1], "loss") is None:
        return "It was not evaluated on held-out text."
    last = evals[-1]
    rows = {"loss": "nats per token", "perplexity": "e^loss", "bits_per_byte": "comparable between tokenizers"}
    if not str(exported["class"]).endswith(_GENERATES):
        rows = {key: "" for key in last if key not in ("type", "time", "step", "tokens", "seconds")}
    lines = [
        f"| {key.replace('_', ' ')} | {value:.4f} | {meaning} |"
        for key, meaning in rows.items()
        if (value := number(last, key)) is not None
    ]
    at = f"On the run's validation text (at most {exported['eval_sequences']} sequences of it), at step "
    at += f"{int(number(last, 'step') or 0):,}"
    if exported["weights"] == "raw" and exported["averaged"]:
        at += " (measured on the moving average, not on the weights in this folder)"
    return f"{at}:\n\n| metric | value | |\n|---|---|---|\n" + "\n".join(lines)


def _limits(lock: Mapping[str, Any], *, generates: bool) -> str:
    length = section(section(lock, "recipe"), "data").get("seq_len")
    wrong = (
        "It continues text. It was not trained to follow instructions or to refuse anything, and it can be wrong, "
        "offensive, or repeat its training text word for word."
    )
    limits = [
        f"It was trained on sequences of {length} tokens; longer ones were not tested.",
        wrong if generates else "It can be wrong.",
        "It knows only what is in the data above. The licence of these data applies to it, and it has their biases.",
    ]
    return "\n".join(f"- {limit}" for limit in limits)


def making(events: History, lock: Mapping[str, Any], exported: Mapping[str, Any]) -> dict[str, Any]:
    versions, machine = section(lock, "versions"), section(lock, "machine")
    hours = events.until(exported["step"]).last_number("hours", "step")
    git = section(lock, "git")
    return {
        "run": f"`{lock.get('run_id')}`, seed {lock.get('seed')}",
        "machine": machine.get("name"),
        "training time": "unknown" if hours is None else format_seconds(3600 * hours),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "commit": f"`{git['commit']}`{' with changes' if git.get('dirty') else ''}" if git.get("commit") else None,
    }


def resolved_recipe(lock: Mapping[str, Any]) -> str:
    return yaml.safe_dump(redact_all(section(lock, "recipe")), sort_keys=False, allow_unicode=True)


def bullets(facts: Mapping[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in facts.items() if value is not None)


# ----------------------------------------------------------------------------------------------------
# The card of a model that was fine-tuned on a base.


_PROMPTS = {
    True: 'chat = [{"role": "user", "content": "What is it?"}]\n'
    "prompt = tokenizer.apply_chat_template(\n"
    '    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"\n)\n',
    False: 'prompt = tokenizer("What is it?\\n", return_tensors="pt", return_token_type_ids=False)\n',
}


def finetuned_card(
    run: Path, lock: Mapping[str, Any], exported: Mapping[str, Any], *, learn: str, template: bool
) -> str:
    """Return README.md, with the front matter that model hubs read. `exported` is the content of redline.json.

    `learn` names the tokens that the loss was taken over; `template` says whether there is a chat template.
    """
    events = read_events(run / EVENTS_FILE)
    is_adapter = exported["form"] == "adapter"
    front = {
        "library_name": _library(exported, "peft" if is_adapter else "transformers"),
        # Model hubs reject a card whose base_model is not one of their ids.
        **({"base_model": known} if (known := exported["base"]["hub_id"]) else {}),
        "pipeline_tag": "text-generation",
        "tags": ["redline", str(exported["objective"]), str(exported["method"]), str(exported["model_type"])],
    }
    entries = section(lock, "data").get("vocab_size")
    facts = {
        **data_facts(events, lock, exported["step"]),
        "tokenizer": f"the base's, {entries} entries",
        "tokens in the loss": learn,
    }
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {lock['recipe_name']}, step {exported['step']:,}",
        _adapter_summary(lock, exported),
        "## Its base\n" + bullets(_base(lock, exported)),
        "## How to load it\n" + (_gguf_loading(exported) or _adapter_loading(exported, template)),
        "## Training data\n" + bullets(facts),
        "## Quality\n" + quality(events, exported),
        "## Limits\n" + _adapter_limits(lock),
        "## How it was made\n" + bullets(making(events, lock, exported)),
        f"The recipe, as it was resolved:\n\n```yaml\n{resolved_recipe(lock)}```",
    ]
    return "\n\n".join(parts) + "\n"


def _adapter_summary(lock: Mapping[str, Any], exported: Mapping[str, Any]) -> str:
    base, kind = f"`{exported['base']['name']}`", _stored(exported)
    held = "the moving average of the weights" if exported["weights"] == "ema" else "the weights"
    if exported["form"] == "adapter":
        what = f"{_adapters(lock)} for {base}. This folder holds {held} in {exported['dtype']}, and not the base."
        return what[0].upper() + what[1:]
    if exported["form"] == "merged":
        return f"{base} with {_adapters(lock)} merged into it. This folder holds {held} {kind}."
    return f"{base}, with all of its weights trained further. This folder holds {held} {kind}."


def _adapters(lock: Mapping[str, Any]) -> str:
    count = number(section(lock, "parameters"), "trainable") or 0
    lora = section(section(section(lock, "recipe"), "model"), "lora")
    where = ", ".join(map(str, lora.get("target_modules") or ()))
    width = f"rank {lora.get('r')}, alpha {lora.get('alpha'):g}{', rank-stabilised' if lora.get('rslora') else ''}"
    return f"low-rank adapters of {format_count(count)} parameters ({width}, on {where})"


def _base(lock: Mapping[str, Any], exported: Mapping[str, Any]) -> dict[str, Any]:
    base, origin = exported["base"], section(lock, "init_from")
    begun = f"the weights of run `{origin.get('run_id')}` at step {origin.get('step')}" if origin else None
    return {
        "base": f"`{base['name']}`" + (f", revision `{base['revision']}`" if base["revision"] else ""),
        "fingerprint of its weights": f"`{base['fingerprint']}`",
        "weights": "unpacked from a quantised .gguf copy; those on the hub differ by the quantisation error"
        if base["hub_id"] and base.get("unpacked_from_gguf")
        else None,
        "in training": _in_training(exported),
        "in this folder": _in_folder(exported),
        "the run started with": begun,
    }


def _in_training(exported: Mapping[str, Any]) -> str:
    quantised = exported["quantisation"]
    if not quantised:
        return "as it is stored" + (", and trained" if exported["method"] == "full" else "")
    return f"in NF4{', doubly quantised' if quantised['double'] else ''}"


def _in_folder(exported: Mapping[str, Any]) -> str | None:
    """Return which weights the adapters were added to; None if there is only one answer."""
    if exported["form"] != "merged" or not exported["quantisation"]:
        return None
    if (difference := exported.get("quantisation_difference")) is None:
        return "dequantised from NF4: the weights that the adapters were trained beside, not the original weights"
    return (
        f"the original weights, not those that the adapters were trained beside: NF4 differs from them by "
        f"{difference:.2%} (the norm of the difference over the norm of the quantised matrices)"
    )


def _adapter_loading(exported: Mapping[str, Any], template: bool) -> str:
    stops = ""
    if exported["form"] == "adapter":
        imports = (
            "from peft import PeftModel\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig\n"
        )
        # peft takes the generation settings from the base, which may not stop at the chat template's end mark.
        model = (
            f"base = AutoModelForCausalLM.from_pretrained({_base_arguments(exported['base'])})\n"
            'model = PeftModel.from_pretrained(base, "PATH-OF-THIS-FOLDER")\n'
            'stops = GenerationConfig.from_pretrained("PATH-OF-THIS-FOLDER")\n'
        )
        stops = ", generation_config=stops"
    else:
        imports = "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        model = 'model = AutoModelForCausalLM.from_pretrained("PATH-OF-THIS-FOLDER")\n'
    code = (
        f"{imports}\n"
        'tokenizer = AutoTokenizer.from_pretrained("PATH-OF-THIS-FOLDER")\n'
        f"{model}{_PROMPTS[template]}"
        f"answer = model.generate(**prompt{stops}, max_new_tokens=100)[0, prompt.input_ids.shape[1] :]\n"
        "print(tokenizer.decode(answer, skip_special_tokens=True))\n"
    )
    return f"```python\n{code}```" + _where_the_base_is(exported) + _in_four_bits(exported)


def _base_arguments(base: Mapping[str, Any]) -> str:
    """Return the arguments of `from_pretrained` that load the base, as Python source."""
    if not base["hub_id"]:
        return '"PATH-OF-THE-BASE"'
    return json.dumps(base["hub_id"]) + (f", revision={json.dumps(base['revision'])}" if base["revision"] else "")


def _where_the_base_is(exported: Mapping[str, Any]) -> str:
    """Explain the name of a base that has no hub id."""
    base = exported["base"]
    if exported["form"] != "adapter" or base["hub_id"]:
        return ""
    return (
        f"\n\nThe base was a local folder, so `adapter_config.json` calls it `{base['name']}`: peft finds it when the "
        "working directory contains a folder of that name. If the base is elsewhere, or on a model hub, set "
        "`base_model_name_or_path` there to its path or id. It has to have the fingerprint above; "
        "`redline export RUN --out DIR --base OWNER/NAME` checks that and writes the id."
    )


def _in_four_bits(exported: Mapping[str, Any]) -> str:
    quantised = exported["quantisation"]
    if exported["form"] != "adapter" or not quantised:
        return ""
    return (
        "\n\nThe adapters were trained beside the base in NF4. On the base as it is stored, the answers differ by "
        "the quantisation error; to get the model that was trained, load the base with "
        "`quantization_config=BitsAndBytesConfig(load_in_4bit=True, "
        f'bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant={quantised["double"]})`.'
    )


def _adapter_limits(lock: Mapping[str, Any]) -> str:
    length = section(section(lock, "recipe"), "data").get("seq_len")
    limits = [
        f"It was fine-tuned on sequences of at most {length} tokens; longer ones were not tested.",
        "It answers in the style of the rows above, with the knowledge of its base. It can be wrong, offensive, or "
        "repeat its training text word for word, and it may no longer refuse what its base refuses.",
        "The licence of the base applies to it, and the licence of the rows may. It has the biases of both.",
    ]
    return "\n".join(f"- {limit}" for limit in limits)
