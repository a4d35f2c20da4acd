"""Stages of Hugging Face causal LMs.

A stage is the whole model with the parts that belong to other stages taken out: layers before and after its own let
their input through, so masks, positions and layer numbers stay the model's own business. The first stage is given
tokens, the others are given the hidden states as embeddings. Whether the stages add up to the whole model is checked
by verify_cut, and only known architectures are admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from freerun.config import ModelConfig
from freerun.errors import ConfigError
from freerun.model.cut import Piece, pieces
from freerun.model.huggingface_config import read_config
from freerun.model.huggingface_weights import read_tensors
from freerun.model.initial import seed_of
from freerun.model.size import parameters
from freerun.model.stage import Stage

OLDER_ENABLE = "gradient_checkpointing_enable"
"""What transformers called activation_checkpointing_enable before 5.23."""


class PassThrough(nn.Module):
    """In the place of a layer or norm that another stage owns."""

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> Tensor:
        return hidden


class Nothing(nn.Module):
    """In the place of a position embedding that the first stage has already added."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


class TiedHead(nn.Module):
    """A head that uses the embedding's weights, without listing them a second time."""

    embedding: nn.Embedding

    def __init__(self, embedding: nn.Embedding, bias: nn.Parameter | None) -> None:
        super().__init__()
        object.__setattr__(self, "embedding", embedding)
        self.bias = bias

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding.weight, self.bias)


