"""How `make site` builds the documents: Sphinx with MyST and furo.

The source folder is the repository and its Markdown as it lies there, so that a link between two
files leads to the same place in a viewer of the repository and on the site. Markdown holds no
directives: what only a site has (its tree, the reference of the code, the list of components) is
appended here while the pages are read.

Zensical was tried beside it. It reads one folder alone, so that links to README, studies and
examples lead nowhere, and its pages ask for fonts of another host.
"""

import json
import re
import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
sys.path.insert(0, str(SOURCE))  # this tree's code, whatever is installed

project = "gradleak"
author = "The gradleak authors"
project_copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc"]
include_patterns = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md"]
exclude_patterns = [".venv*", "build", "runs", "src", "tests", "studies", "benchmarks", "examples"]
root_doc = "README"
html_theme = "furo"
html_title = "gradleak"
html_static_path = ["_static"]
html_css_files = ["site.css"]
highlight_language = "text"  # of blocks that name no language
html_copy_source = False
html_show_sphinx = False
templates_path: list[str] = []
# `page.md#a-heading` is checked, by the names that viewers of repositories give to headings
myst_heading_anchors = 4
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
suppress_warnings = [
    "misc.highlighting_failure",  # console blocks quote shells and programs that are no Python
]

# The tree at the left of the site: caption, then pages in their order.
TREE = {
    "Begin": ["docs/get_started", "docs/read_a_report", "docs/audit_your_model", "docs/own_update"],
    "Tutorials": [
        "docs/tutorials/gate_in_ci",
        "docs/tutorials/evidence_for_a_dpia",
        "docs/tutorials/a_study_of_your_own",
        "docs/tutorials/before_joining",
        "docs/tutorials/audit_a_flower_app",
        "docs/tutorials/audit_an_nvflare_job",
        "docs/tutorials/audit_a_lora_fine_tuning",
    ],
    "Guides": [
        "docs/studies",
        "docs/defenses",
        "docs/gate",
        "docs/captures",
        "docs/write_your_own",
        "docs/command_line",
        "docs/components",
    ],
    "What a number means": [
        "docs/threat_model",
        "docs/flags",
        "docs/certificates",
        "docs/bounds",
        "docs/footguns",
        "docs/prior",
    ],
    "Results": [
        "docs/measured",
        "docs/results/README",
        "docs/reproducing",
        "docs/performance",
        "docs/log/README",
    ],
    "Inside": [
        "ARCHITECTURE",
        "docs/design/flow",
        "docs/design/engine",
        "docs/design/search",
        "docs/design/learning",
        "docs/design/streams",
        "docs/design/disk",
        "docs/reference",
        "CONTRIBUTING",
        "CHANGELOG",
    ],
}


def toctree(pages: list[str], caption: str = "") -> str:
    """Returns a hidden tree of pages, named from the source folder."""
    lines = [
        ":hidden:",
        ":titlesonly:",
        *([f":caption: {caption}"] if caption else []),
        "",
        *(f"/{page}" for page in pages),
    ]
    return "\n".join(["", "```{toctree}", *lines, "```", ""])


def pages_below(page: Path) -> list[str]:
    """Returns the Markdown files below an index page that it links to, in the order of its
    links."""
    linked = re.findall(r"\]\(([\w./-]+)\.md\)", page.read_text(encoding="utf-8"))
    below = [name for name in dict.fromkeys(linked) if not name.startswith("..")]
    return [str((page.parent / name).relative_to(ROOT)) for name in below]


def nouns() -> list[str]:
    """Returns the modules of the reference: the package, what audits and studies offer, every
    module of the core, the record."""
    core = sorted(
        path.stem for path in (SOURCE / "gradleak" / "core").glob("*.py") if path.stem != "__init__"
    )
    ways_in = ["gradleak", "gradleak.audit", "gradleak.study"]
    return [*ways_in, *(f"gradleak.core.{name}" for name in core), "gradleak.records.schema"]


def reference() -> str:
    """Returns the reference of the public code, by its docstrings."""
    import gradleak  # of this tree, by the path above

    modules = nouns()
    # What the package offers under its own name too is described where it is at home.
    elsewhere = ", ".join(name for name, home in gradleak.HOMES.items() if home in modules)
    options = {"gradleak": f"\n   :exclude-members: {elsewhere}"}
    sections = [
        f"\n## {name}\n\n```{{eval-rst}}\n.. automodule:: {name}{options.get(name, '')}\n```\n"
        for name in modules
    ]
    return "".join(sections)


def components() -> str:
    """Returns what `gradleak list` says: every component with its fields, by kind."""
    index = json.loads(
        (SOURCE / "gradleak" / "cli" / "components.json").read_text(encoding="utf-8")
    )
    lines = []
    for kind, found in index.items():
        lines += ["", f"## Every {kind}", ""]
        for name, entry in found.items():
            fields = ", ".join(f"{field}={default}" for field, default in entry["fields"].items())
            paper = f" *{entry['cites']}.*" if entry.get("cites") else ""
            lines += [
                f"`{name}`",
                f": {entry['summary']}{paper}",
                *([f"  Fields: `{fields}`"] if fields else []),
                "",
            ]
    return "\n".join(lines)


myst_enable_extensions = ["deflist"]


def add_what_a_site_has(app: Sphinx, page: str, source: list[str]) -> None:
    """Appends to a page what Markdown files of a repository do not hold."""
    if page == root_doc:
        source[0] += "".join(toctree(pages, caption) for caption, pages in TREE.items())
    elif page in ("docs/results/README", "docs/log/README"):
        source[0] += toctree(pages_below(ROOT / f"{page}.md"))
    elif page == "docs/reference":
        source[0] += reference()
    elif page == "docs/components":
        source[0] += components()


def read_as_sentences(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Turns our docstrings, sentences with `code` in them, into reStructuredText that says the
    same."""
    for number, line in enumerate(lines):
        pieces = re.split(r"(`[^`]+`)", line.strip())
        plain = [
            piece if at % 2 else re.sub(r"([*_|\\`])", r"\\\1", piece)
            for at, piece in enumerate(pieces)
        ]
        lines[number] = "".join(f"`{piece}`" if at % 2 else piece for at, piece in enumerate(plain))


def open_at_the_readme(app: Sphinx, failure: Exception | None) -> None:
    """Puts the README where a browser looks first."""
    if failure is None:
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_what_a_site_has)
    app.connect("autodoc-process-docstring", read_as_sentences)
    app.connect("build-finished", open_at_the_readme)
