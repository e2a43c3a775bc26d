"""Bars are for people: a log gets none."""

import io
import sys

import pytest

from synthq_jax.training import progress


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.mark.parametrize(
  ("stream", "wanted", "is_drawn"),
  [
    (Terminal, True, True),
    (Terminal, False, False),
    (io.StringIO, True, False),
  ],
)
def test_a_bar_is_drawn_on_terminals_alone(
  monkeypatch, stream, wanted, is_drawn
):
  monkeypatch.setattr(sys, "stderr", stream())
  hidden, inside = progress.shown(wanted), progress.shown(True)
  with hidden, inside, progress.bar("writing", 3) as bar:
    bar.update()
  assert ("writing" in sys.stderr.getvalue()) == is_drawn
  assert progress._IS_SHOWN.get()
