"""Runs T5X from gin several times in one process, as `t5x.main` does once.

drive.py PLAN.json [ADDRESS INDEX]: a list of {mode, files, bindings, save}; a
run that raises ValueError leaves its message in SAVE.error, a training its
parameters in SAVE.npz. With an address it is one of two processes.
"""

import json
import pathlib
import sys

import gin
import jax
import numpy as np
from flax import traverse_util

if len(sys.argv) > 2:  # before anything looks at devices
  jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))

from t5x import gin_utils  # noqa: E402
from t5x import infer as infer_lib  # noqa: E402
from t5x import train as train_lib  # noqa: E402

MODES = {"train": train_lib.train, "infer": infer_lib.infer}


def main(plan):
  this = sys.modules["__main__"]
  for name, function in MODES.items():
    setattr(this, name, function)
    gin.register(function, "__main__")
  for run in json.loads(pathlib.Path(plan).read_text()):
    save = pathlib.Path(run["save"])
    gin.clear_config()
    try:
      gin_utils.parse_gin_flags(run["search"], run["files"], run["bindings"])
      done = gin.get_configurable(MODES[run["mode"]])()
    except ValueError as error:
      save.with_suffix(".error").write_text(str(error))
      continue
    if run["mode"] == "train":
      params = traverse_util.flatten_dict(done[1].state_dict()["target"])
      arrays = {"/".join(k): np.asarray(v) for k, v in params.items()}
      np.savez(save.with_suffix(".npz"), **arrays)


if __name__ == "__main__":
  main(sys.argv[1])
