"""The two tools that gpt-oss was trained with, described to it in exactly these words.

The wording is part of the format (openai/harmony, Apache-2.0): the models know the tools by it.
"""

from gptoss_jax.text.harmony.messages import Namespace

_BROWSER = """\
Tool for browsing.
The `cursor` appears in brackets before each browsing display: `[{cursor}]`.
Cite information from the tool using the following format:
`【{cursor}†L{line_start}(-L{line_end})?】`, for example: `【6†L9-L11】` or `【8†L3】`.
Do not quote more than 10 words directly from the tool output.
sources=web (default: web)"""

_OPEN = """\
Opens the link `id` from the page indicated by `cursor` starting at line number `loc`, showing \
`num_lines` lines.
Valid link ids are displayed with the formatting: `【{id}†.*】`.
If `cursor` is not provided, the most recent page is implied.
If `id` is a string, it is treated as a fully qualified URL associated with `source`.
If `loc` is not provided, the viewport will be positioned at the beginning of the document or \
centered on the most relevant passage, if available.
Use this function without `id` to scroll to a new location of an opened page."""

_PYTHON = """\
Use this tool to execute Python code in your chain of thought. The code will not be shown to the \
user. This tool should be used for internal reasoning, but not for code that is intended to be \
visible to the user (e.g. when creating plots, tables, or files).

When you send a message containing Python code to python, it will be executed in a stateful \
Jupyter notebook environment. python will respond with the output of the execution or time out \
after 120.0 seconds. The drive at '/mnt/data' can be used to save and persist user files. \
Internet access for this session is UNKNOWN. Depends on the cluster."""


def _number(default: int) -> dict:
    return {"type": "number", "default": default}


BROWSER = Namespace(
    name="browser",
    description=_BROWSER,
    tools=(
        {
            "name": "search",
            "description": "Searches for information related to `query` and displays `topn` "
            "results.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "topn": _number(10),
                    "source": {"type": "string"},
                },
                "required": ["query"],
            },
        },
        {
            "name": "open",
            "description": _OPEN,
            "parameters": {
                "type": "object",
                "properties": {
                    "id": {"type": ["number", "string"], "default": -1},
                    "cursor": _number(-1),
                    "loc": _number(-1),
                    "num_lines": _number(-1),
                    "view_source": {"type": "boolean", "default": False},
                    "source": {"type": "string"},
                },
            },
        },
        {
            "name": "find",
            "description": "Finds exact matches of `pattern` in the current page, or the page "
            "given by `cursor`.",
            "parameters": {
                "type": "object",
                "properties": {"pattern": {"type": "string"}, "cursor": _number(-1)},
                "required": ["pattern"],
            },
        },
    ),
)

PYTHON = Namespace(name="python", description=_PYTHON)

BUILTIN = {"browser": BROWSER, "python": PYTHON}
