"""Counts what the source of gradleak is made of: python benchmarks/house.py --base COMMIT.

    python benchmarks/house.py                    this tree
    python benchmarks/house.py --base HEAD~20     and the tree of that commit beside it
    python benchmarks/house.py --walks            also the files that three commands run through
    python benchmarks/house.py --names            what is behind each count, by name
    python benchmarks/house.py --write            runs the walks, writes them into ARCHITECTURE.md

What is counted is src/gradleak as the files lie there, untracked ones too. How each count is made
is said beside its function below.
"""

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "gradleak"
SHORT = 40  # lines; below it a file is counted as short
WIDE = 100  # characters; above it a line is counted as long
# Participles that do not end in "ed"
IRREGULAR = frozenset(
    "begun born bought bound broken brought built caught chosen cut done drawn driven fed felt"
    " found given gone grown heard held hidden kept known learnt left lent lost made meant met paid"
    " proven run said seen sent set shown shut slept sold spent split spoken stuck sunk sworn taken"
    " taught thought thrown told torn understood won worn written".split()
)
# After one of these a participle is a name by itself (`limit_to`); before a noun it is not one
# (`paired_difference`)
LINKS = frozenset(
    "against as at back before beside by for from in into of off on or out over to under".split()
)
# Verbs in the imperative that are spelled as a participle is
IMPERATIVE = frozenset("cut embed exceed feed need proceed run seed set shut speed split".split())


@dataclass(frozen=True)
class Module:
    """One file of the package: its dotted name and its text."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@dataclass(frozen=True)
class House:
    """All modules of a tree, by dotted name."""

    modules: Mapping[str, Module]

    @staticmethod
    def read(source: Path) -> "House":
        """Reads every file below a folder that holds the package."""
        modules = {}
        for path in sorted((source / PACKAGE).rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = Module(name, path, path.read_text(encoding="utf-8"))
        return House(modules)

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Which modules each module imports: anywhere in it, in functions and under
        TYPE_CHECKING too."""
        return {name: {*self._imported(module)} - {name} for name, module in self.modules.items()}

    def _imported(self, module: Module) -> Iterable[str]:
        above = module.name.split(".")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                # `from .x import y` of a module counts from its package, of a package from itself
                start = above[: len(above) - node.level + module.is_package] if node.level else []
                origin = ".".join([*start, *filter(None, [node.module])])
                # `from package import name` is of a module of that name where there is one
                inside = [f"{origin}.{alias.name}" for alias in node.names]
                wanted = [name if name in self.modules else origin for name in inside]
            else:
                continue
            yield from (name for name in wanted if name in self.modules)

    def cycles(self) -> list[tuple[str, ...]]:
        """Groups of modules that reach one another by imports (Kosaraju's two passes)."""
        order: list[str] = []
        visit(self.modules, self.imports, order)
        back: dict[str, set[str]] = {name: set() for name in self.modules}
        for name, wanted in self.imports.items():
            for other in wanted:
                back[other].add(name)
        groups = []
        seen: set[str] = set()
        for name in reversed(order):
            if name not in seen:
                group: list[str] = []
                visit([name], back, group, seen)
                groups.append(tuple(sorted(group)))
        return sorted(group for group in groups if len(group) > 1)

    def imported_once(self) -> list[str]:
        """Modules that one other imports, unless that is a package or the command, which offer
        them."""
        importers = defaultdict(set)
        for name, wanted in self.imports.items():
            for other in wanted:
                importers[other].add(name)
        once = {name: next(iter(found)) for name, found in importers.items() if len(found) == 1}
        offers = {name for name, module in self.modules.items() if module.is_package} | {
            f"{PACKAGE}.cli.main"
        }
        return sorted(
            name for name, importer in once.items() if importer not in offers and name not in offers
        )


def visit(
    starts: Iterable[str],
    edges: Mapping[str, set[str]],
    ended: list[str],
    seen: set[str] | None = None,
) -> None:
    """Walks a graph depth first and appends each node when all behind it has been seen."""
    seen = set() if seen is None else seen
    for start in starts:
        if start in seen:
            continue
        seen.add(start)
        way = [(start, iter(sorted(edges[start])))]
        while way:
            node, rest = way[-1]
            following = next((other for other in rest if other not in seen), None)
            if following is None:
                ended.append(node)
                way.pop()
            else:
                seen.add(following)
                way.append((following, iter(sorted(edges[following]))))


