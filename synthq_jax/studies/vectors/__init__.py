"""Reconstructs sentences and planted secrets from sentence vectors.

One client is the victim; the other clients, with their own sentences, are the
attacker. The shipped T5's encoder computes the vectors, or any T5 or BERT of the
user. There are two attacks. The nearest candidate needs no training: the attacker
encodes a sentence with each secret that it might hold, and takes the nearest
vector. The shipped T5's decoder (`audit.inversion`) learns to read raw vectors.
It first learns the language alone. From there, one decoder trains with vectors
and another, for as many steps, without them.

Formal guarantee: none. All results are as private as the victim's text and are
saved below private/ unless `Config.public_data`.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from synthq_jax import checks, intervals
from synthq_jax.audit import canaries, exposure, inversion
from synthq_jax.audit import candidates as candidates_lib
from synthq_jax.data import sentences, shipped, sources, vocabulary
from synthq_jax.generation import text_measures
from synthq_jax.models import t5_checkpoints
from synthq_jax.report import blocks, tables
from synthq_jax.retrieval import encode, text_encoders
from synthq_jax.runtime import config_types, fingerprints
from synthq_jax.storage import artifacts
from synthq_jax.studies import frame
from synthq_jax.training import loop
from synthq_jax.training import recipe as recipe_lib

__all__ = ["STUDY", "Config", "Reading", "Secrets", "Study"]

_KINDS = {"digits": "own_query", "words": "rare_words"}
_MADE_UP = (
  0.1  # sentences with made-up secrets of a kind per attacker's sentence
)
_TOKENS = 64  # of a sentence, for a user's own encoder
_WORDS = frame.load_words("vectors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(frame.Config, config_types.Encoder):
  """Settings of the study."""

  source: str = "environment_docs"
  """Data source (`data.sources`) whose documents name their clients."""
  victim: str | None = None
  """Name of the victim; None for a client of middle size."""
  noise: tuple[float, ...] = (0.0, 0.05, 0.1, 0.3, 1.0)
  """Standard deviations of the noise on vectors with secrets, a row for each."""
  decoders: bool = True
  """Whether to train decoders, which takes nearly all of the time."""
  language_steps: int = 400
  """Steps of the decoder that learns the language, with vectors hidden."""
  steps: int = 400
  """Steps of each decoder that starts from the language decoder."""
  batch_size: int = 64
  """Sentences of a step."""
  length: int = 32
  """Maximum tokens of a sentence; longer sentences are left out."""
  num_sentences: int = 20_000
  """Maximum number of the attacker's sentences."""
  num_victims: int = 300
  """Maximum number of the victim's sentences."""
  num_secrets: int = 100
  """Number of planted secrets of each kind."""
  num_candidates: int = 50
  """Candidates of each secret, itself included."""
  seed: int = 0
  """Seed of the sentences, secrets and trainings."""

  def __post_init__(self):
    super().__post_init__()
    config_types.at_least(
      self, 1, "language_steps", "steps", "batch_size", "length",
      "num_victims",
    )  # fmt: skip
    config_types.at_least(self, 2, "num_secrets", "num_candidates")
    config_types.at_least(self, round(1 / _MADE_UP), "num_sentences")
    for deviation in self.noise:
      checks.within("[0, inf)", **{"vectors.Config.noise": deviation})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Secrets:
  """A row of the secrets table: one kind of secret at one amount of noise."""

  kind: str
  """Kind of secret, "digits" or "words"."""
  noise: float
  """Standard deviation of the noise on a vector."""
  first: intervals.Interval
  """Share of secrets that the nearest candidate names."""
  mean_rank: intervals.Interval
  """Mean rank of the secrets among their candidates."""
  other: intervals.Interval
  """`first` with another planted sentence's vector, which shows chance."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
  """Scores of decoders in three cases: own vector, no vector, another's vector."""

  perplexity: tuple[float, ...]
  """Perplexity of the victim's sentences per token."""
  bleu: tuple[float, ...]
  """BLEU of the written sentences, 0 to 100; nan if none has four words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """The result of the study; as private as the victim's text."""

  victim: str
  """Name of the victim."""
  num_read: int
  """Sentences of the victim."""
  num_attackers: int
  """Sentences of the attacker."""
  num_candidates: int
  """Candidates of each secret."""
  num_secrets: int
  """Planted secrets of each kind."""
  reading: Reading | None
  """Scores of the decoders; None without decoders."""
  secrets: tuple[Secrets, ...]
  """Rows of the secrets table."""


