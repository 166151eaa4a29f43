"""Tool and format descriptions in the form gpt-oss was trained on: JSON schemas as TypeScript.

The forms follow openai-harmony 0.0.8 to the character, odd ones included (a `oneOf` has no
parentheses inside an array, a comma of its own line, and quotes in strings are not escaped),
because the models have seen these and no others.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gptoss_jax.text.harmony.messages import Namespace

_PRIMITIVE = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def typescript(schema: Any, indent: str = "") -> str:
    """A JSON schema as a TypeScript type; lines inside it start with `indent`."""
    if not isinstance(schema, Mapping):
        return "any"
    if isinstance(variants := schema.get("oneOf"), list):
        return "".join(
            f"\n{indent} | {_variant(variant, indent)}{_trailing(_notes(variant, bare_enum=False))}"
            for variant in variants
        )
    kind = schema.get("type")
    if isinstance(kind, list):
        names = ["number" if name == "integer" else name for name in kind if _is_str(name)]
        if names:
            return " | ".join(names)
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return f"{typescript(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    if kind == "string" and (choices := _choices(schema)):
        return " | ".join(f'"{choice}"' for choice in choices)
    return _PRIMITIVE.get(kind, "any") if _is_str(kind) else "any"


def tools_section(namespaces: Sequence[Namespace]) -> str:
    """The `# Tools` section: namespaces in order of their names."""
    ordered = sorted(namespaces, key=lambda namespace: namespace.name)
    return _joined(["# Tools"], _namespace, ordered)


def formats_section(formats: Sequence[Mapping[str, Any]]) -> str:
    """The `# Response Formats` section, with each schema as compact JSON."""
    return _joined(["# Response Formats"], _format, formats)


def _joined(head: list[str], describe: Callable[[Any], str], described: Sequence[Any]) -> str:
    try:
        return "\n\n".join([*head, *map(describe, described)])
    except RecursionError:
        raise ValueError("a schema is nested a thousand levels deep, or in a circle.") from None


def compact_json(value: Any) -> str:
    """JSON without spaces, characters unescaped, and floats as Rust writes them."""
    match value:
        case bool() | None | str():
            return json.dumps(value, ensure_ascii=False)
        case int() if -(2**63) <= value < 2**64:
            return str(value)
        case int() | float():
            return _float(float(value))
        case Mapping():
            items = (f"{compact_json(str(k))}:{compact_json(v)}" for k, v in value.items())
            return "{" + ",".join(items) + "}"
        case Sequence():
            return "[" + ",".join(map(compact_json, value)) + "]"
    raise ValueError(f"a JSON schema holds JSON values only; got {value!r:.80}.")


def _float(value: float) -> str:
    """Shortest digits like Python's, but 1e-05 is 0.00001 and 1e+16 is 1e16."""
    if value != value or value in (float("inf"), float("-inf")):
        return "null"
    digits, _, exponent = repr(value).partition("e")
    if not exponent:
        return digits
    if int(exponent) != -5:
        return f"{digits}e{int(exponent)}"
    sign, digits = ("-", digits[1:]) if digits.startswith("-") else ("", digits)
    return f"{sign}0.0000{digits.replace('.', '')}"


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _choices(schema: Mapping[str, Any]) -> list[str]:
    choices = schema.get("enum")
    return [choice for choice in choices if _is_str(choice)] if isinstance(choices, list) else []


def _default(schema: Mapping[str, Any], *, bare_enum: bool = True) -> str | None:
    """`default: ...`; a string is quoted unless it is one of an enum (where bare_enum says so)."""
    if "default" not in schema:
        return None
    default = schema["default"]
    if not _is_str(default):
        return f"default: {compact_json(default)}"
    is_enum = isinstance(schema.get("enum"), list) and bool(schema["enum"])
    if is_enum and bare_enum:
        return f"default: {default}"
    return f"default: {compact_json(default)}" if is_enum else f'default: "{default}"'


def _notes(schema: Any, *, bare_enum: bool = True, without: Sequence[Any] = ()) -> list[str]:
    """Description and default of a variant, for the end of its line."""
    if not isinstance(schema, Mapping):
        return []
    description = schema.get("description")
    notes = [description] if _is_str(description) and description not in without else []
    default = _default(schema, bare_enum=bare_enum)
    return notes if default is None else [*notes, default]


def _trailing(notes: list[str]) -> str:
    return f" // {' '.join(notes)}" if notes else ""


