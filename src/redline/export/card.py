"""The model card: what the model is, what it learnt from, how well, and how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from redline.errors import cleaned
from redline.monitor.events import EventList, number, read_events, section
from redline.monitor.runs import EVENTS, last_number
from redline.units import format_count, format_seconds

CARD = "README.md"


def model_card(run: Path, lock: Mapping[str, Any], exported: Mapping[str, Any], *, tokenizer: bool) -> str:
    """README.md in Markdown, with the front matter that model hubs read. `exported` is what redline.json says."""
    events = read_events(run / EVENTS)
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["redline", str(exported["objective"]), str(exported["model_type"])],
    }
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {lock['recipe_name']}, step {exported['step']:,}",
        _what(lock, exported),
        "## How to load it\n" + _loading(tokenizer),
        "## What it learnt from\n" + bullets(data_facts(events, lock, exported["step"])),
        "## How well\n" + quality(events, exported),
        "## Limits\n" + _limits(lock),
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
    return (
        f"A decoder-only language model with {format_count(total)} parameters ({shape}), trained from {start} to "
        f"predict the next token. This folder holds {kind} in {exported['dtype']} as `{exported['class']}`."
    )


def _loading(tokenizer: bool) -> str:
    if not tokenizer:
        return (
            "```python\nfrom transformers import AutoModelForCausalLM\n\n"
            'model = AutoModelForCausalLM.from_pretrained("PATH-OF-THIS-FOLDER")\n```\n\n'
            "The tokenizer's files were not at hand when this was exported; add them before using text."
        )
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("PATH-OF-THIS-FOLDER")\n'
        'model = AutoModelForCausalLM.from_pretrained("PATH-OF-THIS-FOLDER")\n'
        'prompt = tokenizer("The ", return_tensors="pt", return_token_type_ids=False)\n'
        "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=100)[0], skip_special_tokens=True))\n```\n\n"
        "The tokenizer puts the end-of-text token before a text, as every document had it in training."
    )


def data_facts(events: EventList, lock: Mapping[str, Any], step: int) -> dict[str, Any]:
    data, recipe = section(lock, "data"), section(lock, "recipe")
    seen = [e for e in events if e["type"] in ("step", "eval", "stop") and (number(e, "step") or 0) <= step]
    tokens = last_number(seen, "tokens")
    return {
        "source": f"`{json.dumps(section(recipe, 'data').get('source'), ensure_ascii=False)}`",
        "fingerprint of the tokens": f"`{data.get('fingerprint')}`",
        "tokenizer": f"{data.get('tokenizer')}, {data.get('vocab_size')} entries",
        "fingerprint of the tokenizer": f"`{data.get('tokenizer_fingerprint')}`",
        "tokens there are for training": f"{number(data, 'train_tokens') or 0:,.0f}",
        "tokens seen": "unknown" if tokens is None else f"{int(tokens):,}",
        "updates": f"{step:,}",
    }


def quality(events: EventList, exported: Mapping[str, Any]) -> str:
    step = exported["step"]
    evals = [e for e in events if e["type"] == "eval" and (number(e, "step") or 0) <= step]
    if not evals or number(evals[-1], "loss") is None:
        return "It was not evaluated on text that was held out."
    last = evals[-1]
    rows = {"loss": "nats per token", "perplexity": "e to that", "bits_per_byte": "comparable between tokenizers"}
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


def _limits(lock: Mapping[str, Any]) -> str:
    length = section(section(lock, "recipe"), "data").get("seq_len")
    limits = [
        f"It saw sequences of {length} tokens; what it does beyond that was not tried.",
        "It continues text. It was not taught to follow instructions or to refuse anything, and it can be wrong, "
        "offensive, or repeat its training text word for word.",
        "It knows only what the data above told it, and the data's licence and biases are its own.",
    ]
    return "\n".join(f"- {limit}" for limit in limits)


def making(events: EventList, lock: Mapping[str, Any], exported: Mapping[str, Any]) -> dict[str, Any]:
    versions, machine = section(lock, "versions"), section(lock, "machine")
    steps = [e for e in events if e["type"] == "step" and (number(e, "step") or 0) <= exported["step"]]
    hours = last_number(steps, "hours")
    git = section(lock, "git")
    return {
        "run": f"`{lock.get('run_id')}`, seed {lock.get('seed')}",
        "machine": machine.get("name"),
        "training time": "unknown" if hours is None else format_seconds(3600 * hours),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "commit": f"`{git['commit']}`{' with changes' if git.get('dirty') else ''}" if git.get("commit") else None,
    }


def resolved_recipe(lock: Mapping[str, Any]) -> str:
    return yaml.safe_dump(cleaned(section(lock, "recipe")), sort_keys=False, allow_unicode=True)


def bullets(facts: Mapping[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in facts.items() if value is not None)
