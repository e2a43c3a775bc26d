"""Trainings from gin in T5X's own loop, in processes of their own; needs T5X."""

import json
import math
import shutil

import jax
import numpy as np
import pytest

pytest.importorskip("t5x", reason="T5X is not installed: docs/t5x.md")

import runs  # noqa: E402

from synthq_jax.models import t5, t5_checkpoints  # noqa: E402
from synthq_jax.privacy import ledger, statement  # noqa: E402

pytestmark = pytest.mark.timeout(1800)

SHAPE = runs.SHAPE
MESH = {
  "partitioning__PjitPartitioner__num_partitions": None,
  "partitioning__PjitPartitioner__model_parallel_submesh": (1, 2),
}
HALF = {"TRAIN_STEPS": 3, "utils__SaveCheckpointConfig__period": 3}
ROUTES = {
  "trainer_bookkeeping": (runs.FILES, "bookkeeping"),
  "trainer_vmap": (runs.FILES, "vmap"),
  "optax_bookkeeping": (runs.OPTAX, "bookkeeping"),
  "optax_vmap": (runs.OPTAX, "vmap"),
}
START = 1000
"""The step of the checkpoint that some trainings begin with."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("t5x")


@pytest.fixture(scope="module")
def routes(folder):
  """Five steps without noise by each route."""
  quiet = {"EPSILON": math.inf}
  runs.begin(folder, *ROUTES, **quiet)
  plan = [
    runs.training(
      folder, name, files=files, STRATEGY=strategy, LEARNING_RATE=0.01, **quiet
    )
    for name, (files, strategy) in ROUTES.items()
  ]
  runs.run(folder, "routes", plan)
  return {name: runs.parameters(folder, name) for name in ROUTES}


@pytest.fixture(scope="module")
def meshes(folder):
  """Five private steps, and three and two, on 1 device and on 2 x 2."""
  names = ("whole", "halves", "whole_2x2", "halves_2x2", "hosts")
  names += ("whole_optax", "halves_optax")
  (folder / "noisy").mkdir()
  runs.begin(folder / "noisy", *names)
  cases = (
    (1, "", {}),
    (4, "_2x2", MESH),
    (1, "_optax", {"files": runs.OPTAX}),
  )
  for devices, suffix, mesh in cases:
    plan = [
      runs.training(folder / "noisy", f"whole{suffix}", **mesh),
      runs.training(folder / "noisy", f"halves{suffix}", **mesh, **HALF),
      runs.training(folder / "noisy", f"halves{suffix}", **mesh),
    ]
    runs.run(folder / "noisy", f"meshes{suffix}", plan, devices=devices)
  return folder / "noisy"


@pytest.fixture(scope="module")
def tuned(folder):
  """Trainings that begin with a checkpoint of ours, at another RANDOM_SEED."""
  place = folder / "tuned"
  place.mkdir()
  ours = _random_parameters()
  start = t5_checkpoints.save_t5x(place / "start", ours, START)
  begin = {
    "INITIAL_CHECKPOINT_PATH": str(start),
    "TRAIN_STEPS": START + 5,
    **{k.replace(".", "__"): v for k, v in runs.RESTORE.items()},
  }
  runs.begin(place, "seed0", "seed1", "moved")
  native = {"train__use_orbax": False}
  plan = [
    runs.training(place, "none", **{**begin, "TRAIN_STEPS": START}),
    runs.training(place, "seed0", **begin, RANDOM_SEED=0),
    runs.training(place, "seed1", **begin, RANDOM_SEED=1, **native),
    runs.training(place, "moved", **begin, DROPOUT_RATE=0.5),
    runs.training(place, "other", **begin),
  ]
  begin |= {
    "INITIAL_CHECKPOINT_PATH": str(place / "seed0" / "checkpoint_1005"),
    "TRAIN_STEPS": START + 10,
  }
  plan += [
    runs.training(place, "again", **begin),
    runs.training(place, "again_optax", files=runs.OPTAX, **begin),
  ]
  runs.run(place, "tuned", plan)
  return place, t5_checkpoints.flatten(ours)


def _random_parameters():
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(
    lambda key: t5.init_params(SHAPE, key), jax.random.key(0)
  )
  return jax.tree.map(
    lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(np.float32), shapes
  )


@pytest.mark.parametrize("name", list(ROUTES)[1:])
def test_five_steps_by_any_route_and_strategy_end_alike(routes, name):
  assert runs.difference(routes[name], routes["trainer_bookkeeping"]) <= 1e-5


@pytest.mark.parametrize("suffix", ["", "_2x2", "_optax"])
def test_three_steps_and_two_are_five_bit_for_bit(meshes, suffix):
  whole = runs.parameters(meshes, f"whole{suffix}")
  halves = runs.parameters(meshes, f"halves{suffix}")
  assert whole.keys() == halves.keys()
  for name in whole:
    np.testing.assert_array_equal(whole[name], halves[name], err_msg=name)
  entries = ledger.read(meshes / f"halves{suffix}" / "privacy" / "ledger.jsonl")
  [statement] = entries.values()
  assert statement.ledger[0].steps == 5 and 7.9 < statement.epsilon <= 8.0


def test_two_by_two_devices_make_the_steps_of_one(meshes):
  one, four = (runs.parameters(meshes, n) for n in ("whole", "whole_2x2"))
  assert runs.difference(four, one) <= 1e-5


def test_two_hosts_that_read_their_own_rows_make_the_steps_of_one(meshes):
  submesh = "partitioning__PjitPartitioner__model_parallel_submesh"
  plan = runs.training(meshes, "hosts", **{**MESH, submesh: (1, 1)})
  runs.run_on_two_hosts(meshes, "hosts", plan)
  one = runs.parameters(meshes, "whole")
  for host in ("host0", "host1"):
    assert runs.difference(runs.parameters(meshes / host, "hosts"), one) <= 1e-5
  assert len(ledger.read(meshes / "hosts" / "privacy" / "ledger.jsonl")) == 1


def test_what_t5x_restores_of_our_checkpoint_is_what_we_saved(tuned):
  place, ours = tuned
  found = runs.parameters(place, "none")
  assert found.keys() == ours.keys()
  for name in ours:
    np.testing.assert_array_equal(found[name], ours[name], err_msg=name)


@pytest.mark.parametrize("name", ["seed0", "seed1"], ids=["orbax", "native"])
def test_we_read_what_t5x_saved(tuned, name):
  place, _ = tuned
  params, config = t5_checkpoints.load(place / name / "checkpoint_1005")
  assert config == SHAPE
  theirs = runs.parameters(place, name)
  ours = t5_checkpoints.flatten(params)
  assert ours.keys() == theirs.keys()
  for path in ours:
    np.testing.assert_array_equal(ours[path], theirs[path], err_msg=path)


def test_noise_and_batches_do_not_move_with_random_seed(tuned):
  place, _ = tuned
  one, other = (runs.parameters(place, name) for name in ("seed0", "seed1"))
  for name in one:
    np.testing.assert_array_equal(one[name], other[name], err_msg=name)
  for changed in ("moved", "other"):  # dropout; another release
    assert runs.difference(runs.parameters(place, changed), one) > 1e-4


@pytest.mark.parametrize("name", ["again", "again_optax"])
def test_a_second_training_from_the_last_checkpoint_counts_both(tuned, name):
  """T5X cast the step of its own checkpoints, and nothing could go on from one."""
  place, _ = tuned
  first, then = (runs.parameters(place, n) for n in ("seed0", name))
  assert 1e-4 < runs.difference(then, first) < 1
  folder = place / name / "privacy"
  record = json.loads((folder / "release.json").read_text())
  assert record["first_step"] == START + 5
  made = t5_checkpoints.claim(place / name)
  assert [release.steps for release in made.ledger] == [5, 5]
  assert made.epsilon > 9
  words = (folder / "statement.txt").read_text()
  assert words.strip() == statement.in_words(made)


BATCHES = """
from __gin__ import dynamic_registration
import __main__ as train_script
from t5x import utils
train_script.train.get_dataset_fn = @utils.get_dataset
"""
"""T5X's own batches."""
OWN = f"""{BATCHES}
from t5x import trainer
train_script.train.trainer_cls = @trainer.Trainer
"""
"""T5X's own batches and steps."""
TRAPS = {
  "packed": ({"train/utils__DatasetConfig__pack": True}, "pack = False"),
  "public_trainer": (
    {"train__trainer_cls": "@trainer.Trainer"},
    "DPTrainer",
  ),
  "public_batches": (
    {"file": BATCHES},
    "expected Poisson batches",
  ),
  "used_before": ({"TRAIN_STEPS": 10}, "MODEL_DIR without checkpoints"),
  "longer": ({"TRAIN_STEPS": 6}, "PRIVATE_STEPS=5"),
  "other_start": (
    {
      "utils__CheckpointConfig__restore": "@utils.RestoreCheckpointConfig()",
      "utils__RestoreCheckpointConfig__path": "/other/checkpoint_0",
    },
    "RestoreCheckpointConfig.path of INITIAL_CHECKPOINT_PATH",
  ),
  # Last: T5X changes the generator of the whole process for them.
  "clock": ({"RANDOM_SEED": None}, "RANDOM_SEED"),
  "hardware": ({"USE_HARDWARE_RNG": True}, "USE_HARDWARE_RNG"),
}


