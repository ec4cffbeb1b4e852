"""Options from the command line and a YAML file, for recipes."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import yaml
from transformers import HfArgumentParser

from grpo_moe.arguments import OneLineParser
from grpo_moe.text import clean


def parse_args(
    *classes: type, argv: list[str] | None = None, defaults: dict[str, Any] | None = None, known_only: bool = False
) -> tuple:
    """Reads dataclasses from the command line: flags, over the YAML file of ``--config``, over ``defaults``.

    Args:
        classes: dataclasses whose fields become flags.
        argv: arguments without the program's name; those of the process by default.
        defaults: values of options instead of the classes' own.
        known_only: pass over flags and YAML options of other classes, to read these first.

    Returns:
        One instance a class, in order.

    Raises:
        ValueError: the file is no YAML or names an option that no class has, or a value breaks a class's rules.
        SystemExit: an unknown flag or a value of the wrong type; argparse prints which.
    """
    file_parser = OneLineParser(add_help=False, allow_abbrev=False)
    file_parser.add_argument("--config", help="YAML file with values for any of these options.")
    # what is read first must leave --help to the parser that knows all options
    parser = OptionsParser(classes, allow_abbrev=False, parents=[file_parser], add_help=not known_only)
    argv = list(sys.argv[1:] if argv is None else argv)
    names = {f.name for cls in classes for f in dataclasses.fields(cls)}
    from_file = _read_yaml(file_parser.parse_known_args(argv)[0].config)
    if not known_only and (unknown := sorted(set(from_file) - names)):
        raise ValueError(f"options in the --config file must be known, got {', '.join(unknown)}; see --help")
    merged = {**(defaults or {}), **from_file}
    parser.set_defaults(**{name: value for name, value in merged.items() if name in names})
    values = vars(parser.parse_known_args(argv)[0] if known_only else parser.parse_args(argv))
    return tuple(cls(**{f.name: values[f.name] for f in dataclasses.fields(cls)}) for cls in classes)


class OptionsParser(OneLineParser, HfArgumentParser):
    """Of every option of some dataclasses."""


class _OneOfEach(yaml.SafeLoader):
    """Refuses an option that is given twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is given twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def _read_yaml(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, _OneOfEach)  # a SafeLoader
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: not UTF-8, or no such date
        reason = clean(" ".join(str(error).split()), 500)  # YAML's takes several lines
        raise ValueError(
            f"--config must be a YAML file, got {path}: {reason}; write 'option: value' lines, see --help"
        ) from error
    if content is None:  # an empty file
        return {}
    wrong = [type(content)] if not isinstance(content, dict) else [type(k) for k in content if not isinstance(k, str)]
    if wrong:
        raise ValueError(
            f"--config must be a YAML file of 'option: value' lines, got {wrong[0].__name__} in {path}; see --help"
        )
    return content
