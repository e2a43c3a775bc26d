"""T5X's checkpoints, written and read here as T5X itself does: with Flax."""

import dataclasses
import json
import re
import shutil

import checkpoint_trees
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from flax import serialization

from synthq_jax.models import t5, t5_checkpoints, t5_config
from synthq_jax.models.checkpoints import t5x
from synthq_jax.models.checkpoints import tensors as tensors_lib

T5_1_1 = t5_config.get("tiny")
T5_1_0 = dataclasses.replace(
  T5_1_1,
  num_heads=4,
  mlp_activations=("relu",),
  logits_via_embedding=True,
  num_decoder_layers=1,
  relative_attention_num_buckets=12,
)
KERNEL = "decoder/layers_1/mlp/wo/kernel"
FOLDER = f"target.{KERNEL.replace('/', '.')}"


def specs(style, name, dtype, metadata):
  """A tensorstore spec as versions of T5X wrote it, on a disk or to a bucket."""
  spec = {"driver": "zarr", "dtype": dtype, "metadata": metadata}
  bucket = {"driver": "gcs", "bucket": "t5x-dummy-bucket"}
  if style == "path at the top":
    return spec | {"kvstore": bucket, "path": name}
  if style == "bucket":
    return spec | {"kvstore": bucket | {"path": f"{name}/"}}
  if style == "gfile":
    return spec | {"kvstore": {"driver": "gfile", "path": f"{name}/"}}
  shape = metadata["shape"]
  transform = {
    "input_exclusive_max": [[size] for size in shape],
    "input_inclusive_min": [0] * len(shape),
  }
  place = {"driver": "file", "path": f"{name}/"}
  return spec | {"kvstore": place, "transform": transform}


def write_zarr(folder, metadata, values):
  store = tensorstore.open(
    {
      "driver": "zarr",
      "dtype": values.dtype.name,
      "kvstore": {"driver": "file", "path": f"{folder}/"},
      "metadata": metadata,
      "create": True,
    }
  ).result()
  store.write(values).result()


