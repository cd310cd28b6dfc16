"""From a recipe and `key=value` arguments to a checked config: recipe lookup, bases, overrides, errors naming the key.

Order of merging: schema defaults, the recipe's `bases`, the recipe, the overrides. Values are written in Hydra's
override grammar; a text field takes everything after the first `=` as it stands.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from headtrain import config as schema
from headtrain.config import ConfigError, PromptSource, RecipeConfig
from headtrain.configcheck import RULES, validate
from headtrain.hardware import fast_bf16

# Lists of alternatives that one run goes through; a single value is wrapped.
SWEPT = (
    "eval.k", "eval.tree", "eval.temperature", "eval.batch", "eval.drafters", "eval.suites", "eval.speed_prompts",
    "eval.cost_batches", "export.formats", "data.responses.urls",
)  # fmt: skip


@dataclass(frozen=True)
class Key:
    """One key of the schema: dotted path, declared type, default value, comment."""

    path: str
    kind: Any
    default: Any
    comment: str

    @property
    def is_text(self) -> bool:
        return self.kind in (str, str | None)

    @property
    def is_list(self) -> bool:
        return typing.get_origin(_without_none(self.kind)) is list

    @property
    def is_open(self) -> bool:
        """True for a mapping whose keys are the user's own."""
        return typing.get_origin(_without_none(self.kind)) is dict

    @property
    def item(self) -> Any:
        return typing.get_args(_without_none(self.kind))[0]

    def type_name(self) -> str:
        kind = _without_none(self.kind)
        if self.is_list:
            return {str: "a list of texts", int: "a list of whole numbers", float: "a list of numbers"}.get(
                self.item, "a list of {source: …, limit: …, weight: …}"
            )
        names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        return names.get(kind, "a mapping" if self.is_open else "a value")


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        left = [part for part in typing.get_args(kind) if part is not type(None)]
        return left[0]
    return kind


@functools.cache
def keys() -> dict[str, Key]:
    """Every key of the schema by dotted path, in order; `data.prompts` itemised as `data.prompts.source` and so on."""
    found: dict[str, Key] = {}
    _collect("", RecipeConfig, found)
    return found


def _collect(prefix: str, cls: type, found: dict[str, Key]) -> None:
    hints, comments = typing.get_type_hints(cls), _comments().get(cls.__name__, {})
    for entry in fields(cls):
        path, kind = f"{prefix}{entry.name}", hints[entry.name]
        if is_dataclass(kind):
            _collect(f"{path}.", kind, found)
            continue
        default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        found[path] = Key(path, kind, default, comments.get(entry.name, ""))
        if found[path].is_list and is_dataclass(found[path].item):
            _collect(f"{path}.", found[path].item, found)


@functools.cache
def _comments() -> dict[str, dict[str, str]]:
    """Class -> field -> the comment behind the field in `headtrain/config.py`."""
    source = inspect.getsource(schema)
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            entries = [entry for entry in node.body if isinstance(entry, ast.AnnAssign)]
            found[node.name] = {
                entry.target.id: lines[entry.end_lineno - 1][entry.end_col_offset :].strip().removeprefix("#").strip()
                for entry in entries
            }
    return found


# ------------------------------------------------------------------------------------------------- recipes

def recipe_folder() -> Path:
    import headtrain.recipes

    return Path(headtrain.recipes.__path__[0])


