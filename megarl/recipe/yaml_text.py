"""YAML text and `key=value` overrides to plain data, with every fault as a violation; and plain data to YAML.

PyYAML reads YAML 1.1, in which `1e-5` is text, `no` and `on` are booleans, `010` is 8, `1:30` is 90, `2026-11-25` is a date,
and a key that is given twice wins silently. Here scalars have the meaning of YAML 1.2, and a repeated key is an error.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import yaml

from megarl.recipe.violation import Violation

_CHANGED = tuple(f"tag:yaml.org,2002:{name}" for name in ("float", "bool", "int", "timestamp"))


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars; merge keys (`<<`) as every YAML 1.1 loader has them; no key twice in the text of a mapping."""

    # A copy, so that the resolvers below change this class alone.
    yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in resolvers if tag not in _CHANGED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Check keys here, in the mapping as it is written: constructing it merges other mappings into the node."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    way_out = "; merge several mappings as <<: [*a, *b]" if key_node.value == "<<" else ""
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value!r} is given twice{way_out}", key_node.start_mark
                    )
                seen.add(key_node.value)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


class _Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.1 or 1.2 would read as something else, so that every loader reads the same recipe."""

    yaml_implicit_resolvers = {
        first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *_Loader.yaml_implicit_resolvers.get(first, [])]
        for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
    }


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Unquoted or in single quotes, YAML folds these line breaks into spaces.
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump_yaml(data: Any) -> str:
    """The text of plain data, keys in their order."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def parse_yaml(text: str) -> Any:
    """Plain data of one YAML document. Raises yaml.YAMLError, and ValueError for a number of thousands of digits."""
    return yaml.load(text, Loader=_Loader)


def read_yaml(path: str | Path) -> tuple[dict[str, Any] | None, list[Violation]]:
    """The mapping in a recipe file, or None and what is wrong with the file."""
    file = Path(path)

    def refuse(rule: str, nearest: str = "") -> tuple[None, list[Violation]]:
        return None, [Violation("recipe", str(path), rule, nearest)]

    if not file.is_file():
        siblings = sorted(map(str, file.parent.glob("*.y*ml"))) if file.parent.is_dir() else []
        close = difflib.get_close_matches(str(file), siblings, 1) or siblings[:1]
        return refuse("is no file" if file.exists() else "the file does not exist", "".join(close))
    try:
        data = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        return refuse(f"cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        return refuse(f"is not UTF-8 text (byte {error.start})")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return refuse(f"is not valid YAML: {_one_line(error)}")
    if data is None:
        return refuse("the file is empty; a recipe is a mapping of sections", "run: {name: ..., steps: ...}")
    if not isinstance(data, dict):
        rule = f"holds a {type(data).__name__}; a recipe is a mapping of sections"
        return refuse(rule, "run: {name: ..., steps: ...}")
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
    """Put `value` at the path; create sections that are absent or null."""
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
        if error.problem and "'\\t'" in error.problem:
            return f"{place}a tab; YAML is indented with spaces"
        return place + (error.problem or "unreadable")
    return " ".join(str(error).split()) or type(error).__name__


def value_at(content: Any, key: str) -> Any:
    """Return the value of a dotted key; None if the recipe lacks the key."""
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content
