"""YAML text and `key=value` overrides to plain data, with every fault as a violation.

PyYAML reads YAML 1.1, which has three traps for a recipe: `1e-5` is a string, `no` and `on` are booleans, and a key
given twice wins silently. The loader here closes all three.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import yaml

from megarl.recipe.violation import Violation


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1e-5 is a number, only true and false are booleans, no key twice."""

    # A copy, so that the resolvers below change this class alone; YAML 1.1's float and bool are left out.
    yaml_implicit_resolvers = {
        first: [
            (tag, regexp) for tag, regexp in resolvers if tag not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:bool")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def parse_yaml(text: str) -> Any:
    """Plain data of one YAML document. Raises yaml.YAMLError, and ValueError for a date or number that does not exist."""
    return yaml.load(text, Loader=_Loader)


def read_yaml(path: str | Path) -> tuple[dict[str, Any] | None, list[Violation]]:
    """The mapping in a recipe file, or None and what is wrong with the file."""
    file = Path(path)

    def refuse(value: Any, rule: str, nearest: str = "") -> tuple[None, list[Violation]]:
        return None, [Violation("recipe", value, rule, nearest)]

    if not file.is_file():
        siblings = sorted(str(one) for one in file.parent.glob("*.y*ml")) if file.parent.is_dir() else []
        close = difflib.get_close_matches(str(file), siblings, 1) or siblings[:1]
        return refuse(str(path), "is no file" if file.exists() else "the file does not exist", "".join(close))
    try:
        data = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        return refuse(str(path), f"cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        return refuse(str(path), f"is not UTF-8 text (byte {error.start})")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return refuse(str(path), f"is not valid YAML: {_one_line(error)}")
    if data is None:
        return refuse(str(path), "the file is empty; a recipe is a mapping of sections", "run: {name: ..., steps: ...}")
    if not isinstance(data, dict):
        return refuse(
            str(path),
            f"holds a {type(data).__name__}; a recipe is a mapping of sections",
            "run: {name: ..., steps: ...}",
        )
    return data, []


def apply_overrides(data: dict[str, Any], overrides: list[str]) -> list[Violation]:
    """Set each dotted `key=value` in `data`; values are YAML. Returns what is wrong with the overrides."""
    violations = []
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            violations.append(Violation("override", override, "an override is key=value with a dotted key", "run.steps=3"))
            continue
        try:
            value = parse_yaml(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            violations.append(Violation(key, text, f"the value is not valid YAML: {_one_line(error)}", f"{key}='...'"))
            continue
        problem = _set(data, parts, value)
        if problem:
            violations.append(problem)
    return violations


def _set(data: Any, parts: list[str], value: Any) -> Violation | None:
    """Put `value` at the path; sections that are absent or null are made."""
    here = data
    for depth, part in enumerate(parts):
        key: Any = part
        dotted, above = ".".join(parts[: depth + 1]), ".".join(parts[:depth])
        if isinstance(here, list):
            if not part.isdigit() or int(part) >= len(here):
                return Violation(dotted, value, f"{above} is a list of {len(here)}", f"{above}.{max(len(here) - 1, 0)}")
            key = int(part)
        elif not isinstance(here, dict):
            return Violation(".".join(parts), value, f"{above} = {here!r} is not a section", above)
        if depth == len(parts) - 1:
            here[key] = value
            return None
        if isinstance(here, dict) and here.get(key) is None:
            here[key] = {}
        here = here[key]
    return None


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        return place + (error.problem or "unreadable")
    return " ".join(str(error).split()) or type(error).__name__
