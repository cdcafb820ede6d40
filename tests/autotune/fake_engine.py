"""An engine without a model, for tests of worker, gate and explorers: it starts in milliseconds.

Its "target" is a hash of the context: a token, a margin spread evenly over 0..1, a best logit.
Parameters `kernel.fake.NAME` of a candidate make it faulty:

    SPEED   decodes so many times faster than plain
    FLIP    takes the second best token where the margin is below this
    ON      ... only in these requests, comma separated: generate, force, state, sampled, batch
    ROWS    writes another KV row at this position
    NOISE   adds this to every best logit (and changes its bits)
    FAIL    crash | hang | nonsense | short
    EOS     ends an answer early (lengths differ)

In a tree with `pallas_kernels/toy.py` its `token(context, right)` and `PAUSE_S` per token count.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

VOCAB = 1_000
STEP_S = 0.001  # of plain decoding, in the times that it reports


def _hash(*parts: Any) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def _number(raw: bytes) -> float:
    return int.from_bytes(raw[:8], "big") / 2**64


class FakeEngine:
    def __init__(self, params: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
        self._fault = {k.rpartition(".")[2]: v for k, v in params.items() if "fake" in k}
        self._exact = engine.get("kernels") != "xla"  # "xla": another implementation, with noise
        there = importlib.util.find_spec("pallas_kernels.toy")
        self._toy: Any = None
        if there is not None:
            from pallas_kernels import toy  # type: ignore[attr-defined]  # of a test's tree

            self._toy = toy

    def facts(self) -> dict[str, Any]:
        return {"arithmetic": "float", "weights": {}, "bitwise": True, "capacity": 4096}

    def encode(self, conversations: Sequence[Any]) -> list[list[int]]:
        return [list(_hash(c[0]["content"])[:8]) for c in conversations]

    def warm(self, params: Any, batch: int, sampling: Any) -> dict[str, Any]:
        return {"seconds": 0.0}

    def _step(self, ids: Sequence[int], op: str, plain: bool, sampling: Mapping[str, Any]) -> Any:
        """(choice, best, margin, digest) after a context."""
        sampled = bool(sampling.get("temperature"))
        state = _hash(tuple(ids[-6:]), len(ids), sampling.get("seed") if sampled else None)
        token, margin = state[0] * 3 % VOCAB, _number(state)
        best = 10.0 + _number(state[8:])
        if not self._exact:
            best += 1e-4 * (_number(_hash(best)) - 0.5)
        if plain:
            return token, best, margin, _hash(best).hex()
        kinds = str(self._fault.get("ON", "generate,force,state,sampled,batch")).split(",")
        if margin < float(self._fault.get("FLIP", 0.0)) and (
            op in kinds or (sampled and "sampled" in kinds)
        ):
            token = (token + 1) % VOCAB
        best += float(self._fault.get("NOISE", 0.0))
        if self._toy is not None:
            token = self._toy.token(list(ids), token)
        return token, best, margin, _hash(best).hex()

    def _row(self, ids: Sequence[int], at: int, plain: bool) -> str:
        bad = not plain and self._fault.get("ROWS") == at
        return _hash("row", tuple(ids[max(at - 6, 0) : at + 1]), at, bad).hex()

    def _fail(self) -> None:
        kind = self._fault.get("FAIL")
        if kind == "crash":
            os._exit(3)
        if kind == "hang":
            time.sleep(3600)

    def _plain(self, params: Mapping[str, Any]) -> bool:
        return params.get("spec.mode") == "off"

    def _answer(self, prompt: Any, sampling: Any, op: str, plain: bool) -> list[int]:
        ids = list(prompt)
        for _ in range(sampling["max_tokens"]):
            ids.append(self._step(ids, op, plain, sampling)[0])
            if self._toy is not None:
                time.sleep(self._toy.PAUSE_S)
        early = not plain and "EOS" in self._fault
        return ids[len(prompt) : -1 if early else None]

    def generate(self, prompts: Any, sampling: Any, params: Any, batch: int) -> Any:
        plain = self._plain(params)
        if not plain:
            self._fail()
        speed = 1.0 if plain else float(self._fault.get("SPEED", 1.0))
        made = []
        for prompt, how in zip(prompts, sampling, strict=True):
            ids = self._answer(prompt, how, "batch" if batch > 1 else "generate", plain)
            jitter = 1.0 + 0.02 * _number(_hash(tuple(ids), speed))
            made.append(
                {
                    "token_ids": ids,
                    "decode_s": len(ids) * STEP_S / speed * jitter,
                    "prefill_s": 0.0,
                    "rounds": len(ids),
                    "tau": 1.0,
                    "nodes": len(ids),
                }
            )
        if self._fault.get("FAIL") == "nonsense":
            return [{"token_ids": None}]
        return made[:-1] if self._fault.get("FAIL") == "short" and not plain else made

    def state(self, prompts: Any, sampling: Any, params: Any, batch: int) -> Any:
        plain, made = self._plain(params), []
        for prompt, how in zip(prompts, sampling, strict=True):
            op = "sampled" if how.get("temperature") else "batch" if batch > 1 else "state"
            ids = self._answer(prompt, how, op, plain)
            whole = [*prompt, *ids]
            rows = [self._row(whole, at, plain) for at in range(len(whole) - 1)]
            made.append({"token_ids": ids, "rows": rows})
        return made

    def force(
        self, prompts: Any, streams: Any, sampling: Any, params: Any, batch: int, logits: bool
    ) -> Any:
        plain, made = self._plain(params), []
        for prompt, stream, how in zip(prompts, streams, sampling, strict=True):
            whole = [*prompt, *stream]
            found = [
                self._step(whole[: len(prompt) + at], "force", plain, how)
                for at in range(len(stream))
            ]
            one: dict[str, Any] = {"choices": [f[0] for f in found]}
            one["rows"] = [self._row(whole, at, plain) for at in range(len(whole) - 1)]
            if logits:
                for index, name in enumerate(("best", "margin", "digests"), 1):
                    one[name] = [f[index] for f in found]
            made.append(one)
        return made


def load(*, model: Any, draft: Any, candidate: Any, spec: Any, engine: Any) -> FakeEngine:
    return FakeEngine(candidate["params"], {**engine, **_engine(candidate["params"])})


def _engine(params: Mapping[str, Any]) -> dict[str, Any]:
    return {k.partition(".")[2]: v for k, v in params.items() if k.startswith("engine.")}
