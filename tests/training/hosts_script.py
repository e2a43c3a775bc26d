"""One process of a small training that several share; see hosts_test.py.

  python hosts_script.py FOLDER --steps=8 [--pause=0.1] [--save_seconds=0]

Its parameters lie on the devices of all processes, and so do its batches.
"""

import argparse
import os
import pathlib
import signal
import sys
import time

import numpy as np

from synthq_jax.privacy import ledger, statement
from synthq_jax.training import cluster, distributed, loop, stopping

WIDTH = 8


def make_step(mesh, pause):
  import jax
  import jax.numpy as jnp

  spec = jax.sharding.PartitionSpec
  split = jax.sharding.NamedSharding(mesh, spec("data"))
  whole = jax.sharding.NamedSharding(mesh, spec())

  @jax.jit
  def compute(state, batch, step):
    # Integers: no order of adding them up is better than another.
    key = jax.random.fold_in(jax.random.key(0), step)
    drawn = jax.random.randint(key, (WIDTH,), 0, 1000)
    total = jnp.sum(batch, axis=0)
    w = (state["w"] * 3 + drawn + total) % 100_003
    loss = jnp.sum(w, dtype=jnp.int32) / 1000.0
    state = {"w": jax.lax.with_sharding_constraint(w, split)}
    return state, {"loss": jax.lax.with_sharding_constraint(loss, whole)}

  def step_fn(state, batch, step):
    time.sleep(pause)
    return compute(state, batch, step)

  def batch_fn(step):
    rows = np.arange(WIDTH * WIDTH).reshape(WIDTH, WIDTH) * (step + 1)
    return jax.make_array_from_callback(
      rows.shape, split, lambda at: rows[at].astype(np.int32)
    )

  start = jax.make_array_from_callback(
    (WIDTH,), split, lambda at: np.ones(WIDTH, np.int32)[at]
  )
  return step_fn, {"w": start}, batch_fn


def signalling(step_fn, folder, number, process, at):
  """Signals this process before a step, the first time only; 0: an error."""

  def wrapped(state, batch, step):
    flag = folder / f"signalled_{process}"
    if distributed.index() == process and step == at and not flag.exists():
      flag.touch()
      if not number:
        raise ValueError("a mistake of the user")
      os.kill(os.getpid(), number)
    return step_fn(state, batch, step)

  return wrapped


def signalled_in_start(options):
  """Tells a process to stop when it has joined, but start has not ended."""
  import jax

  found = jax.process_count

  def told():
    jax.process_count = found
    if os.environ["SYNTHQ_PROCESS_ID"] == str(options.signal_in_start):
      os.kill(os.getpid(), signal.SIGTERM)
    return found()

  jax.process_count = told


def run(options):
  """Trains in all processes together, or in process 0 alone."""
  if not options.alone:
    train(options)
  elif distributed.is_main():
    with distributed.alone():
      train(options)
  distributed.barrier("done")


def train(options):
  import jax

  folder = pathlib.Path(options.folder)
  if distributed.is_main():
    made = statement.non_private("a test")
    ledger.enter(folder / "ledger.jsonl", "test", made)
  mesh = jax.sharding.Mesh(np.array(distributed.devices()), ("data",))
  step_fn, state, batch_fn = make_step(mesh, options.pause)
  for one in options.signal:
    number, process, at = map(int, one.split(","))
    step_fn = signalling(step_fn, folder, number, process, at)
  state = loop.train(
    step_fn,
    state,
    batch_fn,
    loop.Files.below(folder, "test"),
    steps=options.steps,
    examples_per_step=WIDTH,
    settings=loop.Settings(save_seconds=options.save_seconds, log_every=3),
  )
  whole = jax.jit(
    lambda x: x, out_shardings=jax.sharding.NamedSharding(mesh, jax.P())
  )(state["w"])
  if distributed.is_main():
    np.save(folder / "result.npy", np.asarray(whole))


def main():
  parser = argparse.ArgumentParser()
  flag = parser.add_argument
  flag("folder")
  flag("--steps", type=int, default=8)
  flag("--pause", type=float, default=0.0)
  flag("--save_seconds", type=float, default=1e9)
  flag("--signal", action="append", default=[], help="NUMBER,PROCESS,STEP")
  flag("--signal_in_start", type=int, help="process")
  flag("--progress", action="store_true")
  flag("--alone", action="store_true")
  flag("--distributed")
  flag("--cpu_devices", type=int)
  options = parser.parse_args()
  if options.progress:
    sys.stderr.isatty = lambda: True  # bars are drawn on terminals alone
  code = 1
  try:
    if options.signal_in_start is not None:
      signalled_in_start(options)
    with stopping.raising():
      distributed.start(cluster.from_flags(options))
      run(options)
    code = 0
  except distributed.Left as left:
    code = left.code
  except stopping.Terminated:
    code = stopping.EXIT_CODE
  except ValueError as error:
    if distributed.is_loss(error):
      raise
    code = 2
    if distributed.announce(code):
      print(error, flush=True)
  finally:
    distributed.finish(code)
  return code


if __name__ == "__main__":
  sys.exit(main())
