"""Pre-trains a T5 on public text: it reads, copies, names and compares.

Two uses: from scratch, which made the checkpoint that is shipped
(gin_configs/recipes/pretrain_large.gin), and as the first stage of a run, going
on from a checkpoint with the user's own public documents. It sees public text
only, so its statement is that no private record was read.
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from synthq_jax import artifacts
from synthq_jax.data import pretrain_tasks, public_text
from synthq_jax.losses import contrastive, seq2seq
from synthq_jax.models import (
  copy_circuit,
  dual_encoder,
  t5,
  t5_checkpoints,
  t5_config,
)
from synthq_jax.pipeline import inputs, results
from synthq_jax.stages import stage
from synthq_jax.training import loop

__all__ = [
  "STAGE",
  "Config",
  "Phase",
  "examples",
  "fresh",
  "run",
  "train",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
  """A part of the curriculum: short inputs first, longer ones later."""

  steps: int
  """Optimizer steps."""
  input_length: int
  """Tokens of the input, prefix and EOS included."""
  target_length: int
  """Tokens of the target, EOS included."""
  tasks: tuple[str, ...]
  """Tasks of `pretrain_tasks`, those of the contrastive loss first."""
  batch_sizes: tuple[int, ...]
  """Examples of each task in a batch."""
  rates: tuple[float, ...] = (1.0, 0.0)
  """Factor of the learning rates at the start and at the end, linear between.

  High rates keep undoing the copying that short inputs taught: lower them
  before the inputs grow (docs/experiments)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What is learned in which order, and how."""

  phases: tuple[Phase, ...] = ()
  """The curriculum; without phases a run skips this stage."""
  from_scratch: None = dataclasses.field(default=None, init=False, repr=False)
  """Gone; named for fingerprints of what was pre-trained while it was there."""
  learning_rate: float = 0.02
  """Of Muon, for the kernels."""
  other_learning_rate: float = 0.003
  """Of Adam, for the embedding, biases and scales."""
  warmup_steps: int = 50
  """Linear warm-up at the start of the first phase."""
  contrastive_weight: float = 0.1
  """Weight of the loss that tells the targets' own inputs apart."""
  contrastive_tasks: tuple[str, ...] = (
    "question",
    "summary",
    "rule",
    "heading",
    "sentence",
    "keywords",
  )
  """Tasks whose target and input are a public pair of texts."""
  temperature: float = 0.05
  """Of the contrastive softmax."""
  seed: int = 0
  """Windows, gaps and the order of the examples."""
  settings: loop.Settings = artifacts.speed_only(make=loop.Settings)
  """Saving and reporting."""

  def __post_init__(self):
    for phase in self.phases:
      if len(phase.tasks) != len(phase.batch_sizes):
        raise ValueError(
          "Phase.batch_sizes must name a size for each task, got"
          f" {phase.batch_sizes} for {phase.tasks}"
        )
      if len(phase.rates) != 2:
        raise ValueError(
          "Phase.rates must be the factors at start and end, got"
          f" rates={phase.rates}"
        )
      shortest = pretrain_tasks.SHORTEST_FILL
      if "fill" in phase.tasks and phase.target_length < shortest:
        raise ValueError(
          f"Phase.target_length must be at least {shortest} for the task 'fill',"
          f" got {phase.target_length}"
        )

  def check_sentinels(self, extra_ids: int) -> None:
    """Refuses gaps to fill where the vocabulary has no ids that mark them."""
    if not extra_ids and any("fill" in phase.tasks for phase in self.phases):
      raise ValueError(
        "Phase.tasks has 'fill', which needs sentinels, got extra_ids=0: set"
        " extra_ids, or leave 'fill' out"
      )


def jobs(run):
  """Yields one checkpoint where a curriculum is given."""
  config = run.config.pretrain
  if config.phases:
    yield stage.Job(depends=(config, *run.data), settings=config)


