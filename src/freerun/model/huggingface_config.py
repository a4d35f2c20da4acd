"""Reading the configuration of a Hugging Face causal LM: is it one that can be cut, and what are its sizes?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from freerun.config import ModelConfig
from freerun.errors import ConfigError
from freerun.model.size import Sizes

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox", "phi")
"""Model types whose stages are known to compose to exactly the whole model's logits."""

PLAIN_MLP = ("gpt2", "gpt_neox", "phi")
DROPOUTS = (
    "attention_dropout",
    "hidden_dropout",
    "classifier_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "summary_first_dropout",
)


def read_config(model: ModelConfig, vocabulary: int) -> Any:
    """The transformers config of model.pretrained or model.architecture, with dropout off.

    A run's numbers depend only on its config, so nothing in the model may draw random numbers.
    """
    key, source = ("pretrained", model.pretrained) if model.pretrained else ("architecture", model.architecture)
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ConfigError(f"model.{key} needs transformers, which is missing; pip install 'freerun[hf]'.") from None
    if key == "architecture" and not Path(source).exists():
        raise ConfigError(f"model.architecture is {source!r}, which does not exist; give a config.json or its folder.")
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.{key} is {source!r}, which transformers can't read as a model ({first_line(error)}); "
            f"give a folder or name of one of these architectures: {', '.join(ARCHITECTURES)}."
        ) from error
    if config.model_type not in ARCHITECTURES:
        raise ConfigError(
            f"model.{key} is {source!r} of the architecture {config.model_type}, whose stages are not known to add up "
            f"to the whole model; use one of {', '.join(ARCHITECTURES)}."
        )
    for dropout in DROPOUTS:
        if getattr(config, dropout, None):
            setattr(config, dropout, 0.0)
    fit_vocabulary(config, model, vocabulary)
    positions = getattr(config, "max_position_embeddings", None) or model.context
    if model.context > positions:
        raise ConfigError(
            f"model.context is {model.context}, but {source!r} has {positions} positions; use at most {positions}."
        )
    return config


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def fit_vocabulary(config: Any, model: ModelConfig, vocabulary: int) -> None:
    """Fresh weights take the tokenizer's vocabulary; pretrained ones must have room for it."""
    if not model.pretrained:
        config.vocab_size = vocabulary
        for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
            identity = getattr(config, token, None)
            if isinstance(identity, int) and identity >= vocabulary:
                setattr(config, token, None)
    elif vocabulary > config.vocab_size:
        raise ConfigError(
            f"data.tokenizer has {vocabulary} tokens, but model.pretrained {model.pretrained!r} has room for "
            f"{config.vocab_size}; use the model's own tokenizer."
        )


def huggingface_sizes(model: ModelConfig, vocabulary: int) -> Sizes:
    """The sizes that the config gives, under the names that all architectures share."""
    config = read_config(model, vocabulary)
    heads, width = config.num_attention_heads, config.hidden_size
    return Sizes(
        layers=config.num_hidden_layers,
        width=width,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_width=getattr(config, "head_dim", None) or width // heads,
        hidden=getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * width,
        vocabulary=config.vocab_size,
        context=model.context,
        tied=bool(config.tie_word_embeddings),
        gated=config.model_type not in PLAIN_MLP,
    )