class HuggingFaceStage(Stage):
    """The part of a Hugging Face model that a stage owns; parameter names are those of the model's state dict."""

    whole: Any

    def __init__(self, whole: Any, first: bool, last: bool) -> None:
        super().__init__()
        object.__setattr__(self, "whole", whole)  # not a child: its children are ours, so that names have no prefix
        for name, child in whole.named_children():
            self.add_module(name, child)
        self.first, self.last = first, last
        self.input_width = 0 if first else whole.config.hidden_size
        self.output_width = whole.config.vocab_size if last else whole.config.hidden_size
        self.context = getattr(whole.config, "max_position_embeddings", None) or 1 << 30

    def new_cache(self, capacity: int) -> DynamicCache:
        return DynamicCache(config=self.whole.config)

    def forward(self, inputs: Tensor, cache: DynamicCache | None = None) -> Tensor:
        options = {"past_key_values": cache, "use_cache": cache is not None}
        options["input_ids" if self.first else "inputs_embeds"] = inputs
        if self.last:
            return self.whole(**options).logits  # type: ignore[no-any-return]
        return self.whole.base_model(**options).last_hidden_state  # type: ignore[no-any-return]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HuggingFaceStage:
        """Rotary frequencies move with the stage, but stay fp32 when its weights become bf16."""
        kept = {name: buffer for name, buffer in self.named_buffers() if buffer.is_floating_point()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            owner, _, attribute = name.rpartition(".")
            module = self.get_submodule(owner)
            moved = getattr(module, attribute)
            setattr(module, attribute, moved if moved.dtype == buffer.dtype else buffer.to(moved.device))
        return self


def build_huggingface_stage(
    model: ModelConfig, vocabulary: int, pieces: Sequence[Piece], *, seed: int, first: bool, last: bool
) -> HuggingFaceStage:
    """The stage that owns the pieces, in fp32 on the CPU: pretrained, or fresh by the model's own rules."""
    config = read_config(model, vocabulary)
    with parameters_without_storage():
        whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    whole.train()
    tied = bool(config.tie_word_embeddings)
    take_out_others(whole, {piece.layer for piece in pieces}, first, last, tied)
    stage = HuggingFaceStage(whole, first, last)
    stage._apply(lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor)
    if model.activation_checkpointing:
        enable = (
            "activation_checkpointing_enable" if hasattr(whole, "activation_checkpointing_enable") else OLDER_ENABLE
        )
        getattr(whole, enable)({"use_reentrant": False})
    if tied and first != last:
        shared = (f"{name_of(whole, whole.get_input_embeddings())}.weight",)
        stage.borrowed, stage.lent = (shared, ()) if last else ((), shared if first else ())
    if model.pretrained:
        own = dict(stage.named_parameters())
        with torch.no_grad():
            for name, tensor in read_tensors(model.pretrained, own, whole.base_model_prefix):
                own[name].copy_(tensor)
    else:
        initialise(whole, seed)
    return stage


@contextmanager
def parameters_without_storage() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device, and their buffers, which are small, for real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def name_of(whole: nn.Module, part: nn.Module) -> str:
    return next(str(name) for name, module in whole.named_modules() if module is part)


def take_out_others(whole: Any, layers: set[int], first: bool, last: bool, tied: bool) -> None:
    """Replaces what other stages own: the base model is embeddings, a list of layers, a final norm, in this order."""
    base, tokens = whole.base_model, whole.get_input_embeddings()
    before = True
    for name, child in list(base.named_children()):
        if isinstance(child, nn.ModuleList):
            before = False
            for layer in set(range(len(child))) - layers:
                child[layer] = PassThrough()
        elif next(child.parameters(), None) is None:
            continue
        elif child is tokens:
            if not (first or (last and tied)):
                setattr(base, name, PassThrough())
        elif before and not first:
            setattr(base, name, Nothing())
        elif not before and not last:
            setattr(base, name, PassThrough())
    head = whole.get_output_embeddings()
    if not last:
        setattr(whole, name_of(whole, head), PassThrough())
    elif tied:
        setattr(whole, name_of(whole, head), TiedHead(tokens, head.bias))


@torch.no_grad()
def initialise(whole: Any, seed: int) -> None:
    """The model's own rules for fresh weights, module by module, children first, each from (seed, module name).

    What no rule covers is 0.
    """
    for parameter in whole.parameters():
        parameter.zero_()
    with torch.random.fork_rng(devices=[]):
        for name, module in reversed(list(whole.named_modules())):
            torch.manual_seed(seed_of(seed, name))
            whole._init_weights(module)


def verify_cut(model: ModelConfig, vocabulary: int, cuts: Sequence[range], *, seed: int) -> bool:
    """Compares the logits of all stages, one after another, with the whole model's; ConfigError when they differ.

    False when the whole model doesn't fit in memory, so nothing was compared.
    """
    config = read_config(model, vocabulary)
    if 2.5 * 4 * parameters(model, vocabulary) > available_memory():
        return False
    tokens = torch.randint(config.vocab_size, (2, min(model.context, 16)), generator=torch.Generator().manual_seed(0))
    everything = pieces(model, vocabulary)
    state: dict[str, Tensor] = {}
    with torch.no_grad():
        hidden = tokens
        for index, own in enumerate(cuts):
            first, last = index == 0, index == len(cuts) - 1
            stage = build_huggingface_stage(
                model, vocabulary, [everything[i] for i in own], seed=seed, first=first, last=last
            )
            hidden = stage(hidden)
            if not model.pretrained:
                state.update(stage.named_parameters())
        whole = whole_model(model, config, state)
        expected = whole(input_ids=tokens, use_cache=False).logits
    if not torch.allclose(hidden, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())):
        difference = float((hidden - expected).abs().max())
        raise ConfigError(
            f"The architecture {config.model_type} can't be cut into {len(cuts)} stages: their logits differ from the "
            f"whole model's by up to {difference:.2g}; use pipeline.stages 1 or another model."
        )
    return True


def whole_model(model: ModelConfig, config: Any, state: dict[str, Tensor]) -> Any:
    """The model as transformers itself builds it, from its files or from the stages' fresh weights."""
    if model.pretrained:
        whole = AutoModelForCausalLM.from_pretrained(
            model.pretrained, config=config, dtype=torch.float32, trust_remote_code=False
        )
        return whole.eval()
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    own = dict(whole.named_parameters())
    if own.keys() != state.keys():
        raise ConfigError(
            f"The architecture {config.model_type} can't be cut: its stages don't hold all of its weights."
        )
    for name, parameter in own.items():
        parameter.copy_(state[name])
    return whole.eval()


def available_memory() -> float:
    """Bytes that can still be allocated on this machine; unlimited where the system doesn't say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return float("inf")
    line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
    return 1024.0 * int(line.split()[1])
