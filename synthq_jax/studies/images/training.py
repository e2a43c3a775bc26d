"""Trains one image encoder on pairs, and scores it on public test images."""

import dataclasses
import functools
import hashlib
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int32

from synthq_jax import field_kinds, optim
from synthq_jax.data import images
from synthq_jax.losses import contrastive
from synthq_jax.privacy import claim as claim_lib
from synthq_jax.privacy import ledger, sampling, terms
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.retrieval import neighbours
from synthq_jax.runtime import fingerprints, private_training, workspace
from synthq_jax.runtime import release as release_lib
from synthq_jax.storage import artifacts
from synthq_jax.studies import frame
from synthq_jax.training import heads, image_pairs, loop

__all__ = ["UNTRAINED", "Data", "Study", "Trainer", "Training", "claim", "read"]

UNTRAINED = "untrained"
"""The row of the initial weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
  """One encoder, trained once and scored on the public test images."""

  encoder: str
  """Name of the encoder's configuration."""
  row: str
  """Name of the method's configuration; "untrained" for the initial weights."""
  seed: int
  """Of the initial weights; also tells the secrets apart."""
  statement: statement_lib.PrivacyStatement
  """What may be claimed about the encoder."""
  num_parameters: int
  """All of them trained."""
  steps: int
  """Noisy sums, one for each batch."""
  batch_size: int
  """Expected pairs of a batch."""
  max_batch_size: int
  """Pairs of a batch with padding."""
  noise_multiplier: float
  """Noise over sensitivity; 0 without noise."""
  l2_sensitivity: float
  """Of the clipped sum when one pair comes or goes; 0 without clipping."""
  l2_clip_norm: float
  """0 without clipping."""
  neighbours: neighbours.Scores
  """Of the nearest test images' labels."""
  coarse: neighbours.Scores
  """Of a head on the frozen vectors."""
  curve_steps: tuple[int, ...]
  """Where the loss was written down."""
  curve_losses: tuple[float, ...]
  """Mean loss of the held-out pairs in the steps before."""
  examples_per_second: float
  """Pairs a second, compiling aside; nan if it was not timed."""
  seconds: float
  """How long it took, compiling included."""
  accumulation: int = field_kinds.later(1)
  """Batches whose gradients make one step of Adam."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """All trainings of a study."""

  source: str
  """Which images."""
  num_pairs: int
  """Private pairs n."""
  num_test: int
  """Public test images."""
  epsilon: float
  """The target of each private training."""
  delta: float
  """Of each private training."""
  neighbours: int
  """Nearest neighbours of each test image that count."""
  head: str
  """What the head was trained and scored on, in one sentence."""
  trainings: tuple[Training, ...]
  """By encoder, row and seed."""
  seconds: float
  """Of all trainings, whenever they ran."""


@dataclasses.dataclass(frozen=True)
class Data:
  """Images of one size.

  Attributes:
    train: private.
    test: public.
    head: what the head learns on and is tested on, public.
    num_coarse: coarse classes of `head`.
    pairs: rows of `train`.
    held_out: public pairs, "queries" and "documents".
    digest: of all of it, the private pairs too: not to be shared as it is.
  """

  train: images.Images
  test: images.Images
  head: tuple[images.Images, images.Images]
  num_coarse: int
  pairs: Int32[np.ndarray, "pair 2"]
  held_out: dict[str, np.ndarray]
  digest: str


def read(config: Any) -> dict[int | None, Data]:
  """Reads, pairs and digests the images, in the size of every encoder.

  Args:
    config: an `images.Config`.

  Returns:
    By `Encoder.image_size`.
  """
  if not config.encoders:
    raise ValueError(
      "images.Config.encoders must hold at least one images.Encoder, got ()"
    )
  train, test = images.load(
    config.source, seed=config.seed, data_dir=config.data_dir
  )
  head = None
  if config.head_source is not None:
    head = images.load(config.head_source, data_dir=config.data_dir)
  sizes = dict.fromkeys(encoder.image_size for encoder in config.encoders)
  return {size: _sized(config, size, train, test, head) for size in sizes}


def _sized(
  config: Any,
  size: int | None,
  train: images.Images,
  test: images.Images,
  head: tuple[images.Images, images.Images] | None,
) -> Data:
  train, test = _resized(train, size), _resized(test, size)
  if head is None:
    head = images.split(test, test_share=0.5, seed=config.seed)
  learned, tested = (_resized(part, size) for part in head)
  public = images.pairs(test.labels, seed=config.seed)
  pairs = images.pairs(train.labels, seed=config.seed)
  return Data(
    train=train,
    test=test,
    head=(learned, tested),
    num_coarse=len(images.COARSE[config.head_source or config.source]),
    pairs=pairs,
    held_out=_sides(test, public[: config.held_out_pairs]),
    digest=_digest(train, test, learned, tested, pairs),
  )


def _sides(
  part: images.Images, pairs: Int32[np.ndarray, "pair 2"]
) -> dict[str, np.ndarray]:
  """Returns the first images of pairs as queries, the second as documents."""
  return {
    "queries": part.pixels[pairs[:, 0]],
    "documents": part.pixels[pairs[:, 1]],
  }


def _resized(part: images.Images, size: int | None) -> images.Images:
  if size is None or part.pixels.shape[1:3] == (size, size):
    return part
  shape = (len(part), size, size, part.pixels.shape[-1])
  pixels = jax.image.resize(jnp.asarray(part.pixels), shape, "bilinear")
  return dataclasses.replace(part, pixels=np.asarray(pixels))


def _digest(*parts: Any) -> str:
  found = hashlib.sha256()
  for part in parts:
    is_array = isinstance(part, np.ndarray)
    for values in [part] if is_array else dataclasses.astuple(part):
      found.update(f"{values.dtype} {values.shape}".encode())
      found.update(np.ascontiguousarray(values).data)
  return found.hexdigest()[:16]


def claim(
  grad_fn: optim.ContrastiveGrad | None,
  *,
  sampler: sampling.Poisson,
  epsilon: float,
  delta: float | None,
  steps: int,
  is_fixed: bool,
) -> claim_lib.Claim:
  """Returns the promise of a training, with the least noise for its target.

  Formal guarantee: that of `claim.Claim`, for one pair of images that is added
  or removed, and noise on each of `steps` sums of `grad_fn` over batches of
  `sampler`.

  Args:
    grad_fn: clips; None where nothing is clipped and nothing is claimed.
    sampler: draws the batches.
    epsilon: the target, finite.
    delta: the target; None: 1 / (2n).
    steps: noisy sums.
    is_fixed: whether the secret is known to everybody.

  Raises:
    ValueError: if accounting refuses.
  """
  if grad_fn is None:
    return claim_lib.Claim(
      sampler=sampler,
      steps=steps,
      noise_multiplier=0.0,
      l2_clip_norm=0.0,
      words=terms.IMAGE_PAIRS,
    )
  is_whole = isinstance(grad_fn.method, optim.Batch)
  return claim_lib.calibrated(
    epsilon=epsilon,
    sampler=sampler,
    steps=steps,
    l2_clip_norm=grad_fn.l2_clip_norm,
    l2_sensitivity=grad_fn.sensitivity("ADD_OR_REMOVE_ONE", "pair"),
    delta=delta,
    words=terms.IMAGE_PAIRS.but(
      mechanism="batch" if is_whole else "logit", secret_is_fixed=is_fixed
    ),
  )


@dataclasses.dataclass(frozen=True)
class Trainer:
  """Trains one row with one seed, and scores it.

  Attributes:
    config: an `images.Config`.
    encoder: one of its encoders.
    row: one of the encoder's rows; None for the untrained weights.
    seed: of the repetition.
    space: the working directory, with its secret.
    data: the images in the encoder's size.
  """

  config: Any
  encoder: Any
  row: Any
  seed: int
  space: workspace.Workspace
  data: Data

  @property
  def name(self) -> str:
    return UNTRAINED if self.row is None else self.row.name

  @property
  def stage(self) -> str:
    return f"trainings/{self.encoder.name}/{self.name}_seed{self.seed}"

  @property
  def is_private(self) -> bool:
    return self.row is not None and self.row.method is not None

  @functools.cached_property
  def digest(self) -> str:
    """Of everything the training depends on, and no other row.

    It stands in names and results that may be shared, so it is keyed: without
    the secret it confirms no guess about the pairs.
    """
    measured = dataclasses.replace(self.config, encoders=())
    alone = dataclasses.replace(self.encoder, rows=(), seeds=1)
    return artifacts.fingerprint(
      "image_study",
      measured,
      alone,
      self.row,
      self.seed,
      self.data.digest,
      self.space.seed("digest"),
      fingerprints.versions(),
    )

  @property
  def sampler(self) -> sampling.Poisson:
    return sampling.Poisson.with_margin(
      num_examples=len(self.data.pairs),
      expected_batch_size=self.encoder.batch_size,
    )

  def job(self) -> frame.Job:
    """Returns the training with its place and fingerprint."""
    digest, folders = self.digest, self.space
    # A result without privacy is as private as the pairs.
    may_be_shared = self.row is None or self.is_private
    place = folders.public if may_be_shared else folders.private
    return frame.Job(
      directory=place(self.stage),
      kind=Training,
      digest=digest,
      make=self._make,
      state=private_training.state_directory(folders, self.stage, digest),
    )

  def _make(self) -> Training:
    start = time.monotonic()
    net = self.encoder.build()
    key = jax.random.fold_in(jax.random.key(self.config.seed), self.seed)
    params = jax.jit(net.init)(key, jnp.asarray(self.data.test.pixels[:1]))
    facts: dict[str, Any] = _UNTRAINED_FACTS
    if self.row is not None:
      params, facts = self._train(net, params)
    return Training(
      encoder=self.encoder.name,
      row=self.name,
      seed=self.seed,
      num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
      batch_size=self.encoder.batch_size,
      max_batch_size=self.sampler.max_batch_size,
      **_scores(net, params, self.data, self.config),
      **facts,
      seconds=time.monotonic() - start,
    )

  def _train(self, net: Any, params: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the parameters, and what is to be said of how they were made."""
    config, encoder, row = self.config, self.encoder, self.row
    grad_fn = _clipped(net, row, self.sampler.max_batch_size)
    promise = claim(
      grad_fn if self.is_private else None,
      sampler=self.sampler,
      epsilon=config.epsilon,
      delta=config.delta,
      steps=encoder.steps,
      is_fixed=self.space.is_fixed,
    )
    release = self.release(promise)
    statement = promise.enter(
      self.space.private(ledger.NAME), release.identifier
    )
    metrics_path = self.space.private(
      self.stage, f"metrics_{self.digest}.jsonl"
    )
    trained = image_pairs.train(
      grad_fn,
      functools.partial(self._optimizer, grad_fn, promise.noise_multiplier),
      release.noise_key,
      params,
      _sides(self.data.train, self.data.pairs),
      loop.Files(
        directory=self.job().state,
        metrics_path=metrics_path,
        description=f"{encoder.name} {self.name} {self.seed}",
      ),
      is_private=self.is_private,
      held_out=self.data.held_out,
      held_out_loss=contrastive.Softmax(
        temperature=config.held_out_temperature
      ),
      sampler=self.sampler,
      steps=encoder.steps,
      batch_seed=release.batch_seed,
      settings=config.settings,
    )
    lines = list(map(json.loads, metrics_path.read_text().splitlines()))
    return trained.params, {
      "statement": statement,
      "steps": encoder.steps,
      "accumulation": row.accumulation,
      "noise_multiplier": promise.noise_multiplier,
      "l2_sensitivity": promise.l2_sensitivity,
      "l2_clip_norm": row.clip_norm if self.is_private else 0.0,
      "curve_steps": tuple(line["step"] for line in lines),
      "curve_losses": tuple(line["loss"] for line in lines),
      "examples_per_second": trained.examples_per_second,
    }

  def release(self, promise: claim_lib.Claim) -> release_lib.Release:
    """Starts the training, or goes on with it."""
    return release_lib.start(
      self.space,
      self.stage,
      self.digest,
      directory=self.job().state,
      program=fingerprints.program({}, None),  # all settings are in the digest
      promise=private_training.promised(promise),
    )

  def _optimizer(
    self,
    grad_fn: optim.ContrastiveGrad,
    noise_multiplier: float,
    noise_key: jax.Array,
  ) -> optax.GradientTransformation:
    """Adam: on the private mean, or on the plain one.

    Each of several batches gets noise of its own before they are averaged:
    post-processing of as many releases.
    """
    batches, size = self.row.accumulation, float(self.encoder.batch_size)
    steps = self.encoder.steps // batches
    adam = optax.adam(
      optim.schedules.linear(
        self.row.learning_rate, steps=steps, warmup_steps=steps // 10
      )
    )
    if batches > 1:
      adam = optax.MultiSteps(adam, batches).gradient_transformation()
    if not self.is_private:
      return optax.chain(optax.scale(1 / size), adam)
    is_one = isinstance(self.row.method, optim.Batch)
    private = optim.logit_dp(
      grad_fn,
      relation="ADD_OR_REMOVE_ONE",
      unit="pair",
      noise_multiplier=noise_multiplier,
      denominator=1.0 if is_one else size,
      key=noise_key,
    )
    return optax.chain(private, adam)


