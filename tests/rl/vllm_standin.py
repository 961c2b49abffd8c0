"""A server that speaks the part of vLLM's HTTP protocol that the engine uses: `with standin(folder) as s`.

It loads nothing: completions are drawn from a generator, and a reload notes the bytes of the weights.
`faults` says what it does wrong, and how often.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Standin:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.weights: list[str] = []
        self.faults: dict[str, int] = {}

    def fault(self, name: str) -> bool:
        self.faults[name] = self.faults.get(name, 0) - 1
        return self.faults[name] >= 0

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.calls.append((path, body))
        if self.fault("overloaded"):
            return 503, {"error": "busy"}
        if path == "/collective_rpc" and body == {"method": "reload_weights"}:
            if self.fault("no development mode"):
                return 404, {"detail": "Not Found"}
            index = sorted(self.folder.glob("*.safetensors"))
            self.weights.append(sha256(b"".join(file.read_bytes() for file in index)).hexdigest())
            return 200, {"results": [None]}
        if path == "/reset_prefix_cache":
            return 200, None
        if path == "/v1/completions":
            return 200, {"choices": [self.choice(body, i) for i in range(body["n"])]}
        return 404, {"detail": "Not Found"}

    def choice(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        drawn = random.Random(f"{body['seed']} {index} {body['prompt']}")
        tokens = [drawn.randrange(258) for _ in range(drawn.randint(1, body["max_tokens"]))]
        if self.fault("another vocabulary"):
            tokens[0] = 100_000
        answer = {
            "index": index,
            "token_ids": tokens,
            "finish_reason": "length",
            "logprobs": {"token_logprobs": [-5.5 - drawn.random() for _ in tokens]},
        }
        if self.fault("no token ids"):
            del answer["token_ids"]
        return answer


@contextmanager
def standin(folder: Path) -> Iterator[Standin]:
    state = Standin(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = state.answer(self.path, body)
            data = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(status)
            data = b"\xff" if state.fault("no letters") else data
            self.send_header("Content-Length", str(len(data) + state.fault("cut off")))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
