"""What can be read out of sentence vectors, raw and with Gaussian noise.

One client is the victim; the others, with their own sentences, are the attacker.
The shipped T5's encoder makes the vectors, or any T5 or BERT of the user, and the
shipped T5's decoder learns to read them:
first the language alone, then from there one decoder for each amount of noise,
and one that goes on without vectors for as long. Planted secrets stand behind
the beginnings of the victim's sentences: digits, or words drawn at random; the
attacker knows the form and trains on secrets that it made up.

Formal guarantee: none; all results are as private as the victim's text, and lie
below private/ unless `Config.public_data`.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from synthq_jax import artifacts, checks
from synthq_jax.audit import (
  canaries,
  inversion,
  inversion_measures,
  vector_bounds,
  vector_secrets,
)
from synthq_jax.data import sentences, shipped, sources, vocabulary
from synthq_jax.models import t5_checkpoints
from synthq_jax.pipeline import config_types, fingerprints
from synthq_jax.report import blocks, tables
from synthq_jax.retrieval import encode, text_encoders
from synthq_jax.studies import frame
from synthq_jax.training import loop
from synthq_jax.training import recipe as recipe_lib

__all__ = ["STUDY", "Config", "Level", "Nearest", "Study"]

_KINDS = {"digits": "own_query", "words": "rare_words"}
_MADE_UP = 0.1  # sentences with made-up secrets of a kind, over the attacker's
_WORDS = frame.words("vectors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(frame.Config, config_types.Encoder):
  """The whole study."""

  source: str = "environment_docs"
  """A source of runs whose documents name their clients."""
  victim: str | None = None
  """A client; None: one of middle size."""
  noise: tuple[float, ...] = (0.0, 0.05, 0.1, 0.3, 1.0)
  """Standard deviations of the noise in every coordinate."""
  decoders: bool = True
  """Whether decoders are trained, which takes nearly all of the time; if not,
  only the attack that needs no training is measured."""
  language_steps: int = 400
  """Of the decoder that learns the language with vectors hidden."""
  steps: int = 400
  """Of each decoder that goes on from there."""
  batch_size: int = 64
  """Sentences of a step."""
  learning_rate: float = 3e-3
  """Adam's, at its peak."""
  memories: int = 8
  """States that the decoder attends to."""
  length: int = 32
  """Tokens of a sentence; longer ones are left out."""
  num_sentences: int = 20_000
  """Of the attacker, at most."""
  num_victims: int = 300
  """Sentences of the victim that are read."""
  num_secrets: int = 100
  """Planted, of each kind."""
  num_candidates: int = 50
  """Of each secret, itself included."""
  num_shown: int = 0
  """Sentences of the victim that the page shows, with what was read of them."""
  seed: int = 0
  """Of the sentences, secrets and trainings."""

  def __post_init__(self):
    super().__post_init__()
    config_types.positive(self, "learning_rate")
    config_types.at_least(
      self, 1, "language_steps", "steps", "batch_size", "memories", "length",
      "num_sentences", "num_victims",
    )  # fmt: skip
    config_types.at_least(self, 2, "num_secrets", "num_candidates")
    config_types.at_least(self, 0, "num_shown")
    for deviation in self.noise:
      checks.within("[0, inf)", **{"vectors.Config.noise": deviation})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nearest:
  """The attack by the nearest candidate, on one kind of secret."""

  kind: str
  noise: float
  own: vector_secrets.Recovery
  """From the secrets' own vectors."""
  other: vector_secrets.Recovery
  """From another sentence's vector: chance."""
  bound: float
  """Mean over secrets of the share that no attacker exceeds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
  """What a decoder reads at one amount of noise."""

  noise: float
  reading: inversion_measures.Reading
  bits: float
  """Of a sentence, that no attacker exceeds."""
  secrets: dict[str, inversion_measures.SecretsRead]
  """By kind."""
  shown: tuple[tuple[str, ...], ...]
  """Sentences, each with what was read of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """The whole study; as private as the victim's text."""

  victim: str
  num_read: int
  """Sentences of the victim that were read."""
  num_attackers: int
  """Sentences of the attacker."""
  num_candidates: int
  num_secrets: int
  nearest: tuple[Nearest, ...]
  levels: tuple[Level, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _Text:
  """Sentences of one side, and their tokens."""

  sentences: tuple[str, ...]
  tokens: np.ndarray


def _digest(encoder: text_encoders.OwnEncoder | text_encoders.Bert) -> str:
  """Returns what the vectors of an encoder depend on."""
  if isinstance(encoder, text_encoders.Bert):
    return artifacts.fingerprint(
      fingerprints.of_folder(encoder.folder), encoder.length
    )
  return artifacts.fingerprint(
    fingerprints.of_checkpoint(pathlib.Path(encoder.checkpoint)),
    fingerprints.of_file(encoder.vocabulary),
    encoder.length,
  )


class _Attack:
  """The victim's vectors and secrets, and what decoders are trained from."""

  def __init__(self, task: frame.Task):
    config: Config = task.config
    self.config, self._states = config, task.root / "states"
    self._settings = loop.Settings(log_every=50, progress=task.progress)
    if not config.noise:
      raise ValueError("vectors.Config.noise must have an entry, got none")
    source = sources.open(config.source, "vectors.Config.source")
    own: tuple[str, ...] = ()
    self._encoder = text_encoders.given(
      config.bert, config.checkpoint, config.vocabulary
    )
    if self._encoder is not None:
      text_encoders.load(self._encoder)
      own = (_digest(self._encoder),)
    self.digest = artifacts.fingerprint(
      source.digest(),
      fingerprints.of_checkpoint(shipped.DIRECTORY),
      *own,
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
    # One of the middle: neither the rarest text nor most of what there is.
    middle = str(names[np.argsort(counts)[len(names) // 2]])
    self.victim = config.victim or middle
    if self.victim not in names or len(names) < 2:
      raise ValueError(
        "vectors.Config.victim: expected one of two clients or more, got"
        f" {self.victim!r} of {len(names)} in {config.source}"
      )
    self.attacker, self.text = self._sides(clients)
    for text, side in ((self.text, "the victim"), (self.attacker, "others")):
      if not text.sentences:
        raise ValueError(
          f"vectors.Config.length: expected sentences of {side} in"
          f" {config.length} tokens, got none: give a larger one, or another victim"
        )
    self.vectors = self._encoded(self.text.tokens)
    self.planted = self._plant()

  def _sides(self, clients: dict[str, str]) -> tuple[_Text, _Text]:
    """Returns the attacker's text and the victim's; they share no sentence."""
    config, sides = self.config, []
    rng = np.random.default_rng(config.seed)
    folded = {s.casefold() for s, c in clients.items() if c != self.victim}
    for is_victim, size in (
      (False, config.num_sentences),
      (True, config.num_victims),
    ):
      chosen = [
        sentence
        for sentence, client in clients.items()
        if (client == self.victim) == is_victim
        and not (is_victim and sentence.casefold() in folded)
      ]
      rng.shuffle(chosen)
      # Most are too long, and tokenizing takes time.
      chosen = chosen[: 8 * size]
      tokens = vocabulary.tokenize(self.vocab, chosen, length=config.length + 1)
      fit = np.flatnonzero(tokens[:, -1] == 0)[:size]
      texts = tuple(chosen[i] for i in fit)
      sides.append(_Text(texts, tokens[fit, : config.length]))
    return sides[0], sides[1]

  def _encoded(self, tokens: np.ndarray) -> np.ndarray:
    if self._encoder is None:
      return encode.encode(self._params, self._model, tokens)
    return self._encoder.encode(list(map(self._text_of, tokens)))

  def _text_of(self, tokens: np.ndarray) -> str:
    return self.vocab.decode([int(token) for token in tokens if token])

  def _made(
    self, text: _Text, kind: str, number: int, seed: int
  ) -> Sequence[canaries.Canary]:
    return canaries.make(
      text.sentences,
      self.vocab,
      number=number,
      kinds=(_KINDS[kind],),
      repetitions=(1,),
      digits=4,
      seed=[seed, *kind.encode()],
    )

  def _plant(self) -> dict[str, tuple[vector_secrets.Planted, np.ndarray]]:
    """Returns secrets of each kind, and the vectors of all their candidates."""
    config, planted = self.config, {}
    for number, kind in enumerate(_KINDS):
      secrets = vector_secrets.plant(
        self._made(self.text, kind, config.num_secrets, config.seed),
        self.vocab,
        length=config.length,
        num_candidates=config.num_candidates,
        seed=[config.seed, number],
      )
      flat = self._encoded(secrets.rows.reshape(-1, config.length))
      planted[kind] = secrets, flat.reshape(*secrets.rows.shape[:2], -1)
    return planted

  def nearest(self, kind: str, noise: float) -> Nearest:
    vectors = self.planted[kind][1]
    sent = inversion.send(noise, vectors[:, 0], jax.random.key(5))
    own, other = (
      vector_secrets.recovery(vector_secrets.nearest(one, vectors))
      for one in (sent, sent[vector_secrets.others(len(sent), 1)])
    )
    shares = [
      vector_bounds.success(
        num_candidates=vectors.shape[1],
        radius=float(radius),
        standard_deviation=noise,
      )
      for radius in vector_bounds.enclosing_radius(vectors)
    ]
    return Nearest(
      kind=kind, noise=noise, own=own, other=other, bound=np.mean(shares).item()
    )

  @functools.cached_property
  def _training_set(self) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and vectors of the attacker, with secrets that it made up."""
    rows, config = [self.attacker.tokens], self.config
    number = int(_MADE_UP * len(rows[0]))
    for kind in _KINDS:
      sides = canaries.tokenize(
        self._made(self.attacker, kind, number, config.seed + 1),
        self.vocab,
        prefix="",
        document_length=1,
        query_length=config.length,
      )
      rows.append(sides["targets"])
    tokens = np.concatenate(rows)
    return tokens, self._encoded(tokens)

  def _fit(self, name: str, start, noise: float | None, steps: int):
    """Trains a decoder, or reads what is finished of it."""
    config, (tokens, vectors) = self.config, self._training_set
    place = self._states / artifacts.fingerprint(
      name,
      self.digest,
      self.victim,
      tokens.tolist(),
      (steps, config.language_steps, config.batch_size, config.memories),
      (config.learning_rate, config.seed),
    )
    sent = inversion.send(noise, vectors, jax.random.key(1))
    return inversion.train(
      self._inverter,
      self._inverter.init(start, sent, jax.random.key(2)),
      vectors,
      tokens,
      noise=noise,
      recipe=recipe_lib.Recipe(
        steps=steps,
        batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        warmup_steps=min(50, steps // 4),
        seed=config.seed,
        settings=self._settings,
      ),
      files=loop.Files.below(place, name),
    )

  @functools.cached_property
  def _inverter(self) -> inversion.Inverter:
    return inversion.Inverter(
      model=self._model,
      vector_dim=self.vectors.shape[1],
      memories=self.config.memories,
    )

  @functools.cached_property
  def _language(self):
    steps = self.config.language_steps
    return self._fit("language", self._params, None, steps)

  @functools.cached_property
  def _hidden(self):
    return self._fit("hidden", self._language, None, self.config.steps)

  def level(self, noise: float) -> Level:
    """Trains the decoder of an amount of noise, and has it read."""
    decoders = inversion_measures.Decoders(
      inverter=self._inverter,
      params=self._fit(
        f"noise_{noise}", self._language, noise, self.config.steps
      ),
      hidden=self._hidden,
      noise=noise,
    )
    return Level(
      noise=noise,
      reading=inversion_measures.reading(
        decoders,
        self.vectors,
        self.text.tokens,
        to_text=self.vocab.decode,
        key=jax.random.key(4),
      ),
      bits=vector_bounds.information_bits(
        dim=self.vectors.shape[1], radius=1, standard_deviation=noise
      ),
      secrets={
        kind: inversion_measures.read_secrets(
          decoders, secrets, candidates, key=jax.random.key(5)
        )
        for kind, (secrets, candidates) in self.planted.items()
      },
      shown=self._shown(decoders),
    )

  def _shown(
    self, decoders: inversion_measures.Decoders
  ) -> tuple[tuple[str, ...], ...]:
    number = min(self.config.num_shown, len(self.vectors))
    if not number:
      return ()
    vectors = self.vectors[:number]
    sent = inversion.send(decoders.noise, vectors, jax.random.key(3))
    written = inversion.write(
      decoders.inverter, decoders.params, sent, max_length=self.config.length
    )
    return tuple(
      (sentence, self._text_of(row))
      for sentence, row in zip(self.text.sentences, written, strict=False)
    )


def _jobs(task: frame.Task, attack: _Attack) -> list[frame.Job]:
  """Lists the attack without training, then a decoder for each noise."""
  config = task.config
  # What a result depends on beside its own noise and the source's content.
  alone = dataclasses.replace(
    config, source="", victim=attack.victim, noise=(), decoders=True,
    public_data=False,
  )  # fmt: skip

  def job(kind: type, name: str, make, *arguments) -> frame.Job:
    digest = artifacts.fingerprint("vectors", attack.digest, alone, name)
    return frame.Job(
      directory=task.root / "attacks" / name,
      kind=kind,
      digest=digest,
      make=functools.partial(make, *arguments),
    )

  listed = [
    job(Nearest, f"nearest_{kind}_{noise:g}", attack.nearest, kind, noise)
    for kind in _KINDS
    for noise in config.noise
  ]
  if config.decoders:
    listed += [
      job(Level, f"decoder_{noise:g}", attack.level, noise)
      for noise in config.noise
    ]
  return listed


def _result(
  task: frame.Task, attack: _Attack, found: Sequence[Nearest | Level]
) -> Study:
  return Study(
    victim=attack.victim,
    num_read=len(attack.text.tokens),
    num_attackers=len(attack.attacker.tokens),
    num_candidates=task.config.num_candidates,
    num_secrets=task.config.num_secrets,
    nearest=tuple(one for one in found if isinstance(one, Nearest)),
    levels=tuple(one for one in found if isinstance(one, Level)),
  )


def _page(study: Study) -> blocks.Page:
  nearest = tables.of(
    study.nearest,
    {
      "Secret": lambda one: one.kind,
      "Noise": lambda one: f"{one.noise:g}",
      "Named": lambda one: f"{one.own.first:.2f}",
      "Mean rank": lambda one: f"{one.own.mean_rank:.1f}",
      "Other vector": lambda one: f"{one.other.first:.2f}",
      "No attacker exceeds": lambda one: f"{one.bound:.3f}",
    },
  )
  parts = [frame.part("Nearest candidate", _WORDS("nearest"), nearest)]
  if study.levels:
    parts += _decoded(study)
  return blocks.Page(
    title="Secrets in exchanged vectors",
    introduction=(_WORDS("setting", study=study),),
    parts=tuple(parts),
  )


def _decoded(study: Study) -> list[blocks.Part]:
  def three(name: str, form: str):
    """Writes a figure with the vector, without it, and with another's."""
    return lambda level: ", ".join(
      format(getattr(level.reading, f"{name}{end}"), form)
      for end in ("", "_hidden", "_other")
    )

  noise = {"Noise": lambda level: f"{level.noise:g}"}
  reading = {
    "Perplexity": three("perplexity", ".1f"),
    "BLEU": three("bleu", ".1f"),
    "Bits": lambda level: f"{level.reading.bits:.1f}",
    "No attacker exceeds": lambda level: f"{level.bits:.1f}",
  }
  secrets = {}
  for kind in _KINDS:
    for title, name in (("first", "likelihood"), ("written", "written")):
      secrets[f"{kind} {title}"] = _share(kind, name)
      secrets[f"{kind} {title}, other"] = _share(kind, f"{name}_other")
  parts = [
    frame.part(
      "A decoder's reading",
      _WORDS("reading", study=study),
      tables.of(study.levels, noise | reading),
    ),
    frame.part(
      "Secrets read by a decoder",
      _WORDS("secrets"),
      tables.of(study.levels, noise | secrets),
    ),
  ]
  rows = [(level, *pair) for level in study.levels for pair in level.shown]
  if rows:
    columns = {
      "Noise": lambda row: f"{row[0].noise:g}",
      "True": lambda row: row[1],
      "Read": lambda row: row[2],
    }
    shown = tables.of(rows, columns, left=tuple(columns))
    parts.append(frame.part("Sentences", _WORDS("shown"), shown))
  return parts


def _share(kind: str, name: str):
  def written(level: Level) -> str:
    found = getattr(level.secrets[kind], name)
    return f"{getattr(found, 'first', found):.2f}"

  return written


STUDY = frame.Study(
  config=Config,
  prepare=_Attack,
  jobs=_jobs,
  result=_result,
  page=_page,
  num_shown=3,
  digests=lambda attack: (attack.digest,),
)
