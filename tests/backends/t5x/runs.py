"""Plans of T5X runs: what gin files and flags say, and what came of them."""

import importlib.util
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import numpy as np

from synthq_jax.backends.t5x import release, settings
from synthq_jax.models import t5_config

SHAPE = t5_config.T5Config(
  vocab_size=384,
  emb_dim=8,
  num_heads=4,
  num_encoder_layers=2,
  num_decoder_layers=2,
  head_dim=3,
  mlp_dim=16,
)
"""The shape of gin_configs/t5x/tiny.gin."""
HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]
TINY = "gin_configs/t5x/tiny.gin"
FILES = (TINY, "gin_configs/t5x/dp_finetune.gin")
OPTAX = (*FILES, "gin_configs/t5x/dp_optax.gin")
BINDINGS = {
  "NUM_EXAMPLES": 40,
  "EXPECTED_BATCH_SIZE": 8,
  "BATCH_SIZE": 16,
  "PRIVATE_STEPS": 5,
  "TRAIN_STEPS": 5,
  "EPSILON": 8.0,
  "DROPOUT_RATE": 0.0,
  "STRATEGY": "bookkeeping",
  "MIXTURE_OR_TASK_NAME": "synthq_tiny",
  "MIXTURE_OR_TASK_MODULE": "tiny_task",
  "TASK_FEATURE_LENGTHS": {"inputs": 16, "targets": 8},
  "USE_CACHED_TASKS": False,
  "INITIAL_CHECKPOINT_PATH": None,
  "utils.CheckpointConfig.restore": None,
  "utils.SaveCheckpointConfig.period": 5,
}
INFER = {
  "MIXTURE_OR_TASK_NAME": "synthq_tiny",
  "MIXTURE_OR_TASK_MODULE": "tiny_task",
  "TASK_FEATURE_LENGTHS": {"inputs": 16, "targets": 8},
  "DROPOUT_RATE": 0.0,
  "utils.DatasetConfig.batch_size": 4,
}
RESTORE = {"utils.CheckpointConfig.restore": "@utils.RestoreCheckpointConfig()"}


def literal(value):
  """A value as gin reads it; references and macros stay what they are."""
  if isinstance(value, str) and value[:1] not in ("@", "%"):
    return json.dumps(value)
  return "1e999" if value == float("inf") else str(value)


def training(folder, name, *, files=FILES, secret="secret", **changes):
  """One training into folder/name; `changes` are gin bindings."""
  bindings = {
    **BINDINGS,
    "MODEL_DIR": str(folder / name),
    "SECRET_FILE": str(folder / secret),
    **{k.replace("__", "."): v for k, v in changes.items()},
  }
  return {
    "mode": "train",
    "search": [str(ROOT), package_folder()],
    "files": list(files),
    "bindings": [f"{k} = {literal(v)}" for k, v in bindings.items()],
    "save": str(folder / name),
  }


def inference(folder, name, checkpoint):
  """Answers to the task's test split, into folder/name."""
  bindings = {
    **INFER,
    "CHECKPOINT_PATH": str(checkpoint),
    "INFER_OUTPUT_DIR": str(folder / name),
  }
  return {
    "mode": "infer",
    "search": [str(ROOT), package_folder()],
    "files": [TINY, "t5x/configs/runs/infer.gin"],
    "bindings": [f"{k} = {literal(v)}" for k, v in bindings.items()],
    "save": str(folder / name),
  }


def run_command(plan, *flags):
  """Runs a training or an inference of a plan as a user does."""
  flags = [*flags, *(f"--gin_file={name}" for name in plan["files"])]
  for line in plan["bindings"]:
    name, _, value = line.partition(" = ")
    flags.append(f"--gin.{name}={value}")
  done = subprocess.run(
    [sys.executable, "-m", "t5x.main", f"--run_mode={plan['mode']}", *flags],
    cwd=ROOT,
    env=environment(1),
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]


def begin(folder, *names, **changes):
  """Gives several MODEL_DIRs one release: equal batches, equal noise."""
  given = {**BINDINGS, **changes}
  promised = settings.Settings(
    num_examples=given["NUM_EXAMPLES"],
    expected_batch_size=given["EXPECTED_BATCH_SIZE"],
    max_batch_size=given["BATCH_SIZE"],
    steps=given["PRIVATE_STEPS"],
    epsilon=given["EPSILON"],
    l2_clip_norm=given.get("CLIP_NORM", 0.1),
  )
  first, *others = (folder / name for name in names)
  release.Release(promised, model_dir=first, secret_file=folder / "secret")
  for other in others:
    shutil.copytree(first / release.FOLDER, other / release.FOLDER)


def package_folder():
  """Where `t5x/...gin` is found."""
  place = importlib.util.find_spec("t5x").origin
  return str(pathlib.Path(place).parents[1])


def environment(devices):
  return {
    **os.environ,
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE))),
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "XLA_FLAGS": (
      f"--xla_force_host_platform_device_count={devices}"
      " --xla_backend_optimization_level=0"
    ),
  }


def run(folder, name, plan, *, devices=1):
  """Runs a plan in a process of its own with some virtual devices."""
  path = folder / f"{name}.json"
  path.write_text(json.dumps(plan))
  done = subprocess.run(
    [sys.executable, str(HERE / "drive.py"), str(path)],
    cwd=ROOT,
    env=environment(devices),
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done


def run_on_two_hosts(folder, name, training):
  """Runs one training in two processes; each saves into host0 and host1."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  processes = []
  for index in range(2):
    host = folder / f"host{index}"
    host.mkdir()
    plan = host / f"{name}.json"
    plan.write_text(json.dumps([training | {"save": str(host / name)}]))
    command = [sys.executable, str(HERE / "drive.py"), str(plan), address]
    processes.append(
      subprocess.Popen(
        [*command, str(index)],
        cwd=ROOT,
        env=environment(1),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
      )
    )
  assert [process.wait() for process in processes] == [0, 0]


def parameters(folder, name):
  """The parameters that a training ended with."""
  error = folder / f"{name}.error"
  assert not error.exists(), error.read_text()
  return dict(np.load(folder / f"{name}.npz"))


def error(folder, name):
  return (folder / f"{name}.error").read_text()


def difference(left, right):
  """The largest relative difference of two sets of parameters."""
  assert left.keys() == right.keys()
  return max(
    float(np.max(np.abs(left[k] - right[k])) / np.max(np.abs(right[k])))
    for k in left
  )
