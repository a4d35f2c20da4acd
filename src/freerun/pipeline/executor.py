"""Carries out a stage's actions: the schedule has decided what, in which order, on which version of the weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from freerun.errors import NonFiniteError
from freerun.mesh import Place
from freerun.model.loss import token_loss
from freerun.model.stage import Stage
from freerun.pipeline.deferred import Deferred
from freerun.pipeline.feed import Feed
from freerun.pipeline.schedule import Backward, Forward, Update
from freerun.pipeline.tied import TiedBorrower, TiedOwner
from freerun.pipeline.transport import Incoming, Outgoing
from freerun.replicas.base import ReplicaStrategy
from freerun.steps import Steps
from freerun.weights.flat import FlatParameters
from freerun.weights.policy import WeightPolicy
from freerun.weights.versions import WeightVersions


@dataclass
class Links:
    """The four ends of links that a stage may have; none at the pipeline's ends."""

    activations_in: Incoming | None = None
    activations_out: Outgoing | None = None
    gradients_in: Incoming | None = None
    gradients_out: Outgoing | None = None
    tied_owner: TiedOwner | None = None
    tied_borrower: TiedBorrower | None = None


@dataclass(repr=False)
class InFlight:
    """What the backward of a microbatch needs from its forward, which sets inputs and output."""

    norms: Tensor
    inputs: Tensor = field(init=False)
    output: Tensor = field(init=False)


@dataclass
class Losses:
    """The loss of the update under way: a sum over tokens, and how many."""

    total: float = 0.0
    tokens: int = 0
    skipped: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.tokens


