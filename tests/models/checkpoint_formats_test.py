"""What holds for every format: recognition, conversion, memory."""

import dataclasses
import functools
import subprocess
import sys

import checkpoint_trees
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from hypothesis import strategies as st

from synthq_jax.models import t5_checkpoints, t5_config
from synthq_jax.models.checkpoints import tensors as tensors_lib

TINY = t5_config.get("tiny")
SMALL = dataclasses.replace(TINY, num_encoder_layers=1, num_decoder_layers=1)
EMBEDDING = "token_embedder/embedding"
WO = "encoder/layers_0/mlp/wo/kernel"


def save_orbax(path, params):
  tree = {"target": jax.tree.map(jnp.asarray, params), "state": {"step": 3}}
  checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
  checkpointer.save(path.resolve() / "checkpoint_3" / "state", tree)


WRITERS = {
  "ours": t5_checkpoints.save,
  "huggingface": t5_checkpoints.save_huggingface,
  "t5x": lambda path, params, config: t5_checkpoints.save_t5x(path, params, 3),
  "orbax": lambda path, params, config: save_orbax(path, params),
}


@st.composite
def configs(draw):
  size = functools.partial(st.integers, 1)
  gated = draw(st.booleans())
  return t5_config.T5Config(
    vocab_size=draw(size(40)),
    emb_dim=draw(size(20)),
    num_heads=draw(size(5)),
    head_dim=draw(size(5)),
    mlp_dim=draw(size(20)),
    num_encoder_layers=draw(size(3)),
    num_decoder_layers=draw(size(3)),
    mlp_activations=("gelu", "linear") if gated else ("relu",),
    logits_via_embedding=draw(st.booleans()),
    relative_attention_num_buckets=2 * draw(st.integers(2, 10)),
  )


@hypothesis.settings(max_examples=6, deadline=None)
@hypothesis.given(config=configs(), decoder=st.booleans())
def test_any_shape_goes_through_every_format_bit_for_bit(
  tmp_path_factory, config, decoder
):
  root = tmp_path_factory.mktemp("any")
  params = checkpoint_trees.make(config)
  if not decoder:
    del params["decoder"]
  t5_checkpoints.save(root / "ours", params, config)
  convert = t5_checkpoints.convert
  hugging = convert(root / "ours", root / "hf", format="huggingface")
  native = convert(hugging, root / "t5x", format="t5x")
  back = convert(native, root / "back", format="safetensors")
  assert t5_checkpoints.load(hugging)[1] == config
  # Nothing in an encoder says where logits come from: T5 1.0's are tied.
  wanted = config if decoder else dataclasses.replace(
    config, logits_via_embedding=config.mlp_activations == ("relu",),
    num_decoder_layers=config.num_encoder_layers,
  )  # fmt: skip
  for place in (native, back):
    loaded, found = t5_checkpoints.load(place)
    assert found == wanted
    checkpoint_trees.assert_same_bits(loaded, params)
  ours = (root / "ours" / "params.safetensors").read_bytes()
  assert (root / "back" / "params.safetensors").read_bytes() == ours


@pytest.mark.parametrize(
  "change",
  [
    {"relative_attention_max_distance": 64},
    {"mlp_activations": ("relu", "linear")},
  ],
  ids=str,
)
def test_t5x_gets_no_model_that_its_tensors_do_not_tell(change, tmp_path):
  config = dataclasses.replace(SMALL, **change)
  t5_checkpoints.save(tmp_path / "ours", checkpoint_trees.make(config), config)
  with pytest.raises(ValueError, match=f"expected {next(iter(change))}="):
    t5_checkpoints.convert(tmp_path / "ours", tmp_path / "to", format="t5x")
  assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_is_recognised(name, tmp_path):
  WRITERS[name](tmp_path, checkpoint_trees.make(SMALL), SMALL)
  loaded, config = t5_checkpoints.load(tmp_path)
  assert config == t5_checkpoints.load_config(tmp_path) == SMALL
  checkpoint_trees.assert_same_bits(loaded, checkpoint_trees.make(SMALL))
  assert all(path.is_file() for path in t5_checkpoints.files(tmp_path))


@pytest.mark.parametrize("name", ["ours", "huggingface", "t5x"])
def test_another_parameter_is_another_file(name, tmp_path):
  """Files say when results that rest on a checkpoint have to be made anew."""
  params = checkpoint_trees.make(SMALL)
  contents = []
  for place in ("a", "b"):
    WRITERS[name](tmp_path / place, params, SMALL)
    files = t5_checkpoints.files(tmp_path / place)
    contents.append([path.read_bytes() for path in files])
    params["encoder"]["layers_0"]["mlp"]["wo"]["kernel"][3, 4] += 1
  assert contents[0] != contents[1]


def test_results_do_not_rest_on_an_optimizers_state(tmp_path):
  place = t5_checkpoints.save_t5x(tmp_path, checkpoint_trees.make(SMALL), 3)
  before = t5_checkpoints.files(tmp_path)
  for name in ("state.param_states.decoder.v", "train_ds-000-of-001"):
    (place / name).mkdir()
    (place / name / "0").write_text("large")
  assert t5_checkpoints.files(tmp_path) == before
  assert place / "checkpoint" in before


def test_our_own_folder_is_known_beside_checkpoints_of_training(tmp_path):
  t5_checkpoints.save_t5x(tmp_path, checkpoint_trees.make(TINY), 3)
  t5_checkpoints.save(tmp_path, checkpoint_trees.make(SMALL), SMALL)
  assert t5_checkpoints.load(tmp_path)[1] == SMALL