@pytest.fixture(scope="module")
def traps(folder):
  place = folder / "traps"
  place.mkdir()

  def plan_trap(name, file="", **change):
    files = runs.FILES
    if file:
      path = place / f"{name}.gin"
      path.write_text(file)
      files = (*files, str(path))
    change = {"EPSILON": math.inf, "files": files, **change}
    return runs.training(place, name, **change)

  before = plan_trap("used_before", OWN, TRAIN_STEPS=1)
  plan = [{**before, "save": str(place / "before")}]
  plan += [plan_trap(name, **change) for name, (change, _) in TRAPS.items()]
  runs.run(place, "traps", plan)
  assert (place / "before.npz").exists()
  return place


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_in_gin_is_refused(traps, name):
  message = runs.error(traps, name)
  assert TRAPS[name][1] in message
  assert not (traps / f"{name}.npz").exists()


def test_nothing_private_lies_beside_the_checkpoints(meshes, tuned):
  for place, name in ((meshes, "halves"), (tuned[0], "seed1")):
    secret = (place / "secret").read_text().strip().encode()
    files = [path for path in (place / name).rglob("*") if path.is_file()]
    assert any(path.name == "config.gin" for path in files)
    assert any("events.out" in path.name for path in files)
    for path in files:
      content = path.read_bytes()
      assert secret not in content, path
      for word in (b"accuracy", b"loss_per", b"private/", b"cross_ent_loss"):
        assert word not in content or path.name == "config.gin", path