_UNTRAINED_FACTS = {
  "statement": statement_lib.none(unit=terms.IMAGE_PAIRS.unit),
  "steps": 0,
  "noise_multiplier": 0.0,
  "l2_sensitivity": 0.0,
  "l2_clip_norm": 0.0,
  "curve_steps": (),
  "curve_losses": (),
  "examples_per_second": float("nan"),
}


def _clipped(net: Any, row: Any, max_batch_size: int) -> optim.ContrastiveGrad:
  """Returns the row's clipped gradient; without privacy its loss is used."""
  loss = row.loss
  if isinstance(loss, contrastive.Spreadout) and loss.max_batch_size is None:
    # A constant divisor needs less noise than the realised n - 1.
    loss = dataclasses.replace(loss, max_batch_size=max_batch_size)
  return optim.contrastive_clipped_grad(
    net.apply,
    net.apply,
    loss=loss,
    l2_clip_norm=row.clip_norm,
    method=row.method or optim.Batch(),
    max_batch_size=max_batch_size,
  )


def _scores(net: Any, params: Any, data: Data, config: Any) -> dict[str, Any]:
  """Scores vectors of public images: their neighbours, and a head."""
  apply = jax.jit(net.apply)

  def encode(part: Any) -> np.ndarray:
    return np.asarray(apply(params, part.pixels))

  scores = neighbours.score(
    encode(data.test),
    data.test.labels,
    k=config.neighbours,
    num_classes=int(data.test.labels.max()) + 1,
  )
  learned, tested = data.head
  fit = heads.fit
  if config.head_layers:
    fit = functools.partial(
      heads.fit_layers, hidden=config.head_layers, epochs=config.head_epochs
    )
  head = fit(
    encode(learned), learned.coarse_labels, num_classes=data.num_coarse
  )
  counts = neighbours.confusion(
    tested.coarse_labels, heads.predict(head, encode(tested)), data.num_coarse
  )
  return {"neighbours": scores, "coarse": neighbours.scores_of(counts)}