def is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def count_statements(module: Module) -> int:
    """Statements of the syntax tree, docstrings left out: a number that line breaks do not
    change."""
    return sum(
        isinstance(node, ast.stmt) and not is_docstring(node) for node in ast.walk(module.tree)
    )


def find_comments(module: Module) -> list[str]:
    """Lines that hold a comment, alone or behind code."""
    tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
    return [f"{module.name}:{token.start[0]}" for token in tokens if token.type == tokenize.COMMENT]


def find_functions(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def is_participle(name: str) -> bool:
    """Whether a name is a participle, alone or before a preposition: a state and not what is
    done."""
    first, *rest = name.strip("_").split("_")
    alone = not rest or rest[0] in LINKS
    return (
        alone
        and first not in IMPERATIVE
        and (first in IRREGULAR or bool(re.fullmatch(r"[a-z]{2,}ed", first)))
    )


def find_repeated(names: Iterable[str]) -> list[str]:
    """Names that occur more than once, with how often."""
    return sorted(f"{name} ×{times}" for name, times in Counter(names).items() if times > 1)


def count(house: House) -> dict[str, int | float | list[str]]:
    """Every count by what it says. Of a list, the length is the count."""
    modules = list(house.modules.values())
    classes = [
        node.name
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    ]
    functions = [(module, function) for module in modules for function in find_functions(module)]
    lines = sum(len(module.lines) for module in modules)
    comments = [place for module in modules for place in find_comments(module)]
    return {
        "files": len(modules),
        "lines": lines,
        "statements, by the syntax tree": sum(count_statements(module) for module in modules),
        "longest file, lines": max(len(module.lines) for module in modules),
        f"files of fewer than {SHORT} lines, but __init__": [
            module.name for module in modules if len(module.lines) < SHORT and not module.is_package
        ],
        "modules with one importer": house.imported_once(),
        "import cycles": [" ↔ ".join(group) for group in house.cycles()],
        f"lines over {WIDE} characters": [
            f"{module.name}:{at}"
            for module in modules
            for at, line in enumerate(module.lines, 1)
            if len(line) > WIDE
        ],
        "class names used twice": find_repeated(classes),
        "module names used twice": find_repeated(
            module.path.stem for module in modules if not module.is_package
        ),
        "functions": len(functions),
        "functions named by a participle": [
            f"{module.name}.{function.name}"
            for module, function in functions
            if is_participle(function.name) and not is_property(function)
        ],
        "comment lines per hundred": round(100 * len(comments) / lines, 1),
    }


# The walks: what is run, and the folders that are on the way. Files elsewhere (the nouns, the
# engine) are not counted.
SMALL = "--target tiny:hidden=64,heads=4 --limit 1 --seed 0"
WALKS = {
    "audit --attack portfolio": (
        f"audit {SMALL} --attack portfolio",
        ("cli", "audit", "attacks/portfolio.py"),
    ),
    "audit --attack lti_p": (
        "audit --target tiny --limit 1 --attack lti_p:steps=4,training_batch=4",
        ("attacks/learning_to_invert",),
    ),
}
RAY = ("run --engine ray", ("cli", "study"))

# Runs a command and writes down every file of the package of which a function was called. Imports
# are left out: a module's own code runs whatever the command is, and so do the bodies of its
# classes.
TRACE = """
import inspect, json, sys, threading
from pathlib import Path
import gradleak.audit
from gradleak.cli import main
source, kept, words = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
files = set()
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        files.add(frame.f_code.co_filename)
threading.setprofile(note)
sys.setprofile(note)
code = main(words)
sys.setprofile(None)
inside = [Path(name) for name in files if name.startswith(str(source))]
kept.write_text(json.dumps(sorted(str(path.relative_to(source / "gradleak")) for path in inside)))
sys.exit(code)
"""


def trace(source: Path, command: str) -> list[str]:
    """The files of the package that a command enters, by running it."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "files.json"
        words = [
            sys.executable,
            "-c",
            TRACE,
            str(source),
            str(kept),
            *command.split(),
            "--out",
            folder,
        ]
        environment = {**os.environ, "PYTHONPATH": str(source)}
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(
                f"gradleak {command} ended with {done.returncode}:\n{done.stderr[-2000:]}"
            )
        return list(json.loads(kept.read_text(encoding="utf-8")))


def reach(house: House, starts: Iterable[str], folders: tuple[str, ...]) -> list[str]:
    """The files in some folders that modules reach by imports, read off without running
    anything."""
    inside = {
        name for name, module in house.modules.items() if is_on_the_way(place_of(module), folders)
    }
    edges = {name: house.imports[name] & inside for name in inside}
    ended: list[str] = []
    visit([name for name in starts if name in inside], edges, ended)
    return sorted(place_of(house.modules[name]) for name in ended)


def place_of(module: Module) -> str:
    """Where a module lies in the package: `audit/runner.py`."""
    depth = module.name.count(".") + module.is_package
    return "/".join(module.path.parts[-depth:])


def is_on_the_way(place: str, folders: tuple[str, ...]) -> bool:
    return any(place == folder or place.startswith(f"{folder}/") for folder in folders)


def walk(house: House, source: Path) -> dict[str, list[str]]:
    """The files that each walk goes through, in the folders that are on its way."""
    walks = {}
    for name, (command, folders) in WALKS.items():
        entered = trace(source, command)
        walks[name] = [place for place in entered if is_on_the_way(place, folders)]
    name, folders = RAY
    ray = [module for module in house.modules if "ray" in module.rsplit(".", 1)[-1].split("_")]
    walks[f"{name} (by imports)"] = reach(house, [f"{PACKAGE}.cli.run", *ray], folders)
    return walks


def write_walks(walks: Mapping[str, list[str]], page: Path) -> None:
    """Writes the walks between their marks."""
    lines = ["", "| walk | files | which |", "|---|---|---|"]
    for name, files in walks.items():
        folders: dict[str, list[str]] = defaultdict(list)
        for place in files:
            folder, _, file = place.rpartition("/")
            folders[folder].append(file.removesuffix(".py"))
        which = "; ".join(f"{folder}/: {', '.join(found)}" for folder, found in folders.items())
        lines.append(f"| {name} | {len(files)} | {which} |")
    begin, end = "<!-- walks:begin -->\n", "<!-- walks:end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(
        f"{before}{begin}{chr(10).join(lines)}\n{end}{rest.partition(end)[2]}", encoding="utf-8"
    )


def extract(commit: str, folder: Path) -> Path:
    """Writes the source of a commit into a folder and returns where the package lies in it."""
    packed = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "src"], capture_output=True, check=False
    )
    if packed.returncode:
        raise SystemExit(packed.stderr.decode().strip())
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def say(value: int | float | list[str] | None) -> str:
    if value is None:
        return ""
    return f"{len(value) if isinstance(value, list) else value:,}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", metavar="COMMIT", help="count that commit's tree beside this one")
    parser.add_argument("--walks", action="store_true", help="run the walks too")
    parser.add_argument(
        "--write", action="store_true", help="run the walks and write them into ARCHITECTURE.md"
    )
    parser.add_argument(
        "--names", action="store_true", help="name what is behind each count of this tree"
    )
    chosen = parser.parse_args()
    if chosen.write:
        return write_walks(walk(House.read(ROOT / "src"), ROOT / "src"), ROOT / "ARCHITECTURE.md")
    with tempfile.TemporaryDirectory() as folder:
        sources = {"this tree": ROOT / "src"}
        if chosen.base:
            sources = {chosen.base: extract(chosen.base, Path(folder)), **sources}
        houses = {name: House.read(source) for name, source in sources.items()}
        columns: dict[str, dict[str, int | float | list[str]]] = {
            name: count(house) for name, house in houses.items()
        }
        if chosen.walks:
            for name, house in houses.items():
                columns[name] |= {
                    f"files of {way}": files for way, files in walk(house, sources[name]).items()
                }
    print(f"{'':<48}" + "".join(f"{name:>14}" for name in columns))
    for row in columns["this tree"]:
        print(f"{row:<48}" + "".join(f"{say(column.get(row)):>14}" for column in columns.values()))
    if chosen.names:
        for row, behind in columns["this tree"].items():
            if isinstance(behind, list):
                print(f"\n{row}", *behind, sep="\n  ")


if __name__ == "__main__":
    main()