def test_the_command_of_t5x_itself_trains(folder):
  place = folder / "command"
  shutil.rmtree(place, ignore_errors=True)
  place.mkdir()
  plan = runs.training(place, "model", EPSILON=math.inf, TRAIN_STEPS=1)
  runs.run_command(plan)
  assert (place / "model" / "checkpoint_1").is_dir()
  assert (place / "model" / "privacy" / "ledger.jsonl").exists()
  runs.run_command(
    runs.inference(place, "answers", place / "model" / "checkpoint_1")
  )
  assert list((place / "answers").glob("*predict.jsonl*[0-9]"))


@pytest.mark.parametrize("size", ["base", "large"])
def test_a_file_for_googles_checkpoints_is_read(folder, size):
  plan = runs.training(
    folder, size, files=(f"gin_configs/t5x/t5_1_1_{size}.gin",)
  )
  start = [b for b in plan["bindings"] if "INITIAL" in b or ".restore" in b]
  plan["bindings"] = [b for b in plan["bindings"] if b not in start]
  runs.run_command(plan, "--dry_run")
  assert not (folder / size).exists()


def test_evaluation_beside_a_private_training_changes_nothing(folder):
  """Of the split `test`, which the user says is public."""
  place = folder / "evaluated"
  place.mkdir()
  runs.begin(place, "plain", "evaluated")
  public = {"split": "test", "pack": False, "batch_size": 4}
  changes = {
    f"{name}_eval/utils__DatasetConfig__{field}": value
    for name in ("train", "infer")
    for field, value in public.items()
  }
  changes |= {
    f"train__{name}_eval_dataset_cfg": f"@{name}_eval/utils.DatasetConfig()"
    for name in ("train", "infer")
  }
  plan = [
    runs.training(place, "plain"),
    runs.training(place, "evaluated", EVAL_PERIOD=5, EVAL_STEPS=1, **changes),
  ]
  runs.run(place, "evaluated", plan)
  one, other = (runs.parameters(place, n) for n in ("plain", "evaluated"))
  assert runs.difference(one, other) == 0
  assert list((place / "evaluated" / "training_eval").rglob("events.out*"))
