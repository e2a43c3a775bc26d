"""Reads the sentences of pages, which stand in files beside the code."""

import os
import pathlib
import tomllib
from typing import Any

from synthq_jax.report import blocks

__all__ = ["Words", "paragraph"]


class Words:
  """Paragraphs by name, with places to be filled in.

  A TOML file holds them: a text, or a table of a text and the words in bold
  before it. Its lines are joined by a space.
  """

  def __init__(self, path: str | os.PathLike):
    """Reads a file.

    Args:
      path: of the TOML file.
    """
    self._groups = tomllib.loads(pathlib.Path(path).read_text("utf-8"))

  def __call__(self, name: str, /, **values: Any) -> blocks.Paragraph:
    """Returns a paragraph with its values filled in.

    Args:
      name: of the paragraph; "group.name" where it stands in a group.
      **values: what stands in braces there.

    Raises:
      KeyError: if there is no such paragraph, or a value is missing.
    """
    said: Any = self._groups
    for key in name.split("."):
      said = said[key]
    parts = {"text": said} if isinstance(said, str) else said
    return blocks.Paragraph(
      **{
        part: " ".join(text.split()).format(**values)
        for part, text in parts.items()
      }
    )

  def text(self, name: str, /, **values: Any) -> str:
    """Returns the text of a paragraph alone; see `__call__`."""
    return self(name, **values).text


paragraph = Words(pathlib.Path(__file__).parent / "templates/words.toml")
"""The paragraphs of a run's reports."""
