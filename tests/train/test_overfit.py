"""Case 15: a head that overfits three sequences must draft whole blocks when it is served.

Anything that differs between training and serving (slot offset, positions, taps, context, norms,
vocabulary map) keeps tau near 1 here.
"""

import json
from pathlib import Path

import numpy as np

from jetspec_jax import EngineConfig, SamplingParams, SpecConfig
from jetspec_jax.engine import LLM
from jetspec_jax.loading import Target, load_head
from jetspec_jax.testing import byte_tokenizer
from tests.train.conftest import CONFIG, TAPS, Tiny, greedy_answers
from train.config import load_config
from train.train_draft import Trainer

PROMPT, BLOCK, ANSWER = 6, 4, 24


def test_overfit_and_served_tau_is_near_the_block(tiny: Tiny, tmp_path: Path) -> None:
    tokens, taps, final = greedy_answers(tiny.params, 3, PROMPT + ANSWER + BLOCK, PROMPT)
    data = tmp_path / "data"
    data.mkdir()
    np.savez(
        data / "shard-0.npz",
        tokens=tokens,
        taps=taps,
        final=final,
        length=np.full(3, tokens.shape[1], np.int32),
        prompt_len=np.full(3, PROMPT, np.int32),
    )
    line = {"verdict": "done", "shard": "shard-0.npz", "ids": ["a", "b", "c"]}
    (data / "manifest.jsonl").write_text(json.dumps(line) + "\n")
    (data / "meta.json").write_text(json.dumps({"taps": list(TAPS)}))
    settings = {
        "data.path": str(data),
        "data.target": str(tiny.path),
        "data.sequences": 3,
        "data.anchors": 16,
        "data.bucket": 32,
        "data.held_out": 0.0,
        "draft.layers": 1,
        "draft.block_size": BLOCK,
        "draft.vocab": 48,
        "draft.path_rank": 8,
        "draft.mask_token_id": 3,
        "optim.steps": 400,
        "optim.precision": "float32",
        "optim.lr": 5e-3,
        "optim.weight_decay": 0.0,
        "run.save_every": 1000,
        "run.eval_every": 1000,
        "run.out": str(tmp_path / "run"),
    }
    overrides = [f"{key}={value!r}" for key, value in settings.items()]
    trainer = Trainer(load_config(None, overrides), "test", say=lambda text: None)
    trainer.run()

    engine = EngineConfig(capacity=96, attention_chunk=32, kernels="xla")
    target = Target(tiny.path, CONFIG, tiny.params, byte_tokenizer(), "xla", False)
    head = load_head(tmp_path / "run" / "last", target, engine)
    llm = LLM.from_parts(target, head, engine=engine)
    sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    prompts = [row[:PROMPT].tolist() for row in tokens]
    results = llm.generate(prompts, sampling, spec=SpecConfig(mode="chain", drafter="head"))
    for row, result in zip(tokens, results, strict=True):
        assert list(result.token_ids) == row[PROMPT : PROMPT + ANSWER].tolist()
    rounds = sum(r.spec.rounds for r in results)
    tau = 1 + sum(r.spec.accepted for r in results) / rounds
    assert tau >= 0.9 * BLOCK, tau
