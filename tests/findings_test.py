"""The scripts of findings/; and what is known of libraries, where it meets us.

findings/README.md says for each known surprise whether it reaches this project,
and names the test.
"""

import ast
import importlib.metadata
import os
import pathlib
import re
import subprocess
import tomllib

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

from synthq_jax import optim
from synthq_jax.models.checkpoints import tensors
from synthq_jax.privacy import accounting, sampling
from synthq_jax.retrieval import bm25, measures
from synthq_jax.runtime import fingerprints

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / "findings"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
MODULES = sorted((ROOT / "synthq_jax").rglob("*.py"))


# The form of the scripts.


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_finding_says_what_whom_and_where_and_notices_a_change(path):
  text = path.read_text("utf-8")
  header, _, body = text.partition("\nset -eu\n")
  assert os.access(path, os.X_OK) and text.startswith("#!/bin/sh\n# ")
  assert re.match(r"[\w-]+==[\d.]+", header.splitlines()[1].removeprefix("# "))
  for part in ("Why it surprises: ", "Whom it hurts: ", "Source: ", "Seen: "):
    assert f"\n# {part}" in header
  packages = re.search(r"pip\" install --quiet (.+)\n", body)[1].split()
  assert all(re.fullmatch(r"[\w-]+==[\d.]+", name) for name in packages)
  [program] = re.findall(r"<<'END'\n(.*?)\nEND\n", body, re.DOTALL)
  ast.parse(program)
  assert 'raise SystemExit("changed: ' in program
  assert not re.search(r"://|index-url|find-links|synthq", text)
  assert not re.search(r"(?<![\w.])/(work|opt|home|root|tmp)/", text)


def test_the_table_names_every_finding_once():
  table = (FOLDER / "README.md").read_text("utf-8")
  named = re.findall(r"\]\((\w+)\.sh\)", table)
  assert sorted(named) == [path.stem for path in SCRIPTS] and len(named) >= 12


def test_run_prints_which_finding_changed(tmp_path):
  (tmp_path / "run").write_bytes((FOLDER / "run").read_bytes())
  scripts = {
    "right": "exit 0",
    "other": "echo 'changed: it is right now' >&2; exit 1",
    "broken": "echo 'no such package' >&2; exit 2",
  }
  for name, line in scripts.items():
    (tmp_path / f"{name}.sh").write_text(f"#!/bin/sh\n{line}\n")
  for path in tmp_path.iterdir():
    path.chmod(0o755)
  made = subprocess.run(
    [tmp_path / "run"], capture_output=True, text=True, check=False
  )
  assert made.returncode == 1
  assert made.stdout.splitlines() == [
    "failed    broken: no such package",
    "changed   other: it is right now",
    "as found  right",
  ]
  alone = [tmp_path / "run", "right"]
  assert subprocess.run(alone, capture_output=True, check=False).returncode == 0


# What is known of libraries.


def attributes():
  """Yields every name after a dot in the package, with its place."""
  for path in MODULES:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
      if isinstance(node, ast.Attribute):
        yield node.attr, f"{path.relative_to(ROOT)}:{node.lineno}"


@pytest.mark.parametrize(
  "name, instead",
  [
    ("bernoulli", "a binomial count and a uniform choice"),
    ("categorical", "generation.decoding, which draws in float32"),
    ("save_file", "tensors.write_safetensors, which copies views"),
    ("retrieve", "bm25.Index.search, whose ties keep their order"),
    ("T5Tokenizer", "AutoTokenizer on the tokenizer.json that is written"),
    ("load_t5x_checkpoint", "t5_checkpoints.load, which casts no step"),
    ("RandomizedResponseDpEvent", "no event, whose count PLD ignores"),
  ],
)
def test_no_module_calls_what_surprises(name, instead):
  places = [place for each, place in attributes() if each == name]
  assert not places, f"expected {instead}, got {name} at {places}"