class _Attack:
  """The victim's vectors and secrets, and the attacker's sentences."""

  def __init__(self, task: frame.Task):
    config: Config = task.config
    self.config, self._states = config, task.root / "states"
    self._settings = loop.Settings(log_every=50)
    if not config.noise:
      raise ValueError(
        "vectors.Config.noise must have an entry, got none: give (0.0,) for"
        " vectors without noise"
      )
    source = sources.open(config.source, "vectors.Config.source")
    self._encoder, digests = None, []
    if config.bert:
      self._encoder = text_encoders.load_folder(config.bert, length=_TOKENS)
      digests = [fingerprints.of_folder(config.bert)]
    elif config.checkpoint:
      own = config.checkpoint, config.vocabulary
      self._encoder = text_encoders.load_own(*own, length=_TOKENS)
      digests = [
        fingerprints.of_checkpoint(pathlib.Path(config.checkpoint)),
        fingerprints.of_file(config.vocabulary),
      ]
    self.digest = artifacts.fingerprint(
      source.digest(),
      fingerprints.of_checkpoint(shipped.DIRECTORY),
      *([artifacts.fingerprint(*digests, _TOKENS)] if digests else ()),
      fingerprints.versions(),
    )
    self.vocab = shipped.vocabulary()
    self._params, self._model = t5_checkpoints.load(shipped.DIRECTORY)
    clients: dict[str, str] = {}
    for document in source.read().documents:
      for sentence in sentences.split(document.text):
        if len(sentence.split()) >= 4:
          clients.setdefault(sentence, document.client)
    names, counts = np.unique(list(clients.values()), return_counts=True)
    # A client of middle size has neither little text nor most of the text.
    middle = str(names[np.argsort(counts)[len(names) // 2]])
    self.victim = config.victim or middle
    if self.victim not in names or len(names) < 2:
      raise ValueError(
        "vectors.Config.victim: expected one of two clients or more, got"
        f" {self.victim!r} of {len(names)} in {config.source}"
      )
    folded = {s.casefold() for s, c in clients.items() if c != self.victim}
    rng = np.random.default_rng(config.seed)
    sides = [[], []]
    for sentence, client in clients.items():
      if client != self.victim:
        sides[0].append(sentence)
      elif sentence.casefold() not in folded:
        sides[1].append(sentence)
    self.attacker = self._choose(rng, sides[0], config.num_sentences)
    self.text = self._choose(rng, sides[1], config.num_victims)
    for side, whose in ((self.text, "the victim"), (self.attacker, "others")):
      if not side[0]:
        raise ValueError(
          f"vectors.Config.length: expected sentences of {whose} in"
          f" {config.length} tokens, got none: give a larger one, or another"
          " victim"
        )
    self.planted = {kind: self._plant(kind) for kind in _KINDS}

  def _choose(self, rng, side: list[str], size: int):
    """Draws sentences of at most `length` tokens; returns them and their tokens."""
    length = self.config.length
    rng.shuffle(side)
    side = side[: 8 * size]  # most are too long, and tokenizing takes time
    tokens = vocabulary.tokenize(self.vocab, side, length=length + 1)
    fit = np.flatnonzero(tokens[:, -1] == 0)[:size]
    return tuple(side[i] for i in fit), tokens[fit, :length]

  def _encode(self, tokens: np.ndarray) -> np.ndarray:
    if self._encoder is None:
      return encode.encode(self._params, self._model, tokens)
    return self._encoder.encode(
      [self.vocab.decode([int(t) for t in row if t]) for row in tokens]
    )

  def _make_canaries(self, texts: Sequence[str], kind: str, number: int, seed):
    """Makes canaries; returns them and their sentences' tokens, with secrets."""
    drawn = canaries.make(
      texts, self.vocab, number=number, kinds=(_KINDS[kind],),
      repetitions=(1,), digits=4, seed=[seed, *kind.encode()],
    )  # fmt: skip
    sides = canaries.tokenize(
      drawn, self.vocab, prefix="", document_length=1,
      query_length=self.config.length,
    )  # fmt: skip
    return drawn, sides["targets"]

  def _plant(self, kind: str) -> np.ndarray:
    """Encodes candidates: vectors [secret, candidate, dim], true secrets first."""
    config, rows = self.config, []
    rng = np.random.default_rng([config.seed, list(_KINDS).index(kind)])
    alphabet = canaries.alphabets({_KINDS[kind]}, self.vocab)[_KINDS[kind]]
    planted = self._make_canaries(
      self.text[0], kind, config.num_secrets, config.seed
    )
    for canary, row in zip(*planted, strict=True):
      drawn = candidates_lib.draw(canary, alphabet, config.num_candidates, rng)
      rows.append(
        candidates_lib.with_secrets(row, len(canary.secret), drawn.secrets)
      )
    vectors = self._encode(np.concatenate(rows))
    return vectors.reshape(len(rows), config.num_candidates, -1)

  def nearest(self, kind: str, noise: float) -> Secrets:
    """Ranks candidates by distance to the sent vector; no attack does better."""
    vectors = self.planted[kind]
    normal = jax.random.normal(jax.random.key(5), vectors[:, 0].shape)
    sent = np.asarray(vectors[:, 0] + noise * normal, np.float32)
    ranks = []
    for targets in (sent, sent[_get_others(len(sent), 1)]):
      apart = targets.astype(float)[:, None] - vectors.astype(float)
      ranks.append(exposure.ranks(-np.sum(apart**2, axis=-1)))
    first, other = (
      intervals.clopper_pearson(int(np.sum(case == 1)), len(case))
      for case in ranks
    )
    mean_rank = exposure.mean_rank(ranks[0], vectors.shape[1])
    return Secrets(
      kind=kind, noise=noise, first=first, mean_rank=mean_rank, other=other
    )

  def _fit(self, name: str, start, tokens, vectors, steps: int):
    """Trains a decoder; resumes from its newest checkpoint."""
    config = self.config
    return inversion.train(
      self._inverter,
      self._inverter.init(start, vectors, jax.random.key(2)),
      vectors,
      tokens,
      recipe=recipe_lib.Recipe(
        steps=steps,
        batch_size=config.batch_size,
        learning_rate=3e-3,
        warmup_steps=min(50, steps // 4),
        seed=config.seed,
        settings=self._settings,
      ),
      files=loop.Files.below(
        self._states
        / artifacts.fingerprint(
          name, self.digest, self.victim, tokens.tolist(),
          (steps, config.language_steps, config.batch_size, config.seed),
        ),
        name,
      ),
    )  # fmt: skip

  @functools.cached_property
  def _inverter(self) -> inversion.Inverter:
    dim = self.planted["digits"].shape[-1]
    return inversion.Inverter(model=self._model, vector_dim=dim)

  def read(self) -> Reading:
    """Trains the decoders on raw vectors and scores them on the victim's."""
    config, (texts, tokens) = self.config, self.attacker
    number = int(_MADE_UP * len(tokens))
    secrets = [
      self._make_canaries(texts, kind, number, config.seed + 1)[1]
      for kind in _KINDS
    ]
    tokens = np.concatenate([tokens, *secrets])
    vectors = self._encode(tokens)
    zeros = np.zeros_like(vectors)
    start = self._fit(
      "language", self._params, tokens, zeros, config.language_steps
    )
    decoder = self._fit("raw", start, tokens, vectors, config.steps)
    blind = self._fit("hidden", start, tokens, zeros, config.steps)
    own = self._encode(self.text[1])
    order = jax.random.bits(jax.random.split(jax.random.key(4))[1], (2,))
    other = own[_get_others(len(own), np.asarray(order).tolist())]
    cases = (decoder, own), (blind, np.zeros_like(own)), (decoder, other)
    logs = [
      inversion.log_likelihoods(self._inverter, *case, self.text[1])
      for case in cases
    ]
    count = int(np.sum(self.text[1] > 0))
    return Reading(
      perplexity=tuple(math.exp(-np.sum(case) / count) for case in logs),
      bleu=tuple(self._compute_bleu(*case) for case in cases),
    )

  def _compute_bleu(self, params, vectors: np.ndarray) -> float:
    # Without vectors, the decoder writes the same text for all sentences.
    some = vectors if vectors.any() else vectors[:1]
    written = inversion.write(
      self._inverter, params, some, max_length=self.config.length
    )
    eos = self._model.token_ids.eos
    texts, truth = (
      [
        self.vocab.decode([int(t) for t in row if t not in (0, eos)])
        for row in rows
      ]
      for rows in (written, self.text[1])
    )
    repeated = texts * (len(truth) // len(texts))
    references = [[sentence] for sentence in truth]
    return text_measures.bleu(repeated, references).score


def _get_others(number: int, seed) -> np.ndarray:
  """Assigns each row another row as its control; each row serves once."""
  checks.at_least(2, number=number)
  circle = np.random.default_rng(seed).permutation(number)
  others = np.empty(number, np.int64)
  others[circle] = np.roll(
    circle, 1
  )  # one circle, so no row is its own control
  return others


def _list_jobs(task: frame.Task, attack: _Attack) -> list[frame.Job]:
  """Lists the attacks without training, then the decoders' attack."""
  config = task.config
  # Settings that results depend on. A job's name adds its noise, the digest the
  # content of the source.
  settings = dataclasses.replace(
    config, source="", victim=attack.victim, noise=(), decoders=True,
    public_data=False,
  )  # fmt: skip

  def job(kind: type, name: str, make, *arguments) -> frame.Job:
    return frame.Job(
      directory=task.root / "attacks" / name,
      kind=kind,
      digest=artifacts.fingerprint("vectors 2", attack.digest, settings, name),
      make=functools.partial(make, *arguments),
    )

  listed = [
    job(Secrets, f"nearest_{kind}_{noise!r}", attack.nearest, kind, noise)
    for kind in _KINDS
    for noise in config.noise
  ]
  return listed + [job(Reading, "decoder", attack.read)] * config.decoders


def _make_result(task: frame.Task, attack: _Attack, results: Sequence) -> Study:
  rows = [result for result in results if isinstance(result, Secrets)]
  return Study(
    victim=attack.victim,
    num_read=len(attack.text[0]),
    num_attackers=len(attack.attacker[0]),
    num_candidates=task.config.num_candidates,
    num_secrets=task.config.num_secrets,
    reading=next(
      (result for result in results if isinstance(result, Reading)), None
    ),
    secrets=tuple(rows),
  )


def _make_page(study: Study) -> blocks.Page:
  columns = {
    "Secret": lambda row: row.kind,
    "Noise": lambda row: f"{row.noise:g}",
    "Named": lambda row: f"{row.first:.2f}",
    "Mean rank": lambda row: f"{row.mean_rank:.1f}",
    "Other vector": lambda row: f"{row.other:.2f}",
  }
  table = tables.of(study.secrets, columns)
  parts = [frame.make_part("Secrets", _WORDS("secrets"), table)]
  if study.reading:
    rows = zip(
      ("its vector", "none", "another's"),
      study.reading.perplexity,
      study.reading.bleu,
      strict=True,
    )
    columns = {
      "Vector": lambda row: row[0],
      "Perplexity": lambda row: f"{row[1]:.1f}",
      "BLEU": lambda row: tables.number(row[2], ".1f"),
    }
    parts.append(
      frame.make_part(
        "A decoder's reading",
        _WORDS("reading", study=study),
        tables.of(rows, columns),
      )
    )
  return blocks.Page(
    title="Secrets in exchanged vectors",
    introduction=(_WORDS("setting", study=study),),
    parts=tuple(parts),
  )


STUDY = frame.Study(
  config=Config,
  prepare=_Attack,
  jobs=_list_jobs,
  result=_make_result,
  page=_make_page,
  num_shown=2,
  digests=lambda attack: (attack.digest,),
)
