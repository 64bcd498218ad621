"""The size of a vocabulary whose tokenizer is in a folder of Hugging Face's, without the network.

Megatron would download a tokenizer that is not here.
"""

from pathlib import Path
from typing import Any

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.json_input import naming
from megatron_pp_ext.json_input import read as read_json

FROM_HUGGING_FACE = "HuggingFaceTokenizer", "SFTTokenizer", "MultimodalTokenizer"
"""The types of tokenizers that are a folder, or would be downloaded."""

_FIX = "give --vocab-size"


def size(asked: RequestedJob) -> int:
    """Return the tokens of the tokenizer in the folder --tokenizer-model, or else of the model there.

    ValueError where there is no such folder, and where its files do not have the number.
    """
    if not asked.flags.tokenizer_model:
        raise ValueError(
            f"--tokenizer-type {asked.flags.tokenizer_type} needs --tokenizer-model, the folder whose "
            "vocabulary would be counted: give it, or --vocab-size"
        )
    folder = Path(asked.flags.tokenizer_model)
    flag = f"--tokenizer-model {asked.flags.tokenizer_model}"
    if not folder.is_dir():
        raise ValueError(
            f"{flag} is no folder here, and would be downloaded for the size of its vocabulary: {_FIX}"
        )
    for name, count in (("tokenizer.json", _tokens), ("config.json", _rows)):
        if (folder / name).is_file():
            with naming(folder / name):
                tokens = count(read_json(folder / name, _FIX))
            if tokens:
                return tokens
    raise ValueError(f"{flag} has neither a tokenizer.json nor a config.json with its vocabulary: {_FIX}")


def _tokens(content: Any) -> int:
    """Return the number of tokens in a tokenizer.json, with the tokens added to its model."""
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return 0
    vocabulary, added = content["model"].get("vocab", ()), content.get("added_tokens", ())
    texts = vocabulary if isinstance(vocabulary, dict) else [token for token, *_ in vocabulary]
    return len({*texts, *(entry["content"] for entry in added)})


def _rows(content: Any) -> int:
    """Return the rows of the embedding in a config.json; 0 where it has none."""
    if not isinstance(content, dict):
        return 0
    inner = content.get("text_config", content)
    rows = inner.get("vocab_size", 0) if isinstance(inner, dict) else 0
    return rows if isinstance(rows, int) else 0
