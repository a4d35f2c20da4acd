"""Text from a model: one token after another, with the keys and values of those before kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from freerun.model.stage import Stage


def generate(
    stage: Stage,
    tokens: Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Collection[int] = (),
) -> Iterator[int]:
    """Continues the tokens with a stage that is the whole model; temperature 0 takes the likeliest token each time.

    When the model's context is full, it goes on from the newest half of it.
    """
    if not tokens:
        raise ValueError("generate needs at least one token to start from.")
    device = next(stage.parameters()).device
    random = torch.Generator().manual_seed(seed)
    seen = list(tokens)[-stage.context :]
    fresh, cache = seen, stage.new_cache(stage.context)
    for _ in range(max_tokens):
        with torch.no_grad():
            logits = stage(torch.tensor([fresh], device=device), cache)[0, -1]
        token = pick(logits.float().cpu(), temperature, top_p, random)
        yield token
        if token in stop:
            return
        seen.append(token)
        fresh = [token]
        if len(seen) > stage.context:
            seen = seen[-max(1, stage.context // 2) :]
            fresh, cache = seen, stage.new_cache(stage.context)


def pick(logits: Tensor, temperature: float, top_p: float, random: torch.Generator) -> int:
    """One token, from the smallest set of likeliest tokens that has the probability top_p."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax(logits / temperature, dim=-1).sort(descending=True)
    likelier = probabilities.cumsum(-1) - probabilities
    kept = torch.where(likelier < top_p, probabilities, 0.0)
    kept[0] = probabilities[0]
    return int(order[torch.multinomial(kept, 1, generator=random)])
