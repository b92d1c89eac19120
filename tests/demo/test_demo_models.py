"""The demo's own models."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers", reason="the demo's models need tokenizers, which comes with vLLM")
pytest.importorskip("safetensors", reason="the demo's models need safetensors, which comes with vLLM")

from vllm_async_spec.demo import train as demo
from vllm_async_spec.demo.model import ModelShape, TinyLlama
from vllm_async_spec.demo.train import EOS, EOS_ID, PROMPTS, Training, byte_tokenizer, corpus_tokens, prepare_models

TINY = ModelShape(hidden=32, heads=2, layers=2, intermediate=48, head_dim=16)
BRIEF = Training(steps=3, batch=2, context=24)


def prepare(cache_dir: Path, training: Training = BRIEF) -> demo.DemoModels:
    return prepare_models(cache_dir, training=training, target=TINY, draft=replace(TINY, layers=1))


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On models this small a second thread only waits, for seconds when the machine is busy."""
    monkeypatch.setattr(demo, "_MAX_THREADS", 1)


def test_logits_equal_those_of_transformers(tmp_path: Path):
    transformers = pytest.importorskip("transformers", reason="transformers is what the logits are compared with")
    model = TinyLlama(TINY)
    model.initialise(torch.Generator().manual_seed(1))
    demo.save(model, byte_tokenizer(), tmp_path / "model")

    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.randint(257, (2, 40), generator=torch.Generator().manual_seed(2))
    positions = torch.stack((torch.arange(40), torch.arange(40) * 7 + 900))
    with torch.no_grad():
        expected = reference(input_ids=tokens, position_ids=positions).logits
        torch.testing.assert_close(model(tokens, positions), expected, rtol=1e-4, atol=1e-4)
    assert type(reference).__name__ == "LlamaForCausalLM"
    assert set(reference.state_dict()) == set(model.state_dict())


def test_transformers_loads_the_tokenizer_and_lays_out_a_chat(tmp_path: Path):
    transformers = pytest.importorskip("transformers", reason="the tokenizer is loaded with transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepare(tmp_path).target)
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerFast)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == (EOS, EOS_ID)
    assert tokenizer.decode(tokenizer("na\u00efve \U0001f682")["input_ids"]) == "na\u00efve \U0001f682"
    messages = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "How?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "Q: Why?\nA: So.<eos>\n\nQ: How?\nA: "


@pytest.mark.parametrize(
    "text", ["", "two  spaces\n\ttab\r\n", "gr\u00fc\u00df dich, \u4e16\u754c \U0001f9d1\u200d\U0001f373", "\x00\x7f"]
)
def test_tokenizer_round_trips_one_token_per_byte(text: str):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_every_byte_has_the_same_id_wherever_it_stands():
    tokenizer = byte_tokenizer()
    ids_of: dict[int, set[int]] = {}
    for text in [chr(point) for point in range(0x80, 0x800)] + [chr(point) * 2 for point in range(0x80)]:
        for byte, token in zip(text.encode(), tokenizer.encode(text).ids, strict=True):
            ids_of.setdefault(byte, set()).add(token)
    assert all(len(ids) == 1 for ids in ids_of.values())
    assert len(set.union(*ids_of.values())) == len(ids_of), "two bytes share an id"
    assert max(set.union(*ids_of.values())) < EOS_ID


def test_training_reads_the_ids_that_the_saved_tokenizer_gives(tmp_path: Path):
    from tokenizers import Tokenizer

    saved = Tokenizer.from_file(str(prepare(tmp_path).draft / "tokenizer.json"))
    tokens = corpus_tokens("One.\n\nTwo.\n", byte_tokenizer()).tolist()
    assert tokens == saved.encode("One.<eos>\n\nTwo.<eos>\n\n").ids
    assert tokens.count(EOS_ID) == 2


