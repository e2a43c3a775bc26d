"""`synthq` with small parts, which says who makes them, and one that is killed.

  python hosts_script.py FOLDER KILLS FLAGS OF SYNTHQ

kills a process in the middle of a save of a training, if FOLDER is there to
remember that it did. KILLS are PLACE:PROCESS:STEP,...: the first state of that
step or later, of a training whose folder PLACE ends.
"""

import os
import pathlib
import signal
import sys

from synthq_jax.cli import main
from synthq_jax.data import blocks
from synthq_jax.stages import _search, generate
from synthq_jax.training import checkpoints, distributed


def after(function, then):
  """Returns a method that does something more when it is done."""

  def wrapped(self, number, *args, **kwargs):
    function(self, number, *args, **kwargs)
    then(self, number)

  return wrapped


def patch(folder: pathlib.Path, kills: str, put=setattr) -> None:
  """Has parts made small and told, and one process killed."""
  plan = [kill.split(":") for kill in kills.split(",")] if kills else []

  def die_once(writer, step):
    trained = writer._root.parent.name
    if distributed.is_main():
      print("saving", trained, step, flush=True)
    for place, process, least in plan:
      flag = folder / f"{place}_{process}_{least}"
      if (
        folder.is_dir()
        and not flag.exists()
        and distributed.index() == int(process)
        and step >= int(least)
        and trained == place
      ):
        flag.write_text(str(step))
        os.kill(os.getpid(), signal.SIGKILL)

  put(generate, "_PART", 16)
  put(_search, "_BLOCK", 32)
  Writer = checkpoints.Writer
  put(Writer, "save", after(Writer.save, die_once))

  class Parts(blocks.Blocks):
    def write(self, number, rows, **named):
      super().write(number, rows, **named)
      if self.directory.name.startswith("parts_"):
        print("part", number, flush=True)
      if self.path(number).name.startswith("block_"):
        print("block", number, flush=True)

  put(blocks, "Blocks", Parts)


if __name__ == "__main__":
  patch(pathlib.Path(sys.argv[1]), sys.argv[2])
  sys.exit(main.main(sys.argv[3:]))
