"""A running vLLM server as the sampler: four-bit weights by folder, completions over HTTP.

The server is started on the folder that the weights are written to, with its development endpoints on and
with log-probabilities of the distribution that is sampled from:

    VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --logprobs-mode processed_logprobs

Before each step the policy is exported into FOLDER, `POST /collective_rpc {"method": "reload_weights"}` makes
the workers read it again, and `POST /reset_prefix_cache` drops what older weights left. Completions come from
`POST /v1/completions` with token ids as prompts, `logprobs` and `return_token_ids`. Written against the
protocol and tested with a stand-in server that speaks it; not yet run against vLLM itself.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nybble.errors import EngineError
from nybble.rl.config import EngineConfig
from nybble.rl.sampler import Completion, Request, SamplingParams

ATTEMPTS = 4
"""Tries of a request that finds no server, or one that is overloaded."""
PAUSE_S = 0.5
"""Before the second try; doubled for each further one."""


class VLLMEngine:
    """Speaks to one server. `write_weights(folder)` puts the current policy, exported, into a new folder."""

    def __init__(
        self,
        config: EngineConfig,
        stop: frozenset[int],
        vocabulary: int,
        write_weights: Callable[[Path], None],
        seed: int,
    ) -> None:
        assert config.export_to is not None
        self.config, self.stop, self.vocabulary, self.seed = config, stop, vocabulary, seed
        self.folder = config.export_to
        self.model = config.served_model or str(self.folder)
        self._write_weights = write_weights
        self._fresh: int | None = None

    def refresh(self, update: int) -> None:
        """Exports the policy and has the server read it; nothing if it holds that policy already."""
        if self._fresh == update:
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder.parent, prefix=f".{self.folder.name}-") as aside:
            made = Path(aside) / "export"
            self._write_weights(made)
            self.folder.mkdir(exist_ok=True)
            # The server may hold the folder open, so files are replaced one by one, the index last.
            for file in sorted(made.iterdir(), key=lambda f: (f.suffix == ".json", f.name)):
                file.replace(self.folder / file.name)
        self._post("/collective_rpc", {"method": "reload_weights"})
        self._post("/reset_prefix_cache", {})
        self._fresh = update

    def sample(self, requests: Sequence[Request], params: SamplingParams, version: int) -> list[Completion]:
        """One call a problem, for all completions of its group."""
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            groups[request.problem, request.prompt].append(place)
        found: dict[int, Completion] = {}
        for (problem, prompt), places in groups.items():
            choices = self._complete(prompt, len(places), params, version, problem)
            found |= {place: self._completion(choice) for place, choice in zip(places, choices, strict=True)}
        return [found[place] for place in range(len(requests))]

    def _complete(
        self, prompt: tuple[int, ...], n: int, params: SamplingParams, version: int, problem: int
    ) -> list[dict[str, Any]]:
        answer = self._post(
            "/v1/completions",
            {
                "model": self.model,
                "prompt": list(prompt),
                "n": n,
                "max_tokens": params.max_new_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "seed": (self.seed * 1_000_003 + version * 10_007 + problem) % (1 << 31),
                "logprobs": 0,
                "return_token_ids": True,
                "stop_token_ids": sorted(self.stop),
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
            },
        )
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != n:
            raise EngineError(f"{self.config.url}: asked for {n} completions and got {_short(answer)}")
        return sorted(choices, key=lambda choice: choice.get("index", 0))

    def _completion(self, choice: dict[str, Any]) -> Completion:
        try:
            tokens = [int(token) for token in choice["token_ids"]]
            logprobs = [float(np.float32(p)) for p in choice["logprobs"]["token_logprobs"]]
            finish = str(choice["finish_reason"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.config.url}: a completion without usable token_ids, token_logprobs or finish_reason "
                f"({type(error).__name__} {error}); vLLM answers with them since 0.10.2"
            ) from None
        if not tokens or len(tokens) != len(logprobs):
            raise EngineError(
                f"{self.config.url}: {len(tokens)} tokens with {len(logprobs)} log-probabilities"
            )
        if not all(0 <= token < self.vocabulary for token in tokens):
            raise EngineError(
                f"{self.config.url}: token {max(tokens)} is beyond the model's {self.vocabulary}; the server "
                "has another model or tokenizer"
            )
        if not np.isfinite(logprobs).all():
            raise EngineError(f"{self.config.url}: a log-probability is not finite")
        return Completion(
            tokens=tuple(tokens), logprobs=tuple(logprobs), finish="stop" if finish == "stop" else "length"
        )

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """The server's answer. Raises EngineError after several tries, or at once if it refuses."""
        url = self.config.url.rstrip("/") + path
        data = json.dumps(body).encode()
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE_S * 2 ** (attempt - 1))
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=self.config.timeout_s) as answer:
                    text = answer.read().decode()
                return json.loads(text) if text.strip() else None
            except urllib.error.HTTPError as error:
                with error:
                    reason = f"status {error.code}: {_short(error.read().decode(errors='replace'))}"
                if error.code not in (429, 502, 503, 504):
                    hint = "; is VLLM_SERVER_DEV_MODE=1 set for it?" if error.code == 404 else ""
                    raise EngineError(f"{url} answered with {reason}{hint}") from None
            except ValueError as error:  # of the JSON, or of its letters
                raise EngineError(f"{url} answered with no JSON: {error}") from None
            except (OSError, http.client.HTTPException) as error:  # no connection, or one that broke
                reason = str(getattr(error, "reason", error))
        raise EngineError(
            f"{url} does not answer ({reason}) after {ATTEMPTS} tries; start the server and go on with "
            "--resume: finished rollouts are saved"
        )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
