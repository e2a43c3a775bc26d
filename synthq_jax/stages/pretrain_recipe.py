"""Makes a public checkpoint of public text, as the shipped one was made.

Text of a manifest, a vocabulary, one cache of tokens, a T5, the curriculum. The
queries of the demo set and of every other set that is named are held out of all
of it: no 8 words of any of them in a row are left, and `result.json` says how
many sentences were dropped for that. A finished checkpoint may be where a next
sitting starts.
"""

import collections
import dataclasses
import gzip
import hashlib
import json
import math
import os
import pathlib
import random
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from synthq_jax import artifacts
from synthq_jax.data import (
  beir,
  environment_docs,
  pretrain_tasks,
  public_text,
  shipped,
  text_sources,
)
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models import t5_checkpoints, t5_config, transfer
from synthq_jax.pipeline import inputs, results, workspace
from synthq_jax.stages import pretrain

__all__ = ["Config", "Pretrained", "run"]

CACHE_NAME = "tokens.npz"
CORPUS_NAME = "corpus.jsonl.gz"
"""The cache of tokens, in the working directory: enough for another machine."""
_MOST_REPEATED = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """A checkpoint of public text."""

  pretrain: pretrain.Config
  """Curriculum and optimizer."""
  model: str | t5_config.T5Config = "demo"
  """Shape, or its name; its vocab_size is pieces and extra ids together."""
  manifest: str = str(shipped.DIRECTORY / "sources.json")
  """The list of sources, for `text_sources.manifest`."""
  store: str | None = None
  """Folder for what is fetched; None: `sources` in the working directory."""
  held_out: tuple[str, ...] = ()
  """Folders in the BEIR layout whose queries are held out, and the questions in
  their documents; or files with a query in the last column of each line. The
  queries of the demo set always are."""
  start_from: str | None = None
  """Folder of a checkpoint to go on from, with its vocabulary; "shipped" is the
  package's. None: from scratch."""
  new_vocabulary: bool = False
  """Whether a vocabulary of this text takes the place of the start's."""
  most: tuple[tuple[str, int], ...] = (("", 90_000), ("heading", 70_000))
  """Most records of a kind; more are drawn from."""
  extra_ids: int = shipped.EXTRA_IDS
  """Sentinels for span corruption."""
  half_precision: bool = False
  """Whether params.safetensors is written in float16; it is read as float32."""
  seed: int = 0
  """Of the draws of records and of the initialisation."""

  def __post_init__(self):
    if isinstance(self.model, str):
      object.__setattr__(self, "model", t5_config.get(self.model))
    self.pretrain.check_sentinels(self.extra_ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
  """A public checkpoint and what it was made of."""

  directory: str
  """params.safetensors, config.json, vocabulary.model."""
  sources: tuple[str, ...]
  """Name, version, licence and words of every source."""
  demo_set: str
  """Versions of the demo set that was held out."""
  num_records: dict[str, int]
  """Records of each kind; "" counts passages nobody wrote anything about."""
  num_words: int
  """Words of text."""
  text_digest: str
  """SHA-256 of all records, in order."""
  dropped: dict[str, int]
  """Sentences, titles and records that repeated what is held out."""
  num_held_out: dict[str, int]
  """Queries held out, by set."""
  num_repeated: int
  """Records that repeat a held-out query after all: 0."""
  num_parameters: int
  """Trained parameters."""
  start_from: str | None
  """What it goes on from."""
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
    workdir: gets params.safetensors, config.json, vocabulary.model, tokens.npz,
      metrics.jsonl and result.json. Where it holds tokens.npz, the folder text/
      and vocabulary.model of an earlier call, no text is read.
    on_accepted: called once the working directory is ours and holds no run of
      the pipeline, before anything else is written to it.

  Returns:
    What was made, and of what.

  Raises:
    ValueError: if another run is in the working directory, a source cannot be
      fetched, or the text repeats what is held out.
  """
  with workspace.locked(workdir):
    return _run(config, pathlib.Path(workdir), on_accepted)


def _run(config: Config, root: pathlib.Path, on_accepted) -> Pretrained:
  if (root / "prepare_data").exists() or (root / results.PRIVATE).exists():
    raise ValueError(
      f"{root}: expected a new working directory, got that of a run: give"
      " another --workdir"
    )
  start = shipped.DIRECTORY
  if config.start_from not in (None, "shipped"):
    start = pathlib.Path(config.start_from)
    inputs.check_t5(start)
    inputs.refuse_private(start)
  on_accepted()
  if not (root / CACHE_NAME).exists():
    _read(config, root, start)
  text = artifacts.load(root / "text", Pretrained)
  digest = artifacts.fingerprint("pretrain_recipe", config, text.text_digest)
  if (finished := artifacts.find(root, Pretrained, digest)) is not None:
    print("[pretrain] finished earlier, skipped", flush=True)
    return finished
  params, seconds = pretrain.train(
    config.pretrain,
    _start(config, root, start),
    config.model,
    pretrain_tasks.Cache.load(root / CACHE_NAME),
    directory=root / "state" / digest,
    metrics_path=root / "metrics.jsonl",
  )
  if config.half_precision:
    params = jax.tree.map(lambda leaf: leaf.astype(np.float16), params)
  words = vocabulary_lib.load(root / "vocabulary.model")
  shape = dataclasses.replace(
    config.model,
    dropout_rate=0.0,
    dtype="float32",
    token_ids=words.token_ids,
  )
  t5_checkpoints.save(root, params, shape)
  result = dataclasses.replace(
    text,
    num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
    start_from=config.start_from,
    seconds=seconds,
  )
  artifacts.save(root, result, digest)
  return result


def _start(config: Config, root: pathlib.Path, start: pathlib.Path):
  """Returns the parameters to begin with."""
  if config.start_from is None:
    return pretrain.fresh(config.model, config.seed)
  params, shape = t5_checkpoints.load(start)
  old = vocabulary_lib.load(
    start / "vocabulary.model",
    extra_ids=shape.vocab_size
    - vocabulary_lib.load(start / "vocabulary.model").vocab_size,
  )
  new = vocabulary_lib.load(
    root / "vocabulary.model", extra_ids=config.extra_ids
  )
  return transfer.transfer(
    params,
    transfer.pieces(old, new),
    config.model,
    jax.random.key(config.seed + 1),
  )


def _held_out(config: Config) -> dict[str, list[str]]:
  """Returns the queries that must not be in the text, by set."""
  found = {"demo": environment_docs.private_queries()}
  for place in map(pathlib.Path, config.held_out):
    found[place.name] = _queries_of(place)
  return found


def _queries_of(place: pathlib.Path) -> list[str]:
  """Returns the queries of a set and the questions in its documents."""
  if place.is_file():
    return [line.split("\t")[-1] for line in place.read_text().splitlines()]
  collection = beir.read_beir(place)
  asked = [
    sentence
    for document in collection.documents
    for sentence in public_text.split_sentences(document.text)
    if sentence.endswith("?")
  ]
  return [query.text for query in collection.queries] + asked


def _read(config: Config, root: pathlib.Path, start: pathlib.Path) -> None:
  """Fetches and reads the text; writes vocabulary, cache and account."""
  begun = time.monotonic()
  held_out = _held_out(config)
  queries = [query for part in held_out.values() for query in part]
  dropped: collections.Counter = collections.Counter()
  names: list[str] = []
  made = _drawn(config, list(_records(config, root, queries, dropped, names)))
  text = [f"{r.kind}\n{r.query}\n{r.passage}\n\n" for r in made]
  repeated = public_text.repeated(queries, made)
  if repeated:
    raise ValueError(f"{repeated} records repeat held-out queries: a defect")
  model = root / "vocabulary.model"
  if config.start_from is None or config.new_vocabulary:
    vocabulary_lib.train(
      (line for r in made for line in (r.query, r.passage) if line),
      model,
      vocab_size=config.model.vocab_size - config.extra_ids,
    )
  else:
    artifacts.write_atomically(model, (start / "vocabulary.model").read_bytes())
  vocabulary = vocabulary_lib.load(model, extra_ids=config.extra_ids)
  cache = pretrain_tasks.tokenize(vocabulary, made)
  with gzip.open(root / CORPUS_NAME, "wt", encoding="utf-8") as stream:
    stream.writelines(f"{json.dumps({'text': one})}\n" for one in text)
  account = Pretrained(
    directory=root.name,
    sources=tuple(names),
    demo_set=environment_docs.digest(),
    num_records=dict(collections.Counter(r.kind for r in made)),
    num_words=sum(len(line.split()) for line in text),
    text_digest=hashlib.sha256("".join(text).encode()).hexdigest(),
    dropped=dict(dropped),
    num_held_out={name: len(part) for name, part in held_out.items()},
    num_repeated=repeated,
    num_parameters=0,
    start_from=config.start_from,
    seconds=time.monotonic() - begun,
  )
  artifacts.save(root / "text", account, account.text_digest)
  cache.save(root / CACHE_NAME)
  print(f"[pretrain] text and tokens: {account.seconds:.0f} s", flush=True)


def _records(
  config, root, queries, dropped, names
) -> Iterator[pretrain_tasks.Record]:
  """Yields the records of all sources, and of the demo set's documents."""
  held_out = public_text.HeldOut(queries)
  store = pathlib.Path(config.store or root / "sources")
  seen: set[str] = set()
  for source in text_sources.manifest(config.manifest):
    entries, words = text_sources.entries(source, store), 0
    for record in public_text.records(entries, held_out, seen, dropped):
      words += len(record.passage.split())
      yield record
    names.append(
      f"{source.name} {source.version} ({source.licence}): {words} words"
    )
    print(f"[pretrain] {names[-1]}", flush=True)


def _drawn(config: Config, made: list) -> list:
  """Draws from the kinds of which there are too many; mixes the order.

  A title that stands above many texts ("Remarks") tells none of them.
  """
  titles = collections.Counter(r.query for r in made if r.query)
  made = [r for r in made if titles[r.query] <= _MOST_REPEATED]
  rng = random.Random(config.seed)
  rng.shuffle(made)
  most, kept = dict(config.most), []
  seen: collections.Counter = collections.Counter()
  for record in made:
    seen[record.kind] += 1
    if seen[record.kind] <= most.get(record.kind, math.inf):
      kept.append(record)
  return kept
