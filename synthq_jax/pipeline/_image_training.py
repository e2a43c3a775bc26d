"""One training of the study of image encoders, and its scores."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from synthq_jax import artifacts, optim
from synthq_jax.losses import contrastive
from synthq_jax.pipeline import (
  _fingerprints,
  _image_data,
  _image_privacy,
  _image_results,
  _release,
  private_training,
  workspace,
)
from synthq_jax.privacy import sampling
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.retrieval import neighbours
from synthq_jax.training import image_pairs, linear_head

__all__ = ["UNTRAINED", "of_encoder"]

UNTRAINED = "untrained"
"""The row of the initial weights."""


def of_encoder(
  config: Any, encoder: Any, space: workspace.Workspace, data: _image_data.Data
) -> Iterator[_image_results.Training]:
  """Yields the untrained weights' scores, then every row's, seed by seed.

  Args:
    config: an `image_study.Config`.
    encoder: one of its `image_study.Encoder`s.
    space: the working directory.
    data: the images in the encoder's size.
  """
  for row in (None, *encoder.rows):
    for seed in range(encoder.seeds):
      yield _Job(config, encoder, row, seed, space, data).finished()


@dataclasses.dataclass(frozen=True)
class _Job:
  """One row and seed; `row` is None for the untrained weights."""

  config: Any
  encoder: Any
  row: Any
  seed: int
  space: workspace.Workspace
  data: _image_data.Data

  @property
  def name(self) -> str:
    return UNTRAINED if self.row is None else self.row.name

  @property
  def stage(self) -> str:
    return f"trainings/{self.encoder.name}/{self.name}_seed{self.seed}"

  @property
  def is_private(self) -> bool:
    return self.row is not None and self.row.method is not None

  @property
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
      _fingerprints.versions(),
    )

  @property
  def directory(self) -> pathlib.Path:
    """A result without privacy is as private as the pairs."""
    if self.row is None or self.is_private:
      return self.space.public(self.stage)
    return self.space.private(self.stage)

  @property
  def state(self) -> pathlib.Path:
    return private_training.state_directory(self.space, self.stage, self.digest)

  @property
  def sampler(self) -> sampling.Poisson:
    return sampling.Poisson.with_margin(
      num_examples=len(self.data.pairs),
      expected_batch_size=self.encoder.batch_size,
    )

  def finished(self) -> _image_results.Training:
    """Trains and scores, or reads what is finished."""
    if artifacts.read_fingerprint(self.directory) == self.digest:
      return artifacts.load(self.directory, _image_results.Training)
    start = time.monotonic()
    net = self.encoder.build()
    key = jax.random.fold_in(jax.random.key(self.config.seed), self.seed)
    params = jax.jit(net.init)(key, jnp.asarray(self.data.test.pixels[:1]))
    facts: dict[str, Any] = _UNTRAINED_FACTS
    if self.row is not None:
      params, facts = self._train(net, params)
    result = _image_results.Training(
      encoder=self.encoder.name,
      row=self.name,
      seed=self.seed,
      num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
      batch_size=self.encoder.batch_size,
      max_batch_size=self.sampler.max_batch_size,
      **_scores(net, params, self.data, self.config.neighbours),
      **facts,
      seconds=time.monotonic() - start,
    )
    artifacts.save(self.directory, result, self.digest)
    private_training.remove_state(self.space, self.stage, self.digest)
    return result

  def _train(self, net: Any, params: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the parameters, and what is to be said of how they were made."""
    config, encoder, row = self.config, self.encoder, self.row
    grad_fn = _clipped(net, row, self.sampler.max_batch_size)
    release = self.release()
    claim = _image_privacy.claim(
      grad_fn if self.is_private else None,
      sampler=self.sampler,
      epsilon=config.epsilon,
      delta=config.delta,
      steps=encoder.steps,
      is_fixed=self.space.is_fixed,
    )
    statement = claim.enter(
      self.space.private(private_training.LEDGER), release.identifier
    )
    metrics_path = self.space.private(
      self.stage, f"metrics_{self.digest}.jsonl"
    )
    trained = image_pairs.train(
      grad_fn,
      self._optimizer(grad_fn, claim.noise_multiplier, release.noise_key),
      params,
      _image_data.sides(self.data.train, self.data.pairs),
      is_private=self.is_private,
      held_out=self.data.held_out,
      held_out_loss=contrastive.Softmax(
        temperature=config.held_out_temperature
      ),
      sampler=self.sampler,
      steps=encoder.steps,
      batch_seed=release.batch_seed,
      directory=self.state,
      metrics_path=metrics_path,
      description=f"{encoder.name} {self.name} {self.seed}",
      settings=config.settings,
    )
    lines = list(map(json.loads, metrics_path.read_text().splitlines()))
    return trained.params, {
      "statement": statement,
      "steps": encoder.steps,
      "noise_multiplier": claim.noise_multiplier,
      "l2_sensitivity": claim.l2_sensitivity,
      "l2_clip_norm": row.clip_norm if self.is_private else 0.0,
      "curve_steps": tuple(line["step"] for line in lines),
      "curve_losses": tuple(line["loss"] for line in lines),
      "examples_per_second": trained.examples_per_second,
    }

  def release(self) -> _release.Release:
    """Starts the training, or goes on with it."""
    return _release.start(
      self.space,
      self.stage,
      self.digest,
      directory=self.state,
      program=_fingerprints.program({}, None),  # all settings are in the digest
    )

  def _optimizer(
    self,
    grad_fn: optim.ContrastiveGrad,
    noise_multiplier: float,
    noise_key: jax.Array,
  ) -> optax.GradientTransformation:
    """Adam: on the private mean, or on the plain one."""
    steps, size = self.encoder.steps, float(self.encoder.batch_size)
    schedule = optim.schedules.linear(
      self.row.learning_rate, steps=steps, warmup_steps=steps // 10
    )
    if not self.is_private:
      return image_pairs.plain_adam(schedule, denominator=size)
    is_one = isinstance(self.row.method, optim.Batch)
    private = optim.logit_dp(
      grad_fn,
      relation="ADD_OR_REMOVE_ONE",
      unit="pair",
      noise_multiplier=noise_multiplier,
      denominator=1.0 if is_one else size,
      key=noise_key,
    )
    return optax.chain(private, optax.adam(schedule))


_UNTRAINED_FACTS = {
  "statement": statement_lib.none(unit=_image_privacy.UNIT),
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


def _scores(
  net: Any, params: Any, data: _image_data.Data, k: int
) -> dict[str, Any]:
  """Scores vectors of public images: their neighbours, and a linear head."""
  apply = jax.jit(net.apply)

  def encode(part: Any) -> np.ndarray:
    return np.asarray(apply(params, part.pixels))

  scores = neighbours.score(
    encode(data.test),
    data.test.labels,
    k=k,
    num_classes=int(data.test.labels.max()) + 1,
  )
  learned, tested = data.head
  head = linear_head.fit(
    encode(learned), learned.coarse_labels, num_classes=data.num_coarse
  )
  right = linear_head.predict(head, encode(tested)) == tested.coarse_labels
  return {"neighbours": scores, "coarse_accuracy": float(np.mean(right))}
