"""A run's weights, whole again: to evaluate, to generate from, to export."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from freerun import checkpoint, config_files
from freerun.config import Config
from freerun.data import Data, StreamDecoder, Tokenizer, build, tokenizer_of
from freerun.errors import ConfigError
from freerun.model import interchange
from freerun.model.cut import pieces
from freerun.model.generate import generate
from freerun.model.loss import token_loss
from freerun.model.stage import Stage, build_stage
from freerun.summary import everyone


@dataclasses.dataclass
class Trained:
    """A trained model with what it was trained on."""

    config: Config
    update: int
    stage: Stage
    tokenizer: Tokenizer


def load(folder: Path, update: int | None = None) -> Trained:
    """The model of a run's newest checkpoint, or of the one asked for; replicas are averaged."""
    if not (folder / "config.toml").exists():
        raise ConfigError(f"{folder} is no run: it has no config.toml; name a folder that `freerun train` made.")
    config = config_files.read(str(folder / "config.toml"))
    have = checkpoint.complete(folder / "checkpoints", everyone(config))
    if not have or (update is not None and update not in have):
        raise ConfigError(f"{folder} has no complete checkpoint of update {update or 'any'}; it has {have}.")
    update = have[-1] if update is None else update
    tokenizer = tokenizer_of(config.data)
    whole = pieces(config.model, tokenizer.vocabulary)
    seed = config.training.seed
    stage = build_stage(config.model, tokenizer.vocabulary, whole, seed=seed, first=True, last=True)
    weights = weights_of(folder / "checkpoints", update, config)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter.copy_(weights[name])
    return Trained(config, update, stage.eval(), tokenizer)


def weights_of(folder: Path, update: int, config: Config) -> dict[str, Tensor]:
    """Every parameter of a checkpoint by name, averaged over replicas."""
    weights: dict[str, Tensor] = {}
    for place in everyone(config):
        state = checkpoint.load(folder, update, place)
        for name, shape, start, end in state["layout"]:
            own = state["weights"][start:end].view(shape) / place.replicas
            weights[name] = weights[name] + own if name in weights else own
    return weights


def evaluate(trained: Trained, microbatches: int) -> float:
    """Mean loss over held-out tokens."""
    data = data_of(trained.config)
    total, tokens = 0.0, 0
    for number in range(microbatches):
        batch = data.evaluation.get(number)
        with torch.no_grad():
            total += float(token_loss(trained.stage(batch.tokens), batch.labels))
        tokens += int((batch.labels != -100).sum())
    return total / max(tokens, 1)


def data_of(config: Config) -> Data:
    """The data of a run."""
    return build(config.data, config.model.context, config.training.sequences, config.training.seed, progress=True)


def write_text(
    trained: Trained, prompt: str, tokens: int, temperature: float, top_p: float, seed: int
) -> Iterator[str]:
    """Text that goes on from a prompt, as it comes."""
    tokenizer = trained.tokenizer
    given = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.end_of_text]
    decoder = StreamDecoder(tokenizer)
    stop = {tokenizer.end_of_text}
    for token in generate(trained.stage, given, tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop):
        if token not in stop:
            yield decoder.push(token)
    yield decoder.flush()


def export(trained: Trained, folder: Path) -> None:
    """Write a folder that Hugging Face's AutoModelForCausalLM loads."""
    path = Path(trained.config.data.tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    state = {name: parameter.detach() for name, parameter in trained.stage.named_parameters()}
    interchange.export(
        folder,
        state,
        trained.config.model,
        trained.tokenizer.vocabulary,
        tokenizer=file if file.is_file() else None,
        end=trained.tokenizer.end_of_text,
    )
