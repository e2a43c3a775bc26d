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

__all__ = ["UNTRAINED", "Data", "Study", "Trainer", "Training", "read"]

UNTRAINED = "untrained"
"""Name of the row of the initial weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
  """One encoder, trained once and scored on the public test images."""

  encoder: str
  """Name of the encoder's configuration."""
  row: str
  """Name of the method's configuration; "untrained" for the initial weights."""
  seed: int
  """Seed of the initial weights; also distinguishes the secrets."""
  statement: statement_lib.PrivacyStatement
  """Privacy statement of the encoder."""
  num_parameters: int
  """Number of parameters."""
  steps: int
  """Number of noisy sums, one for each batch."""
  batch_size: int
  """Expected pairs of a batch."""
  max_batch_size: int
  """Pairs of a batch with padding."""
  noise_multiplier: float
  """Standard deviation of the noise over the sensitivity; 0 without noise."""
  l2_sensitivity: float
  """L2 sensitivity of the clipped sum to adding or removing one pair; 0 without
  clipping."""
  l2_clip_norm: float
  """L2 clip norm; 0 without clipping."""
  neighbours: neighbours.Scores
  """Scores of the labels of each test image's nearest test images; there is no vote."""
  coarse: neighbours.Scores
  """Scores of a head on the frozen vectors."""
  curve_steps: tuple[int, ...]
  """Steps at which the loss was logged."""
  curve_losses: tuple[float, ...]
  """Mean loss of the held-out pairs since the previous logged step."""
  examples_per_second: float
  """Pairs a second without compiling; nan for an untimed training."""
  seconds: float
  """Seconds of the run that finished it, compiling and scoring included."""
  accumulation: int = field_kinds.later(1)
  """Batches whose gradients make one step of Adam."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """All trainings of a study."""

  source: str
  """Name of the images' source."""
  num_pairs: int
  """Number of private pairs, n."""
  num_test: int
  """Number of public test images."""
  epsilon: float
  """Target epsilon of each private training."""
  delta: float
  """Target delta of each private training."""
  neighbours: int
  """Number of nearest neighbours of each test image that count."""
  head: str
  """Train and test images of the head, in words."""
  trainings: tuple[Training, ...]
  """Trainings by encoder, row and seed."""
  seconds: float
  """Sum of the trainings' `seconds`, those of earlier runs included."""


