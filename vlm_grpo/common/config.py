"""Options: defaults of a dataclass, then `config=FILE.yaml`, then `key=value` from the command line.

Each room declares its options in plain dataclasses. A program's configuration inherits from those it needs, and
`load_config` fills it. The comment above an option documents it: `help=true` prints that comment. The option's type
and range say what it accepts (see options.py).
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vlm_grpo.common.errors import UserError
from vlm_grpo.common.names import nearest
from vlm_grpo.common.option_help import first_line, help_text
from vlm_grpo.common.options import accepted_words, check_ranges, hints_of, is_mapping, members_of

Config = TypeVar("Config")

HELP_ARGUMENTS = ("help=true", "--help", "-h")

# Names that other trainers use, and the option that takes their place here, with a remark behind a comma
SPELLINGS = (
    ("lr", "learning_rate"),
    ("batch_size train_batch_size per_device_train_batch_size", "prompts_per_step, over all processes"),
    ("train_batch_size per_device_train_batch_size", "batch_size, over all processes"),
    ("epochs num_epochs num_train_epochs", "max_steps, which counts steps"),
    ("num_generations group_size", "num_thoughts, with num_answers to each"),
    ("max_completion_length", "max_thought_length, and max_answer_length"),
    ("model_name_or_path model_name model_path", "model"),
    ("kl_coef kl_coeff", "beta"),
)


@dataclass(frozen=True)
class Setting:
    """One value that the user gave, and `where` it was given. In `key`, dots reach into an option that is a mapping."""

    key: str
    value: Any
    where: str


def load_config(config_type: type[Config], argv: Sequence[str]) -> Config:
    """The configuration that `argv` (without the program's name) describes.

    `help=true` or `--help` prints all options and raises SystemExit(0).

    Raises: UserError for an unknown option, or for a value that its option does not accept.

    >>> @dataclass
    ... class Sampling:
    ...     # Thoughts per prompt
    ...     num_thoughts: int = 4
    ...     temperature: float = 1.0
    >>> load_config(Sampling, ["num_thoughts=8"])
    Sampling(num_thoughts=8, temperature=1.0)
    """
    if any(argument in HELP_ARGUMENTS for argument in argv):
        if os.environ.get("RANK", "0") == "0":
            print(help_text(config_type))
        raise SystemExit(0)
    hints = hints_of(config_type)
    path, given = _read_arguments(argv, hints)
    from_file = [] if path is None else _read_yaml(path, hints)
    return _build(config_type, [*from_file, *given])


def layered_config(
    config_type: type[Config], path: str | None, layers: Sequence[tuple[Mapping[str, Any], str]]
) -> Config:
    """A configuration from layers, of which later ones win: defaults, the file `path`, then each of `layers`.

    A layer is a mapping of options and a phrase for error messages that says where they were given.

    Raises: UserError as `load_config` does.
    """
    hints = hints_of(config_type)
    settings = [] if path is None else list(_read_yaml(path, hints))
    for options, where in layers:
        for key, value in options.items():
            _check_name(str(key), hints, where)
            settings.append(Setting(str(key), value, where))
    return _build(config_type, settings)


def _build(config_type: type[Config], settings: Iterable[Setting]) -> Config:
    hints = hints_of(config_type)
    node = OmegaConf.structured(config_type)
    where: dict[str, str] = {}
    for setting in settings:
        _apply(node, setting, hints)
        where[setting.key] = setting.where
    try:
        config: Any = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:  # an interpolation ${...} that cannot be resolved
        name = f"option {error.full_key!r}: " if error.full_key else ""
        raise UserError(f"{name}{first_line(error)} (a literal ${{ is written \\${{)") from error
    check_ranges(config, where)
    return config


def refuse_idle(config: Any, names: Iterable[str], reason: str) -> None:
    """Raise UserError for the first of the options `names` that the user changed although it has no effect.

    `reason` ends the message: it says which other option makes this one useless.

    >>> @dataclass
    ... class Clip:
    ...     clips: bool = False
    ...     epsilon: float = 0.2
    >>> refuse_idle(Clip(epsilon=0.3), ["epsilon"], "with clips=false")
    Traceback (most recent call last):
    ...
    vlm_grpo.common.errors.UserError: epsilon=0.3 does nothing with clips=false
    """
    for name in names:
        value = getattr(config, name)
        if value != getattr(type(config), name):
            said = str(value).lower() if isinstance(value, bool) else value
            raise UserError(f"{name}={said} does nothing {reason}")


def resolved_yaml(config: Any) -> str:
    """All options with their values, as YAML that `config=FILE` reads back to an equal configuration."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _read_arguments(argv: Sequence[str], hints: dict[str, Any]) -> tuple[str | None, list[Setting]]:
    """The path that `config=` names, or None, and the other settings of the command line."""
    where = "on the command line"
    raw_values: dict[str, str] = {}
    for argument in argv:
        key, equals, raw = argument.partition("=")
        top, *below = key.split(".")
        if not equals or not top.isidentifier() or "" in below:
            bare = key.lstrip("-").replace("-", "_")
            hint = f"; write {bare}={raw or 'VALUE'}" if bare.split(".")[0] in {*hints, "config"} else ""
            raise UserError(f"argument {argument!r} is not of the form key=value{hint} (help=true lists all options)")
        if key in raw_values:
            raise UserError(f"option {key!r} is given twice {where}: {raw_values[key]!r} and {raw!r}")
        if key != "config":
            _check_name(key, hints, where)
        raw_values[key] = raw
    settings = [Setting(k, _parse(raw, hints.get(k, Any)), where) for k, raw in raw_values.items() if k != "config"]
    return raw_values.get("config"), settings


def _parse(raw: str, hint: Any) -> Any:
    """An argument's value, read as YAML; for options that take text, the text as it stands."""
    members = members_of(hint)
    if hint is not Any and all(m in (str, Path, type(None)) or isinstance(m, str) for m in members):
        return None if raw in ("null", "none") and type(None) in members and raw not in members else raw
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError:
        return raw
    if isinstance(value, str) and float in members:  # YAML 1.1 reads 1e-5 as text
        try:
            return float(value)
        except ValueError:
            return value
    kinds = tuple(kind for m in members if isinstance(kind := get_origin(m) or m, type))
    return raw if str in kinds and not isinstance(value, kinds) else value


def _read_yaml(path: str, hints: dict[str, Any]) -> Iterator[Setting]:
    where = f"in {path}"
    try:
        content = OmegaConf.load(path)  # a safe loader that also refuses duplicate keys
    except FileNotFoundError:
        raise UserError(f"config={path}: there is no such file (looked in {Path.cwd()})") from None
    except OSError as error:
        raise UserError(f"config={path}: cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise UserError(f"config={path}: not valid YAML: {error}") from error
    options = OmegaConf.to_container(content)
    if not isinstance(options, dict):
        raise UserError(f"config={path}: must hold lines like 'key: value', but holds a list")
    for key, value in options.items():
        if key == "config":
            raise UserError(f"option 'config' {where}: it may stand on the command line only")
        _check_name(str(key), hints, where)
        yield Setting(str(key), value, where)


def _check_name(key: str, hints: dict[str, Any], where: str) -> None:
    top, _, below = key.partition(".")
    if top not in hints:
        near = nearest(key, [*hints, "config"]) or nearest(top, hints)
        hint = f"; the nearest name is {near!r}" if near else ""
        known = [ours for theirs, ours in SPELLINGS if top in theirs.split() and ours.partition(",")[0] in hints]
        hint = f"; here it is called {known[0]}" if known else hint
        raise UserError(
            f"unknown option {key!r} {where}{hint}. Options may stand on the command line (key=value) "
            "or in the file given by config=FILE.yaml; help=true lists them all"
        )
    if below and not is_mapping(hints[top]):
        raise UserError(f"option {key!r} {where}: {top!r} takes {accepted_words(hints[top])} and has nothing below it")


def _apply(node: Any, setting: Setting, hints: dict[str, Any]) -> None:
    hint = hints.get(setting.key, Any)
    value = setting.value
    members = members_of(hint)
    wrong = str in members and isinstance(value, (bool, int, float)) and type(value) not in members
    wrong = wrong or (isinstance(value, int) and not isinstance(value, bool) and members == (bool,))
    try:
        if wrong:  # OmegaConf would convert: 007 to "7", yes to "True", 1 to true
            raise TypeError
        OmegaConf.update(node, setting.key, value)
    except (OmegaConfBaseException, TypeError) as error:
        quotes = " (text that looks like a number, a date or a yes/no goes in quotes)" if str in members else ""
        is_unbracketed = isinstance(value, str) and "," in value and any(get_origin(m) is list for m in members)
        brackets = f": write {setting.key}=[{value}]" if is_unbracketed else ""
        takes = f"it takes {accepted_words(hint)}{quotes}{brackets}"
        raise UserError(f"option {setting.key!r} {setting.where}: got {value!r}, but {takes}") from error
