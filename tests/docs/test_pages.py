"""Links lead somewhere, and commands and Python calls in the pages are real."""

import importlib
import inspect
import re
import shlex
from pathlib import Path

import click
import pytest

import gptoss_jax as gj
from gptoss_jax.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "kernels/*.md", "recipes/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]


def named(path):
    return str(path.relative_to(ROOT))


def outside_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def fenced(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def anchors(path):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", outside_code(path.read_text("utf-8")), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_relative_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)\s]+)\)", outside_code(page.read_text("utf-8")))
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link} leads nowhere"
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading"


def command(name):
    return main.get_command(click.Context(main), name)


def options(of):
    return {name for parameter in of.params for name in parameter.opts} | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_exist_with_these_options(page):
    for name, rest in re.findall(r"gptoss-jax ([a-z][^\s`]*)([^`\n#&|]*)", page.read_text("utf-8")):
        assert name in COMMANDS, f"gptoss-jax {name} is no command"
        given = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", rest))
        unknown = given - options(command(name))
        assert not unknown, f"gptoss-jax {name} has no {unknown}"


def test_readmes_commands_parse():
    """Whole command lines, values included."""
    blocks = fenced((ROOT / "README.md").read_text("utf-8"), "bash")
    lines = [line for block in blocks for line in block.splitlines()]
    calls = [shlex.split(x, comments=True)[1:] for x in lines if x.startswith("gptoss-jax ")]
    assert len(calls) >= 8
    for name, *args in calls:
        command(name).make_context(name, args)


def test_readmes_calls_fit_their_functions():
    text = (ROOT / "README.md").read_text("utf-8")
    calls = re.findall(r"\bgj\.([\w.]+)\(([^()]*)\)", text)
    assert len(calls) >= 10
    for name, args in calls:
        target = gj
        for part in name.split("."):
            target = getattr(target, part)
        parameters = inspect.signature(target).parameters
        for keyword in re.findall(r"(\w+)=", args):
            assert keyword in parameters, f"gj.{name} takes no {keyword}"


def test_api_pages_name_what_exists():
    objects = [
        name
        for page in (ROOT / "docs" / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), flags=re.M)
    ]
    assert len(objects) > 20
    for name in objects:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name
