"""A tokenizer in which each token is its own number, so that a text says exactly which tokens it has.

The models have random weights and no tokenizer of their own. With this one nothing is downloaded, a prompt has exactly
as many tokens as it should, and served texts can be compared token for token.
"""

import json
from collections.abc import Iterable
from pathlib import Path


def write_tokenizer(folder: Path, vocabulary: int) -> Path:
    """Write the tokenizer of a vocabulary of this size into `folder`, and return its directory."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = folder / f"numbers-{vocabulary}"
    if not (path / "tokenizer_config.json").is_file():
        path.mkdir(parents=True, exist_ok=True)
        numbers = {str(token): token for token in range(vocabulary)}
        tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(path / "tokenizer.json"), pretty=False)
        (path / "config.json").write_text('{"model_type": "llama"}\n')  # vLLM looks for it, and logs an error without
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (path / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
    return path


def as_text(tokens: Iterable[int]) -> str:
    return " ".join(map(str, tokens))
