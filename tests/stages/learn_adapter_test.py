"""The stage of adapters: its rows, its claim, its search and its export."""

import dataclasses
import importlib.util
import math

import dp_accounting
import numpy as np
import pytest

from synthq_jax.models.checkpoints import sentence_folders
from synthq_jax.privacy import ledger
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.retrieval import encode, index, trec, vector_files
from synthq_jax.runtime import (
  encoder_start,
  results,
  stage,
  system_results,
  workspace,
)
from synthq_jax.stages import _ranking, _search, learn_adapter, plan
from synthq_jax.storage import artifacts
from synthq_jax.tools import export, search

QUERY, DOCUMENT = sentence_folders.QUERY, sentence_folders.DOCUMENT
ROWS = ("adapter_eps8", "adapter_both_eps8")


@pytest.fixture(scope="module")
def made(finished_run, tmp_path_factory):
  """A finished run with an adapter of its untrained retriever."""
  root = finished_run.copy(tmp_path_factory.mktemp("adapter"))
  config = dataclasses.replace(
    finished_run.config,
    learn_adapter=learn_adapter.Config(steps=3, pool=8, candidates=8),
    rows=plan.Rows(
      synthetic=(), direct_dp=(), public_only=False, original=False,
      adapted=(8.0,), fused=True,
    ),
    direct_dp_methods=(),
    test_sets=(),
  )  # fmt: skip
  before = len(ledger.read(root / "private" / ledger.NAME))
  plan.run(config, root, stages=["evaluate"], progress=False)
  return root, config, before


def load(root, row):
  return artifacts.load(root / "learn_adapter" / row, system_results.Adapter)


def task_of(root, config):
  folder = root / "train_retriever/untrained"
  vectors = root / "encode_documents/untrained"
  return stage.Task(
    place="learn_adapter/adapter_eps8",
    digest="digest",
    settings=config.learn_adapter,
    folders=workspace.Workspace(root, secret_seed=7),
    inputs=learn_adapter.Inputs(
      prepared=artifacts.load(
        root / "private/prepare_data", results.PreparedData
      ),
      retriever=artifacts.load(folder, results.Checkpoint),
      vectors=artifacts.load(vectors, system_results.Vectors),
      drop_identical=True,
      epsilon=8.0,
    ),
  )


@pytest.mark.slow
def test_both_rows_are_one_training(made):
  root, _, before = made
  assert len(ledger.read(root / "private" / ledger.NAME)) == before + 1
  alone, both = (load(root, row) for row in ROWS)
  assert alone.statement.ledger == both.statement.ledger
  assert alone.statement.epsilon <= 8.0
  assert alone.statement.unit == unit_lib.QUERY
  assert alone.roles == (QUERY,) and both.roles == (QUERY, DOCUMENT)
  base = artifacts.load(
    root / "encode_documents/untrained", system_results.Vectors
  )
  assert alone.vectors == base.vectors != both.vectors
  private = [path.name for path in root.glob("private/learn_adapter/*/*")]
  assert private and all(
    name.startswith(("metrics_", "files")) for name in private
  )


@pytest.mark.slow
def test_the_sides_are_factors_of_the_map(made):
  root, _, _ = made
  alone, both = (load(root, row) for row in ROWS)

  def read(one, role):
    return np.load(root / one.directory / one.file_of(role))

  whole = read(alone, QUERY)
  assert np.abs(whole - np.eye(len(whole))).max() > 1e-4
  np.testing.assert_allclose(
    read(both, QUERY) @ read(both, DOCUMENT).T, whole, atol=1e-5
  )


@pytest.mark.slow
def test_documents_of_a_row_of_both_sides_are_mapped(made):
  root, config, _ = made
  both = load(root, ROWS[1])
  task = task_of(root, config)
  judged = _ranking.of_train(task)
  found = _search.collection(judged, root / both.vectors)
  tokens = judged.passages.tokens[:]
  params, shape = encoder_start.load(task.folders, both, DOCUMENT)
  np.testing.assert_allclose(
    found, encode.encode(params, shape, tokens), atol=1e-5
  )


@pytest.mark.slow
def test_scores_are_of_mapped_queries_and_documents(made):
  root, _, _ = made
  for row in ROWS:
    run = trec.read_run(root / f"private/evaluate/test/{row}/run.trec")
    other = trec.read_run(root / "private/evaluate/test/untrained/run.trec")
    assert run.keys() == other.keys() and run != other
    assert (root / f"private/evaluate/test/fused_{row}/run.trec").exists()


@pytest.mark.slow
def test_what_a_query_learns_of_depends_on_it_alone(made):
  root, config, _ = made
  task = task_of(root, config)
  judged = _ranking.of_train(task)
  vectors = np.asarray(
    vector_files.open_vectors(
      root / task.inputs.vectors.vectors, len(judged.passages.owners)
    )
  )
  built = index.exact(vectors)

  def records(rows):
    chosen = _ranking.chosen(judged, np.array(rows))
    asked = _ranking.query_vectors(
      task.folders, task.inputs.retriever, chosen, 16
    )
    return learn_adapter._records(config.learn_adapter, chosen, asked, built)

  whole, fewer = records([0, 1, 2, 3, 4]), records([1, 3])
  for name, values in fewer.items():
    assert values.tobytes() == whole[name][[1, 3]].tobytes(), name
  assert whole["relevant"].any(axis=1).all()


