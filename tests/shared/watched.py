"""An index that notes what is asked of it."""


class Watched:
  """Passes searches on, and notes how many queries ask for how many results."""

  def __init__(self, built):
    self.built, self.asked = built, []

  def search(self, queries, width):
    self.asked.append((len(queries), width))
    return self.built.search(queries, width)