def recipe_names() -> list[str]:
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def find_recipe(name: str, beside: Path | None = None) -> Path:
    """The YAML file of a recipe given by name or by path; ConfigError names the nearest known one."""
    path = Path(name).expanduser()
    if path.suffix in {".yaml", ".yml"} or len(path.parts) > 1:
        for candidate in ([beside / path] if beside and not path.is_absolute() else []) + [path]:
            if candidate.is_file():
                return candidate
        raise ConfigError(f"recipe={name}: no such file")
    shipped = recipe_folder() / f"{name}.yaml"
    if not shipped.is_file():
        near = nearest(name, recipe_names())
        raise ConfigError(f"recipe={name}: unknown recipe{near} (`headtrain recipes` lists them)")
    return shipped


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, `bases` included as written."""
    import yaml
    from omegaconf import OmegaConf

    try:
        content = OmegaConf.load(path)
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from error
    content = OmegaConf.to_container(content) if content else {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a mapping of config keys is expected, not a {type(content).__name__}")
    return content


def _layers(path: Path, seen: tuple[Path, ...] = ()) -> list[tuple[str, dict[str, Any]]]:
    """(file name, content) of a recipe's bases and of the recipe itself, in merging order."""
    if path.resolve() in seen:
        raise ConfigError(f"{path}: `bases` form a circle")
    content, layers = read_yaml(path), []
    bases = content.pop("bases", None) or []
    for base in [bases] if isinstance(bases, str) else bases:
        layers += _layers(find_recipe(str(base), path.parent), (*seen, path.resolve()))
    return [*layers, (path.name, content)]


# ------------------------------------------------------------------------------------------------- loading

def load(recipe: str, overrides: list[str]) -> RecipeConfig:
    """The checked config of a recipe (name or path) with overrides; ConfigError otherwise.

    `run_dir` is filled in: `runs/<recipe name>`, with `-smoke` behind it for a smoke run.
    """
    layers = _layers(find_recipe(recipe))
    layers.append(("the command line", _nested([parse_override(text) for text in overrides])))
    config = merge(layers)
    if config.run_dir is None:
        config.run_dir = str(Path("runs") / (Path(recipe).stem + ("-smoke" if config.smoke else "")))
    return _checked(config)


def load_overrides(overrides: list[str]) -> RecipeConfig:
    """The checked config of overrides alone, without a recipe."""
    return _checked(merge([("the command line", _nested([parse_override(text) for text in overrides]))]))


def load_resolved(path: Path) -> RecipeConfig:
    """The config that a run folder's `config.yaml` holds."""
    return _checked(merge([(str(path), read_yaml(path))]))


def _checked(config: RecipeConfig) -> RecipeConfig:
    """Number formats given as `auto` are decided by this machine; the result says which."""
    validate(config)
    fast = fast_bf16(config.target.device)
    if config.target.dtype == "auto":
        config.target.dtype = "bfloat16" if fast else "float32"
    if config.train.precision == "auto":
        config.train.precision = "bf16" if fast else "fp32"
    return config