def run(task: stage.Task) -> results.Checkpoint:
  """Goes on with the user's own public documents.

  Args:
    task: its inputs are "documents", the public collection, and "start", the
      folder of a public checkpoint.

  Returns:
    A public checkpoint.
  """
  config, space = task.settings, task.folders
  documents = task.inputs["documents"]
  vocabulary = inputs.vocabulary(space, documents)
  passages = [
    passage
    for text in inputs.document_texts(inputs.corpus(space, documents))
    for passage in public_text.passages(
      public_text.split_sentences(text), max_words=90
    )
  ]
  params, model_config = inputs.load_public(task.inputs["start"], documents)
  directory = task.folder(private=False)
  params, _ = train(
    config,
    jax.tree.map(jnp.asarray, params),
    model_config,
    pretrain_tasks.tokenize(vocabulary, pretrain_tasks.records_of(passages)),
    directory=space.private("pretrain", f"state_{task.digest}"),
    metrics_path=directory / "metrics.jsonl",
  )
  params = jax.device_get(params)
  t5_checkpoints.save(directory, params, model_config)
  model = (space.root / documents.vocabulary).read_bytes()
  artifacts.write_atomically(directory / inputs.VOCABULARY_NAME, model)
  return results.Checkpoint(
    directory=space.relative(directory),
    kind="generator",
    name="pretrain",
    statement=documents.statement(),
    steps=sum(phase.steps for phase in config.phases),
    batch_size=sum(config.phases[-1].batch_sizes),
    num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
    metrics=space.relative(directory / "metrics.jsonl"),
  )


def fresh(shape: t5_config.T5Config, seed: int):
  """Returns new parameters, with the copy circuit where it fits."""
  params = t5.init_params(shape, jax.random.key(seed))
  width = shape.num_heads * shape.head_dim
  if not shape.logits_via_embedding or width != shape.emb_dim:
    return params
  return copy_circuit.add(params, shape, jax.random.key(seed + 1))


def examples(cache: pretrain_tasks.Cache, phase: Phase) -> list[np.ndarray]:
  """Returns the records that have an example of each task of a phase."""
  found = []
  for task in phase.tasks:
    rows = pretrain_tasks.rows_of(cache, task, phase.target_length)
    if not len(rows):
      raise ValueError(
        f"no public passage is long enough for task {task!r}: give more"
        " public text or take the task out of the phase"
      )
    found.append(rows)
  return found


def optimizer(config: Config, params: Any) -> optax.GradientTransformation:
  """Muon for the kernels, Adam for everything else (Jordan et al. 2024)."""

  def schedule(peak):
    return optax.join_schedules(
      [
        optax.linear_schedule(
          peak * phase.rates[0], peak * phase.rates[1], phase.steps
        )
        for phase in config.phases
      ],
      np.cumsum([phase.steps for phase in config.phases])[:-1].tolist(),
    )

  def warmed_up(peak):
    later = schedule(peak)
    return lambda step: (
      later(step) * jnp.minimum(1.0, (step + 1) / config.warmup_steps)
    )

  def dimensions(path, leaf):
    del leaf
    is_kernel = path[-1].key == "kernel"
    return optax.contrib.MuonDimensionNumbers() if is_kernel else None

  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.contrib.muon(
      warmed_up(config.learning_rate),
      adam_learning_rate=warmed_up(config.other_learning_rate),
      muon_weight_dimension_numbers=jax.tree_util.tree_map_with_path(
        dimensions, params
      ),
    ),
  )