@dataclass
class Executor:
    """One stage at work."""

    place: Place
    stage: Stage
    dtype: torch.dtype
    flat: FlatParameters
    versions: WeightVersions
    policy: WeightPolicy
    strategy: ReplicaStrategy
    links: Links
    feed: Feed
    skip_nonfinite: bool = False
    deferred: Deferred | None = None
    """In a replay: the forwards that wait until their microbatch is at the last stage."""
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    losses: Losses = field(default_factory=Losses)
    delays: Counter[int] = field(default_factory=Counter)
    norms: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    replayed_norms: dict[int, Tensor] = field(default_factory=dict)
    microbatches_done: int = 0
    _microbatches_before: int = 0
    _completing: bool = False

    def forward(self, action: Forward) -> Steps[None]:
        """Run a microbatch forward on the version that the schedule says, and send it on."""
        microbatch, links, following = action.microbatch, self.links, self.links.activations_out
        inputs = yield from self._inputs(microbatch)
        if links.tied_borrower:
            yield from links.tied_borrower.load(self.feed.tied_version(microbatch))
        flight = InFlight(self.replayed_norms.pop(microbatch, self.norms).clone())
        self.in_flight[microbatch] = flight
        run = partial(self._run, self.versions.acquire(action.version), flight)
        if following is None:
            logits = run(self.deferred.catch_up(microbatch, inputs) if self.deferred else inputs)
            flight.output = self._loss(logits, microbatch)
        elif self.deferred:
            self.deferred.put_off(microbatch, inputs, lambda message: following.form.checked(run(message)))
            yield from following.send(following.placeholder, flight.norms)
        else:
            yield from following.send(run(inputs).detach(), flight.norms)

    def backward(self, action: Backward) -> Steps[None]:
        """Run a microbatch backward, and send its gradient to the stage before."""
        flight = self.in_flight.pop(action.microbatch)
        self._completing = self.feed.completes(action.microbatch)
        self.policy.before_backward(self.versions, action)
        if self.place.last:
            flight.output.backward()  # type: ignore[no-untyped-call]
        else:
            assert self.links.gradients_in
            gradient, norms = yield from self.links.gradients_in.receive()
            self._hear(norms, slice(self.place.stage + 1, None))
            torch.autograd.backward(flight.output, gradient)
            self.links.gradients_in.reuse(gradient)
        self.policy.after_backward(self.versions)
        self.versions.release(action.version)
        self.microbatches_done += 1
        if self.links.gradients_out:
            assert self.links.activations_in and flight.inputs.grad is not None
            yield from self.links.gradients_out.send(flight.inputs.grad, self.norms)
            if self.deferred is None:  # otherwise they are the stage before's own outputs
                self.links.activations_in.reuse(flight.inputs.detach())
        self.delays[self.feed.age(action)] += 1

    def update(self, action: Update) -> Steps[None]:
        """Turn the gradients of an update into the next version of the weights."""
        if self.links.tied_owner:
            yield from self.links.tied_owner.collect()
        if self.links.tied_borrower:
            yield from self.links.tied_borrower.send_gradient()
        stepper = self.strategy.stepper
        stepper.others_norm2 = float(self.norms.sum() - self.norms[self.place.stage]) if len(self.norms) else 0.0
        self.policy.before_update(self.versions, stepper, action)
        microbatches = self.microbatches_done - self._microbatches_before
        self._microbatches_before = self.microbatches_done
        yield from self.strategy.update(action.update, action.delay, microbatches)
        self.flat.gradient.zero_()
        if self.strategy.ended(action.update + 1):
            yield from self.strategy.finish()
        if len(self.norms) and math.isfinite(stepper.last_norm):  # a skipped update must not clip others to nothing
            self.norms[self.place.stage] = stepper.last_norm**2
        self.policy.publish(self.versions, action.update + 1)
        if self.links.tied_owner:
            yield from self.links.tied_owner.send(self.versions.read(action.update + 1))

    def skip_to(self, microbatches: int) -> None:
        """Go on after so many microbatches."""
        self.microbatches_done = self._microbatches_before = microbatches

    def start(self, oldest: int) -> Steps[None]:
        """Before the first action: let the last stage have the shared weights of every version still in use."""
        if self.links.tied_owner:
            for version in range(oldest, self.versions.newest + 1):
                yield from self.links.tied_owner.send(self.versions.read(version))

    def gradient_done(self, name: str) -> None:
        """A parameter has its gradient of a microbatch; with an update's last one it can leave for other replicas."""
        if self._completing and name not in self.stage.lent:
            self.strategy.gradient_ready([name])

    def take_loss(self) -> float | None:
        """The mean loss over the tokens of the update just done, in the last stage, which alone knows it."""
        if not self.place.last:
            return None
        loss = self.losses.mean if self.losses.tokens else None
        self.losses.total, self.losses.tokens = 0.0, 0
        return loss

    def load_tied(self, version: int) -> Steps[None]:
        """Before an evaluation: have the weights shared with the first stage at this version."""
        if self.links.tied_borrower:
            yield from self.links.tied_borrower.load(version, again=True)

    def evaluate(self, module: nn.Module) -> Steps[list[float]]:
        """Run the held-out microbatches through a module; the last stage gives the sum of losses and their tokens."""
        total, tokens = 0.0, 0
        for number in self.feed.evaluation_microbatches():
            if self.links.activations_in:
                inputs, norms = yield from self.links.activations_in.receive()
                self._hear(norms, slice(0, self.place.stage))
            else:
                inputs = self.feed.evaluation_tokens(number)
            with torch.no_grad():
                output = module(inputs)
            if self.links.activations_in:
                self.links.activations_in.reuse(inputs)
            if self.links.activations_out:
                yield from self.links.activations_out.send(output, self.norms)
            else:
                labels = self.feed.evaluation_labels(number)
                total += float(token_loss(output, labels))
                tokens += int((labels != -100).sum())
        return [total, float(tokens)]

    def discard(self) -> Steps[None]:
        """Take in a microbatch and let it be."""
        assert self.links.activations_in
        message, _ = yield from self.links.activations_in.receive()
        self.links.activations_in.reuse(message)

    def close(self, newest: int) -> Steps[None]:
        """Leave every link with nothing under way."""
        links = self.links
        if not self.strategy.ended(newest):  # an early end, after which others must not wait for a round to go on
            yield from self.strategy.finish()
        if links.activations_out:
            yield from links.activations_out.close()
        if links.gradients_out:
            yield from links.gradients_out.close()
        if links.activations_in:
            yield from links.activations_in.close()
        if links.gradients_in:
            yield from links.gradients_in.close()
        if links.tied_owner:
            yield from links.tied_owner.close()
        if links.tied_borrower:
            yield from links.tied_borrower.drain(newest)

    def _inputs(self, microbatch: int) -> Steps[Tensor]:
        if self.links.activations_in is None:
            return self.feed.tokens(microbatch)
        message, norms = yield from self.links.activations_in.receive()
        self._hear(norms, slice(0, self.place.stage))
        return message

    def _run(self, module: nn.Module, flight: InFlight, message: Tensor) -> Tensor:
        flight.inputs = message if self.place.first else message.detach().requires_grad_()
        flight.output = module(flight.inputs)
        return flight.output

    def _loss(self, logits: Tensor, microbatch: int) -> Tensor:
        """The microbatch's share of the update's loss; what is not finite stops the run or counts for nothing."""
        labels = self.feed.labels(microbatch)
        total = token_loss(logits, labels)
        value = float(total.detach())
        if not math.isfinite(value):
            if not self.skip_nonfinite:
                raise NonFiniteError(f"the loss of microbatch {microbatch} is {value}")
            self.losses.skipped += 1
            return logits.mul(0).nan_to_num(0, 0, 0).sum()
        self.losses.total += value
        self.losses.tokens += self.feed.valid(microbatch)
        return total * self.feed.scale(microbatch)

    def _hear(self, norms: Tensor, stages: slice) -> None:
        if len(self.norms):
            self.norms[stages] = norms[stages]