@pytest.mark.slow
def test_a_search_finds_what_the_evaluation_found(made):
  root, _, _ = made
  folders = workspace.Folders(root)
  known = search.rows(folders, private=False)
  assert set(ROWS) <= set(known)
  prepared = artifacts.load(root / "private/prepare_data", results.PreparedData)
  opened = search._Opened(folders, prepared, known)
  judged = _search.asked(
    folders,
    prepared,
    root / prepared.private_directory,
    prepared.test_split,
    root / prepared.private_directory / f"{prepared.test_split}.npz",
  )
  for row in ROWS:
    run = trec.read_run(root / f"private/evaluate/test/{row}/run.trec")
    query, text = next(iter(judged.qrels)), judged.queries[0]
    found = opened.system(row)(text, 3)
    names = [str(judged.passages.ids[int(place)]) for place in found]
    assert names == list(run[query])[:3]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_sentence_transformers_gives_the_vectors_of_an_export(
  made, row, tmp_path
):
  if importlib.util.find_spec("sentence_transformers") is None:
    pytest.skip("needs sentence-transformers")
  import sentence_transformers

  root, _, _ = made
  place = root / "learn_adapter" / row
  said = export.run(place, tmp_path / "out", format="sentence-transformers")
  assert "epsilon = 8" in said
  theirs = sentence_transformers.SentenceTransformer(
    str(tmp_path / "out"), device="cpu"
  )
  folders, one = workspace.Folders(root), load(root, row)
  prepared = artifacts.load(root / "private/prepare_data", results.PreparedData)
  folder = root / prepared.private_directory
  judged = _search.asked(
    folders, prepared, folder, "train", folder / "train.npz"
  )
  params, shape = encoder_start.load(folders, one, QUERY)
  ours = encode.encode(params, shape, judged.query_tokens[:5])
  np.testing.assert_allclose(
    theirs.encode_query(judged.queries[:5]), ours, atol=1e-5
  )
  params, shape = encoder_start.load(folders, one, DOCUMENT)
  ours = encode.encode(params, shape, judged.passages.tokens[:5])
  texts = [*map(str, sentence_texts(root, prepared))][:5]
  np.testing.assert_allclose(theirs.encode_document(texts), ours, atol=1e-5)


def sentence_texts(root, prepared):
  from synthq_jax.runtime import inputs

  return inputs.document_texts(inputs.corpus(workspace.Folders(root), prepared))


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_a_map_alone_is_applied_by_its_ten_lines(made, row, tmp_path):
  root, _, _ = made
  export.run(root / "learn_adapter" / row, tmp_path / "out", format="map")
  text = (tmp_path / "out" / "README.md").read_text()
  program = text.split("```python\n")[1].split("```")[0]
  program = program.replace("FOLDER", str(tmp_path / "out"))
  scope: dict = {}
  exec(program, scope)  # noqa: S102
  one = load(root, row)
  vectors = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
  dim = len(np.load(root / one.directory / one.file_of(QUERY)))
  vectors = np.random.default_rng(0).normal(size=(4, dim)).astype(np.float32)
  matrix = np.load(root / one.directory / one.file_of(QUERY))
  moved = vectors @ matrix
  np.testing.assert_allclose(
    scope["apply"](vectors, QUERY),
    moved / np.linalg.norm(moved, axis=1, keepdims=True),
    rtol=1e-5,
  )
  assert (tmp_path / "out" / export.CLAIM).exists()


def test_a_pool_is_public():
  """One query moves the sum by the clip norm, whatever pool its batch brings."""
  generator = np.random.default_rng(0)
  vectors = generator.normal(size=(30, 6)).astype(np.float32)
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  config = learn_adapter.Config(clip_norm=0.01, pool=5, microbatch_size=None)
  grad_fn = learn_adapter.PooledGrad(vectors, config)
  batch = {
    "queries": vectors[:8],
    "rows": np.arange(24, dtype=np.int32).reshape(8, 3) % 30,
    "relevant": np.tile([True, False, False], (8, 1)),
    "candidate": np.ones((8, 3), bool),
    "pool": np.array([1, 4, 9, 16, 25], np.int32),
  }
  params = {"map": 0.1 * np.ones((6, 6), np.float32)}
  whole, aux = grad_fn(params, batch)
  is_cut = np.asarray(aux.norms) > config.clip_norm
  assert is_cut.sum() == 7  # the first query is its own document
  relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
  assert grad_fn.sensitivity(relation) == config.clip_norm
  for place in range(8):
    is_padding = np.arange(8) == place
    less, _ = grad_fn(params, batch, is_padding_example=is_padding)
    moved = np.linalg.norm(whole["map"] - less["map"])
    assert moved <= 1.001 * config.clip_norm
    assert not is_cut[place] or moved >= 0.999 * config.clip_norm
    other = {k: np.array(v) for k, v in batch.items()}
    other["rows"][place] = [29, 28, 27]
    there, _ = grad_fn(params, other, is_padding_example=is_padding)
    np.testing.assert_array_equal(there["map"], less["map"])


def test_without_noise_a_map_is_private():
  assert learn_adapter.names(math.inf) == ("adapter_inf", "adapter_both_inf")


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"adapted": (8.0,), "untrained": False}, "adapted needs the encoder"),
    ({"adapted": (0.0,)}, "adapted must hold epsilons above 0"),
    ({"adapted": (8.0, 8)}, "different names"),
  ],
)
def test_rows_that_cannot_be_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    plan.Rows(**fields)


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"candidates": 4, "most_relevant": 4}, "candidates must be above"),
    ({"temperature": 0.0}, "temperature"),
    ({"pool": -1}, "pool"),
    ({"optimizer": "sgd"}, "optimizer"),
  ],
)
def test_settings_out_of_range_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    learn_adapter.Config(**fields)
