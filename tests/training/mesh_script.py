"""The training of mesh_test.py on a mesh over the devices of two processes.

  python launch/processes.py --num_processes=2 --devices_per_process=2 -- \
      python tests/training/mesh_script.py FOLDER

leaves noise.npz there, and goes on with the training whose state lies there,
until it is killed before its fourth step.
"""

import argparse
import importlib.util
import pathlib
import sys

import numpy as np


def load_mesh_test():
  path = pathlib.Path(__file__).with_name("mesh_test.py")
  spec = importlib.util.spec_from_file_location("mesh_test_in_script", path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  spec.loader.exec_module(module)
  return module


def main(folder: pathlib.Path) -> None:
  from synthq_jax.training import cluster, distributed, mesh

  distributed.start(cluster.from_flags(argparse.Namespace(distributed=None)))
  test = load_mesh_test()
  shape = mesh.Shape(data=2, fsdp=2)
  made, _ = test.noise(shape, test.zeros())
  made = mesh.gather(made)
  try:
    test.train(folder, shape, sampler=test.Stopping(test.SAMPLER, 3))
  except test.Stop:
    pass
  distributed.barrier("killed")
  if distributed.is_main():
    np.savez(folder / "noise.npz", **made)
  distributed.finish(0)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
