"""The papers' recipes build their whole private step, without its memory."""

import dataclasses
import math
import pathlib
import re

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu_v4

import tpu_types
from synthq_jax.cli import guide, main
from synthq_jax.models import t5, t5_config
from synthq_jax.privacy import sampling
from synthq_jax.stages import finetune_dp, plan
from synthq_jax.storage import artifacts
from synthq_jax.training import dp_step

ROOT = pathlib.Path(__file__).resolve().parents[2]
NEEDS = ("SOURCE=msmarco:m", "CHECKPOINT=c", "VOCABULARY=v.model")
QUERIES = 502_939  # of MS MARCO
PREFIX = 6  # tokens, about
NAMED = {  # what the papers call the size, and what the tree holds
  "small": ("60M", 60_506_624),
  "base": ("220M", 222_903_552),
  "large": ("770M", 737_668_096),  # 4% below its name
  "xl": ("3B", 2_851_598_336),
}
GATED = {  # T5 1.1
  "small": 76_961_152,
  "base": 247_577_856,
  "large": 783_150_080,
  "xl": 2_849_757_184,
}


def configure(name, *flags):
  recipe = f"recipes/paper_t5_{name}.gin"
  needs = NEEDS if name == "base" else (*NEEDS, "ENCODER=r")
  config, _ = main.configure(plan.RunConfig, [recipe], [*needs, *flags])
  return config


def abstract(model):
  """Returns the parameters by path, as shapes and types."""
  tree = jax.eval_shape(
    lambda key: t5.init_params(model, key), jax.random.key(0)
  )
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {"/".join(e.key for e in path): leaf for path, leaf in leaves}


def count(params):
  return sum(math.prod(leaf.shape) for leaf in params.values())


def layered(model, layers):
  return dataclasses.replace(
    model, num_encoder_layers=layers, num_decoder_layers=layers
  )


def size(model):
  """The number of parameters, of which every layer has as many."""
  layers = model.num_encoder_layers
  assert layers == model.num_decoder_layers
  one, two = (count(abstract(layered(model, n))) for n in (1, 2))
  return one + (layers - 1) * (two - one)


@pytest.mark.parametrize("name", NAMED)
def test_a_recipe_has_a_model_of_the_size_that_the_papers_name(name):
  word, parameters = NAMED[name]
  assert size(configure(name).model) == parameters
  nominal = float(word[:-1]) * {"M": 1e6, "B": 1e9}[word[-1]]
  assert abs(parameters / nominal - 1) < 0.06


@pytest.mark.parametrize("name", ["base", "xl"])
def test_a_recipe_builds_its_private_step(name):
  config = configure(name)
  tuned = config.finetune_dp
  # A third layer is traced as the second was.
  model = layered(config.model, 2)
  params = abstract(model)
  grad_fn = finetune_dp.grad_fn(tuned, {}, model)
  sampler = sampling.Poisson.with_margin(
    num_examples=QUERIES,
    expected_batch_size=tuned.batch_size,
    multiple_of=tuned.microbatch_size,
  )
  relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
  tx = dp_step.Optimizer(
    name=tuned.optimizer,
    learning_rate=tuned.learning_rate,
    steps=tuned.steps,
    denominator=sampler.expected_batch_size,
  ).build(
    l2_sensitivity=grad_fn.sensitivity(relation),
    noise_multiplier=0.554,
  )(jax.random.key(0))
  state = jax.eval_shape(lambda p: dp_step.State(p, tx.init(p)), params)
  rows = sampler.max_batch_size
  data = config.prepare_data
  batch = {
    "inputs": tokens(rows, PREFIX + data.document_length),
    "targets": tokens(rows, data.query_length),
  }
  after, metrics = jax.eval_shape(
    dp_step.step(grad_fn, tx),
    state,
    batch,
    jax.ShapeDtypeStruct((rows,), bool),
  )
  assert jax.tree.map(shape_and_type, after) == jax.tree.map(
    shape_and_type, state
  )
  assert metrics["loss"].shape == metrics["norm"].shape == ()
  factored = [
    leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim >= 2
  ]
  assert sum(math.prod(leaf.shape) for leaf in factored) < 0.01 * count(params)


@pytest.mark.parametrize("name", NAMED)
def test_a_recipe_is_compiled_for_the_slice_that_its_header_names(name):
  """tests/benchmarks/tpu_v4.py compiles the step that a user would launch."""
  case = tpu_v4.CASES[f"paper_{name}"]
  config = configure(name)
  tuned, shape = config.finetune_dp, config.finetune_dp.mesh
  sides = [int(side) for side in case.topology.partition(":")[2].split("x")]
  assert math.prod(case.mesh) == math.prod(sides)
  assert (shape.data, *case.mesh[1:]) == (-1, shape.fsdp, shape.tensor)
  assert (case.microbatch, case.remat) == (tuned.microbatch_size, tuned.remat)
  assert dataclasses.asdict(t5_config.get(case.model)) == dataclasses.asdict(
    config.model
  )
  assert (tpu_v4.INPUTS, tpu_v4.TARGETS, tpu_v4.ROWS) == (
    config.prepare_data.document_length,
    config.prepare_data.query_length,
    tuned.batch_size,
  )
  path = ROOT / f"gin_configs/recipes/paper_t5_{name}.gin"
  said = guide.header(path)["Slice"]
  mesh = " x ".join(map(str, case.mesh))
  slice_ = tpu_types.describe(said.split()[0])
  assert slice_.topology == case.topology.partition(":")[2]
  assert said.startswith(f"{slice_.accelerator} as {mesh} (")
  assert re.search(rf"\b{case.microbatch} rows? of each chip at once", said)
  way = {"bookkeeping": "book-keeping", "ghost": "ghost"}[tuned.strategy]
  assert way in said


def tokens(rows, length):
  return jax.ShapeDtypeStruct((rows, length), jnp.int32)


def shape_and_type(leaf):
  return leaf.shape, np.dtype(leaf.dtype) if not jnp.issubdtype(
    leaf.dtype, jax.dtypes.prng_key
  ) else str(leaf.dtype)


@pytest.mark.parametrize("name", GATED)
def test_a_recipe_takes_the_shape_of_t5_1_1_too(name):
  config = configure(name, f"MODEL=t5_1_1_{name}")
  assert size(config.model) == GATED[name]


def test_the_sisters_differ_from_the_papers_base_in_size_and_memory_alone():
  base = plan.RunConfig.__dataclass_fields__
  config = configure("base")
  for name in ("small", "large", "xl"):
    sister = configure(name)
    for field in base:
      if field not in ("model", "finetune_dp", "encoder"):
        ours, theirs = (getattr(c, field) for c in (sister, config))
        # But for the mesh, which changes no result.
        assert artifacts.fingerprint(ours) == artifacts.fingerprint(theirs), (
          field
        )
    for field in ("steps", "batch_size", "clip_norm", "delta", "optimizer"):
      ours, theirs = (getattr(c.finetune_dp, field) for c in (sister, config))
      assert ours == theirs, field
