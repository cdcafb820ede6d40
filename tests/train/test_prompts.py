"""Training prompts are distinct, reproducible, and share nothing with the evaluation suites."""

import json
import random

import pytest

from jetspec_jax.errors import ConfigError, ModelFileError
from train import prompts


@pytest.fixture(scope="module")
def drawn() -> list[dict]:
    return prompts.training_prompts(400, seed=3, turns=3)


def _suite_texts() -> list[str]:
    texts = []
    for distribution, name in prompts.EVALUATION_FILES:
        for record in prompts._records(prompts.package_file(distribution, name)):
            texts += [t for t in prompts._texts(record) if len(prompts.words(t)) >= prompts.NGRAM]
    return texts


def test_prompts_are_distinct_reproducible_and_from_every_source(drawn: list[dict]) -> None:
    assert len({p["id"] for p in drawn}) == 400
    assert {p["source"] for p in drawn} == set(prompts.SHARES)
    assert prompts.training_prompts(400, seed=3, turns=3) == drawn
    assert prompts.training_prompts(400, seed=4) != drawn
    assert all(p["messages"][0]["role"] == "user" for p in drawn)
    assert all(len(p["messages"][0]["content"]) <= prompts.MAX_CHARS for p in drawn)


def test_no_training_prompt_shares_content_with_an_evaluation_suite(drawn: list[dict]) -> None:
    # Independent of `evaluation_index`: plain text search of every 8-word run in all suites' texts.
    haystack = "\n".join(" " + " ".join(prompts.words(t)) + " " for t in _suite_texts())
    for text in (m["content"] for p in drawn for m in p["messages"]):
        w = prompts.words(text)
        runs = [
            " " + " ".join(w[i : i + prompts.NGRAM]) + " "
            for i in range(len(w) - prompts.NGRAM + 1)
        ]
        assert not any(run in haystack for run in runs), text


def test_follow_ups_leave_the_first_questions_as_they_are(drawn: list[dict]) -> None:
    cut = prompts.training_prompts(400, seed=3)
    assert [(p["id"], p["messages"]) for p in cut] == [(p["id"], p["messages"][:1]) for p in drawn]
    turns = [len(p["messages"]) for p in drawn]
    assert {1, 2, 3} == set(turns) and 80 < sum(n > 1 for n in turns) < 190
    assert {p["source"] for p in drawn if len(p["messages"]) > 1} == set(prompts.SHARES)
    more = [m["content"] for p in drawn for m in p["messages"][1:]]
    assert len(set(more)) > len(more) / 3 and not any("{" in text for text in more)
    assert all(m["role"] == "user" for p in drawn for m in p["messages"])


def test_every_evaluation_item_is_recognised_verbatim_reworded_and_embedded() -> None:
    texts = _suite_texts()
    assert len(texts) > 300  # 164 HumanEval + 80 MT-Bench + 100 GSM8K items, with answers
    for text in texts[::7]:
        assert prompts.overlaps_evaluation(text)
        assert prompts.overlaps_evaluation(
            "Please help: " + text.upper().replace(",", " ;") + " Thanks!"
        )


def test_a_source_that_offers_an_evaluation_item_is_filtered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leak = _suite_texts()[0]
    offers = iter([leak, leak + " again", "An innocent prompt."])
    monkeypatch.setattr(prompts, "SHARES", {"chat": 1.0})
    monkeypatch.setitem(prompts._SOURCES, "chat", lambda rng: next(offers))
    assert [p["messages"][0]["content"] for p in prompts.training_prompts(1)] == [
        "An innocent prompt."
    ]


def test_too_many_prompts_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "SHARES", {"chat": 1.0})
    monkeypatch.setitem(prompts._SOURCES, "chat", lambda rng: "one " + str(rng.randint(1, 3)))
    with pytest.raises(ConfigError, match="only 3 distinct prompts"):
        prompts.training_prompts(10)
    with pytest.raises(ConfigError, match="n=0"):
        prompts.training_prompts(0)
    with pytest.raises(ModelFileError, match="no-such-package"):
        prompts.package_file("no-such-package", "x")


def test_computed_examples_of_procedural_tasks_are_right() -> None:
    from train.prompts_python import procedural_prompt, third_person

    seen = [procedural_prompt(random.Random(i)) for i in range(60)]
    assert any(">>>" in text for text in seen)
    assert third_person("Return the sum.") == "returns the sum"
    assert third_person("Apply f to x") == "applies f to x"
    assert third_person("The sum of all.") is None


def test_a_file_of_prompts_and_conversations(tmp_path) -> None:
    file = tmp_path / "p.jsonl"
    turns = [
        {"role": "user", "content": "Name a river."},
        {"role": "assistant", "content": "The Danube."},
        {"role": "user", "content": "How long is it?"},
    ]
    lines = [{"prompt": "Name a river."}, {"messages": turns}, {"prompt": "Name a river."}]
    file.write_text("\n".join(json.dumps(x) for x in lines) + "\n\n")
    found = prompts.prompts_from_file(file)
    assert [len(p["messages"]) for p in found] == [1, 3]  # the repeated prompt counts once
    assert len({p["id"] for p in found}) == 2 and found[0]["source"] == "p.jsonl"
    # the target's own answers instead of those given, which may then end the conversation
    file.write_text(json.dumps({"messages": turns[:2]}) + "\n" + json.dumps({"messages": turns}))
    with pytest.raises(ModelFileError, match="--replace-answers"):
        prompts.prompts_from_file(file)
    found = prompts.prompts_from_file(file, replace_answers=True)
    assert [p["messages"] for p in found] == [turns[:1], [turns[0], turns[2]]]


def test_prompts_of_a_file_differ_where_their_text_does(tmp_path, capsys) -> None:
    file = tmp_path / "p.jsonl"
    texts = ["什么是河", "川とは何ですか。", "Что такое река?", "3 + 4", "3 - 4", "3 - 4"]
    file.write_text("\n".join(json.dumps({"prompt": t}) for t in texts))
    found = prompts.prompts_from_file(file)
    assert [p["messages"][0]["content"] for p in found] == texts[:5]
    assert len({p["id"] for p in found}) == 5
    assert "1 repeated lines count once" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "y"}]}',
        "[]",
        '{"prompt": 3}',
        '{"messages": []}',
        '{"messages": [{"role": "assistant", "content": "x"}]}',
    ],
)
def test_a_bad_line_is_named(tmp_path, line: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ModelFileError, match=r"p\.jsonl:2: "):
        prompts.prompts_from_file(file)


def test_evaluation_prompts_of_a_file_never_train(tmp_path) -> None:
    text = next(t for t in _suite_texts() if len(prompts.words(t)) > 20)
    file = tmp_path / "p.jsonl"
    later = [{"role": "user", "content": content} for content in ("Name a river.", text)]
    for line in ({"prompt": text}, {"messages": later}):
        file.write_text(json.dumps(line) + "\n")
        with pytest.raises(ConfigError, match="evaluation suite"):
            prompts.prompts_from_file(file)
    assert len(prompts.prompts_from_file(file, evaluation=True)) == 1