def write(path, params, *, style="file", zarray=True, inline=(), version=3):
  """Writes a native checkpoint; its optimizer state lies nowhere."""
  path.mkdir(parents=True)
  target = {}
  for name, values in t5_checkpoints.flatten(params).items():
    if name in inline:
      target[name] = values
      continue
    folder = f"target.{name.replace('/', '.')}"
    metadata = {
      "compressor": {"id": "gzip", "level": 1},
      "shape": list(values.shape),
      # Not a divisor: the last chunk hangs over.
      "chunks": [max(1, size * 2 // 3) for size in values.shape],
    }
    write_zarr(path / folder, metadata, values)
    target[name] = specs(style, folder, values.dtype.name, metadata)
    if not zarray:
      (path / folder / ".zarray").unlink()
  lost = {"shape": [4], "chunks": [4], "compressor": None}
  states = {
    name: {"v": specs(style, f"state.param_states.{name}", "float32", lost)}
    for name in target
  }
  state = {
    "step": np.int32(7),
    "param_states": t5_checkpoints.unflatten(states),
  }
  target = t5_checkpoints.unflatten(target)
  contents = {"optimizer": {"state": state, "target": target}}
  contents |= {} if version is None else {"version": version}
  (path / "checkpoint").write_bytes(serialization.msgpack_serialize(contents))


def read(path):
  """Reads a native checkpoint as T5X does: target by path, and the rest."""
  contents = serialization.msgpack_restore((path / "checkpoint").read_bytes())
  assert contents["version"] == 3

  def is_spec(node):
    return isinstance(node, dict) and "driver" in node

  def fetch(node):
    if not is_spec(node):
      return node
    del node["metadata"]["chunks"], node["metadata"]["compressor"]
    node["kvstore"]["path"] = f"{path}/{node['kvstore']['path']}"
    return tensorstore.open(node, open=True).result().read().result()

  target = jax.tree.map(fetch, contents["optimizer"]["target"], is_leaf=is_spec)
  return t5_checkpoints.flatten(target), contents["optimizer"]["state"]


@pytest.mark.parametrize(
  ("config", "style", "zarray"),
  [
    (T5_1_0, "file", True),
    (T5_1_1, "bucket", True),
    (T5_1_0, "path at the top", False),
    (T5_1_1, "gfile", False),
  ],
)
def test_a_checkpoint_of_t5x_is_read_with_its_shape(
  config, style, zarray, tmp_path
):
  params = checkpoint_trees.make(config)
  write(tmp_path / "checkpoint_7", params, style=style, zarray=zarray)
  loaded, found = t5_checkpoints.load_t5x(tmp_path / "checkpoint_7")
  assert found == config
  checkpoint_trees.assert_same_bits(loaded, params)


@pytest.mark.parametrize("zarray", [True, False])
def test_bfloat16_becomes_float32_unless_told_otherwise(zarray, tmp_path):
  params = checkpoint_trees.make(T5_1_1, jnp.bfloat16)
  inline = ("encoder/encoder_norm/scale",)
  write(tmp_path / "checkpoint_7", params, zarray=zarray, inline=inline)
  kept, _ = t5_checkpoints.load(tmp_path, dtype=None)
  checkpoint_trees.assert_same_bits(kept, params)
  loaded, _ = t5_checkpoints.load(tmp_path)
  wanted = jax.tree.map(lambda leaf: leaf.astype(np.float32), params)
  checkpoint_trees.assert_same_bits(loaded, wanted)


def test_from_t5x_and_back_the_tensors_hold_the_same_bits(tmp_path):
  write(tmp_path / "checkpoint_7", checkpoint_trees.make(T5_1_0, jnp.bfloat16))
  params, _ = t5_checkpoints.load(tmp_path, dtype=None)
  place = t5_checkpoints.save_t5x(tmp_path / "ours", params, 1_000_000)
  assert place == tmp_path / "ours" / "checkpoint_1000000"
  ours, state = read(place)
  theirs, _ = read(tmp_path / "checkpoint_7")
  checkpoint_trees.assert_same_bits(ours, theirs)
  assert state["step"] == 1_000_000 and state["step"].dtype == np.int32


def test_a_large_tensor_is_cut_into_chunks(tmp_path, monkeypatch):
  monkeypatch.setattr(t5x, "_CHUNK_BYTES", 2000)
  params = checkpoint_trees.make(T5_1_1)
  place = t5_checkpoints.save_t5x(tmp_path, params, 3)
  chunks = [
    path
    for path in (place / "target.token_embedder.embedding").iterdir()
    if path.name != ".zarray"
  ]
  assert len(chunks) > 1
  assert all(path.stat().st_size <= 2000 for path in chunks)
  checkpoint_trees.assert_same_bits(t5_checkpoints.load(tmp_path)[0], params)


def test_the_optimizers_state_is_that_of_a_fresh_adafactor(tmp_path):
  # Sizes about Adafactor's 128, below which it keeps the whole second moment.
  config = dataclasses.replace(
    T5_1_1, vocab_size=256, emb_dim=128, mlp_dim=192, head_dim=8
  )
  _, state = read(
    t5_checkpoints.save_t5x(tmp_path, checkpoint_trees.make(config), 3)
  )
  shapes = {
    name: leaf.shape
    for name, leaf in t5_checkpoints.flatten(state["param_states"]).items()
  }
  layer = "decoder/layers_1"
  one = (1,)
  wanted = {
    "token_embedder/embedding": ((128,), (256,), one),
    f"{layer}/mlp/wi_0/kernel": ((128,), (192,), one),
    f"{layer}/mlp/wo/kernel": ((128,), (192,), one),
    f"{layer}/self_attention/out/kernel": (one, one, (16, 128)),
    f"{layer}/pre_mlp_layer_norm/scale": (one, one, (128,)),
    "decoder/relpos_bias/rel_embedding": (one, one, (2, 32)),
  }
  for name, (row, column, whole) in wanted.items():
    assert shapes[f"{name}/v_row"] == row, name
    assert shapes[f"{name}/v_col"] == column, name
    assert shapes[f"{name}/v"] == whole, name
    assert shapes[f"{name}/m"] == one, name
  assert not any(leaf.any() for leaf in jax.tree.leaves(state["param_states"]))


def test_the_optimizers_state_is_skipped_unread(checkpoint):
  path = checkpoint / "checkpoint"
  contents = msgpack.unpackb(path.read_bytes(), strict_map_key=False)
  garbage = msgpack.unpackb(
    b"\xa3\xff\xfe\xfd", unicode_errors="surrogateescape"
  )
  contents["optimizer"]["state"] = garbage
  packed = msgpack.packb(contents, unicode_errors="surrogateescape")
  path.write_bytes(packed)
  with pytest.raises(UnicodeDecodeError):
    msgpack.unpackb(packed, strict_map_key=False)
  checkpoint_trees.assert_same_bits(
    t5_checkpoints.load(checkpoint)[0], checkpoint_trees.make(T5_1_1)
  )


def test_the_newest_step_is_taken_and_a_step_may_be_named(tmp_path):
  params = checkpoint_trees.make(T5_1_1)
  for step in (9, 100, 20):
    changed = jax.tree.map(lambda leaf, step=step: leaf + step, params)
    t5_checkpoints.save_t5x(tmp_path, changed, step)
  (tmp_path / "checkpoint_300.tmp-1").mkdir()
  newest, _ = t5_checkpoints.load(tmp_path)
  checkpoint_trees.assert_same_bits(
    newest, jax.tree.map(lambda leaf: leaf + 100, params)
  )
  named, _ = t5_checkpoints.load(tmp_path / "checkpoint_9" / "checkpoint")
  checkpoint_trees.assert_same_bits(
    named, jax.tree.map(lambda leaf: leaf + 9, params)
  )


# Writing.


def test_a_checkpoint_that_fails_half_way_leaves_nothing(tmp_path):
  class Stubborn:
    shape, dtype = (16,), np.dtype(np.float32)

    def __array__(self, *args, **kwargs):
      raise RuntimeError("the device is gone")

  params = checkpoint_trees.make(T5_1_1)
  params["token_embedder"] = dict(params["token_embedder"])
  params["encoder"]["encoder_norm"] = {"scale": Stubborn()}
  with pytest.raises(ValueError, match="encoder_norm/scale.*device is gone"):
    t5_checkpoints.save_t5x(tmp_path, params, 3)
  assert not list(tmp_path.iterdir())


def test_what_is_no_t5_is_not_written(tmp_path):
  with pytest.raises(ValueError, match="params: expected a T5 .*embedding"):
    t5_checkpoints.save_t5x(tmp_path, {"a": {"b": np.ones((2, 2))}}, 3)
  params = checkpoint_trees.make(T5_1_1)
  params["adapter"] = {"a": np.ones(3, np.float32)}
  with pytest.raises(ValueError, match=r"adapter/a of shape nothing, got"):
    t5_checkpoints.save_t5x(tmp_path, params, 3)
  with pytest.raises(ValueError, match="step must be at least 0, got step=-1"):
    t5_checkpoints.save_t5x(tmp_path, checkpoint_trees.make(T5_1_1), -1)
  assert not list(tmp_path.iterdir())


# Damage.


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
  place = tmp_path_factory.mktemp("intact") / "checkpoint_7"
  write(place, checkpoint_trees.make(T5_1_1))
  return place


@pytest.fixture
def checkpoint(intact, tmp_path):
  return shutil.copytree(intact, tmp_path / "checkpoint_7")


def change(checkpoint, edit):
  """Edits the target of the msgpack file."""
  path = checkpoint / "checkpoint"
  contents = msgpack.unpackb(path.read_bytes(), strict_map_key=False)
  edit(contents["optimizer"]["target"])
  path.write_bytes(msgpack.packb(contents))


def spec_of(target):
  return target["decoder"]["layers_1"]["mlp"]["wo"]["kernel"]


def refuse(checkpoint, *words):
  with pytest.raises(ValueError) as caught:
    t5_checkpoints.load(checkpoint)
  message = str(caught.value)
  assert "\n" not in message
  for word in words:
    assert re.search(word, message), (word, message)


@pytest.mark.parametrize("zarray", [True, False])
def test_a_missing_chunk_is_named_and_not_read_as_zeros(checkpoint, zarray):
  (checkpoint / FOLDER / "0.1").unlink()
  if not zarray:
    (checkpoint / FOLDER / ".zarray").unlink()
  refuse(checkpoint, KERNEL, FOLDER, "0.1.* is missing", "copy .* again")


@pytest.mark.parametrize(
  "damage",
  [
    lambda data: data[:-12],  # the last 9 bytes are a checksum
    lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:],
  ],
  ids=["some less", "a bit"],
)
def test_a_damaged_chunk_is_named(checkpoint, damage):
  path = checkpoint / FOLDER / "0.0"
  path.write_bytes(damage(path.read_bytes()))
  refuse(checkpoint, f"tensor {KERNEL}", FOLDER, "0.0")


@pytest.mark.parametrize("place", ["../../elsewhere", "/etc", ".", "", None])
def test_a_folder_outside_of_the_checkpoint_is_not_read(checkpoint, place):
  (checkpoint.parent.parent / "elsewhere").mkdir(exist_ok=True)

  def move(target):
    spec_of(target)["kvstore"]["path"] = place

  change(checkpoint, move)
  refuse(checkpoint, f"tensor {KERNEL}", "no folder|path=")


def no_metadata(checkpoint):
  (checkpoint / FOLDER / ".zarray").unlink()
  change(checkpoint, lambda target: spec_of(target).pop("metadata"))


@pytest.mark.parametrize(
  "damage, words",
  [
    (lambda c: shutil.rmtree(c / FOLDER), f"{KERNEL}.*no folder {FOLDER}"),
    (no_metadata, f"{KERNEL}.*no .zarray, and no metadata"),
    (
      lambda c: change(c, lambda t: t["decoder"].update(adapter=spec_of(t))),
      r"decoder/adapter of shape nothing, got \(32, 16\)",
    ),
    (
      lambda c: change(c, lambda t: t["decoder"]["layers_0"].pop("mlp")),
      "decoder/layers_0/mlp/.* got nothing",
    ),
  ],
  ids=["no folder", "no metadata", "unknown", "missing"],
)
def test_a_damaged_tensor_is_named(checkpoint, damage, words):
  damage(checkpoint)
  refuse(checkpoint, f"tensor {words}")


@pytest.mark.parametrize("version", [2, None])
def test_another_version_is_named(version, tmp_path):
  write(
    tmp_path / "checkpoint_7", checkpoint_trees.make(T5_1_1), version=version
  )
  refuse(tmp_path, f"version 3 .*got version={version}")


def test_a_file_without_parameters_says_what_it_has(checkpoint):
  path = checkpoint / "checkpoint"
  path.write_bytes(msgpack.packb({"version": 3, "optimizer": {"state": {}}}))
  refuse(checkpoint, "optimizer/target")


@pytest.mark.parametrize(
  "names",
  [
    ("token_embedder",),
    ("encoder", "layers_0", "attention", "query"),
  ],
)
def test_a_tensor_that_tells_the_shape_is_missed_by_name(checkpoint, names):
  def drop(target):
    for name in names[:-1]:
      target = target[name]
    del target[names[-1]]

  change(checkpoint, drop)
  refuse(checkpoint, f"expected a T5 with a matrix {'/'.join(names)}")


def test_heads_that_do_not_divide_the_kernels_are_named(tmp_path):
  params = checkpoint_trees.make(T5_1_1)
  for stack in ("encoder", "decoder"):
    bias = np.ones((3, 32), np.float32)
    params[stack]["relpos_bias"]["rel_embedding"] = bias
  write(tmp_path / "checkpoint_7", params)
  refuse(tmp_path, "multiple of 3 heads, got 16 columns")


def test_a_newest_step_that_was_cut_off_is_named(tmp_path):
  """It is not passed over for an older one, nor taken for another format."""
  write(tmp_path / "checkpoint_3", checkpoint_trees.make(T5_1_1))
  (tmp_path / "checkpoint_9").mkdir()
  words = "checkpoint_9: expected a T5X checkpoint .* got an empty folder"
  for read in (t5_checkpoints.load, t5_checkpoints.check):
    with pytest.raises(ValueError, match=words):
      read(tmp_path)


# Orbax.


def write_orbax(path, params, ocdbt=True):
  state = {"step": np.int32(3), "param_states": {"v": np.zeros(4, np.float32)}}
  tree = jax.tree.map(jnp.asarray, {"target": params, "state": state})
  handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)
  ocp.Checkpointer(handler).save(path, tree)


