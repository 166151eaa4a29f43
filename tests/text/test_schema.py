"""JSON schemas as TypeScript: one picture, and openai-harmony on schemas made at random."""

import random

import openai_harmony as oh
import pytest

from gptoss_jax.text.harmony import Namespace, typescript
from gptoss_jax.text.harmony.schema import compact_json, formats_section, tools_section

VALUES = [
    *["a", "null", "x\ny", "é😀", 'q"q', "", 1, 2.5, None, True, -3, 0.1, 123456.789],
    *[1e-5, -1.5e-5, 1e-7, 1e15, 1e16, 1e22, 2**63, 2**64, -(2**63) - 1],
    *[[1, "a", {}], {"k": "v", "a": [1e-5]}],
]
TYPES = [
    *["string", "number", "integer", "boolean", "array", "object", "object", "null", "weird", None],
    *[["string", "null"], ["integer"], [], [1], 5],
]


def test_picture():
    schema = {
        "type": "object",
        "properties": {
            "place": {"type": "string", "description": "Where"},
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
            "days": {"type": "array", "items": {"type": ["integer", "null"]}},
            "map": {"type": "object", "properties": {"scale": {"type": "number"}}},
        },
        "required": ["place"],
    }
    assert typescript(schema).splitlines() == [
        "{",
        "// Where",
        "place: string,",
        'unit?: "c" | "f", // default: c',
        "days?: number | null[],",
        "map?: {",
        "    scale?: number,",
        "    },",
        "}",
    ]


def random_schema(rng, depth):
    def maybe(probability):
        return rng.random() < probability

    def inner():
        return random_schema(rng, depth - 1)

    out = {}
    if (kind := rng.choice(TYPES)) is not None:
        out["type"] = kind
    if maybe(0.5):
        out["description"] = rng.choice(["d", "e", "a null\nb", 3])
    for key in ("title", "default"):
        if maybe(0.3):
            out[key] = rng.choice(VALUES)
    if maybe(0.3):
        out["enum"] = rng.choice([["a", "b"], [1, "x"], [], [1, 2], "no"])
    if maybe(0.2):
        out["nullable"] = rng.choice([True, False, "true", 1])
    if maybe(0.2):
        out["examples"] = rng.choice([["a"], ["x", 3], [], "x"])
    if depth and maybe(0.5):
        out["items"] = rng.choice([inner(), inner(), True])
    if depth and maybe(0.7):
        named = {key: inner() for key in rng.sample(["z", "a", "m", "q r"], rng.randrange(4))}
        out["properties"] = rng.choice([named, named, [1], {"p": True}])
    if depth and maybe(0.4):
        out["required"] = rng.choice([["a"], ["z", "m"], [1], "a"])
    if depth and maybe(0.4):
        variants = [inner() for _ in range(rng.randrange(4))]
        out["oneOf"] = rng.choice([variants, variants, variants, "x", [True]])
    order = rng.sample(list(out), len(out))
    return {key: out[key] for key in order}


def random_object(rng):
    return {
        "type": "object",
        "properties": {name: random_schema(rng, 2) for name in "abcd"},
        "required": ["b"],
    }


@pytest.mark.parametrize("seed", range(4))
def test_equal_to_openai_harmony(seed, official):
    rng = random.Random(seed)
    for _ in range(150):
        tools = [
            {
                "name": f"f{n}",
                "description": rng.choice(["", "d", "d1\nd2\n", "a\r\nb", "\n\nx\n\n"]),
                "parameters": rng.choice([None, {}, random_schema(rng, 3), random_object(rng)]),
            }
            for n in range(rng.randrange(3))
        ]
        description = rng.choice([None, "", "d\ne\n"])
        theirs = oh.DeveloperContent.new().with_tools(
            oh.ToolNamespaceConfig(
                name="functions",
                description=description,
                tools=[oh.ToolDescription(**tool) for tool in tools],
            )
        )
        rendered = official.render(oh.Message.from_role_and_content(oh.Role.DEVELOPER, theirs))
        ours = tools_section([Namespace(name="functions", description=description, tools=tools)])
        assert f"<|start|>developer<|message|>{ours}<|end|>" == official.decode(rendered)


def test_only_json_is_written():
    assert compact_json({"a": (1, True, None)}) == '{"a":[1,true,null]}'
    assert compact_json(float("nan")) == "null"
    with pytest.raises(ValueError, match="JSON values only"):
        compact_json({"a": {1, 2}})


def nested(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": {"type": "array", "items": schema}}}
    return schema


def circle():
    schema = {"type": "array"}
    schema["items"] = schema
    return schema


@pytest.mark.parametrize("schema", [nested(5000), circle()], ids=["deep", "circle"])
def test_schemas_without_end_are_refused(annotations_unchecked, schema):
    tool = {"name": "f", "parameters": schema}
    with pytest.raises(ValueError, match="levels deep, or in a circle"):
        tools_section([Namespace(name="functions", tools=(tool,))])
    with pytest.raises(ValueError, match="levels deep, or in a circle"):
        formats_section([{"name": "f", "schema": schema}])
    tool = {"name": "f", "parameters": nested(40)}
    assert "[]" in tools_section([Namespace(name="functions", tools=(tool,))])


@pytest.mark.parametrize("tool", [3, {"name": 3}, {"type": "function", "function": 3},
                                  {"name": "f", "description": 3}])  # fmt: skip
def test_what_is_no_function(annotations_unchecked, tool):
    with pytest.raises(ValueError, match="needs a name|a description is text"):
        tools_section([Namespace(name="functions", tools=(tool,))])


@pytest.mark.parametrize("given", [3, {}, {"json_schema": 3}, {"name": 3, "schema": {}}])
def test_what_is_no_response_format(annotations_unchecked, given):
    with pytest.raises(ValueError, match="needs a name and a schema"):
        formats_section([given])
