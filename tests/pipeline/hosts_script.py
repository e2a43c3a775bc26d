"""`synthq` with small parts, which says who makes them, and one that is killed.

  python hosts_script.py FOLDER FLAGS OF SYNTHQ

kills process 1 in the middle of a save of its first training, if FOLDER is
there to remember that it did.
"""

import os
import pathlib
import signal
import sys

from synthq_jax.cli import main
from synthq_jax.data import blocks
from synthq_jax.retrieval import vector_files
from synthq_jax.stages import _search, generate
from synthq_jax.training import checkpoints, distributed


def after(function, then):
  """Returns a method that does something more when it is done."""

  def wrapped(self, number, *args, **kwargs):
    function(self, number, *args, **kwargs)
    then(number)

  return wrapped


def patch(folder: pathlib.Path) -> None:
  def die_once(step):
    flag = folder / f"in_a_save_{step}"
    if step < 5 and distributed.index() == 1 and folder.is_dir():
      if not any(folder.iterdir()):
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)

  def say(what):
    return lambda number: print(what, number, flush=True)

  generate._PART = 16
  _search._BLOCK = 32
  Writer = checkpoints.Writer
  Writer.save = after(Writer.save, die_once)

  class Parts(blocks.Blocks):
    def write(self, number, rows):
      super().write(number, rows)
      if self.directory.name.startswith("parts_"):
        print("part", number, flush=True)

  blocks.Blocks = Parts
  vector_files.Writer.write = after(vector_files.Writer.write, say("block"))


if __name__ == "__main__":
  patch(pathlib.Path(sys.argv[1]))
  sys.exit(main.main(sys.argv[2:]))
