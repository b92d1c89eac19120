"""Train the target and the draft of the demo on `corpus.txt`, and keep them as Hugging Face model directories.

Both learn to predict the next byte. The target all but learns the corpus by heart, which makes its greedy choice clear
cut in any precision; the draft, with one layer, is right about two times in three.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_async_spec.demo.checkpoint import Checkpoint
from vllm_async_spec.demo.model import RMS_EPS, ROPE_THETA, ModelShape, TinyLlama
from vllm_async_spec.demo.muon import Muon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress
    from tokenizers import Tokenizer

CORPUS = Path(__file__).with_name("corpus.txt")
EOS = "<eos>"
EOS_ID = 256

TARGET = ModelShape(hidden=128, heads=2, layers=3, intermediate=384)
DRAFT = ModelShape(hidden=128, heads=1, layers=1, intermediate=192)

# Half of these open a sentence of the corpus; the others only share its subjects, or not even those.
PROMPTS: tuple[str, ...] = (
    "A busy kitchen has one head cook whose judgement",
    "An ordinary scheduler waits for the result of a step",
    "Q: Why is the graphics card only half busy?\nA: ",
    "The night express leaves at ten past eleven and",
    "def run(engine):\n  while engine.has_work():\n",
    "With greedy sampling, verification is only a comparison.",
    "The pager rang at twenty past three. Latency had",
    "The cache of keys and values grows with every token.",
    "Once upon a time there was a compiler that refused to",
    "Dear colleague, thank you for the report. The reason is",
    "Q: What should I measure first?\nA: ",
    "def add(a, b):\n  return",
    "The weather in the mountains was clear, and the train",
    "Three things to remember about memory:\n1. ",
    "If the draft model guesses badly, the target model will",
    "It is a truth universally acknowledged, that a single request in possession of a good draft, must be",
)

# The corpus writes its dialogues as "Q: ..." and "A: ...", so a chat is laid out in the same way.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ 'A: ' + message['content'] + eos_token + '\\n\\n' }}"
    "{% else %}{{ 'Q: ' + message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)

_WARMUP_STEPS = 20
_MAX_THREADS = 4  # more of them spend their time waiting for each other on matrices this small
_CHECKPOINT_EVERY_S = 5.0  # a step takes 50 ms, or seconds on a busy machine
_FILES_VERSION = 2  # raise it when the same weights would be trained or saved differently


@dataclass(frozen=True)
class DemoModels:
    """The two model directories, each ready for `transformers` or for `vllm.LLM`."""

    target: Path
    draft: Path


@dataclass(frozen=True)
class Training:
    """How both models are trained.

    Each of `steps` steps takes `batch` windows of `context` bytes. A window is made of pieces of the corpus, `piece`
    bytes long on average, with up to `max_gap` positions left out between pieces. `lr` is the peak learning rate.
    """

    steps: int = 600
    batch: int = 4
    context: int = 256
    piece: int = 80
    max_gap: int = 400
    lr: float = 2e-2
    seed: int = 0


def prepare_models(
    cache_dir: Path,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
    training: Training | None = None,
    target: ModelShape = TARGET,
    draft: ModelShape = DRAFT,
) -> DemoModels:
    """Load the demo's models from `cache_dir`, training first whichever of them is missing.

    A directory is named for everything that shaped it (corpus, sizes, settings), so a change of any of these trains
    anew. It appears complete or not at all, and processes that train at the same time end with the same directory.
    An interrupted training goes on from its last checkpoint, a hidden file in `cache_dir`, and ends with the weights
    of one that was not interrupted. The caller's random state and thread count are left as they were.

    Returns:
        The directories of both models, each with float32 weights, a configuration and a byte-level tokenizer.

    Raises:
        ImportError: `tokenizers` or `safetensors`, which come with vLLM, are not installed.
        OSError: `cache_dir` can't be written, or a checkpoint can't be read.
    """
    training = training or Training()
    corpus = CORPUS.read_text(encoding="utf-8")
    paths = {}
    for role, shape in (("target", target), ("draft", draft)):
        path = cache_dir / f"{role}-{_fingerprint(corpus, shape, training)}"
        if not path.is_dir():
            tokenizer = byte_tokenizer()
            tokens = corpus_tokens(corpus, tokenizer)
            cache_dir.mkdir(parents=True, exist_ok=True)
            checkpoint = cache_dir / f".{path.name}.checkpoint"
            model = train(shape, tokens, training, device, progress, f"Training the {role}", checkpoint)
            save(model, tokenizer, path)
            checkpoint.unlink(missing_ok=True)
        paths[role] = path
    return DemoModels(**paths)


def byte_tokenizer() -> Tokenizer:
    """Build the tokenizer: one token for each of the 256 bytes, then `<eos>` with id 256.

    Raises:
        ImportError: `tokenizers` is not installed.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    return tokenizer


