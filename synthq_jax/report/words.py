"""Reads the sentences of pages from TOML files."""

import os
import pathlib
import tomllib
from typing import Any

from synthq_jax.report import blocks

__all__ = ["Words", "paragraph"]


class Words:
  """Paragraph templates of a TOML file, by name.

  A template is a text with {values}, or a table of a "text" and its "lead", the
  words in bold before it. Lines are joined by a space.
  """

  def __init__(self, path: str | os.PathLike):
    """Reads a TOML file of templates."""
    self._groups = tomllib.loads(pathlib.Path(path).read_text("utf-8"))

  def __call__(self, name: str, /, **values: Any) -> blocks.Paragraph:
    """Returns a paragraph with its values filled in.

    Args:
      name: name of the template, "group.name" inside a group.
      **values: a value for each name in braces.

    Raises:
      KeyError: if there is no such template, or a value is missing.
    """
    entry: Any = self._groups
    for key in name.split("."):
      entry = entry[key]
    parts = {"text": entry} if isinstance(entry, str) else entry
    return blocks.Paragraph(
      **{
        part: " ".join(text.split()).format(**values)
        for part, text in parts.items()
      }
    )

  def text(self, name: str, /, **values: Any) -> str:
    """Returns the text of a paragraph without its lead; see `__call__`."""
    return self(name, **values).text


paragraph = Words(pathlib.Path(__file__).parent / "templates/words.toml")
"""Paragraph templates of a run's reports."""
