"""A whole run as one tree of typed dataclasses.

Nothing here imports torch: a config can be read, printed and refused in milliseconds.
What can't be is refused by checks.py; TOML files and command-line overrides are read by config_files.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """The decoder to train: freerun's own by its sizes, or a Hugging Face causal LM by name or folder."""

    layers: int = 4
    """Decoder layers."""
    width: int = 256
    """Model dimension."""
    heads: int = 4
    """Attention heads."""
    kv_heads: int = 0
    """Key/value heads for grouped-query attention; 0 means as many as heads."""
    hidden: int = 0
    """Inner dimension of the MLP; 0 means 8/3 of width, rounded up to a multiple of 16."""
    context: int = 256
    """Tokens per sequence."""
    tied: bool = False
    """Use the embedding's weights in the head."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding."""
    norm_eps: float = 1e-5
    """Epsilon inside RMSNorm."""
    pretrained: str = ""
    """Start from this Hugging Face model (a local folder or a hub name) instead of fresh weights."""
    architecture: str = ""
    """Train this Hugging Face architecture (a config.json or its folder) from fresh weights."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward instead of keeping its activations."""


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from and how it becomes tokens."""

    source: str = "python-stdlib"
    """python-stdlib, a file, a glob, or hf:NAME for a Hugging Face dataset."""
    format: Literal["auto", "text", "jsonl", "parquet", "tokens", "hf"] = "auto"
    """What the files hold; auto goes by the ending. tokens: .bin (uint16) or .npy, already tokenized."""
    task: Literal["pretrain", "sft"] = "pretrain"
    """pretrain packs documents; sft takes prompt/response pairs and computes the loss on the response only."""
    field: str = "text"
    """Column that holds the text (jsonl, parquet, hf)."""
    prompt_field: str = "prompt"
    """Column of the prompt (task sft)."""
    response_field: str = "response"
    """Column of the response (task sft)."""
    chat_template: str = ""
    """Jinja file or template text that renders a prompt/response pair; empty means the tokenizer's, or a plain one."""
    tokenizer: str = "bytes"
    """bytes, a tokenizer.json, or the name of a Hugging Face tokenizer."""
    vocabulary: int = 0
    """Size of the vocabulary; needed only for format tokens, otherwise the tokenizer's."""
    eval_fraction: float = 0.02
    """Share of the documents held out for evaluation."""
    max_documents: int = 0
    """Use at most this many documents; 0 means all."""
    cache: str = ".freerun-cache"
    """Folder of the memory-mapped token cache."""


@dataclass(frozen=True)
class PipelineConfig:
    """How the model is cut into stages, and how the stages work together."""

    stages: int = 1
    """Pipeline stages; each is one process."""
    schedule: Literal["gpipe", "1f1b", "two-version", "async"] = "async"
    """gpipe and 1f1b flush at every update; two-version and async never do."""
    weights: Literal["auto", "stash", "two-version", "latest"] = "auto"
    """Which weights a backward sees: the forward's own (stash), or the newest (latest)."""
    microbatches: int = 1
    """Microbatches per update."""
    slack: int = 0
    """Extra microbatches in flight per link, to hide slow links (async only); adds to the delay."""
    cut: str = "balanced"
    """balanced (by estimated cost), layers (equal layer counts), or layer counts like 3,3,2."""
    granularity: Literal["layer", "quarter"] = "layer"
    """Smallest piece of a cut; quarter cuts a layer in four and is for simulate only."""


@dataclass(frozen=True)
class ReplicasConfig:
    """How many copies of the pipeline train side by side, and what the copies of a stage do together."""

    count: int = 1
    """Replicas of each stage."""
    strategy: str = "allreduce"
    """allreduce, zero1, dpu, acco, sparse, diloco or none."""
    fraction: float = 0.05
    """sparse: share of the weights that one round averages."""
    interval: int = 20
    """sparse: updates between rounds; diloco: inner updates per outer step."""
    delay: str = "fixed:10"
    """sparse, streaming diloco: fixed:N finishes a round N updates after its launch; free (sparse), when it arrives."""
    correction: Literal["none", "drift", "ema"] = "ema"
    """sparse: how what was learnt during a round is added back."""
    correction_strength: float = 1.0
    """sparse: the factor λ on the correction."""
    mean_decay: tuple[float, float] = (0.5, 0.99)
    """sparse, ema: the running mean's μ at the start and after annealing."""
    mean_warmup: int = 1000
    """sparse, ema: rounds before μ starts to anneal, and over which it then anneals."""
    payload: Literal["fp32", "bf16", "int8"] = "fp32"
    """Number format on the wire."""
    bucket_mib: float = 25.0
    """Size of a communication bucket."""
    elastic: bool = False
    """acco: keep accumulating microbatches until the collective in flight is through (depends on the clock)."""
    outer_lr: float = 0.7
    """diloco: learning rate of the outer Nesterov SGD."""
    outer_momentum: float = 0.9
    """diloco: momentum of the outer Nesterov SGD."""
    fragments: int = 1
    """diloco: parts that are exchanged in turn; more than 1 is streaming DiLoCo."""
    outer_kept: float = 0.5
    """streaming diloco: share of a replica's own weights that is kept when outer weights arrive."""


