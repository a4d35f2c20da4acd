"""The links between neighbouring stages: equal-shaped messages in the order of the schedule, receives posted ahead."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from freerun.errors import ConfigError
from freerun.groups import Group
from freerun.steps import Steps, Wait

POSTED = 2  # receives waiting for their message at any time, so that a link never idles between two


@dataclass(frozen=True)
class Format:
    """What every message of a link looks like: a tensor, and the gradient norms carried along (0 for none)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    norms: int = 0

    def checked(self, message: Tensor) -> Tensor:
        """A message, refused if it does not look like this."""
        if tuple(message.shape) != self.shape or message.dtype != self.dtype:
            raise ConfigError(
                f"a microbatch gave a message of {tuple(message.shape)} {message.dtype}, but the stages agreed on "
                f"{self.shape} {self.dtype}; every microbatch must have the same shape."
            )
        return message

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def empty_norms(self) -> Tensor:
        return torch.zeros(self.norms, dtype=torch.float64, device=self.device)


class Outgoing:
    """The sending end of a link. Sends never block as long as no more than `depth` messages are under way."""

    def __init__(self, group: Group, to: int, form: Format, depth: int) -> None:
        self._group = group
        self._to = to
        self.form = form
        self._depth = depth
        self._under_way: deque[list[Wait]] = deque()

    @cached_property
    def placeholder(self) -> Tensor:
        """What a replay sends in place of a message that nobody reads."""
        return self.form.empty()

    def send(self, message: Tensor, norms: Tensor) -> Steps[None]:
        """Send a message, and the norms known here if the link carries norms."""
        yield from self._make_room(self._depth - 1)
        waits = [self._group.send(self.form.checked(message).contiguous(), self._to)]
        if self.form.norms:
            waits.append(self._group.send(norms.clone(), self._to))
        self._under_way.append(waits)

    def close(self) -> Steps[None]:
        """Fill the receives that the other end still has posted, and see every message off."""
        for _ in range(POSTED):
            yield from self.send(self.form.empty().zero_(), self.form.empty_norms())
        yield from self._make_room(0)

    def _make_room(self, most: int) -> Steps[None]:
        while len(self._under_way) > most:
            yield from _all(self._under_way.popleft())


class Incoming:
    """The receiving end of a link."""

    def __init__(self, group: Group, source: int, form: Format) -> None:
        self._group = group
        self._source = source
        self._form = form
        self._free: list[Tensor] = []
        self._posted: deque[tuple[Tensor, Tensor, list[Wait]]] = deque()
        for _ in range(POSTED):
            self._post()

    def receive(self) -> Steps[tuple[Tensor, Tensor]]:
        """The next message and the norms that came with it; give the message back with `reuse`."""
        message, norms, waits = self._posted.popleft()
        yield from _all(waits)
        self._post()
        return message, norms

    def reuse(self, message: Tensor) -> None:
        """The message's memory may hold another one."""
        self._free.append(message)

    def close(self) -> Steps[None]:
        """Take in what the other end sends when it closes."""
        while self._posted:
            yield from _all(self._posted.popleft()[2])

    def _post(self) -> None:
        message = self._free.pop() if self._free else self._form.empty()
        norms = self._form.empty_norms()
        waits = [self._group.receive(message, self._source)]
        if self._form.norms:
            waits.append(self._group.receive(norms, self._source))
        self._posted.append((message, norms, waits))


def _all(waits: list[Wait]) -> Steps[None]:
    for wait in waits:
        if not wait.ready():
            yield wait
