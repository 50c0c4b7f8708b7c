"""The house's laws, held by its syntax trees: floors, loops, doors, sizes, dtypes and docstrings.

Each check takes the modules of a package by name and returns what is wrong, a line each; the tests run it on
jaxinfer and on snippets that break the law.
"""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
# A room imports only rooms on lower floors.
FLOORS = {
    **dict.fromkeys(("config", "text", "hardware"), 1),
    **dict.fromkeys(("arrays", "schedule"), 2),
    "kernels": 3,
    "model": 4,
    **dict.fromkeys(("steps", "weights"), 5),
    **dict.fromkeys(("engine", "run_config"), 6),
    **dict.fromkeys(("server", "build"), 7),
    "llm": 8,  # the Python door: it has build assemble its engine
    "quality": 8,  # number formats compared, and weights calibrated
    "aot": 8,  # steps compiled for devices that are not here
    "bench": 9,  # load for our engine or for any endpoint
    "": 10,  # the package itself: what it exports
    "cli": 11,
    "replicas": 12,  # several servers' applications behind one
    "__main__": 13,
}
HOST_ROOMS = ("config", "text", "schedule", "hardware", "server", "bench")
DEVICE_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax")
# The only modules (with all that is in them) that may import a library.
DOORS = {
    "absl": "cli",
    "fastapi": "server",
    "fsspec": "weights.remote",
    "gguf": "weights.gguf",
    "huggingface_hub": "weights",
    "jinja2": "text",
    "llvmlite": "kernels",
    "matplotlib": "bench",
    "orbax": "weights.store",
    "prometheus_client": "server",
    "pydantic": "server",
    "ray": "replicas",
    "safetensors": "weights",
    "sentencepiece": "text",
    "starlette": "server",
    "tokenizers": "text",
    "uvicorn": "server",
}
# Rooms that are imported where their extra is installed: what it names they may import at once.
ROOM_EXTRAS = {"kernels": "cpu", "replicas": "ray", "server": "serve"}
FILE_LINES, KERNEL_FILE_LINES = 400, 600
FUNCTION_LINES, KERNEL_FUNCTION_LINES = 60, 150
ARGUMENTS = 10
FIELDS = 12
# Records as wide as what they describe: a model, a run, and vLLM's sampling fields under vLLM's names.
WIDE_RECORDS = {"ModelConfig": 16, "RunConfig": 28, "SamplingParams": 36}
NARROW_DTYPE = re.compile(r"bfloat16|float16|float8\w*|float4\w*|half|bf16|f16|fp16")

Modules = Mapping[str, ast.Module]
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Import(NamedTuple):
    """One imported module: its dotted name, the line, and whether importing the importer imports it."""

    target: str
    line: int
    at_once: bool


def parse(sources: Mapping[str, str]) -> dict[str, ast.Module]:
    """Returns the trees of sources by module name; a package's name is its `__init__`'s."""
    return {name: ast.parse(source) for name, source in sources.items()}


def read_package(package: Path) -> dict[str, str]:
    """Returns the sources of a package by module name."""
    sources = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        sources[name] = path.read_text(encoding="utf-8")
    return sources


def room_of(name: str) -> str:
    """Returns the room of a module of jaxinfer, "" for the package itself."""
    return f"{name}.".split(".")[1]


def is_in(name: str, place: str) -> bool:
    """Tells whether a dotted name is a place or in it."""
    return name == place or name.startswith(f"{place}.")