def test_training_is_deterministic_and_the_seed_matters():
    tokens = corpus_tokens("A cook, a train and a clock.", byte_tokenizer())
    first, again = demo.train(TINY, tokens, BRIEF), demo.train(TINY, tokens, BRIEF)
    other = demo.train(TINY, tokens, replace(BRIEF, seed=1))
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_training_learns():
    tokens = corpus_tokens("The train waits. " * 4, byte_tokenizer())
    model = demo.train(TINY, tokens, Training(steps=60, batch=4, context=32))
    greedy = model(tokens[None, :-1], torch.arange(len(tokens) - 1)[None]).argmax(-1)[0]
    assert (greedy == tokens[1:]).float().mean() > 0.8


def test_caller_keeps_its_random_state_threads_and_grad_mode(tmp_path: Path):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with torch.inference_mode():
        prepare(tmp_path)
        assert torch.is_inference_mode_enabled()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_cache_is_reused_until_a_setting_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = prepare(tmp_path)
    changed = prepare(tmp_path, replace(BRIEF, steps=2))
    assert {first.target, first.draft}.isdisjoint({changed.target, changed.draft})

    def refuse(*_: object) -> TinyLlama:
        raise AssertionError("trained although the models are there")

    monkeypatch.setattr(demo, "train", refuse)
    assert prepare(tmp_path) == first

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("Another corpus.\n")
    monkeypatch.setattr(demo, "CORPUS", corpus)
    with pytest.raises(AssertionError, match="although"):
        prepare(tmp_path)


class InterruptAfter:
    def __init__(self, calls: int) -> None:
        self._batch = demo._batch
        self._left = calls

    def __call__(self, *args: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return self._batch(*args)


def test_interrupted_training_goes_on_and_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    training = replace(BRIEF, steps=9)
    expected = prepare(tmp_path / "at once", training)
    monkeypatch.setattr(demo, "_CHECKPOINT_EVERY_S", 0.0)
    for left in (0, 5, 3, 1, 8):  # at the first step; in the target, twice; in the draft, at its first step and later
        with monkeypatch.context() as patch:
            patch.setattr(demo, "_batch", InterruptAfter(left))
            with pytest.raises(KeyboardInterrupt):
                prepare(tmp_path / "resumed", training)
    assert [path.name.split("-")[0] for path in (tmp_path / "resumed").glob("[!.]*")] == ["target"]
    with monkeypatch.context() as patch:
        patch.setattr(demo, "_batch", InterruptAfter(1))
        found = prepare(tmp_path / "resumed", training)
    for ours, theirs in ((expected.target, found.target), (expected.draft, found.draft)):
        assert ours.name == theirs.name
        assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    assert sorted(tmp_path.joinpath("resumed").iterdir()) == sorted([found.target, found.draft]), "a file is left over"


@pytest.mark.parametrize("name", ["_batch", "_json_files"])
def test_interrupted_training_or_saving_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_checkpoint_keeps_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "_CHECKPOINT_EVERY_S", 0.0)
    save, calls = torch.save, []

    def half(state: Any, file: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            file.write(b"PK")
            raise KeyboardInterrupt
        save(state, file)

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path)
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith(".target-")
    assert torch.load(kept, weights_only=True)["steps"] == 1


def test_a_checkpoint_of_something_else_is_named(tmp_path: Path):
    name = prepare(tmp_path / "whole").target.name
    for content in (b"", b"something else"):
        (tmp_path / f".{name}.checkpoint").write_bytes(content)
        with pytest.raises(OSError, match=rf"\.{name}\.checkpoint is no checkpoint of this training .*; delete it"):
            prepare(tmp_path)


def test_second_of_two_processes_keeps_the_first_directory(tmp_path: Path):
    model = TinyLlama(TINY)
    demo.save(model, byte_tokenizer(), tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").stat()
    demo.save(model, byte_tokenizer(), tmp_path / "model")
    after = (tmp_path / "model" / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert json.loads((tmp_path / "model" / "config.json").read_text())["head_dim"] == TINY.head_dim


def test_corpus_and_prompts_are_what_the_demo_promises():
    corpus = demo.CORPUS.read_text(encoding="utf-8")
    assert corpus.isascii()
    assert 12_000 <= len(corpus) <= 16_000
    assert len(set(PROMPTS)) == 16
    assert all(20 <= len(prompt.encode()) <= 200 for prompt in PROMPTS)
