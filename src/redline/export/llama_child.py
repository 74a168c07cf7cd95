"""A process that asks llama.cpp: `python -m redline.export.llama_child`, a JSON request on stdin, the answer on stdout.

llama.cpp aborts its process on a file that it cannot use, and its threads do not end with the interpreter; so it never
runs in the process that exports. Nothing of redline is imported here.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from urllib.request import Request, urlopen


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Tokenize the texts, render and tokenize the chats, and continue each prompt greedily with log-probabilities."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = request["file"]
    params.n_ctx = request["context"]
    params.n_parallel, params.n_gpu_layers, params.verbosity = 1, 0, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    params.warmup, params.ui = False, False
    params.use_jinja = True
    try:
        server = xllamacpp.Server(params)
    except RuntimeError:
        return {"error": "llama.cpp cannot load it"}

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        url = server.listening_address + path
        with urlopen(Request(url, json.dumps(body).encode(), headers)) as reply:  # noqa: S310 — its own loopback address
            found: dict[str, Any] = json.load(reply)
            return found

    def tokens(text: str, *, special: bool) -> list[int]:
        body = {"content": text, "add_special": special, "parse_special": special}
        return list(post("/tokenize", body)["tokens"])

    def rendered(question: str) -> list[int]:
        prompt = post("/apply-template", {"messages": [{"role": "user", "content": question}]})["prompt"]
        return tokens(prompt, special=True)

    def continued(prompt: list[int]) -> dict[str, Any]:
        options = {"temperature": 0, "cache_prompt": False, "return_tokens": True}
        limits = {"n_predict": request["tokens"], "n_probs": request["top"]}
        reply = post("/completion", {"prompt": prompt, **options, **limits})
        steps = reply.get("completion_probabilities", [])
        return {
            "tokens": reply["tokens"],
            "steps": [[[entry["id"], entry["logprob"]] for entry in (step, *step["top_logprobs"])] for step in steps],
            "ended": reply["stop_type"] == "eos",
        }

    return {
        "version": xllamacpp.__version__,
        "texts": [tokens(text, special=False) for text in request["texts"]],
        "chats": [rendered(question) for question in request["chats"]],
        "continuations": [continued(prompt) for prompt in request["prompts"]],
    }


def main() -> None:
    """Answer the request on stdin. What llama.cpp prints goes to stderr, not into the answer."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    json.dump(answer(json.load(sys.stdin)), answers)
    answers.close()
    os._exit(0)  # llama.cpp's threads would keep the interpreter alive


if __name__ == "__main__":
    main()
