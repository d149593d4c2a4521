"""How the documentation is built: `python -m sphinx -n -W --keep-going docs docs/_build/html`."""

import sys
from pathlib import Path

import torchrepro

sys.path.insert(0, str(Path(__file__).parent))  # generated_reference, the extension of this folder

project = "torchrepro"
author = "the authors of torchrepro"
version = release = torchrepro.__version__

extensions = [
    "myst_parser",  # pages are Markdown, like the README
    "sphinx.ext.autodoc",  # the Python API, from its docstrings
    "generated_reference",  # every other table, from the rows of the code
]
exclude_patterns = ["_build"]

myst_heading_anchors = 3  # `page.md#a-heading` is a link that the build checks
myst_enable_extensions = ["attrs_block", "colon_fence"]

smartquotes = False  # "1" and -- are what a reader types

default_role = "code"  # docstrings write `name`, as Markdown does
autodoc_typehints = "signature"
autodoc_class_signature = "separated"  # nobody makes the classes that are answers
autodoc_member_order = "bysource"
# Type hints name these classes. Their pages are those of other projects, which the build does not
# ask for, or they are our own and nothing that a caller meets. Any other name has to be a link.
nitpick_ignore = [
    ("py:class", name)
    for name in (
        *(f"collections.abc.{name}" for name in ("Callable", "Iterable", "Iterator", "Mapping")),
        *("collections.abc.Sequence", "os.PathLike", "Path", "torchrepro.knobs.knob.Knob"),
        *("random.Random", "torch.Generator", "np.random.Generator", "np.random.RandomState"),
        *("Destination", "Knob", "ProcessFacts", "Recording", "ResolvedProfile"),
        *("torchrepro.ground.errors._WrongRequestError", "torchrepro.seeding.streams.Mesh"),
        "torchrepro.seeding.generators.Generator",
    )
]

html_theme = "furo"
html_title = f"torchrepro {release}"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
