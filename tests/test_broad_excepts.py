"""Running out of memory is no answer: each handler of any error raises it again, or is listed here with a reason."""

import ast
from itertools import chain
from pathlib import Path
from textwrap import indent

import pytest
import torch
import transformers
from torch import nn

import wellposed.hub
import wellposed_lab
import wellposed_studies
from wellposed.attack import lipschitz_lower_bound
from wellposed.constrain import constrain_
from wellposed.errors import is_about_resources, is_out_of_memory
from wellposed.models import load_pretrained

SOURCES = [
    Path(package.__file__).parent for package in (wellposed, wellposed_lab, wellposed_studies)
]
BROAD = {"Exception", "BaseException", "RuntimeError", "MemoryError", "OutOfMemoryError"}
GUARDS = {"is_about_resources", "is_out_of_memory"}
REASONS = {
    "interrupts.py:run": "every undo is tried; the first error is raised after the last",
    "cli/main.py:main": "the command says in one line that memory ran out",
    "module_state.py:restore": "every tensor is put back; an error about memory is raised after the last",
}
"""Handlers that keep an error for later, by file and function."""


def names_of(handler):
    """Return the names of the classes that a handler catches."""
    caught = handler.type
    parts = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return {
        "BaseException" if part is None else getattr(part, "id", getattr(part, "attr", ""))
        for part in parts
    }


def is_guard(statement, name):
    """Return whether a statement is ``if is_about_resources(error): raise``, or that with ``or``."""
    if not isinstance(statement, ast.If) or name is None:
        return False
    test = statement.test
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else [test]
    calls = {ast.unparse(part) for part in parts}
    raises = isinstance(statement.body[0], ast.Raise) and statement.body[0].exc is None
    return raises and any(f"{guard}({name})" in calls for guard in GUARDS)


def passes_on(handler):
    """Return whether a handler raises an error about memory again."""
    *before, last = handler.body
    leaves = any(
        isinstance(node, ast.Return | ast.Continue | ast.Break) for node in ast.walk(handler)
    )
    if isinstance(last, ast.Raise) and last.exc is None and not leaves:
        return True
    # Assignments may come before it: they compute a part of its condition.
    guards = [statement for statement in [*before, last] if not isinstance(statement, ast.Assign)]
    return is_guard(guards[0], handler.name) if guards else False


def handlers_in(node, function=""):
    """Yield the innermost function around each handler of broad errors, and the handler."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ExceptHandler) and names_of(child) & BROAD:
            yield function, child
        yield from handlers_in(
            child, getattr(child, "name", None) if is_function(child) else function
        )


def is_function(node):
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def handlers():
    """Yield file and function, line, and node of each handler of broad errors."""
    for root in SOURCES:
        for path in sorted(root.rglob("*.py")):
            for function, handler in handlers_in(ast.parse(path.read_text())):
                yield f"{path.relative_to(root)}:{function}", handler.lineno, handler


def test_each_broad_handler_raises_errors_about_memory_again():
    visited = list(handlers())
    assert len(visited) >= 30
    swallowing = {location: line for location, line, handler in visited if not passes_on(handler)}
    assert swallowing.keys() == REASONS.keys(), swallowing


def test_no_broad_error_is_suppressed():
    for path in chain.from_iterable(root.rglob("*.py") for root in SOURCES):
        calls = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        names = [getattr(call.func, "id", getattr(call.func, "attr", "")) for call in calls]
        for call, name in zip(calls, names, strict=True):
            caught = {getattr(part, "id", getattr(part, "attr", "")) for part in call.args}
            assert name != "suppress" or not caught & BROAD, path


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("if is_about_resources(e):\n  raise\nreturn 1", True),
        ("if isinstance(e, ValueError) or is_out_of_memory(e):\n  raise\nreturn 1", True),
        ("known = 1\nif is_about_resources(e) or not known:\n  raise\nreturn 1", True),
        ("undo()\nraise", True),
        ("if odd:\n  return 1\nraise", False),
        ("if is_about_resources(e) and odd:\n  raise\nreturn 1", False),
        ("if not is_about_resources(e):\n  raise\nreturn 1", False),
        ("return 1", False),
        ("raise ValueError", False),
        ("note(e)\nif is_about_resources(e):\n  raise\nreturn 1", False),
    ],
)
def test_the_look_at_handlers_tells_those_that_swallow(text, passes):
    tree = ast.parse("def f():\n  try:\n    g()\n  except Exception as e:\n" + indent(text, "    "))
    ((function, handler),) = handlers_in(tree)
    assert function == "f"
    assert passes_on(handler) is passes


ERRORS = {
    "python": lambda: MemoryError("on purpose"),
    "cuda": lambda: torch.OutOfMemoryError("on purpose"),
    "cpu": lambda: RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    ),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_about_memory_are_recognised(kind):
    assert is_out_of_memory(ERRORS[kind]())
    assert is_about_resources(ERRORS[kind]())


def failing(kind):
    def fail(*_args, **_named):
        raise ERRORS[kind]()

    return fail


def trial(kind, monkeypatch):
    class Large(torch.optim.SGD):
        step = failing(kind)

    model = nn.Linear(4, 4)
    constrain_(model, Large(model.parameters(), lr=0.1), nn.Linear)


def hub(kind, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", failing(kind))
    wellposed.hub.hub_answers.__wrapped__()


def loading(kind, monkeypatch):
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", failing(kind))
    load_pretrained(transformers.AutoConfig, "name-of-the-hub")


def ascent(kind, monkeypatch):
    class Large(nn.Module):
        def forward(self, x):
            if torch.is_grad_enabled():
                failing(kind)()
            return x

    lipschitz_lower_bound(Large(), (2, 4), norm=2)


ROUTES = {route.__name__: route for route in (trial, hub, loading, ascent)}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("route", ROUTES)
def test_memory_that_runs_out_is_raised_by_every_route(route, kind, monkeypatch):
    expected = ERRORS[kind]()
    with pytest.raises(type(expected)) as caught:
        ROUTES[route](kind, monkeypatch)
    assert type(caught.value) is type(expected)
    assert str(caught.value) == str(expected)