@pytest.mark.parametrize(
  ("ocdbt", "dtype"), [(True, jnp.bfloat16), (False, np.float32)]
)
def test_a_checkpoint_that_t5x_wrote_with_orbax_is_read(ocdbt, dtype, tmp_path):
  params = checkpoint_trees.make(T5_1_0, dtype)
  write_orbax(tmp_path / "checkpoint_3" / "state", params, ocdbt)
  for path in (tmp_path, tmp_path / "checkpoint_3"):
    loaded, config = t5_checkpoints.load(path)
    assert config == T5_1_0
    wanted = jax.tree.map(lambda leaf: leaf.astype(np.float32), params)
    checkpoint_trees.assert_same_bits(loaded, wanted)
  kept, _ = t5_checkpoints.load(tmp_path, dtype=None)
  checkpoint_trees.assert_same_bits(kept, params)


def test_placeholders_of_old_orbax_versions_are_followed(tmp_path):
  params = checkpoint_trees.make(T5_1_1)
  place = tmp_path / "checkpoint_3" / "state"
  write(place, params)
  names = t5_checkpoints.flatten(params)
  target = {
    name: f"PLACEHOLDER://target.{name.replace('/', '.')}" for name in names
  }
  contents = {"target": t5_checkpoints.unflatten(target), "state": {}}
  (place / "checkpoint").write_bytes(msgpack.packb(contents))
  checkpoint_trees.assert_same_bits(t5_checkpoints.load(tmp_path)[0], params)