def merge(layers: list[tuple[str, dict[str, Any]]]) -> RecipeConfig:
    """Merges (origin, content) layers into the typed schema."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    result = OmegaConf.structured(RecipeConfig)
    for origin, content in layers:
        check_keys(content, origin)
        for path, value in _leaves("", content):
            if path in keys() and keys()[path].is_text and not isinstance(value, str | None):
                raise ConfigError(f"{origin}: {path}: {value} is not text; put it in quotes")
            try:
                OmegaConf.update(result, path, _shaped(path, value))
            except OmegaConfBaseException as error:
                raise _wrong_type(path, value, origin) from error
    return OmegaConf.to_object(result)


def to_yaml(config: RecipeConfig) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def check_keys(content: dict[str, Any], origin: str, prefix: str = "") -> None:
    """Raises ConfigError at the first key of a nested mapping that the schema does not have."""
    for name, value in content.items():
        path = f"{prefix}{name}"
        sections = {part for key in keys() for part in _parents(key)}
        if path in keys():
            key = keys()[path]
            if key.is_list and is_dataclass(key.item) and isinstance(value, list):
                for row in value:
                    if isinstance(row, dict):
                        check_keys(row, origin, f"{path}.")
        elif path in sections:
            if not isinstance(value, dict):
                raise ConfigError(f"{origin}: {path} is a section with keys of its own; write {path}.KEY=VALUE")
            check_keys(value, origin, f"{path}.")
        else:
            raise unknown_key(path, origin)


def unknown_key(path: str, origin: str) -> ConfigError:
    """The error for a key that does not exist, with the nearest ones that do."""
    by_last: dict[str, list[str]] = {}
    for key in keys():
        by_last.setdefault(key.rsplit(".", 1)[-1], []).append(key)
    near = difflib.get_close_matches(path, keys(), n=2, cutoff=0.75)
    if not near:
        for last in difflib.get_close_matches(path.rsplit(".", 1)[-1], by_last, n=1, cutoff=0.6):
            near = by_last[last][:3]
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `headtrain fit --help` lists every key"
    return ConfigError(f"{origin}: unknown key {path}{hint}")


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?` or nothing."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f", did you mean {near[0]}?" if near else ""


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _leaves(prefix: str, content: dict[str, Any]):
    for name, value in content.items():
        path = f"{prefix}{name}"
        if path not in keys() and isinstance(value, dict):
            yield from _leaves(f"{path}.", value)
        else:
            yield path, value


def _shaped(path: str, value: Any) -> Any:
    """A single value of a list key is wrapped; a prompt source may be given by its place alone."""
    key = keys().get(path)
    if key is None:
        return value
    if key.is_list and not isinstance(value, list) and value is not None:
        if path not in SWEPT and not is_dataclass(key.item):
            return value
        value = [value]
    if key.is_list and key.item is PromptSource and isinstance(value, list):
        value = [{"source": item} if isinstance(item, str) else item for item in value]
    return value


def _wrong_type(path: str, value: Any, origin: str) -> ConfigError:
    key = keys().get(path)
    needed = key.type_name() if key else "another kind of value"
    allowed = f" (allowed: {RULES[path].allowed})" if path in RULES else ""
    return ConfigError(f"{origin}: {path}={value}: {needed} is needed{allowed}")


# ------------------------------------------------------------------------------------------------- overrides

def parse_override(text: str) -> tuple[str, Any]:
    """(dotted key, value) of one `key=value` argument."""
    name, equals, raw = text.partition("=")
    name = name.lstrip("+")
    if not equals or not name:
        raise ConfigError(f"{text}: arguments are written key=value")
    if name.startswith("~"):
        raise ConfigError(f"{text}: keys cannot be removed; write {name[1:]}=null for a key's empty value")
    key = keys().get(name) or _open_parent(name)
    if key is None:
        section = any(path.startswith(f"{name}.") for path in keys())
        if not section:
            raise unknown_key(name, "the command line")
        raise ConfigError(f"{text}: {name} is a section with keys of its own; write {name}.KEY=VALUE")
    if key.is_text:
        return name, None if raw == "null" and key.kind is not str else raw
    if key.is_list and key.item in (str, PromptSource) and not raw.startswith(("[", "{")) and raw != "null":
        if "," in raw:
            raise ConfigError(f"{text}: write a list as {name}=[{raw}]")
        return name, [raw]
    if key.is_list and key.item is str:
        raw = _EQUATION.sub(r'"\1"', raw)
    return name, _grammar(name, raw, key)


# An item such as gsm8k=/data/gsm8k.jsonl in a list of texts; Hydra's grammar takes it in quotes only.
_EQUATION = re.compile(r"""(?<=[\[,])\s*([^\[\],'"]*=[^\[\],'"]*?)\s*(?=[,\]])""")


def _open_parent(name: str) -> Key | None:
    return next((keys()[parent] for parent in _parents(name) if parent in keys() and keys()[parent].is_open), None)


def _grammar(name: str, raw: str, key: Key) -> Any:
    """The value of `raw` in Hydra's override grammar."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(f"{name}={raw}")
        sweep = override.is_sweep_override()
        value = None if sweep else override.value()
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{name}={raw}: {reason}; {key.type_name()} is needed") from error
    if not sweep:
        return value
    if key.is_list:
        raise ConfigError(f"{name}={raw}: write a list as {name}=[{raw}]")
    raise ConfigError(f"{name}={raw}: one value is needed; a list is written {name}=[{raw}] where a key takes one")


def _nested(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Dotted pairs as one nested mapping; a key given twice is an error."""
    result: dict[str, Any] = {}
    for path, value in pairs:
        *parents, last = path.split(".")
        node = result
        for part in parents:
            node = node.setdefault(part, {})
        if last in node:
            raise ConfigError(f"{path} is given twice")
        node[last] = value
    return result