def test_no_checkpoint_at_all_is_named(tmp_path):
  place = tmp_path / "nothing"
  with pytest.raises(ValueError, match="expected a T5 checkpoint, got no file"):
    t5_checkpoints.load(place)
  with pytest.raises(ValueError, match="expected a T5 checkpoint, got no file"):
    t5_checkpoints.load_config(place)


def test_a_format_that_is_not_known_is_refused(tmp_path):
  with pytest.raises(ValueError, match="one of t5x, huggingface, safetensors"):
    t5_checkpoints.convert(tmp_path, tmp_path / "to", format="gguf")


def test_the_type_of_the_values_survives_a_conversion(tmp_path):
  params = checkpoint_trees.make(SMALL, jnp.bfloat16)
  t5_checkpoints.save(tmp_path / "ours", params, SMALL)
  place = tmp_path / "ours"
  for index, name in enumerate(("t5x", "huggingface", "safetensors")):
    place = t5_checkpoints.convert(place, tmp_path / f"to{index}", format=name)
  checkpoint_trees.assert_same_bits(
    t5_checkpoints.load(place, dtype=None)[0], params
  )


# Files of our own.


@pytest.mark.parametrize("dtype", sorted(map(str, tensors_lib._NAMES)))
def test_the_bytes_are_those_that_the_library_writes(dtype, tmp_path):
  """In every type, bfloat16 too; unlike ours it holds all tensors at once."""
  numbers = np.random.default_rng(0).normal(size=(3, 5)) * 100
  values = {
    "layer/kernel": numbers.astype(dtype),
    "a": np.zeros((0, 3), dtype),
    "b": np.asarray(7, dtype),
    "odd": numbers[0, :3].astype(dtype),
  }
  for metadata in (None, {"format": "pt"}):
    tensors_lib.write_safetensors(
      tmp_path / "x", tensors_lib.of_tree(values), metadata
    )
    written = (tmp_path / "x").read_bytes()
    assert written == safetensors.numpy.save(values, metadata)
  for name, tensor in tensors_lib.read_safetensors(tmp_path / "x").items():
    np.testing.assert_array_equal(tensor.read(), values[name], strict=True)


def test_a_type_that_the_format_lacks_is_named(tmp_path):
  tensors = tensors_lib.of_tree({"a": np.zeros(3, np.complex64)})
  with pytest.raises(ValueError, match="tensor a of type .* got complex64"):
    tensors_lib.write_safetensors(tmp_path / "x", tensors)
  assert not list(tmp_path.iterdir())


# Memory.

_MEASURE = """
import pathlib, sys
from synthq_jax.models import t5_checkpoints

def spent(step, *args, **options):
  # The kernel's mark of the highest memory is put back first.
  pathlib.Path("/proc/self/clear_refs").write_text("5")
  before = peak()
  kept = step(*args, **options)
  print(peak() - before)
  return kept

def peak():
  text = pathlib.Path("/proc/self/status").read_text()
  return int(text.split("VmHWM:")[1].split()[0]) * 1024

root = sys.argv[1]
places = [f"{root}/{name}" for name in ("ours", "hf", "t5x")]
convert = t5_checkpoints.convert
for run in (lambda step, *args, **options: step(*args, **options), spent):
  source = "warm" if run is not spent else "ours"
  to = f"{root}/warm_" if run is not spent else f"{root}/"
  run(convert, f"{root}/{source}", f"{to}hf", format="huggingface")
  run(convert, f"{to}hf", f"{to}t5x", format="t5x")
for place in places:
  spent(t5_checkpoints.load, place)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_the_models_own_and_one_tensor(tmp_path):
  config = dataclasses.replace(
    TINY,
    vocab_size=20_000,  # 40 MB
    emb_dim=512,
    mlp_dim=4096,
    num_encoder_layers=3,
    num_decoder_layers=2,
    logits_via_embedding=True,
  )
  params = checkpoint_trees.make(config)
  t5_checkpoints.save(tmp_path / "ours", params, config)
  t5_checkpoints.save(tmp_path / "warm", checkpoint_trees.make(SMALL), SMALL)
  done = subprocess.run(
    [sys.executable, "-c", _MEASURE, str(tmp_path)],
    check=True,
    capture_output=True,
    text=True,
    env={
      "JAX_PLATFORMS": "cpu",
      "MALLOC_MMAP_THRESHOLD_": "65536",  # memory that is free goes back
      "PYTHONPATH": ":".join(filter(None, sys.path)),
    },
  )
  spent = [int(line) for line in done.stdout.split()]
  sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
  model, largest, slack = sum(sizes), max(sizes), 10e6
  # Converting keeps nothing: one tensor, and what is made of it.
  converted, loaded = spent[:2], spent[2:]
  assert len(loaded) == 3
  assert 2 * largest + slack < model
  assert max(converted) < 2 * largest + slack, (spent, model, largest)
  assert max(loaded) < model + largest + slack, (spent, model, largest)
  # Or nothing was measured. What steps before gave back may be taken again.
  assert min(loaded) > model - largest, (spent, model, largest)


def test_parameters_that_lie_on_several_devices_are_written(tmp_path):
  params = checkpoint_trees.make(SMALL)
  mesh = jax.make_mesh((8,), ("data",))
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  params["token_embedder"] = jax.device_put(params["token_embedder"], rows)
  t5_checkpoints.save(tmp_path, params, SMALL)
  checkpoint_trees.assert_same_bits(t5_checkpoints.load(tmp_path)[0], params)
