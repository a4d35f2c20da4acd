"""The versions of a stage's weights that microbatches in flight must see.

Each version is a copy of the stage's module whose parameters are views of one flat buffer; a forward runs on the copy
of its version, so autograd keeps that version for the backward. Where nothing is in flight across an update and compute
is fp32, the one version is the master itself and nothing is copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from freerun.weights.flat import FlatParameters


class WeightVersions:
    """A ring of `capacity` versions; version v lies in slot v % capacity.

    `overwrite` is the weight policy `latest`: the single version changes under forwards that are in flight, and their
    backward reads what is there by then. `remember` says of which versions it then keeps the bare weights, for a
    checkpoint whose resumed run must repeat forwards that saw them; these are at most `delay` versions old.
    """

    def __init__(
        self,
        module: nn.Module,
        flat: FlatParameters,
        dtype: torch.dtype,
        capacity: int,
        *,
        in_flight: int,
        overwrite: bool = False,
        delay: int = 0,
        remember: Callable[[int], bool] = lambda version: False,
    ) -> None:
        self.newest = 0
        self.most_kept = 1
        self._flat = flat
        self._overwrite = overwrite
        self._remember = remember
        self._delay = delay
        self._remembered: dict[int, Tensor] = {}
        self._users = [0] * capacity
        self._in_use = 0
        copies = dtype != torch.float32 or capacity > 1 or (overwrite and in_flight > 1)
        self._slots = [_Slot(module, flat, dtype) for _ in range(capacity)] if copies else [_Master(module)]
        self._inside = [0] * capacity
        self._slot_bytes = flat.weights.nbytes + sum(slot.bytes for slot in self._slots)
        self.bytes = self._slot_bytes
        self.write(0, flat.weights)
        self._keep(0, flat.weights)

    def acquire(self, version: int) -> nn.Module:
        """The module to run a forward of this version on; held until released."""
        slot = self._slot(version)
        if self._inside[slot] != version:
            self.write(version, self._remembered[version])
        self._in_use += self._users[slot] == 0
        self._users[slot] += 1
        self.most_kept = max(self.most_kept, self._in_use + (self._users[self._slot(self.newest)] == 0))
        return self._slots[slot].module

    def settle(self) -> None:
        """Before a backward under `latest`: have the newest version in place even if a repeated forward was last."""
        if self._overwrite and self._inside[0] != self.newest:
            self.write(self.newest, self._remembered[self.newest])

    def on_gradient(self, done: Callable[[str], None]) -> None:
        """Call `done` with a parameter's name whenever a microbatch has been added to its gradient."""
        names = {part.name for part in self._flat.slices}
        for slot in self._slots:
            for name, parameter in slot.module.named_parameters():
                if name in names:
                    parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        lambda _, name=name: done(name)
                    )

    def release(self, version: int) -> None:
        """One backward of this version is done."""
        slot = self._slot(version)
        self._users[slot] -= 1
        self._in_use -= self._users[slot] == 0

    def publish(self, version: int, weights: Tensor) -> None:
        """Make `weights` the newest version; the slot it takes must no longer be in use."""
        slot = self._slot(version)
        if self._users[slot] and not self._overwrite:
            raise RuntimeError(f"version {version} would overwrite weights that a backward still needs")
        self.newest = version
        self.write(version, weights)
        self._keep(version, weights)

    def write(self, version: int, weights: Tensor) -> None:
        """Fill a version's slot."""
        self._inside[self._slot(version)] = version
        self._slots[self._slot(version)].write(weights)

    def restore(self, kept: dict[int, Tensor]) -> None:
        """Take over the versions of a checkpoint, the newest of which is the weights now."""
        for version in sorted(kept):
            self.newest = version
            self.write(version, kept[version])
        if self._overwrite:
            self._remembered = dict(kept)

    def read(self, version: int) -> Tensor:
        """The flat weights of a version, as forwards see them."""
        if version in self._remembered:
            return self._remembered[version]
        kept = self._slots[self._slot(version)].flat
        return self._flat.weights if kept is None else kept

    def module(self, version: int) -> nn.Module:
        """The module of a version, not held."""
        return self._slots[self._slot(version)].module

    def modules(self) -> Iterable[nn.Module]:
        """The module of every slot."""
        return (slot.module for slot in self._slots)

    def _keep(self, version: int, weights: Tensor) -> None:
        """Remember a version that is newest now, and forget those that no forward in flight has seen."""
        if not (self._overwrite and self._remember(version)):
            self._remembered.clear()
            return
        self._remembered[version] = weights.clone()
        for old in [old for old in self._remembered if old < version - self._delay]:
            del self._remembered[old]
        self.bytes = max(self.bytes, self._slot_bytes + weights.nbytes * len(self._remembered))

    def _slot(self, version: int) -> int:
        return version % len(self._slots)


class _Master:
    """The one version of a stage without delay: the master weights."""

    flat: Tensor | None = None
    bytes = 0

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def write(self, weights: Tensor) -> None:
        """The optimizer has written it already."""


class _Slot:
    """A compute copy of the weights, whose gradients add up in the stage's one gradient buffer."""

    def __init__(self, module: nn.Module, flat: FlatParameters, dtype: torch.dtype) -> None:
        self.flat = torch.empty_like(flat.weights, dtype=dtype)
        self.bytes = self.flat.nbytes
        self.module = copy.deepcopy(module)
        places = {part.name: part for part in flat.slices}
        for name, parameter in self.module.named_parameters():
            if name in places:
                parameter.data = places[name].of(self.flat)
                accumulate_into(parameter, places[name].of(flat.gradient))
            else:  # borrowed from another stage; TiedHead fills it
                parameter.data = parameter.data.to(dtype)

    def write(self, weights: Tensor) -> None:
        # through .data, so that autograd does not count it as a change of what graphs in flight hold: under the policy
        # `latest` that is the point, and otherwise publish has made sure that there are none
        self.flat.data.copy_(weights)


def accumulate_into(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Let the gradients of `parameter` add up in an fp32 buffer."""
    if parameter.dtype == gradient.dtype:
        parameter.grad = gradient
        return
    parameter.grad = None

    def add(leaf: Tensor) -> None:
        assert leaf.grad is not None
        gradient.add_(leaf.grad)
        leaf.grad = None

    parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
