"""The command line: one function per verb, torch imported only by those that need it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from freerun import __version__, config_files
from freerun.checks import validate_replay
from freerun.config import Config
from freerun.errors import ConfigError, FreerunError

USAGE = f"""freerun {__version__}: train language models across slow, uneven or distant machines without waiting.

usage: freerun VERB ...

  train [RECIPE or FILE.toml] [--section.key value ...]      train; starts all processes of the mesh on this machine,
                                                             or joins those that torchrun started
  simulate [RECIPE or FILE.toml] [--section.key value ...]   replay a mesh of any size in one process, bit for bit
  recipes [NAME]                                             list the configs that ship, or print one
  schedule --stages 4 --kind async                           draw what each pipeline stage does, and when
  report RUN [RUN ...]                                       one HTML page about a run, or several side by side
  eval RUN                                                   loss on held-out data
  generate RUN --prompt TEXT                                 let a trained model write
  export RUN FOLDER                                          write a folder that Hugging Face transformers loads
  tokenizer train FILE.json --vocabulary N                   learn a byte-level BPE from data
  diagnose RUN                                               what delay does to a run, stage by stage
  doctor                                                     what this machine has, and what is missing

`freerun VERB --help` explains a verb; `freerun train --help` lists every key of a config.
"""

Overrides = list[tuple[str, str]]


def main() -> None:
    """Entry point."""
    arguments = sys.argv[1:]
    try:
        sys.exit(dispatch(arguments))
    except FreerunError as error:
        print(f"freerun: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def dispatch(arguments: Sequence[str]) -> int:
    """Run a verb."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    verb, *rest = arguments
    if verb == "--version":
        print(__version__)
    elif verb in ("train", "simulate"):
        _train(verb, rest)
    elif verb in VERBS:
        tyro.cli(VERBS[verb], prog=f"freerun {verb}", args=rest)
    else:
        raise ConfigError(f"there is no verb {verb!r}; choose train, simulate, {', '.join(VERBS)}.")
    return 0


def _train(verb: str, rest: Sequence[str]) -> None:
    """Read the config of `train` or `simulate`, and do it."""
    if "-h" in rest or "--help" in rest:
        _explain_train(verb)
    source, overrides, dry = _parse(rest)
    config = config_files.read(source, overrides)
    if dry:
        _dry_run(config)
        return
    name = Path(source).stem or "run"
    if verb == "train":
        from freerun.launch import launch

        folder = launch(config, name)
        if os.environ.get("RANK", "0") != "0":
            return
    else:
        from freerun.launch import make_folder
        from freerun.simulate.replay import simulate

        validate_replay(config)  # before there is a folder
        folder = make_folder(config, name)
        config_files.write(config, folder / "config.toml")
        simulate(config, folder)
    _after(config, folder)


def _parse(arguments: Sequence[str]) -> tuple[str, Overrides, bool]:
    """[SOURCE] [--section.key value | --section.key=value ...] [--resume] [--dry-run]"""
    source, dry = "", False
    overrides: Overrides = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word == "--dry-run":
            dry = True
        elif word == "--resume":
            overrides.append(("run.resume", "true"))
        elif word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            if not equals:
                if not waiting or waiting[0].startswith("--"):
                    raise ConfigError(f"--{key} has no value; write --{key} VALUE.")
                value = waiting.pop(0)
            overrides.append((key, value))
        elif source:
            raise ConfigError(f"{word!r} is one config too many after {source!r}; name one recipe or TOML file.")
        else:
            source = word
    return source, overrides, dry


def _explain_train(verb: str) -> None:
    """Every key of a config with its meaning and default; ends the process."""
    what = {
        "train": "Train. SOURCE is a recipe (freerun recipes) or a TOML file; every key can be set on top of it.",
        "simulate": "Replay a whole mesh in this one process: the same weights, bit for bit, as `freerun train` gives.",
    }[verb]
    extra = "--resume goes on from the last checkpoint in run.dir; --dry-run shows the run without starting it."
    tyro.cli(
        Config,
        prog=f"freerun {verb} [SOURCE] [--resume] [--dry-run]",
        description=f"{what}\n\n{extra}",
        args=["--help"],
        config=(tyro.conf.FlagConversionOff,),
    )


def _dry_run(config: Config) -> None:
    from rich.console import Console

    from freerun.data import tokenizer_of
    from freerun.dry_run import show

    show(config, tokenizer_of(config.data).vocabulary, Console())


def _after(config: Config, folder: Path) -> None:
    """When a run is over: its page, a sample, and where everything is."""
    from freerun.report import write

    write(folder, folder / "report.html")
    if config.run.sample:
        generate(folder, tokens=config.run.sample)
    print(f"\nrun folder: {folder}\nreport:     {folder / 'report.html'}")


