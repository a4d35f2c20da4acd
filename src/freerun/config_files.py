"""Recipes, TOML files and `--section.key value` into a Config and back; every refusal is one sentence."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w

from freerun.checks import validate
from freerun.config import Config
from freerun.errors import ConfigError
from freerun.files import write_text
from freerun.registry import OPTIMIZER_SETTINGS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Tree = dict[str, Any]


def read(source: str, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """The config of a recipe or a TOML file, with `section.key` overrides on top, checked."""
    tree = _read_toml(_locate(source)) if source else {}
    config = build(_with_optimizer_settings(tree, dict(overrides)), source or "the defaults")
    for key, text in overrides:
        config = replace(config, key, text)
    validate(config)
    return config


def write(config: Config, path: Path) -> None:
    """Write a config as TOML, beside and renamed."""
    write_text(path, dumps(config))


def dumps(config: Config) -> str:
    """A config as TOML, every key named."""
    return tomli_w.dumps(_plain(dataclasses.asdict(config)))


def recipes() -> dict[str, str]:
    """The recipes that ship, with the first comment line of each."""
    found = {}
    for entry in resources.files("freerun.recipes").iterdir():
        if entry.name.endswith(".toml"):
            first = entry.read_text().splitlines()[0]
            found[entry.name.removesuffix(".toml")] = first.lstrip("# ").strip()
    return dict(sorted(found.items()))


def build(tree: Mapping[str, Any], where: str) -> Config:
    """A Config from nested tables; an unknown key or a wrong type is refused by name."""
    config: Config = _build(Config, tree, "", where)
    return config


def replace(config: Config, key: str, text: str) -> Config:
    """The config with one dotted key set from text, as the command line gives it."""
    kind = _kind_of(key)
    value = _from_text(key, kind, text)

    def inner(node: Any, path: list[str]) -> Any:
        head, *rest = path
        return dataclasses.replace(node, **{head: inner(getattr(node, head), rest) if rest else value})

    result: Config = inner(config, key.split("."))
    return result


def keys() -> Iterator[str]:
    """Every dotted key there is."""

    def walk(kind: Any, prefix: str) -> Iterator[str]:
        for name, child in typing.get_type_hints(kind).items():
            if dataclasses.is_dataclass(child):
                yield from walk(child, f"{prefix}{name}.")
            else:
                yield prefix + name

    return walk(Config, "")


def _with_optimizer_settings(tree: Tree, overrides: Mapping[str, str]) -> Tree:
    """The tree with what comes with the optimizer's name, wherever it says nothing itself."""
    given = tree.get("optimizer", {})
    if not isinstance(given, Mapping):
        return tree
    settings = OPTIMIZER_SETTINGS.get(str(overrides.get("optimizer.name", given.get("name"))), {})
    return {**tree, "optimizer": _merged(settings, given)}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """Two tables in one; where both say something, the second wins."""
    merged = {**below, **above}
    for key, value in below.items():
        if isinstance(value, Mapping) and isinstance(above.get(key), Mapping):
            merged[key] = _merged(value, above[key])
    return merged


def _locate(source: str) -> Path:
    path = Path(source)
    if path.suffix == ".toml" or path.exists():
        if not path.is_file():
            raise ConfigError(f"there is no config file {source}; name a TOML file or one of: {', '.join(recipes())}.")
        return path
    if source not in recipes():
        close = difflib.get_close_matches(source, recipes(), 1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of: {', '.join(recipes())}."
        raise ConfigError(f"there is no recipe or file named {source!r}; {hint}")
    return Path(str(resources.files("freerun.recipes") / f"{source}.toml"))


def _read_toml(path: Path) -> Tree:
    try:
        tree: Tree = tomllib.loads(path.read_text())
        return tree
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def _build(kind: Any, tree: Mapping[str, Any], prefix: str, where: str) -> Any:
    hints = typing.get_type_hints(kind)
    values = {}
    for name, value in tree.items():
        key = prefix + name
        if name not in hints:
            raise _unknown(key, where)
        child = hints[name]
        if dataclasses.is_dataclass(child):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{key} in {where} is {value!r}, but it is a section: write [{key}] and keys below.")
            values[name] = _build(child, value, key + ".", where)
        else:
            values[name] = _checked(key, child, value)
    return kind(**values)


def _unknown(key: str, where: str) -> ConfigError:
    close = difflib.get_close_matches(key, list(keys()), 1, cutoff=0.5)
    hint = f"; did you mean {close[0]}?" if close else "; `freerun train --help` lists every key."
    return ConfigError(f"unknown key {key} in {where}{hint}")


def _kind_of(key: str) -> Any:
    node: Any = Config
    for name in key.split("."):
        hints = typing.get_type_hints(node) if dataclasses.is_dataclass(node) else {}
        if name not in hints:
            raise _unknown(key, "the command line")
        node = hints[name]
    if dataclasses.is_dataclass(node):
        raise ConfigError(f"{key} is a section; set one of its keys, such as --{key}.{next(iter(_fields(node)))}.")
    return node


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _from_text(key: str, kind: Any, text: str) -> Any:
    """A value from the command line, in the type that the key has."""
    if kind is str or typing.get_origin(kind) is typing.Literal:
        return _checked(key, kind, text)
    if typing.get_origin(kind) is tuple:
        parts: Any = [part for part in text.replace(",", " ").strip("[]() ").split() if part]
        return _checked(key, kind, [_number(key, kind, part) for part in parts])
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{key} is {text!r}, but it is a switch; give true or false.")
        return text.lower() == "true"
    return _checked(key, kind, _number(key, kind, text))


def _number(key: str, kind: Any, text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{key} is {text!r}, but it takes {_describe(kind)}.") from None


def _checked(key: str, kind: Any, value: Any) -> Any:
    """The value if it has the key's type; an integer serves where a float is asked for."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        if value not in typing.get_args(kind):
            raise ConfigError(f"{key} is {value!r}; choose {_describe(kind)}.")
        return value
    if origin is tuple:
        parts = typing.get_args(kind)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(parts):
            raise ConfigError(f"{key} is {value!r}, but it takes {_describe(kind)}.")
        return tuple(_checked(key, part, item) for part, item in zip(parts, value, strict=True))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{key} is {value!r}, but it takes {_describe(kind)}.")
    return value


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        *most, last = [str(choice) for choice in typing.get_args(kind)]
        return f"{', '.join(most)} or {last}" if most else last
    if typing.get_origin(kind) is tuple:
        return f"{len(typing.get_args(kind))} numbers"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}[kind]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(child) for name, child in value.items()}
    return list(value) if isinstance(value, tuple) else value
