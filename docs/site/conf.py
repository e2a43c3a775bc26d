"""Sphinx: the pages of docs/, and the API from docstrings.

  pip install -e ".[docs]"
  sphinx-build -W -c docs/site docs build/site  # makes build/site/index.html

Examples in docstrings are run by tests/structure_test.py, and links between
pages are followed by tests/docs_test.py.
"""

import pathlib

import synthq_jax

project = "synthq_jax"
version = release = synthq_jax.__version__
extensions = [
  "myst_parser",
  "sphinx.ext.autodoc",
  "sphinx.ext.autosummary",
  "sphinx.ext.napoleon",
]
templates_path = [str(pathlib.Path(__file__).parent / "templates")]
exclude_patterns = ["site/templates"]
default_role = "code"

myst_heading_anchors = 4
myst_ref_domains = ["std"]
suppress_warnings = [
  "misc.highlighting_failure",  # mermaid and gin have no lexer
  "myst.xref_missing",  # files outside of docs/
  "ref.python",  # names in signatures that several modules have
]

autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False
autodoc_mock_imports = ["clu", "seqio", "t5x", "tensorflow"]  # 2 GB
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Formal guarantee"]


def setup(app):
  """Keeps words before a colon in a field's docstring, which are no type."""

  def begin_with_a_blank_line(app, what, name, obj, options, lines):
    if what in ("attribute", "property"):
      lines.insert(0, "")

  event = "autodoc-process-docstring"
  app.connect(event, begin_with_a_blank_line, priority=400)  # before napoleon