def imports_of(name: str, modules: Modules) -> list[Import]:
    """Returns what a module imports, also inside functions, and relative imports by their full names."""
    is_package = any(is_in(other, name) and other != name for other in modules)

    def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        base = node.module or ""
        if node.level:
            parents = name.split(".")[: len(name.split(".")) - node.level + is_package]
            base = ".".join([*parents, *([base] if base else [])])
        for alias in node.names:
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base

    def visit(node: ast.AST, at_once: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield from (Import(target, child.lineno, at_once) for target in targets(child))
            else:
                later = isinstance(child, Function | ast.Lambda)
                later |= isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                yield from visit(child, at_once and not later)

    return list(visit(modules[name], True))


def check_floors(modules: Modules) -> list[str]:
    """Refuses imports of a room on the same floor or above, and rooms that are on no floor."""
    wrong = [
        f"{name}: room {room_of(name)!r} has no floor" for name in modules if room_of(name) not in FLOORS
    ]
    for name in modules:
        for target, line, _ in imports_of(name, modules):
            room, other = room_of(name), room_of(target)
            if target.split(".")[0] == "jaxinfer" and room != other:
                floor, other_floor = FLOORS.get(room, 0), FLOORS.get(other, 0)
                if floor <= other_floor:
                    wrong.append(f"{name}:{line} (floor {floor}) imports {target} (floor {other_floor})")
    return wrong


def check_loops(modules: Modules) -> list[str]:
    """Refuses loops of imports, also where a function hides one."""
    edges = {name: {i.target for i in imports_of(name, modules)} & set(modules) for name in modules}
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> Iterator[str]:
        if name in trail:
            yield " -> ".join([*trail[trail.index(name) :], name])
        elif name not in done:
            for target in sorted(edges[name] - {name}):
                yield from visit(target, [*trail, name])
            done.add(name)

    return [loop for name in modules for loop in visit(name, [])]


def check_host_tower(modules: Modules) -> list[str]:
    """Refuses host rooms that import a device library, or anything that does when it is imported."""

    seen: set[str] = set()

    def reached(name: str) -> Iterator[str]:
        seen.add(name)
        parts = name.split(".")
        parents = {".".join(parts[:length]) for length in range(1, len(parts))} & set(modules)
        for target in sorted(parents | {i.target for i in imports_of(name, modules) if i.at_once}):
            if target.split(".")[0] in DEVICE_LIBRARIES:
                yield f"{name} imports {target}"
            elif target in modules and target not in seen:
                yield from reached(target)

    wrong = []
    for name in (name for name in modules if room_of(name) in HOST_ROOMS):
        wrong += reached(name) if name not in seen else []
        hidden = [i for i in imports_of(name, modules) if not i.at_once]
        wrong += [
            f"{name}:{i.line}: {i.target}" for i in hidden if i.target.split(".")[0] in DEVICE_LIBRARIES
        ]
    return wrong


def check_doors(modules: Modules) -> list[str]:
    """Refuses a library outside the module that is its one door."""
    wrong = []
    for name in modules:
        for target, line, _ in imports_of(name, modules):
            door = DOORS.get(target.split(".")[0])
            if door and not is_in(name, f"jaxinfer.{door}"):
                wrong.append(f"{name}:{line} imports {target}, whose door is jaxinfer.{door}")
    return wrong


def check_sizes(sources: Mapping[str, str]) -> list[str]:
    """Refuses long files and functions, many arguments and wide records."""
    wrong = []
    for name, source in sources.items():
        kernel = room_of(name) == "kernels"
        file_lines, function_lines = (
            (KERNEL_FILE_LINES, KERNEL_FUNCTION_LINES) if kernel else (FILE_LINES, FUNCTION_LINES)
        )

        def limit(what: str, count: int, most: int, name: str = name) -> None:
            if count > most:
                wrong.append(f"{name}: {what} has {count}, at most {most}")

        limit("the file's lines", len(source.splitlines()), file_lines)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, Function):
                limit(f"{node.name}'s lines", (node.end_lineno or 0) - node.lineno + 1, function_lines)
                limit(f"{node.name}'s arguments", num_arguments(node.args), ARGUMENTS)
            elif isinstance(node, ast.ClassDef) and is_record(node):
                fields = [
                    f for f in node.body if isinstance(f, ast.AnnAssign) and "ClassVar" not in ast.unparse(f)
                ]
                limit(f"{node.name}'s fields", len(fields), WIDE_RECORDS.get(node.name, FIELDS))
    return wrong


def num_arguments(args: ast.arguments) -> int:
    """Returns how many arguments a caller can give, `self` left out."""
    names = [
        arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg) if arg
    ]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def is_record(node: ast.ClassDef) -> bool:
    """Tells whether a class is a dataclass (flax's too) or a named tuple."""
    marks = [ast.unparse(mark) for mark in (*node.decorator_list, *node.bases)]
    return any(re.search(r"\b(dataclass|NamedTuple|PyTreeNode)\b", mark) for mark in marks)


def check_dtypes(modules: Modules) -> list[str]:
    """Refuses narrow dtypes by name in model/ and steps/, where precision is an argument (law 4)."""
    wrong = []
    for name in (name for name in modules if room_of(name) in ("model", "steps")):
        for node in ast.walk(modules[name]):
            word = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
            if not isinstance(node, ast.Attribute | ast.Constant) or not isinstance(word, str):
                continue
            if NARROW_DTYPE.fullmatch(word):
                wrong.append(f"{name}:{node.lineno}: {word}")
    return wrong


