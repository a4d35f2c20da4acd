"""Every strategy slowly and plainly, all replicas in one loop, straight from docs/methods.md: the oracle of the tests.

A replica's weights are a list of tensors. `gradient(weights, replica, number)` is the mean gradient of a replica's
microbatch `number`; `optimizer(weights)` makes a torch.optim.Optimizer; `rate(progress)` its learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from freerun.replicas.coordinates import coordinates, parts_for
from freerun.replicas.sparse import Correction

Weights = list[Tensor]


@dataclass
class Task:
    """What is trained."""

    start: Weights
    gradient: Callable[[Weights, int, int], Weights]
    optimizer: Callable[[Weights], torch.optim.Optimizer]
    rate: Callable[[float], float]
    replicas: int
    updates: int
    microbatches: int = 1
    clip: float = 0.0

    def replica_gradient(self, weights: Weights, replica: int, update: int) -> Weights:
        """One replica's mean gradient of an update."""
        total = [torch.zeros_like(weight) for weight in weights]
        for number in range(update * self.microbatches, (update + 1) * self.microbatches):
            for into, part in zip(total, self.gradient(weights, replica, number), strict=True):
                into += part / self.microbatches
        return total

    def mean_gradient(self, weights: Weights, update: int) -> Weights:
        """The gradient of the global batch."""
        total = self.replica_gradient(weights, 0, update)
        for replica in range(1, self.replicas):
            for into, part in zip(total, self.replica_gradient(weights, replica, update), strict=True):
                into += part
        return [part * (1 / self.replicas) for part in total]


@dataclass
class Learner:
    """Weights with their optimizer."""

    task: Task
    weights: Weights = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.weights = [weight.clone() for weight in self.task.start]
        self.optimizer = self.task.optimizer(self.weights)

    def step(self, gradient: Weights, progress: float) -> None:
        """Clip, set the rate, step."""
        norm = float(torch.stack([part.norm() for part in gradient]).double().square().sum().sqrt())
        scale = min(1.0, self.task.clip / norm) if self.task.clip else 1.0
        for weight, part in zip(self.weights, gradient, strict=True):
            weight.grad = part * scale
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.rate(progress)
        self.optimizer.step()

    def proposal(self, gradient: Weights, progress: float) -> Weights:
        """What a step would give."""
        other = Learner(self.task)
        for weight, own in zip(other.weights, self.weights, strict=True):
            weight.copy_(own)
        other.optimizer.load_state_dict(deepcopy(self.optimizer.state_dict()))
        other.step(gradient, progress)
        return other.weights


def synchronous(task: Task) -> Weights:
    """allreduce and zero1: the whole batch in one process."""
    learner = Learner(task)
    for update in range(task.updates):
        learner.step(task.mean_gradient(learner.weights, update), update)
    return learner.weights


def delayed(task: Task) -> Weights:
    """dpu: each gradient is taken while the one before is not yet applied."""
    learner = Learner(task)
    waiting = task.mean_gradient(learner.weights, 0)
    for update in range(1, task.updates):
        gradient = task.mean_gradient(learner.weights, update)
        learner.step(waiting, update - 1)
        waiting = gradient
    learner.step(waiting, task.updates - 1)
    return learner.weights


def acco(task: Task) -> Weights:
    """acco, fixed: phase A at provisional weights, phase B at committed ones, a step from both."""
    learner = Learner(task)
    provisional = [weight.clone() for weight in learner.weights]
    for update in range(0, task.updates, 2):
        first = task.mean_gradient(provisional, update)
        if update + 1 == task.updates:
            learner.step(first, update)
            break
        second = task.mean_gradient(learner.weights, update + 1)
        both = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
        provisional_next = learner.proposal(first, update)
        learner.step(both, update)
        provisional = provisional_next
    return learner.weights


@dataclass
class Averaging:
    """A round of sparse averaging under way; the weights of every replica as whole vectors."""

    number: int
    launched: int
    average: Tensor
    remembered: list[Tensor]


