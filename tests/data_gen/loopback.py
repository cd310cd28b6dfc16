"""A server for tests that speaks like vLLM, SGLang or TensorRT-LLM and can be told to fail.

Its answer is a pure function of the prompt (`answer`), so that tests know what must be stored. As a program:
`python loopback.py PORT DIALECT VOCAB END FOLDER [LOG]` answers until it is killed.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PROBE_BUDGET = 16  # new tokens of the questions that checks ask


def answer(ids: list[int], budget: int, vocab: int, end: int) -> tuple[list[int], str]:
    """A third of the answers are longer than 20 tokens."""
    chance = random.Random(str(ids))
    found = [*(chance.randrange(end + 1, vocab) for _ in range(chance.randint(1, 30))), end]
    return (found, "stop") if len(found) <= budget else (found[:budget], "length")


class Engine:
    """One server on a free port. `fault(ids, n)`: what is wrong with the n-th answer to a row's prompt, if anything.

    A fault is a name (see `_fail`), or what to do with the handler and the whole answer.
    """

    def __init__(self, dialect: str, vocab: int, end: int, tokenizer: Any = None, port: int = 0):
        self.dialect, self.vocab, self.end, self.tokenizer = dialect, vocab, end, tokenizer
        self.names, self.longest, self.key = ["tiny"], 4096, None
        self.fault: Callable[[list[int], int], str | None] = lambda ids, n: None
        self.probe_fault: str | None = None
        self.down = False
        self.asked: list[tuple[int, ...]] = []  # prompts of rows, as they came
        self.bodies: list[dict] = []
        self.log: Path | None = None  # gets a line per request for a row, the ids of its prompt
        self.paths: list[str] = []
        self.most = self.now = 0  # requests for rows at a time
        self.lock = threading.Lock()

        class Handler(_Handler):
            engine = self

        class Server(ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 128

            def handle_error(self, *_: Any) -> None:  # the client is gone
                pass

        self.http = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True) if self.tokenizer else ""

    def generate(self, body: dict) -> dict:
        """The answer to a request in the engine's own form."""
        rule = body["sampling_params"] if self.dialect == "sglang" else body
        ids = body["input_ids"] if self.dialect == "sglang" else body["prompt"]
        budget = rule["max_new_tokens" if self.dialect == "sglang" else "max_tokens"]
        found, finish = answer(ids, budget, self.vocab, self.end)
        if self.dialect == "sglang":
            why = {"type": finish} | ({"matched": self.end} if finish == "stop" else {"length": budget})
            about = {"finish_reason": why, "prompt_tokens": len(ids)}
            return {"text": self.text(found), "output_ids": found, "meta_info": about}
        choice: dict[str, Any] = {"index": 0, "text": self.text(found), "finish_reason": finish, "stop_reason": None}
        if self.dialect == "vllm" and body.get("return_token_ids"):
            choice |= {"token_ids": found, "prompt_token_ids": ids}
        if self.dialect == "tensorrt_llm" and body.get("detokenize") is False:
            choice |= {"token_ids": found, "text": ""}
        return {"object": "text_completion", "choices": [choice], "usage": {"prompt_tokens": len(ids)}}


class _Handler(BaseHTTPRequestHandler):
    engine: Engine
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def parse_request(self) -> bool:
        if self.engine.down:
            self._cut()
            return False
        return super().parse_request()

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _say(self, value: Any, status: int = 200, **headers: str) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", headers.get("Length", str(len(data))))
        self.end_headers()
        self.wfile.write(data)

    def _allowed(self) -> bool:
        key = self.engine.key
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self._say({"error": f"wrong key {self.headers.get('Authorization')}"}, 401)
            return False
        return True

    def do_GET(self) -> None:
        engine = self.engine
        if not self._allowed():
            return
        cards = [{"id": n, "owned_by": engine.dialect, "max_model_len": engine.longest} for n in engine.names]
        version = "/server_info" if engine.dialect == "sglang" else "/version"
        found = {"/v1/models": {"object": "list", "data": cards}, version: {"version": "9.8.7"}}.get(self.path)
        self._say(found or {"detail": "Not Found"}, 200 if found else 404)

    def do_POST(self) -> None:
        engine = self.engine
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._allowed():
            return
        if self.path == "/tokenize" and engine.dialect != "tensorrt_llm" and engine.tokenizer:
            return self._say({"tokens": engine.tokenizer.encode(body["prompt"], add_special_tokens=False)})
        if self.path != ("/generate" if engine.dialect == "sglang" else "/v1/completions"):
            return self._say({"detail": "Not Found"}, 404)
        rule = body.get("sampling_params", body)
        if (rule.get("max_tokens") or rule.get("max_new_tokens")) == PROBE_BUDGET:
            return self._fail(engine.probe_fault, engine.generate(body), 0)
        with engine.lock:
            ids = body.get("input_ids") or body["prompt"]
            engine.asked.append(tuple(ids))
            if engine.log:
                with engine.log.open("a") as log:
                    log.write(f"{json.dumps(ids)}\n")
            engine.bodies.append(body)
            engine.now += 1
            engine.most = max(engine.most, engine.now)
            n = engine.asked.count(tuple(ids)) - 1
        try:
            self._fail(engine.fault(ids, n), engine.generate(body), n)
        finally:
            with engine.lock:
                engine.now -= 1

    def _fail(self, fault: str | None, found: dict, n: int) -> None:
        """Answers, with one thing wrong."""
        if callable(fault):
            return fault(self, found)
        whole = json.dumps(found).encode()
        choice = found.get("choices", [found])[0]
        if fault and fault.isdecimal():
            self._say({"error": f"fault {fault}"}, int(fault), **({"Retry_After": "0"} if fault == "429" else {}))
        elif fault == "hang":
            time.sleep(3)
            self._cut()
        elif fault == "cut":
            self._say(whole[: len(whole) // 2], Length=str(len(whole)))
            self._cut()
        elif fault == "half":
            self._say(whole[: len(whole) // 2])
        elif fault == "list":
            self._say([found])
        elif fault == "no choices":
            self._say({"id": "x"})
        else:
            if fault == "slow":
                time.sleep(0.15)
            elif fault == "no ids":
                for key in ("token_ids", "output_ids"):
                    choice.pop(key, None)
            elif fault == "other prompt":
                found.get("usage", found.get("meta_info"))["prompt_tokens"] += 1
            elif fault == "restless":
                ids = choice.get("token_ids") or choice["output_ids"]
                ids[0] = random.randrange(self.engine.end + 1, self.engine.vocab)
            elif fault == "beyond":
                (choice.get("token_ids") or choice["output_ids"])[0] = self.engine.vocab
            elif fault == "no end":
                (choice.get("token_ids") or choice["output_ids"])[:] = [self.engine.vocab - 1] * 3
                choice["finish_reason"], found.get("meta_info", {})["finish_reason"] = "stop", {"type": "stop"}
            self._say(found)


if __name__ == "__main__":
    from tokenizers import Tokenizer

    class Words:
        """As transformers' tokenizer of that folder, without importing transformers."""

        def __init__(self, folder: str):
            self.inner = Tokenizer.from_file(f"{folder}/tokenizer.json")

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return self.inner.encode(text, add_special_tokens=add_special_tokens).ids

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)

    port, dialect, vocab, end, folder, *log = sys.argv[1:]
    engine = Engine(dialect, int(vocab), int(end), Words(folder), int(port))
    engine.fault = lambda ids, n: "slow"
    engine.log = Path(log[0]) if log else None
    print(engine.url, flush=True)
    threading.Event().wait()