@dataclasses.dataclass(frozen=True)
class Data:
  """Images of one size.

  Attributes:
    train: private train images.
    test: public test images.
    head: public images that the head learns on, and public images that test it.
    num_coarse: number of coarse classes of `head`.
    pairs: private pairs, as rows of `train`.
    held_out: pixels of public pairs, "queries" and "documents".
    digest: digest of all images and the private pairs; do not share it without
      a key.
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
    Data by `Encoder.image_size`.

  Raises:
    ValueError: if there is no encoder.
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
  return {size: _make_data(config, size, train, test, head) for size in sizes}


def _make_data(
  config: Any,
  size: int | None,
  train: images.Images,
  test: images.Images,
  head: tuple[images.Images, images.Images] | None,
) -> Data:
  train, test = _resize(train, size), _resize(test, size)
  if head is None:
    head = images.split(test, test_share=0.5, seed=config.seed)
  learned, tested = (_resize(part, size) for part in head)
  public = images.pairs(test.labels, seed=config.seed)
  pairs = images.pairs(train.labels, seed=config.seed)
  return Data(
    train=train,
    test=test,
    head=(learned, tested),
    num_coarse=len(images.COARSE[config.head_source or config.source]),
    pairs=pairs,
    held_out=_get_sides(test, public[: config.held_out_pairs]),
    digest=_compute_digest(train, test, learned, tested, pairs),
  )


def _get_sides(
  part: images.Images, pairs: Int32[np.ndarray, "pair 2"]
) -> dict[str, np.ndarray]:
  """Returns pixels of pairs: the first images as queries, the second as documents."""
  return {
    "queries": part.pixels[pairs[:, 0]],
    "documents": part.pixels[pairs[:, 1]],
  }


def _resize(part: images.Images, size: int | None) -> images.Images:
  if size is None or part.pixels.shape[1:3] == (size, size):
    return part
  shape = (len(part), size, size, part.pixels.shape[-1])
  pixels = jax.image.resize(jnp.asarray(part.pixels), shape, "bilinear")
  return dataclasses.replace(part, pixels=np.asarray(pixels))


def _compute_digest(*parts: Any) -> str:
  state = hashlib.sha256()
  for part in parts:
    is_array = isinstance(part, np.ndarray)
    for values in [part] if is_array else dataclasses.astuple(part):
      state.update(f"{values.dtype} {values.shape}".encode())
      state.update(np.ascontiguousarray(values).data)
  return state.hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Trainer:
  """Trains one row with one seed, and scores it.

  Attributes:
    config: an `images.Config`.
    encoder: one of its encoders.
    row: one of the encoder's rows; None for the untrained weights.
    seed: seed of the repetition.
    space: the working directory, with its secret.
    data: images in the encoder's size.
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
    """Fingerprint of everything the training depends on, and of no other row.

    Names and results that may be shared contain it, so it is keyed with the
    secret. Without the secret, it confirms no guess about the pairs.
    """
    measured = dataclasses.replace(self.config, encoders=())
    encoder = dataclasses.replace(self.encoder, rows=(), seeds=1)
    return artifacts.fingerprint(
      "image_study",
      measured,
      encoder,
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
    """Returns the training as a job, with its folder and fingerprint."""
    digest, folders = self.digest, self.space
    # A result without privacy is as private as the pairs.
    may_be_shared = self.row is None or self.is_private
    get_folder = folders.public if may_be_shared else folders.private
    return frame.Job(
      directory=get_folder(self.stage),
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
      **_compute_scores(net, params, self.data, self.config),
      **facts,
      seconds=time.monotonic() - start,
    )

  def _train(self, net: Any, params: Any) -> tuple[Any, dict[str, Any]]:
    """Trains the parameters; returns them and facts about their training."""
    config, encoder, row = self.config, self.encoder, self.row
    grad_fn = _make_clipped(net, row, self.sampler.max_batch_size)
    promise = self.claim(grad_fn)
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
      _get_sides(self.data.train, self.data.pairs),
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

  def claim(self, grad_fn: optim.ContrastiveGrad) -> claim_lib.Claim:
    """Returns the claim of the training, with the least noise for its target.

    Formal guarantee: `claim.Claim`'s, for one pair of images that is added or
    removed. The noise is on each of the encoder's `steps` sums of `grad_fn` over
    batches of `sampler`. Without privacy there is neither noise nor a claim.

    Raises:
      ValueError: if accounting refuses the settings.
    """
    if not self.is_private:
      return claim_lib.Claim(
        sampler=self.sampler,
        steps=self.encoder.steps,
        noise_multiplier=0.0,
        l2_clip_norm=0.0,
        words=terms.IMAGE_PAIRS,
      )
    is_whole = isinstance(grad_fn.method, optim.Batch)
    return claim_lib.calibrated(
      epsilon=self.config.epsilon,
      sampler=self.sampler,
      steps=self.encoder.steps,
      l2_clip_norm=grad_fn.l2_clip_norm,
      l2_sensitivity=grad_fn.sensitivity("ADD_OR_REMOVE_ONE", "pair"),
      delta=self.config.delta,
      words=terms.IMAGE_PAIRS.but(
        mechanism="batch" if is_whole else "logit",
        secret_is_fixed=self.space.is_fixed,
      ),
    )

  def release(self, promise: claim_lib.Claim) -> release_lib.Release:
    """Starts the private training, or resumes it, with the same secret seeds."""
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
    """Returns Adam on the private mean, or on the plain mean without privacy.

    With accumulation, each batch gets its own noise before batches are averaged:
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


def _make_clipped(
  net: Any, row: Any, max_batch_size: int
) -> optim.ContrastiveGrad:
  """Returns the row's clipped gradient; rows without privacy use only its loss."""
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


def _compute_scores(
  net: Any, params: Any, data: Data, config: Any
) -> dict[str, Any]:
  """Scores vectors of public images by their neighbours and by a head."""
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
