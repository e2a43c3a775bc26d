"""The papers' recipe in T5X at a tiny size: from Google's layout to answers."""

import dataclasses
import json

import jax
import msgpack
import numpy as np
import pytest

pytest.importorskip("t5x", reason="T5X is not installed: docs/t5x.md")

import runs  # noqa: E402

from synthq_jax.models import t5, t5_checkpoints  # noqa: E402
from synthq_jax.privacy import ledger  # noqa: E402

pytestmark = pytest.mark.timeout(1800)

RELEASED = 999_900
"""The step of Google's T5 1.0 Base."""
NUM_QUERIES, NUM_DOCUMENTS = 40, 12
SHAPE = dataclasses.replace(
  runs.SHAPE, mlp_activations=("relu",), logits_via_embedding=True
)
"""T5 1.0 has other activations, and ties its logits."""
NAMES = (
  *("vocab_size", "emb_dim", "num_heads", "num_encoder_layers"),
  *("num_decoder_layers", "head_dim", "mlp_dim"),
)
TINY = "\n".join(
  [
    "from __gin__ import dynamic_registration",
    "import seqio",
    "from t5x.examples.t5 import network",
    "VOCABULARY = @seqio.ByteVocabulary()",
    "network.T5Config.dtype = 'float32'",
    *(f"network.T5Config.{name} = {getattr(SHAPE, name)}" for name in NAMES),
  ]
)
FILES = [
  "gin_configs/t5x/t5_1_0_base.gin",
  "gin_configs/t5x/msmarco_dp_finetune.gin",
]
LENGTHS = {"inputs": 32, "targets": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  root = tmp_path_factory.mktemp("recipe")
  (root / "tiny.gin").write_text(TINY)
  data = root / "msmarco"
  data.mkdir()
  lines = [f"{n}\tpassage {n} of a shelf\n" for n in range(NUM_DOCUMENTS)]
  (data / "collection.tsv").write_text("".join(lines))
  for split, numbers in (("train", range(40)), ("dev", range(40, 44))):
    lines = [f"{n}\tshelf {n}?\n" for n in numbers]
    (data / f"queries.{split}.tsv").write_text("".join(lines))
    lines = [f"{n} 0 {n % NUM_DOCUMENTS} 1\n" for n in numbers]
    lines += [f"{n} 0 {n % 5} 1\n" for n in numbers if n % 3]
    (data / f"qrels.{split}.tsv").write_text("".join(lines))
  return root


@pytest.fixture(scope="module")
def start(folder):
  """A native checkpoint with Adafactor's state, as Google's are."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(
    lambda key: t5.init_params(SHAPE, key), jax.random.key(0)
  )
  params = jax.tree.map(
    lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(np.float32), shapes
  )
  place = t5_checkpoints.save_t5x(folder / "t5_base", params, RELEASED)
  path = place / "checkpoint"
  written = msgpack.unpackb(path.read_bytes(), raw=False, strict_map_key=False)
  written["optimizer"]["state"]["param_states"] = jax.tree.map(
    lambda leaf: {"m": 0.0, "v": 0.0, "v_col": 0.0, "v_row": 0.0}, params
  )
  path.write_bytes(msgpack.packb(written))
  return place


def plan_training(folder, name, start, **changes):
  bindings = {
    "SOURCE": f"msmarco:{folder / 'msmarco'}",
    "INITIAL_CHECKPOINT_PATH": str(start),
    "MODEL_DIR": str(folder / name),
    "SECRET_FILE": str(folder / "secret"),
    "TASK_FEATURE_LENGTHS": LENGTHS,
    "EPSILON": 8.0,
    "NUM_EXAMPLES": NUM_QUERIES,
    "EXPECTED_BATCH_SIZE": 8,
    "BATCH_SIZE": 16,
    "MICROBATCHES": 2,
    "PRIVATE_STEPS": 10,
    "utils.SaveCheckpointConfig.period": 5,
    **changes,
  }
  return as_plan(folder, name, "train", FILES, bindings)


def as_plan(folder, name, mode, files, bindings):
  return {
    "mode": mode,
    "search": [str(runs.ROOT), runs.package_folder()],
    "files": [*files, str(folder / "tiny.gin")],
    "bindings": [f"{k} = {runs.literal(v)}" for k, v in bindings.items()],
    "save": str(folder / name),
  }


@pytest.fixture(scope="module")
def trained(folder, start):
  """Ten steps at once, and five and five; then every document's query."""
  given = {"NUM_EXAMPLES": NUM_QUERIES, "PRIVATE_STEPS": 10}
  runs.begin(folder, "whole", "halves", **given)
  answers = {
    "SOURCE": f"msmarco:{folder / 'msmarco'}",
    "CHECKPOINT_PATH": str(folder / "halves" / f"checkpoint_{RELEASED + 10}"),
    "INFER_OUTPUT_DIR": str(folder / "answers"),
    "TASK_FEATURE_LENGTHS": LENGTHS,
    "DROPOUT_RATE": 0.0,
    "utils.DatasetConfig.batch_size": 4,
    "utils.DatasetConfig.split": "passage",
  }
  files = ["t5x/examples/t5/t5_1_0/base.gin", "t5x/configs/runs/infer.gin"]
  files.append("gin_configs/t5x/msmarco_task.gin")
  plan = [
    plan_training(folder, "whole", start),
    plan_training(folder, "halves", start, TRAIN_STEPS=RELEASED + 5),
    plan_training(folder, "halves", start),
    as_plan(folder, "answers", "infer", files, answers),
  ]
  runs.run(folder, "plan", plan)
  return folder


def test_the_recipe_is_trained_for_ten_steps_and_resumed(trained, start):
  whole, halves = (runs.parameters(trained, n) for n in ("whole", "halves"))
  for name in whole:
    np.testing.assert_array_equal(whole[name], halves[name], err_msg=name)
  begun, _ = t5_checkpoints.load(start)
  assert runs.difference(whole, t5_checkpoints.flatten(begun)) > 1e-3
  assert set(whole) == set(t5_checkpoints.flatten(begun))
  assert (trained / "whole" / f"checkpoint_{RELEASED + 10}").is_dir()
  entries = ledger.read(trained / "halves" / "privacy" / "ledger.jsonl")
  [statement] = entries.values()
  assert statement.ledger[0].steps == 10 and 7.9 < statement.epsilon <= 8.0


def test_t5x_answers_every_document_from_the_last_checkpoint(trained):
  error = trained / "answers.error"
  assert not error.exists(), error.read_text()
  [path] = (trained / "answers").glob("*predict.jsonl-?????-of-?????")
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  asked = {row["inputs"]["inputs_pretokenized"] for row in rows}
  assert asked == {f"passage {n} of a shelf" for n in range(NUM_DOCUMENTS)}
  assert all(isinstance(row["prediction"], str) for row in rows)


def test_a_checkpoint_of_another_model_is_refused(folder, start):
  from synthq_jax.backends.t5x import dp_optimizers

  target = {"decoder": {"logits_dense": {"kernel": 0}}}
  of_step = {"state": {"step": 7, "param_states": {}}}
  with pytest.raises(ValueError, match="decoder/logits_dense/kernel"):
    dp_optimizers.take_parameters(
      {"target": {"decoder": {}}, **of_step}, {"target": target, **of_step}
    )
  stored = {"decoder": {"logits_dense": {"kernel": {"driver": "zarr"}}}}
  assert dp_optimizers.take_parameters(
    {"target": stored, **of_step}, {"target": target, **of_step}
  ) == {"target": stored, "state": {"step": 7}}