@dataclass(frozen=True)
class RotationConfig:
    """Settings of basis rotation."""

    source: Literal["first", "second"] = "second"
    """Where the bases come from: the momentum (first) or the gradient covariances (second)."""
    geometry: Literal["bilateral", "unilateral"] = "bilateral"
    """Rotate both sides of a matrix, or only the smaller one."""
    interval: int = 10
    """Updates between refreshes of the bases."""
    allocation: Literal["uniform", "stage-aware", "reversed"] = "uniform"
    """Spread the same budget of refreshes evenly, or towards stages with more delay, or (a control) less."""
    fresh: float = 0.0
    """Share γ of the newest gradient in the rotated step's numerator."""
    tempering: float = 0.0
    """Exponent q that damps the steep directions."""
    grading: float = 0.0
    """Exponent p by which the rate of a rotated matrix falls with its gradient's delay: η(1+τ)^−p."""
    bias_correction: bool = True
    """Divide the momentum by 1 − β1ᵗ; off acts as a warm-up."""
    nesterov: bool = False
    """Look ahead inside the rotated basis, as optimizer nesterov does outside; needs fresh 0 and bias_correction."""
    stagger: bool = False
    """Refresh the matrices in turn, so that no update is a spike; off refreshes all at once."""
    block: int = 0
    """Cut matrices into blocks with sides no longer than this, each rotated on its own; 0 is off. Cheaper."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 rotates in bf16 and keeps bases and momentum in it. Cheaper."""


@dataclass(frozen=True)
class DelayConfig:
    """What is done about a gradient's delay, whatever the optimizer."""

    lr: Literal["none", "anneal", "power"] = "none"
    """anneal: rate divided by the delay and annealed back (PipeDream-LR, PipeMare T1); power: η(1+τ)^−p."""
    lr_anneal: int = 0
    """anneal: updates until the rate is back to full; 0 means a quarter of the run."""
    lr_power: float = 1.0
    """power: the exponent p."""
    momentum: bool = False
    """Let β1 grow towards 0.99 with the stage's delay."""
    lookahead: float = 0.0
    """Run forwards on w + lookahead · τ · (last update); 0 is off, 1 looks ahead by the whole delay."""
    compensation: float = 0.0
    """delay-compensated: the factor c in g + c·g⊙g⊙(w_now − w_used)."""
    velocity_decay: float = 0.0
    """PipeMare T2 (weights latest): decay of the mean velocity by which backward weights are set back; 0 is off."""
    error_feedback: float = 0.0
    """One-step error feedback: share of the last step's staleness error that is corrected; 0 is off."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, its learning-rate schedule, and clipping."""

    name: str = "adamw"
    """adamw, basis-rotation, graded-rotation, nesterov, delay-compensated or muon.

    graded-rotation is basis rotation with settings for long delays; what is given beside the name wins over them."""
    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay; norms and biases have none."""
    warmup: int = 100
    """Updates of linear warm-up."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    final: float = 0.1
    """Learning rate at the end, as a share of the peak (cosine, wsd)."""
    decay: float = 0.2
    """wsd: share of the run spent decaying."""
    clip: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    clip_scope: Literal["auto", "global", "stage", "carried"] = "auto"
    """Norm of what: the whole model (needs a flush), the stage, or the last known global norm carried by messages."""
    rotation: RotationConfig = field(default_factory=RotationConfig)
    delay: DelayConfig = field(default_factory=DelayConfig)


@dataclass(frozen=True)
class TrainingConfig:
    """How long, how much at a time, in which number format."""

    updates: int = 1000
    """Updates of the weights."""
    sequences: int = 8
    """Sequences per microbatch."""
    seed: int = 0
    """Fixes the weights at the start and the order of the data."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Number format of compute; master weights are always fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    threads: int = 0
    """CPU threads per process; 0 shares the cores among the processes of a machine."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """On a loss or gradient that is not finite: stop the run, or skip it and count."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Loss on held-out documents, through the same stages."""

    every: int = 0
    """Updates between evaluations; 0 means only at the end."""
    microbatches: int = 8
    """Microbatches per evaluation; 0 turns evaluation off."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, so that a run can go on."""

    every: int = 0
    """Updates between checkpoints; 0 means only at the end."""
    keep: int = 2
    """Complete checkpoints to keep."""


@dataclass(frozen=True)
class RunConfig:
    """The run's folder, and what is written while it runs."""

    dir: str = ""
    """Folder of the run; empty means runs/NAME-DATE-TIME."""
    resume: bool = False
    """Go on from the last checkpoint in dir."""
    time_limit: float = 300.0
    """Seconds that any wait for another process may take."""
    log_every: int = 10
    """Updates between lines of metrics."""
    trace_updates: int = 50
    """Updates at the end of the run whose every action is traced; 0 turns tracing off."""
    tensorboard: bool = True
    """Write TensorBoard events when tensorboard is installed."""
    wandb: str = ""
    """Weights & Biases project to log to."""
    trackio: str = ""
    """trackio project to log to."""
    sample: int = 0
    """Generate this many tokens when the run is done."""


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)