def corpus_tokens(corpus: str, tokenizer: Tokenizer) -> Tensor:
    """Encode the corpus, [tokens] int64, with `<eos>` before the blank line that ends each paragraph, the last too."""
    text = f"{corpus.strip()}\n\n".replace("\n\n", f"{EOS}\n\n")
    return torch.tensor(tokenizer.encode(text).ids)


def train(
    shape: ModelShape,
    tokens: Tensor,
    training: Training,
    device: str = "cpu",
    progress: Progress | None = None,
    description: str = "Training",
    checkpoint: Path | None = None,
) -> TinyLlama:
    """Train a new model to predict each of `tokens` from those before it; the same arguments give the same weights.

    Only on the CPU of one machine are the weights equal to the last bit.

    Args:
        shape: sizes of the model.
        tokens: [tokens] int64 on the CPU, read as a ring.
        training: settings.
        device: where to train; the model, float32, stays there.
        progress: a started progress display, or none.
        description: the label of its bar.
        checkpoint: a file, in a directory that exists, from which the training goes on, and which it renews now and
            then; None for a training that starts at its first step and leaves nothing.

    Raises:
        OSError: the checkpoint can't be read or written.
    """
    generator = torch.Generator().manual_seed(training.seed)
    with _few_threads(), torch.inference_mode(False), torch.enable_grad():
        with torch.device("meta"):  # built without storage, so that no default initialisation draws random numbers
            model = TinyLlama(shape)
        model.to_empty(device=device).initialise(generator)
        optimizers = _optimizers(model)
        kept = None if checkpoint is None else Checkpoint(checkpoint, model, optimizers, generator)
        first = 0 if kept is None else kept.restore()
        saved_at = time.monotonic()
        bar = (
            None
            if progress is None
            else progress.add_task(description, total=training.steps, completed=first, unit="steps")
        )
        for step in range(first, training.steps):
            inputs, positions, labels = (t.to(device) for t in _batch(tokens, training, generator))
            F.cross_entropy(model(inputs, positions).flatten(0, 1), labels.flatten()).backward()
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = training.lr * min((step + 1) / _WARMUP_STEPS, 1 - step / training.steps)
                optimizer.step()
                optimizer.zero_grad()
            if kept is not None and time.monotonic() - saved_at >= _CHECKPOINT_EVERY_S:
                kept.save(step + 1)
                saved_at = time.monotonic()
            if progress is not None and bar is not None:
                progress.advance(bar)
    return model.requires_grad_(False).eval()


def save(model: TinyLlama, tokenizer: Tokenizer, path: Path) -> None:
    """Write a Hugging Face model directory at `path` in one move; if another process was first, keep its directory.

    Raises:
        ImportError: `safetensors` is not installed.
        OSError: the parent of `path` can't be written.
    """
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as scratch:
        fresh = Path(scratch) / path.name
        fresh.mkdir()
        weights = {name: weight.detach().cpu().contiguous() for name, weight in model.state_dict().items()}
        save_file(weights, fresh / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(fresh / "tokenizer.json"))
        for name, content in _json_files(model.shape).items():
            (fresh / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        try:
            fresh.rename(path)
        except OSError:
            if not path.is_dir():
                raise


def _fingerprint(corpus: str, shape: ModelShape, training: Training) -> str:
    settings = [_FILES_VERSION, corpus, CHAT_TEMPLATE, asdict(shape), asdict(training)]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]


def _optimizers(model: TinyLlama) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, where it needs far fewer steps than AdamW, and AdamW for all the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        Muon(matrices, momentum=0.85, weight_decay=0.01),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def _batch(tokens: Tensor, training: Training, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw inputs, positions and labels, all [batch, context] int64; a label of -100 is not to be learnt.

    Every window is a patchwork of the corpus. After each seam the model must find its place again from a few bytes, as
    with a new prompt. Positions jump at the seams, so that distances beyond the window occur too: rotary attention sees
    only differences, and shifting a whole window would teach it nothing.
    """
    size = (training.batch, training.context + 1)
    seams = torch.rand(size, generator=generator) < 1 / training.piece
    seams[:, 0] = True

    def walk(longest_jump: int) -> Tensor:
        jumps = torch.randint(longest_jump, size, generator=generator)
        return torch.arange(size[1]) + torch.where(seams, jumps, 0).cumsum(1)

    windows = tokens[walk(len(tokens)) % len(tokens)]
    positions = walk(training.max_gap + 1)
    labels = windows.masked_fill(seams, -100)  # what follows a seam cannot be known before it
    return windows[:, :-1], positions[:, :-1], labels[:, 1:]


@contextmanager
def _few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(_MAX_THREADS, os.cpu_count() or 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _json_files(shape: ModelShape) -> dict[str, dict[str, Any]]:
    special = {"bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": RMS_EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": ROPE_THETA,  # transformers 4 reads this one,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},  # and transformers 5 this one
        **special,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": shape.max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {"config.json": config, "generation_config.json": special, "tokenizer_config.json": tokenizer_config}


if __name__ == "__main__":
    print(prepare_models(Path(sys.argv[1])))