def check_docstrings(modules: Modules) -> list[str]:
    """Refuses modules, public classes, public functions and public methods without a docstring."""

    def visit(name: str, node: ast.Module | ast.ClassDef) -> Iterator[str]:
        in_protocol = isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
        for child in node.body:
            if not isinstance(child, Function | ast.ClassDef) or child.name.startswith("_"):
                continue
            marks = {ast.unparse(mark).split(".")[-1] for mark in child.decorator_list}
            # The class tells of a protocol's attributes.
            told = marks & {"overload", "setter", "override"} or (in_protocol and "property" in marks)
            if not told and ast.get_docstring(child) is None:
                yield f"{name}:{child.lineno}: {child.name} has no docstring"
            if isinstance(child, ast.ClassDef):
                yield from visit(name, child)

    wrong = [
        f"{name} has no docstring"
        for name, tree in modules.items()
        if tree.body and not ast.get_docstring(tree)
    ]
    return wrong + [line for name, tree in modules.items() for line in visit(name, tree)]


installed_distributions = functools.cache(packages_distributions)


def check_requirements(modules: Modules) -> list[str]:
    """Refuses imports of packages that pyproject.toml does not ask for, or asks for in an extra only."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=!~; ]", line)[0].lower().replace("_", "-") for line in requirements}

    base = names(project["dependencies"])
    optional = project["optional-dependencies"]
    extras = names([line for lines in optional.values() for line in lines])
    distributions = installed_distributions()
    wrong = []
    for name in modules:
        for target, line, at_once in imports_of(name, modules):
            top = target.split(".")[0]
            if top in sys.stdlib_module_names or top == "jaxinfer":
                continue
            own = names(optional.get(ROOM_EXTRAS.get(room_of(name), ""), []))
            asked = base | own if at_once else base | extras
            if not asked & {dist.lower().replace("_", "-") for dist in distributions.get(top, [top])}:
                wrong.append(f"{name}:{line} imports {top}, which pyproject.toml does not install")
    return wrong


SOURCES = read_package(ROOT / "jaxinfer")
TREE_CHECKS = (check_floors, check_loops, check_host_tower, check_doors, check_dtypes, check_docstrings)


@pytest.mark.parametrize("check", [*TREE_CHECKS, check_requirements], ids=lambda check: check.__name__)
def test_house_keeps_its_laws(check: Callable[[Modules], list[str]]):
    wrong = check(parse(SOURCES))
    assert not wrong, "\n".join(wrong)


def test_house_keeps_its_sizes():
    wrong = check_sizes(SOURCES)
    assert not wrong, "\n".join(wrong)


def test_host_tower_loads_without_jax():
    """What the trees cannot see: a third party that imports jax."""
    host = [name for name in SOURCES if room_of(name) in HOST_ROOMS]
    loaded = "import sys; [__import__(name) for name in sys.argv[1:]]; print('jax' in sys.modules)"
    command = [sys.executable, "-c", loaded, *host]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False\n", done.stderr


BAD_HOUSES = {
    "up": (check_floors, {"jaxinfer.text.chat": "from jaxinfer.engine import engine"}),
    "up in a function": (check_floors, {"jaxinfer.model.a": "def f():\n  import jaxinfer.steps.steps"}),
    "up, relative": (check_floors, {"jaxinfer.model.a": "from ..engine import runner"}),
    "the package": (check_floors, {"jaxinfer.engine.a": "from jaxinfer import LLM"}),
    "same floor": (check_floors, {"jaxinfer.steps.a": "from jaxinfer.weights import fetch"}),
    "no floor": (check_floors, {"jaxinfer.attic.a": ""}),
    "loop": (
        check_loops,
        {"j.a": "import j.b", "j.b": "def f():\n  from j import c", "j.c": "from j.a import x"},
    ),
    "relative loop": (check_loops, {"j": "", "j.a": "from . import b", "j.b": "from .a import x"}),
    "jax": (check_host_tower, {"jaxinfer.schedule.a": "import jax.numpy as jnp"}),
    "jax in a function": (check_host_tower, {"jaxinfer.config": "def f():\n  import jax"}),
    "jax through another": (
        check_host_tower,
        {
            "jaxinfer.text.a": "import jaxinfer.text.b",
            "jaxinfer.text.b": "try:\n  from flax import struct\nfinally: ...",
        },
    ),
    "jax through the package": (check_host_tower, {"jaxinfer": "import jax", "jaxinfer.text.a": ""}),
    "door": (check_doors, {"jaxinfer.weights.hf": "import orbax.checkpoint as ocp"}),
    "door's name only": (check_doors, {"jaxinfer.weights.gguf_more": "import gguf"}),
    "dtype": (check_dtypes, {"jaxinfer.model.a": "x = jnp.bfloat16"}),
    "dtype as text": (check_dtypes, {"jaxinfer.steps.a": "x = y.astype('float8_e4m3fn')"}),
    "module docstring": (check_docstrings, {"j.a": "x = 1"}),
    "function docstring": (check_docstrings, {"j.a": "'''A.'''\ndef f(): ..."}),
    "method docstring": (check_docstrings, {"j.a": "'''A.'''\nclass C:\n  '''C.'''\n  def f(self): ..."}),
    "undeclared": (check_requirements, {"jaxinfer.a": "import torch"}),
    "extra at once": (check_requirements, {"jaxinfer.a": "import huggingface_hub"}),
    "another's extra at once": (check_requirements, {"jaxinfer.server.a": "import huggingface_hub"}),
}


@pytest.mark.parametrize(("check", "sources"), BAD_HOUSES.values(), ids=BAD_HOUSES.keys())
def test_bad_house_is_refused(check: Callable[[Modules], list[str]], sources: dict[str, str]):
    assert len(check(parse(sources))) == 1


GOOD_HOUSES = {
    "down": (check_floors, {"jaxinfer.llm": "from jaxinfer.build import x", "jaxinfer.build": ""}),
    "same room": (check_floors, {"jaxinfer.steps.a": "from . import b", "jaxinfer.steps.b": ""}),
    "diamond": (check_loops, {"j.a": "import j.b, j.c", "j.b": "import j.d", "j.c": "import j.d", "j.d": ""}),
    "lazy package": (check_host_tower, {"jaxinfer": "def f():\n  import jax", "jaxinfer.text.a": ""}),
    "for types": (check_host_tower, {"jaxinfer": "if TYPE_CHECKING:\n  import jax", "jaxinfer.text.a": ""}),
    "door": (
        check_doors,
        {"jaxinfer.weights.store": "import orbax.checkpoint", "jaxinfer.text.a": "import tokenizers"},
    ),
    "float32": (
        check_dtypes,
        {"jaxinfer.model.a": "'''bfloat16 is told of.'''\nx = jnp.float32, jnp.int8, bool"},
    ),
    "private": (check_docstrings, {"j.a": "'''A.'''\ndef _f(): ...", "j": ""}),
    "room's extra": (check_requirements, {"jaxinfer.server.a": "import fastapi, pydantic"}),
    "extra, later": (
        check_requirements,
        {"jaxinfer.a": "def f():\n  import huggingface_hub, os, orbax.checkpoint"},
    ),
}


@pytest.mark.parametrize(("check", "sources"), GOOD_HOUSES.values(), ids=GOOD_HOUSES.keys())
def test_good_house_is_let_be(check: Callable[[Modules], list[str]], sources: dict[str, str]):
    assert check(parse(sources)) == []


def filler(count: int, form: str = "x{} = 0", between: str = "\n") -> str:
    return between.join(form.format(number) for number in range(count))


@pytest.mark.parametrize(
    ("room", "make", "most"),
    [
        ("model", filler, FILE_LINES),
        ("kernels", filler, KERNEL_FILE_LINES),
        ("model", lambda n: "def f():\n" + filler(n - 1, "  x{} = 0"), FUNCTION_LINES),
        ("kernels", lambda n: "def f():\n" + filler(n - 1, "  x{} = 0"), KERNEL_FUNCTION_LINES),
        ("model", lambda n: f"class C:\n  def f(self, {filler(n - 1, 'x{}', ', ')}, *, y): ...", ARGUMENTS),
        ("model", lambda n: "@struct.dataclass\nclass C:\n" + filler(n, "  x{}: int"), FIELDS),
        ("model", lambda n: "class C(NamedTuple):\n" + filler(n, "  x{}: int"), FIELDS),
    ],
    ids=["file", "kernel file", "function", "kernel function", "arguments", "fields", "tuple fields"],
)
def test_sizes_are_held_to_the_line(room: str, make: Callable[[int], str], most: int):
    assert check_sizes({f"jaxinfer.{room}.a": make(most)}) == []
    assert len(check_sizes({f"jaxinfer.{room}.a": make(most + 1)})) == 1