def loss_fn(
  params, batch, key=None, *, model_config, config: Config, num_pairs: int
):
  """Cross-entropy of all tasks, and in-batch softmax over the pairs.

  A key draws the dropout of the cross-entropy; without one there is none.
  """
  model = t5.Transformer(model_config)
  inputs, targets = batch["inputs"], batch["targets"]
  logits = model.apply(
    {"params": params},
    inputs,
    t5.shift_right(targets),
    enable_dropout=key is not None,
    rngs=None if key is None else {"dropout": key},
  )
  cross_entropy = seq2seq.cross_entropy(logits, targets)
  metrics = {"loss": jnp.mean(cross_entropy)}
  if num_pairs:
    encode = functools.partial(dual_encoder.encode, params, model_config)
    queries = encode(targets[:num_pairs])
    documents = encode(inputs[:num_pairs])
    pairs = contrastive.softmax(
      queries @ documents.T, temperature=config.temperature
    )
    metrics["contrastive"] = jnp.mean(pairs)
  total = metrics["loss"] + config.contrastive_weight * metrics.get(
    "contrastive", 0.0
  )
  return total, metrics


def train(
  config: Config,
  params: Any,
  model_config: t5_config.T5Config,
  data: pretrain_tasks.Cache,
  *,
  directory: pathlib.Path,
  metrics_path: pathlib.Path,
) -> tuple[Any, float]:
  """Trains through the curriculum; resumes from `directory`.

  Args:
    config: the curriculum and the optimizer.
    params: where to start.
    model_config: their shape.
    data: tokenized public records.
    directory: for the states of unfinished training.
    metrics_path: metrics.jsonl.

  Returns:
    The trained parameters and the seconds this call took.
  """
  start = time.monotonic()
  tx = optimizer(config, params)
  state = (params, tx.init(params))
  keys = _keys(config, model_config)
  done = 0
  for phase in config.phases:
    made = examples(data, phase)
    step_fn = functools.partial(
        _step, tx=tx, model_config=model_config, config=config,
        num_pairs=_num_pairs(phase, config),
    )  # fmt: skip
    compiled = jax.jit(step_fn, donate_argnums=(0,))
    done += phase.steps
    state = loop.train(
      lambda state, batch, step, run=compiled: run(state, batch, keys(step)),
      state,
      functools.partial(_batch, data, phase, made, config.seed),
      loop.Files(
        directory=directory,
        metrics_path=metrics_path,
        description=f"pretrain {phase.input_length}/{phase.target_length}",
      ),
      steps=done,
      examples_per_step=sum(phase.batch_sizes),
      settings=config.settings,
    )
  return state[0], time.monotonic() - start


def _num_pairs(phase: Phase, config: Config) -> int:
  count = 0
  for task, size in zip(phase.tasks, phase.batch_sizes, strict=True):
    if task not in config.contrastive_tasks:
      break
    count += size
  return count


def _keys(config: Config, model_config: t5_config.T5Config):
  """Returns the function from a step to its key of dropout, or to None."""
  if not model_config.dropout_rate:
    return lambda step: None
  key = jax.random.key(config.seed)
  return lambda step: jax.random.fold_in(key, step)


def _step(state, batch, key, *, tx, model_config, config, num_pairs):
  params, opt_state = state
  grads, metrics = jax.grad(
    functools.partial(
      loss_fn,
      model_config=model_config,
      config=config,
      num_pairs=num_pairs,
    ),
    has_aux=True,
  )(params, batch, key)
  updates, opt_state = tx.update(grads, opt_state, params)
  return (optax.apply_updates(params, updates), opt_state), metrics


def _batch(
  cache: pretrain_tasks.Cache,
  phase: Phase,
  made: Sequence[np.ndarray],
  seed: int,
  step: int,
) -> dict[str, np.ndarray]:
  """Draws a batch that depends on (seed, step) alone."""
  rng = np.random.default_rng([seed, step])
  parts = [
    pretrain_tasks.make(
      cache,
      task,
      rng.choice(rows, size),
      input_length=phase.input_length,
      target_length=phase.target_length,
      rng=rng,
    )
    for task, rows, size in zip(
      phase.tasks, made, phase.batch_sizes, strict=True
    )
  ]
  inputs, targets = map(np.concatenate, zip(*parts, strict=True))
  return {"inputs": inputs, "targets": targets}


STAGE = stage.of(
  __name__,
  needs=("prepare_data",),
  reads=("documents", "start"),
)