def sparse(
    task: Task, *, fraction: float, interval: int, delay: int, correction: Correction, seed: int
) -> list[Tensor]:
    """sparse: every replica's weights at the end, as vectors."""
    learners = [Learner(task) for _ in range(task.replicas)]
    size, parts = flat(task.start).numel(), parts_for(fraction)
    mean_learnt = [torch.zeros(size) for _ in learners]
    visited = torch.zeros(size, dtype=torch.bool)
    under_way: list[Averaging] = []

    def finish(done: Averaging) -> None:
        under_way.remove(done)
        places = coordinates(size, parts, seed, done.number)
        decay = correction.mean_decay(done.number)
        for replica, learner in enumerate(learners):
            before = flat(learner.weights)
            learnt = before - done.remembered[replica]
            running = torch.where(visited, decay * mean_learnt[replica] + (1 - decay) * learnt, learnt)
            mean_learnt[replica][places] = running[places]
            back = {"none": torch.zeros(size), "drift": learnt, "ema": running}[correction.kind]
            after = before.clone()
            after[places] = (done.average + correction.strength * back)[places]
            unflatten(after, learner.weights)
            for other in under_way:  # what this round has brought, the others must not take for learnt
                other.remembered[replica] += after - before
        visited[places] = True

    for done in range(1, task.updates + 1):
        for replica, learner in enumerate(learners):
            learner.step(task.replica_gradient(learner.weights, replica, done - 1), done - 1)
        for averaging in [a for a in under_way if a.launched + delay <= done]:
            finish(averaging)
        if done % interval == 0:
            vectors = [flat(learner.weights) for learner in learners]
            under_way.append(Averaging(done // interval - 1, done, mean(vectors), vectors))
            if delay == 0:
                finish(under_way[-1])
    while under_way:
        finish(under_way[0])
    return [flat(learner.weights) for learner in learners]


def diloco(
    task: Task,
    *,
    fragments: list[list[tuple[int, int]]],
    interval: int,
    delay: int,
    rate: float,
    momentum: float,
    kept: float,
) -> list[Tensor]:
    """diloco: every replica's weights at the end, as vectors; fragments take turns, one every `interval` updates."""
    learners = [Learner(task) for _ in range(task.replicas)]
    outer = flat(task.start)
    velocity = torch.zeros_like(outer)
    under_way: list[tuple[int, int, Tensor]] = []

    def finish(number: int, new: Tensor) -> None:
        for learner in learners:
            vector = flat(learner.weights)
            for start, end in fragments[number % len(fragments)]:
                vector[start:end] = torch.lerp(new[start:end], vector[start:end], kept)
            unflatten(vector, learner.weights)

    for done in range(1, task.updates + 1):
        for replica, learner in enumerate(learners):
            learner.step(task.replica_gradient(learner.weights, replica, done - 1), done - 1)
        for entry in [entry for entry in under_way if entry[0] + delay <= done]:
            under_way.remove(entry)
            finish(entry[1], entry[2])
        if done % interval == 0:
            number = done // interval - 1
            step = mean([outer - flat(learner.weights) for learner in learners])
            for start, end in fragments[number % len(fragments)]:
                velocity[start:end] = momentum * velocity[start:end] + step[start:end]
                outer[start:end] -= rate * (step + momentum * velocity)[start:end]
            if delay == 0:
                finish(number, outer)
            else:
                under_way.append((done, number, outer.clone()))
    for _, number, new in under_way:
        finish(number, new)
    return [flat(learner.weights) for learner in learners]


def mean(vectors: list[Tensor]) -> Tensor:
    """The mean of the replicas' vectors, summed in their order."""
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total * (1 / len(vectors))


def flat(weights: Weights) -> Tensor:
    """All weights in one vector."""
    return torch.cat([weight.detach().reshape(-1) for weight in weights])


def unflatten(vector: Tensor, into: Weights) -> None:
    """Put a vector of all weights back."""
    with torch.no_grad():
        start = 0
        for weight in into:
            weight.copy_(vector[start : start + weight.numel()].view_as(weight))
            start += weight.numel()