def test_an_orbax_checkpoint_without_a_target_says_what_it_has(tmp_path):
  place = tmp_path / "checkpoint_3" / "state"
  tree = {"params": jnp.ones(3)}
  ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(place, tree)
  refuse(tmp_path, r"the key target, got \['params'\]")


def test_damage_of_an_orbax_checkpoint_is_named(tmp_path):
  place = tmp_path / "checkpoint_3" / "state"
  write_orbax(place, checkpoint_trees.make(T5_1_1), ocdbt=False)
  known = json.loads((place / "_METADATA").read_text())
  for name in [x for x in known if x.startswith("store_array_data_equal")]:
    del known[name]  # of older versions, whose lost chunks are zeros to Orbax
  (place / "_METADATA").write_text(json.dumps(known))
  t5_checkpoints.load(tmp_path)
  (place / FOLDER / "0.0").unlink()
  refuse(tmp_path, f"tensor {KERNEL}", "0.0.* is missing")
  (place / "_METADATA").write_text("{")
  refuse(tmp_path, "state: expected an Orbax checkpoint, got a damaged one")


def test_the_shape_of_a_public_size_is_inferred():
  config = t5_config.get("t5_1_1_small")
  tensors = {
    path: tensors_lib.Tensor(
      where="",
      name=path,
      shape=shape,
      dtype=np.dtype(np.float32),
      read=lambda index: pytest.fail("read"),
    )
    for path, shape in t5.shapes(config).items()
  }
  assert t5_checkpoints.infer("", tensors) == config


def test_a_checkpoint_is_never_written_over(tmp_path):
  params = checkpoint_trees.make(T5_1_1)
  t5_checkpoints.save_t5x(tmp_path, params, 3)
  before = (tmp_path / "checkpoint_3" / "checkpoint").read_bytes()
  doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
  with pytest.raises(ValueError, match=r"checkpoint_3: .*taken"):
    t5_checkpoints.save_t5x(tmp_path, doubled, 3)
  assert (tmp_path / "checkpoint_3" / "checkpoint").read_bytes() == before
