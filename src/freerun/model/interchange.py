"""Weights to and from the Hugging Face format: freerun's decoder is a Llama under other names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from freerun.config import ModelConfig
from freerun.errors import ConfigError
from freerun.files import write_beside, write_text
from freerun.model.huggingface_weights import SINGLE, locate
from freerun.model.size import is_huggingface, sizes

OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
IN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def llama_names(layers: int, tied: bool) -> dict[str, str]:
    """Our name of every parameter, and Llama's."""
    names = {ours: theirs for ours, theirs in OUTSIDE.items() if not (tied and ours == "head.weight")}
    for layer in range(layers):
        for ours, theirs in IN_LAYER.items():
            names[f"layers.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    return names


def to_llama(
    state: Mapping[str, Tensor], model: ModelConfig, vocabulary: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights under Llama's names, and Llama's config."""
    names = llama_names(model.layers, model.tied)
    if names.keys() != state.keys():
        raise ValueError(f"the weights don't fit the model: {sorted(names.keys() ^ state.keys())[:3]} differ.")
    shape = sizes(model, vocabulary)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": str(state["norm.weight"].dtype).removeprefix("torch."),
    }
    return {theirs: state[ours] for ours, theirs in names.items()}, config


def from_llama(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[dict[str, Tensor], ModelConfig, int]:
    """Our weights, model and vocabulary from a Llama's weights and config."""
    model = model_of_llama(config)
    names = llama_names(model.layers, model.tied)
    missing = sorted(theirs for theirs in names.values() if theirs not in state)
    if missing:
        raise ConfigError(f"The model has no tensor named {missing[0]}; its files are not a whole Llama.")
    return {ours: state[theirs] for ours, theirs in names.items()}, model, int(config["vocab_size"])


def model_of_llama(config: Mapping[str, Any]) -> ModelConfig:
    """Our config of a Llama's; ConfigError for a variant that our decoder doesn't compute."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    heads, width = config["num_attention_heads"], config["hidden_size"]
    plain = {
        "model_type": (config.get("model_type"), "llama"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config.get("attention_bias", False), False),
        "mlp_bias": (config.get("mlp_bias", False), False),
        "rope_type": (rope.get("rope_type", "default"), "default"),
        "head_dim": (config.get("head_dim") or width // heads, width // heads),
    }
    for key, (given, ours) in plain.items():
        if given != ours:
            raise ConfigError(
                f"The Llama's {key} is {given}, but freerun's own decoder has {ours}; train it with model.pretrained."
            )
    return ModelConfig(
        layers=config["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        hidden=config["intermediate_size"],
        context=config.get("max_position_embeddings", 2048),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        norm_eps=config.get("rms_norm_eps", 1e-6),
    )


def export(
    folder: Path,
    state: Mapping[str, Tensor],
    model: ModelConfig,
    vocabulary: int,
    *,
    tokenizer: Path | None = None,
    end: int | None = None,
) -> None:
    """Writes a folder that AutoModelForCausalLM loads; end is the token at which generation stops."""
    if is_huggingface(model):
        from freerun.model.huggingface_config import read_config

        tensors, config = dict(state), read_config(model, vocabulary).to_dict()
    else:
        tensors, config = to_llama(state, model, vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    if end is not None:
        config["eos_token_id"] = end
        write_json(folder / "generation_config.json", {"eos_token_id": end, "do_sample": True})
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    write_beside(folder / SINGLE, lambda path: save_file(contiguous, path, metadata={"format": "pt"}))
    if tokenizer:
        write_beside(folder / "tokenizer.json", lambda path: shutil.copyfile(tokenizer, path))
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    write_json(folder / "config.json", config)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def load(folder: Path) -> tuple[dict[str, Tensor], ModelConfig, int]:
    """Our weights, model and vocabulary from a folder that holds a Llama."""
    state: dict[str, Tensor] = {}
    for shard in sorted(set(locate(str(folder)).values())):
        with safe_open(folder / shard, framework="pt") as file:
            state.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return from_llama(state, json.loads((folder / "config.json").read_text()))