def recipes(name: Annotated[str, tyro.conf.Positional] = "") -> None:
    """List the configs that ship, or print one in full.

    Args:
        name: the recipe to print.
    """
    if name:
        print(config_files.dumps(config_files.read(name)), end="")
        return
    for recipe, what in config_files.recipes().items():
        print(f"{recipe:20} {what}")


def schedule(
    stages: int = 4,
    kind: Literal["gpipe", "1f1b", "two-version", "async"] = "async",
    microbatches: int = 0,
    updates: int = 0,
    slack: int = 0,
) -> None:
    """Draw what each pipeline stage does, and which version of the weights each forward sees.

    Args:
        stages: pipeline stages.
        kind: the schedule.
        microbatches: microbatches per update; 0 means 1 for async and as many as stages for the others.
        updates: updates to draw; 0 means as many as show the pattern.
        slack: extra microbatches in flight per link (async only).
    """
    import shutil

    from freerun.pipeline.draw import draw

    microbatches = microbatches or (1 if kind == "async" else stages)
    updates = updates or max(3, 2 * stages // microbatches + 1)
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size((120, 24)).columns
    print(draw(kind, stages, microbatches, updates, slack, color=color, width=width), end="")


def report(runs: Annotated[list[Path], tyro.conf.Positional], output: Path | None = None) -> None:
    """Write one self-contained HTML page about a run, or about several side by side.

    Args:
        runs: folders of runs.
        output: the page; by default report.html in the (first) run's folder, or comparison.html for several.
    """
    from freerun.report import write

    page = output or (runs[0] / "report.html" if len(runs) == 1 else Path("comparison.html"))
    write(runs if len(runs) > 1 else runs[0], page)
    print(page)


def evaluate(run: Annotated[Path, tyro.conf.Positional], microbatches: int = 32, update: int | None = None) -> None:
    """Loss and perplexity of a trained model on its held-out data.

    Args:
        run: folder of the run.
        microbatches: how much held-out data to use.
        update: the checkpoint; by default the newest.
    """
    import math

    from freerun.trained import evaluate as loss_of
    from freerun.trained import load

    loss = loss_of(load(run, update), microbatches)
    print(f"loss {loss:.4f}  perplexity {math.exp(loss):.2f}")


def generate(
    run: Annotated[Path, tyro.conf.Positional],
    prompt: str = "",
    tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    update: int | None = None,
) -> None:
    """Let a trained model write, as it comes.

    Args:
        run: folder of the run.
        prompt: text to go on from.
        tokens: how many tokens at most.
        temperature: 0 takes the likeliest token each time; higher is wilder.
        top_p: choose among the likeliest tokens that have this probability together.
        seed: another seed, another text.
        update: the checkpoint; by default the newest.
    """
    from freerun.trained import load, write_text

    print(prompt, end="", flush=True)
    for text in write_text(load(run, update), prompt, tokens, temperature, top_p, seed):
        print(text, end="", flush=True)
    print()


def export(
    run: Annotated[Path, tyro.conf.Positional], folder: Annotated[Path, tyro.conf.Positional], update: int | None = None
) -> None:
    """Write a folder that Hugging Face's AutoModelForCausalLM loads.

    Args:
        run: folder of the run.
        folder: where to write it.
        update: the checkpoint; by default the newest.
    """
    from freerun import trained

    trained.export(trained.load(run, update), folder)
    print(folder)


def tokenizer(
    verb: Annotated[Literal["train"], tyro.conf.Positional],
    output: Annotated[Path, tyro.conf.Positional],
    vocabulary: int = 4096,
    source: str = "python-stdlib",
    field: str = "text",
) -> None:
    """Learn a byte-level BPE from data and write it as tokenizer.json, for data.tokenizer.

    Args:
        verb: train.
        output: the file to write.
        vocabulary: how many tokens.
        source: what data.source takes.
        field: column that holds the text.
    """
    from freerun.config import DataConfig
    from freerun.data import train_tokenizer

    print(train_tokenizer(DataConfig(source=source, field=field), vocabulary, output, progress=True))


def diagnose(
    run: Annotated[Path, tyro.conf.Positional], update: int | None = None, probes: int = 24, updates: int = 30
) -> None:
    """How delay acts on a run, per stage: Hessian misalignment, oscillation, staleness; numbers and a figure.

    Args:
        run: folder of a run with a checkpoint from before its end.
        update: the checkpoint; by default the newest of those.
        probes: Hessian products for each estimate.
        updates: updates to replay for the oscillation.
    """
    from freerun.diagnosis_view import show

    show(run, update, probes, updates)


def doctor() -> None:
    """What this machine has for freerun, what is missing, and how to get it."""
    from freerun.doctor import examine

    examine()


VERBS: dict[str, Callable[..., None]] = {
    "recipes": recipes,
    "schedule": schedule,
    "report": report,
    "eval": evaluate,
    "generate": generate,
    "export": export,
    "tokenizer": tokenizer,
    "diagnose": diagnose,
    "doctor": doctor,
}
