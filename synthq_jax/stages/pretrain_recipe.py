"""Makes a public checkpoint from scratch, as the shipped one was made.

Public text, a vocabulary, a fresh T5 with the copy circuit, the curriculum.
The queries of the demo set are held out of all of it; `result.json` says how
many sentences were dropped for repeating one and how much of any query is left.
"""

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable

import jax

from synthq_jax import artifacts
from synthq_jax.data import (
  environment_docs,
  pretrain_tasks,
  public_text,
)
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models import t5_checkpoints, t5_config
from synthq_jax.pipeline import results, workspace
from synthq_jax.stages import pretrain

__all__ = ["PACKAGES", "Config", "Pretrained", "run"]

PACKAGES = (
    *environment_docs.PACKAGES,
    "tensorflow", "sympy", "pandas", "sklearn", "networkx", "statsmodels",
    "astropy", "xarray", "dask", "skimage", "nltk", "sqlalchemy", "IPython",
    "django", "docutils", "sphinx",
)  # fmt: skip
"""The demo set's packages (their bodies are public) and the extra `pretrain`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """A checkpoint from scratch."""

  pretrain: pretrain.Config
  """Curriculum and optimizer."""
  model: str | t5_config.T5Config = "demo"
  """Shape, or its name; its vocab_size is pieces and extra ids together."""
  packages: tuple[str, ...] = PACKAGES
  """Whose docstring bodies are read."""
  extra_ids: int = 32
  """Sentinels for span corruption."""
  seed: int = 0
  """Of the initialisation."""

  def __post_init__(self):
    if isinstance(self.model, str):
      object.__setattr__(self, "model", t5_config.get(self.model))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
  """A public checkpoint and what it was made of."""

  directory: str
  """params.safetensors, config.json, vocabulary.model."""
  packages: tuple[str, ...]
  """Name and version of every package that was read."""
  num_passages: int
  """Passages of text."""
  num_words: int
  """Words of text."""
  text_digest: str
  """SHA-256 of all passages, in order."""
  dropped_sentences: int
  """Sentences dropped for repeating a held-out query."""
  num_held_out: int
  """Queries held out."""
  largest_containment: float
  """Largest share of a held-out query's 8-grams left in the text."""
  num_parameters: int
  """Trained parameters."""
  seconds: float
  """Training time of the last call."""


def run(
  config: Config,
  workdir: str | os.PathLike,
  *,
  on_accepted: Callable[[], None] = lambda: None,
) -> Pretrained:
  """Reads the text, trains vocabulary and model; resumes where it stopped.

  Args:
    config: what to read and to train.
    workdir: gets params.safetensors, config.json, vocabulary.model,
      metrics.jsonl and result.json.
    on_accepted: called once the working directory is ours and holds no run of
      the pipeline, before anything else is written to it.

  Returns:
    What was made, and of what.

  Raises:
    ValueError: if another run is in the working directory.
  """
  with workspace.locked(workdir):
    return _run(config, pathlib.Path(workdir), on_accepted)


def _run(config: Config, root: pathlib.Path, on_accepted) -> Pretrained:
  if (root / "prepare_data").exists() or (root / results.PRIVATE).exists():
    raise ValueError(
      f"{root}: expected a new working directory, got that of a run: give"
      " another --workdir"
    )
  on_accepted()
  queries = environment_docs.private_queries(environment_docs.EnvironmentDocs())
  text = public_text.read(config.packages, public_text.HeldOut(queries))
  text_digest = public_text.digest(text)
  digest = artifacts.fingerprint("pretrain_recipe", config, text_digest)
  if artifacts.read_fingerprint(root) == digest:
    print("[pretrain] finished earlier, skipped", flush=True)
    return artifacts.load(root, Pretrained)
  print(
    f"[pretrain] {len(text.passages)} passages of {len(text.packages)}"
    f" packages; {text.dropped} sentences dropped",
    flush=True,
  )
  data = _tokenize(config, root, text, digest)
  params = pretrain.fresh(config.model, config.seed)
  params, seconds = pretrain.train(
    config.pretrain,
    params,
    config.model,
    data,
    directory=root / "state" / digest,
    metrics_path=root / "metrics.jsonl",
  )
  t5_checkpoints.save(root, params, config.model)
  result = _result(config, root, text, queries, params, seconds)
  artifacts.save(root, result, digest)
  return result


def _tokenize(config, root, text, digest) -> pretrain_tasks.Tokenized:
  """Trains the vocabulary on the same public text, once, and uses it."""
  state = root / "state" / digest
  state.mkdir(parents=True, exist_ok=True)
  model = state / "vocabulary.model"
  start = time.monotonic()
  if not model.exists():
    vocabulary_lib.train(
      (sentence for passage in text.passages for sentence in passage),
      model,
      vocab_size=config.model.vocab_size - config.extra_ids,
    )
  artifacts.write_atomically(root / "vocabulary.model", model.read_bytes())
  vocabulary = vocabulary_lib.load(model, extra_ids=config.extra_ids)
  data = pretrain_tasks.tokenize_passages(vocabulary, text.passages)
  print(f"[pretrain] vocabulary and tokens: {time.monotonic() - start:.0f} s")
  return data


def _result(config, root, text, queries, params, seconds) -> Pretrained:
  return Pretrained(
    directory=root.name,
    packages=text.packages,
    num_passages=len(text.passages),
    num_words=sum(len(s.split()) for p in text.passages for s in p),
    text_digest=public_text.digest(text),
    dropped_sentences=text.dropped,
    num_held_out=len(queries),
    largest_containment=max(public_text.containment(queries, text)),
    num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
    seconds=seconds,
  )