def _nullable(schema: Any, text: str) -> str:
    nullable = isinstance(schema, Mapping) and schema.get("nullable") is True
    return f"{text} | null" if nullable and "null" not in text else text


def _variant(schema: Any, indent: str) -> str:
    return _nullable(schema, typescript(schema, f"{indent}   "))


def _object(schema: Mapping[str, Any], indent: str) -> str:
    out = []
    if _is_str(description := schema.get("description")):
        out.append(f"{indent}// {description}\n")
    out.append("{\n")
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    properties = schema.get("properties")
    for name, value in properties.items() if isinstance(properties, Mapping) else ():
        label = name if name in required else f"{name}?"
        out.append(_property(label, value if isinstance(value, Mapping) else {}, indent))
    out.append(f"{indent}}}")
    return "".join(out)


def _property(label: str, schema: Mapping[str, Any], indent: str) -> str:
    variants = schema.get("oneOf")
    description = schema.get("description")
    comments = []
    if _is_str(title := schema.get("title")):
        comments += [f"{indent}// {title}", f"{indent}//"]
    if _is_str(description) and "oneOf" not in schema:
        comments.append(f"{indent}// {description}")
    if isinstance(examples := schema.get("examples"), list) and examples:
        comments.append(f"{indent}// Examples:")
        comments += [f'{indent}// - "{example}"' for example in examples if _is_str(example)]
    if isinstance(variants, list):
        return "\n".join([*comments, _one_of(label, schema, variants, indent)])
    kind = _nullable(schema, typescript(schema, f"{indent}    "))
    default = None if "oneOf" in schema else _default(schema)
    line = f"{indent}{label}: {kind},{_trailing([default] if default else [])}\n"
    return "\n".join([*comments, line])


def _one_of(label: str, schema: Mapping[str, Any], variants: list[Any], indent: str) -> str:
    """A property of several types, each on a line; a description is not said twice."""
    description = schema.get("description")
    description = description if _is_str(description) else None
    first = variants[0] if variants and isinstance(variants[0], Mapping) else {}
    above = description is not None and first.get("description") != description
    lines = [f"{indent}// {description}"] if above else []
    if (default := _default(schema)) is not None:
        lines.append(f"{indent}// {default}")
    lines.append(f"{indent}{label}:")
    for position, variant in enumerate(variants):
        own = variant.get("description") if isinstance(variant, Mapping) else None
        hidden = [own] if position == 0 and above else [description]
        notes = _trailing(_notes(variant, without=hidden))
        lines.append(f"{indent} | {_variant(variant, indent)}{notes}")
    return "\n".join([*lines, f"{indent},\n"])


def _lines(text: str | None) -> list[str]:
    """Lines as Rust sees them: separated by line feeds alone, a last empty one not counted."""
    if not text:
        return []
    if not isinstance(text, str):
        raise ValueError(f"a description is text; got {text!r:.80}.")
    lines = text.removesuffix("\n").split("\n")
    return [line.removesuffix("\r") for line in lines]


def _namespace(namespace: Namespace) -> str:
    tools = [_function(tool) for tool in namespace.tools]
    mark = "// " if tools else ""
    head = [f"## {namespace.name}\n", *(mark + line for line in _lines(namespace.description))]
    if not tools:
        return "\n".join(head)
    end = f"}} // namespace {namespace.name}"
    return "\n".join([*head, f"namespace {namespace.name} {{\n", *tools, end])


def _function(tool: Mapping[str, Any]) -> str:
    if isinstance(tool, Mapping) and tool.get("type") == "function" and "function" in tool:
        tool = tool["function"]
    if not isinstance(tool, Mapping) or not _is_str(tool.get("name")):
        raise ValueError(f"a function tool needs a name; got {tool!r:.80}.")
    parameters = tool.get("parameters")
    argument = "" if parameters is None else f"_: {typescript(parameters)}"
    comments = [f"// {line}" for line in _lines(tool.get("description"))]
    return "\n".join([*comments, f"type {tool['name']} = ({argument}) => any;\n"])


def _format(described: Mapping[str, Any]) -> str:
    inner = described.get("json_schema", described) if isinstance(described, Mapping) else None
    if not isinstance(inner, Mapping) or not _is_str(inner.get("name")) or "schema" not in inner:
        raise ValueError(f"a response format needs a name and a schema; got {described!r:.80}.")
    described = inner
    comments = [f"// {line}" for line in _lines(described.get("description"))]
    body = "\n".join([*comments, compact_json(described["schema"])])
    return f"## {described['name']}\n\n{body}"
