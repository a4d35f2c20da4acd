"""Replica strategies around anyone's own PyTorch loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from freerun.config import ReplicasConfig
from freerun.errors import ConfigError, NonFiniteError
from freerun.groups import DistributedGroup, Group, Solo
from freerun.optim.base import ProposingOptimizer, adapt
from freerun.optim.sharding import shares
from freerun.optim.stepper import clip, squared_norm
from freerun.replicas.base import BESIDE, State, Timing, mean_over, refuse_unequal_start, spread_around, wire_of
from freerun.replicas.checks import check_settings, delay_of
from freerun.replicas.elementwise import is_elementwise
from freerun.replicas.sharded import Shard
from freerun.replicas.sparse import Correction, SparseRounds
from freerun.replicas.two_phases import TwoPhases
from freerun.steps import Steps, run
from freerun.weights.flat import FlatParameters, flatten, layout

OptimizerFactory = Callable[[list[Tensor]], torch.optim.Optimizer]


class SparseAveraging:
    """Averages a random share of the weights among replicas, in the background; each replica trains on by itself.

    Call `step()` after each step of your own optimizer, and `finish()` once at the end. All replicas must start from
    the same weights and call `step` equally often. Parameters are moved into one fp32 buffer and stay what they are:
    an optimizer or a module that holds them needs not be told. `group` is the replicas' process group (gloo), None for
    all processes.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None = None,
        fraction: float = 0.05,
        interval: int = 20,
        delay: str = "free",
        correction: Literal["none", "drift", "ema"] = "ema",
        *,
        payload: Literal["fp32", "bf16", "int8"] = "fp32",
        seed: int = 0,
        time_limit: float = 300.0,
    ) -> None:
        settings = ReplicasConfig(
            strategy="sparse", fraction=fraction, interval=interval, delay=delay, correction=correction, payload=payload
        )
        check_settings(settings)
        module = _as_module(params)
        self.weights = flatten(module, layout(module))
        self._group = _as_group(group, time_limit)
        self._updates = 0
        run(refuse_unequal_start(self._group, self.weights))
        self._rounds = SparseRounds(
            self.weights,
            self._group,
            fraction=fraction,
            interval=interval,
            delay=delay_of(settings),
            correction=Correction(correction),
            wire=wire_of(settings),
            seed=seed,
        )

    def step(self) -> None:
        """Your optimizer has made a step: finish the rounds that are due, launch one if it is time."""
        self._updates += 1
        run(self._rounds.advance(self._updates))

    def finish(self) -> None:
        """Training is over: complete the rounds under way."""
        run(self._rounds.finish())

    def average(self) -> None:
        """Give every replica the mean of all weights, as for a final evaluation; all must call it together."""
        self.weights.copy_(run(mean_over(self._group, self.weights)))

    def disagreement(self) -> float:
        """Mean squared distance of a weight to its mean over replicas; all must call it together."""
        mean = run(mean_over(self._group, self.weights))
        return run(spread_around(self._group, self.weights, mean))

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other replicas so far."""
        return self._group.bytes_sent

    def state_dict(self) -> State:
        """All that, with the weights, lets a resumed run go on."""
        return {"updates": self._updates, "rounds": run(self._rounds.state_dict())}

    def load_state_dict(self, state: State) -> None:
        """Go on from there; load the weights before."""
        self._updates = state["updates"]
        self._rounds.load_state_dict(state["rounds"])


class Acco:
    """Data parallelism with a sharded optimizer, entirely behind the computation, in rounds of two phases.

    Call `step()` after every backward; there is no optimizer.step() and no zero_grad(). `optimizer_factory` gets this
    replica's shard of the weights and makes an optimizer for it; `rate`, if given, its learning rate from the number of
    microbatches that all replicas have done. Call `finish()` once at the end. `elastic` lets a replica go on adding
    microbatches until the communication under way is through, instead of `microbatches` per phase.

    `whole_matrices` shards by whole parameters, for an optimizer whose step mixes the elements of a matrix.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        optimizer_factory: OptimizerFactory,
        group: dist.ProcessGroup | None = None,
        *,
        microbatches: int = 1,
        elastic: bool = False,
        rate: Callable[[float], float] | None = None,
        clip: float = 0.0,
        whole_matrices: bool = False,
        payload: Literal["fp32", "bf16"] = "fp32",
        time_limit: float = 300.0,
    ) -> None:
        settings = ReplicasConfig(strategy="acco", elastic=elastic, payload=payload)
        check_settings(settings)
        if microbatches < 1:
            raise ConfigError(f"microbatches is {microbatches}; a phase has at least 1.")
        if not whole_matrices and not is_elementwise(optimizer_factory):
            raise ConfigError(
                "the optimizer's step on a part of a matrix differs from its step on the whole one, so it can't be "
                "sharded by elements; set whole_matrices=True."
            )
        self.flat = FlatParameters(_as_module(params))
        self._group = _as_group(group, time_limit)
        self._microbatches = microbatches
        self._elastic = elastic
        self._done = 0
        run(refuse_unequal_start(self._group, self.flat.weights))
        channel = self._group.channel(BESIDE)
        matrices = {part.name for part in self.flat.slices if whole_matrices and len(part.shape) >= 2}
        pieces = shares(self.flat.slices, matrices, self._group.size)
        shard = Shard(self.flat.weights, pieces, channel, wire_of(settings))
        self._stepping = _Stepping(adapt(optimizer_factory(shard.tensors)), shard.tensors, channel, rate, clip)
        self.timing = Timing()
        self._rounds = TwoPhases(
            self.flat.weights,
            self.flat.gradient,
            shard,
            self._stepping,
            channel,
            self.timing,
            batch=1,
            divided_by=1,
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this replica's shard."""
        return self._stepping.optimizer

    @property
    def microbatches_done(self) -> float:
        """Microbatches of all replicas that are in the committed weights; the same number on every replica."""
        return self._rounds.progress

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other replicas so far."""
        return self._group.bytes_sent

    def step(self) -> bool:
        """A backward has added to the gradients. True when that ended a phase, so that the weights are new ones."""
        self.flat.attach_gradients()
        self._done += 1
        if self._rounds.busy if self._elastic else self._done < self._microbatches:
            return False
        run(self._rounds.end_phase(self._done, 0))
        self.flat.gradient.zero_()
        self._done = 0
        return True

    def finish(self) -> None:
        """Training is over: leave the committed weights, the same on every replica."""
        run(self._rounds.finish())

    def state_dict(self) -> State:
        """All that a resumed run needs; call it where `step` has just returned True."""
        rounds = run(self._rounds.state_dict())
        return {"weights": self.flat.weights, "optimizer": self.optimizer.state_dict(), "rounds": rounds}

    def load_state_dict(self, state: State) -> None:
        """Go on from there."""
        self.flat.weights.copy_(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._rounds.load_state_dict(state["rounds"])


class _Stepping:
    """Steps an optimizer of the caller's over a shard."""

    def __init__(
        self,
        optimizer: ProposingOptimizer,
        tensors: list[Tensor],
        channel: Group,
        rate: Callable[[float], float] | None,
        largest_norm: float,
    ) -> None:
        self.optimizer = optimizer
        self._tensors = tensors
        self._channel = channel
        self._rate = rate
        self._largest_norm = largest_norm

    def step(self, progress: float, delay: int) -> Steps[bool]:
        yield from self._prepare(progress)
        self.optimizer.step()
        return True

    def propose(self, progress: float, delay: int) -> Steps[list[Tensor] | None]:
        yield from self._prepare(progress)
        return self.optimizer.propose()

    def _prepare(self, progress: float) -> Steps[None]:
        norm2 = yield from squared_norm(self._tensors, [self._channel])
        if not math.isfinite(norm2):
            raise NonFiniteError(f"the gradient is not finite after {progress:g} microbatches")
        clip(self._tensors, math.sqrt(norm2), self._largest_norm)
        if self._rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate(progress)


def _as_module(params: Iterable[nn.Parameter]) -> nn.ParameterList:
    trainable = [parameter for parameter in params if parameter.requires_grad]
    if not trainable:
        raise ConfigError("params holds no trainable parameter.")
    for index, parameter in enumerate(trainable):
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"parameter {index} is {parameter.dtype}; keep parameters in fp32 and compute in less by autocast."
            )
        if parameter.device.type != "cpu":
            raise ConfigError(f"parameter {index} is on {parameter.device}; replicas exchange CPU tensors only so far.")
    return nn.ParameterList(trainable)


def _as_group(group: dist.ProcessGroup | None, limit: float) -> Group:
    if not dist.is_initialized():
        return Solo()
    process_group = dist.group.WORLD if group is None else group
    assert process_group is not None
    if "gloo" not in dist.get_backend(process_group):
        raise ConfigError(
            "group must be a gloo process group; make one beside NCCL's by dist.new_group(backend='gloo')."
        )
    ranks = dist.get_process_group_ranks(process_group)
    if len(ranks) == 1:
        return Solo()
    return DistributedGroup(
        process_group, ranks, [f"replica {place} (rank {r})" for place, r in enumerate(ranks)], limit
    )
