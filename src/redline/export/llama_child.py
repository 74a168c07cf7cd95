"""A process that asks llama.cpp: `python -m redline.export.llama_child`, a JSON request on stdin, the answer on stdout.

llama.cpp aborts its process on a file that it cannot use, and its threads do not end with the interpreter; so it never
runs in the process that exports. Nothing of redline is imported here.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

# Servers are kept until the process exits: llama.cpp's destructor waits for its threads, sometimes forever.
_servers: list[Any] = []


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
    if request["cache"] == "f32":  # llama.cpp's default rounds keys and values to 16 bits
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    try:
        server = xllamacpp.Server(params)
    except RuntimeError:
        return {"error": "llama.cpp cannot load it"}
    _servers.append(server)

    direct = build_opener(ProxyHandler({}))  # the environment's proxy cannot reach this machine's loopback address

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        url = server.listening_address + path
        with direct.open(Request(url, json.dumps(body).encode(), headers)) as reply:  # noqa: S310 — its own loopback address
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
    code = 0
    try:
        reply = answer(json.load(sys.stdin))
    except HTTPError as error:
        reason = error.read(200).decode(errors="replace")
        reply = {"error": f"llama.cpp refuses a request (HTTP {error.code}: {reason})"}
    except Exception:
        traceback.print_exc()
        reply, code = {}, 1
    json.dump(reply, answers)
    answers.close()
    sys.stderr.flush()
    os._exit(code)  # llama.cpp's threads would keep the interpreter alive


if __name__ == "__main__":
    main()