VIEWS = {
  "whole": lambda x: x,
  "transposed": lambda x: x.T,
  "reversed": lambda x: x[::-1],
  "every other": lambda x: x[:, ::2],
  "column-major": np.asfortranarray,
  "swapped": lambda x: x.reshape(4, 3, 2).swapaxes(0, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_in_any_memory_order_are_written_as_they_read(name, tmp_path):
  view = VIEWS[name](np.arange(24, dtype=np.float32).reshape(4, 6))
  tensors.write_safetensors(tmp_path / "t", tensors.of_tree({"a": view}))
  read = safetensors.numpy.load_file(tmp_path / "t")["a"]
  np.testing.assert_array_equal(read, view)


def test_bm25_scores_are_float32_and_follow_the_documents_in_ties():
  """bm25s itself orders ties the other way where JAX can be imported."""
  texts = ["red sea"] * 5 + ["", "blue"]
  index = bm25.BM25(stemmer="", stopwords="").build(list("abcdefg"), texts)
  (scores, none), (ids, nothing) = index.search(["red", "unknown words"], k=3)
  assert ids == ["a", "b", "c"] and scores.dtype == np.float32
  assert nothing == [] and len(none) == 0


STEMS = {
  "added": "add", "biologists": "biolog", "emergency": "emergenc",
  "international": "internat", "intervals": "interval", "interfering": "interfer",
}  # fmt: skip
"""Words whose stems PyStemmer 2.2, 3.0 and 3.1 do not agree on."""


def test_words_have_the_stems_of_the_oldest_stemmer_that_may_be_installed():
  assert bm25.BM25(stopwords="").words([" ".join(STEMS)]) == [[*STEMS.values()]]
  project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
  run = project["project"]["optional-dependencies"]["run"]
  [wanted] = [line for line in run if line.startswith("PyStemmer")]
  assert wanted == "PyStemmer>=3.1"


def test_another_stemmer_is_another_program_of_a_private_training(monkeypatch):
  installed = list(importlib.metadata.distributions())

  class Older:
    name, version = "PyStemmer", "2.2.0"

  before = fingerprints.machine(None)
  others = [one for one in installed if one.name != "PyStemmer"]
  monkeypatch.setattr(
    importlib.metadata, "distributions", lambda: [*others, Older]
  )
  fingerprints._libraries.cache_clear()
  try:
    assert fingerprints.machine(None) != before
  finally:
    fingerprints._libraries.cache_clear()


SAMPLERS = {
  "poisson": sampling.Poisson.with_margin(
    num_examples=6000, expected_batch_size=60
  ),
  "cyclic": sampling.CyclicPoisson.with_margin(
    num_examples=6000, expected_batch_size=60, cycle_length=4
  ),
  "fixed": sampling.FixedOrder(num_examples=6000, batch_size=60),
}


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("kind", [np.float32, np.float64, int, np.int64])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_noise_multiplier_of_any_type_is_the_same_noise(
  name, kind, accountant
):
  """RDP drops compositions inside a sample where it is no Python float."""
  first, second = (
    accounting.epsilon(
      noise_multiplier=noise,
      delta=1e-5,
      sampler=SAMPLERS[name],
      steps=300,
      relation="REPLACE_SPECIAL",
      accountant=accountant,
    )
    for noise in (2.0, kind(2))
  )
  assert first == pytest.approx(second, rel=1e-6) and first > 0.1


@pytest.mark.parametrize("name", SAMPLERS)
def test_no_sampler_puts_a_composition_inside_a_sample(name):
  for make in (SAMPLERS[name].event, SAMPLERS[name].untruncated_event):
    event = make(np.float32(2.0), 300)
    while isinstance(event, dp_accounting.SelfComposedDpEvent):
      event = event.event
    inner = getattr(event, "event", event)
    composed = (
      dp_accounting.SelfComposedDpEvent,
      dp_accounting.ComposedDpEvent,
    )
    assert not isinstance(inner, composed)


@pytest.mark.parametrize(
  "num, mean, room",
  [(8, 4, 4), (8, 6, 6), (60, 30, 30), (60, 20, 24)],
)
def test_a_claim_counts_the_worst_neighbour_of_truncated_batches(
  num, mean, room
):
  """dp_accounting's epsilon falls again where the mean exceeds the room."""

  def epsilon(size):
    event = dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent(
      dataset_size=size,
      sampling_probability=mean / num,
      truncated_batch_size=room,
      noise_multiplier=1.0,
    )
    accountant = dp_accounting.pld.PLDAccountant(
      value_discretization_interval=1e-2
    )
    return accountant.compose(event, 3).get_epsilon(1e-4)

  sampler = sampling.Poisson(
    num_examples=num, expected_batch_size=mean, max_batch_size=room
  )
  assert sampler.event(1.0, 3).event.dataset_size == num + 1
  assert epsilon(num - 1) <= epsilon(num) <= epsilon(num + 1)


def test_a_tiny_probability_draws_as_many_as_it_says():
  """jax.random.bernoulli draws twice as many of such."""
  sampler = sampling.Poisson.with_margin(
    num_examples=20_000_000, expected_batch_size=1
  )
  cyclic = sampling.CyclicPoisson.with_margin(
    num_examples=1_000_000, expected_batch_size=1, cycle_length=2
  )
  for each, steps in ((sampler, 1600), (cyclic, 400)):
    drawn = sum(
      int((~each.batch(3, step).is_padding).sum()) for step in range(steps)
    )
    assert abs(drawn / steps - 1) < 4 / steps**0.5


@pytest.mark.parametrize("strategy", ["vmap", "bookkeeping", "ghost"])
def test_the_norm_of_many_bfloat16_leaves_is_their_norm(strategy):
  """optax says 16 for 16.7, as it adds squares in bfloat16."""
  params = {f"layer_{i}": jnp.ones(1, jnp.bfloat16) for i in range(24)}
  params |= {"first": jnp.ones(256, jnp.bfloat16)}
  assert optax.tree.norm(params) == 16.0

  def loss(params, batch):
    total = sum(leaf.sum().astype(jnp.float32) for leaf in params.values())
    return total * batch

  grad_fn = optim.clipped_grad(loss, l2_clip_norm=1.0, strategy=strategy)
  clipped, aux = grad_fn(params, jnp.ones(1))
  squares = [float(jnp.square(leaf).sum()) for leaf in jax.tree.leaves(clipped)]
  assert aux.norms[0] == pytest.approx(280**0.5, rel=1e-3)
  assert sum(squares) ** 0.5 == pytest.approx(1.0, rel=1e-3)


def test_close_scores_are_no_tie_to_our_measures():
  """pytrec_eval, which computes them, keeps 32 bits of a score."""
  run = {"q": {"b": 300.00001, "z": 300.0}}
  got = measures.evaluate({"q": {"b": 1}}, run, ("nDCG@10", "RR@10"))
  assert got.mean == {"nDCG@10": 1.0, "RR@10": 1.0}
