import collections
import dataclasses
import json
import shutil

import made_up
import numpy as np
import pytest

from synthq_jax import artifacts
from synthq_jax.data import (
  environment_docs,
  pretrain_tasks,
  public_corpus,
  vocabulary,
)
from synthq_jax.models import t5_checkpoints, t5_config
from synthq_jax.stages import pretrain, pretrain_recipe
from synthq_jax.training import loop

SHAPE = t5_config.T5Config(
  vocab_size=64,
  emb_dim=16,
  num_heads=2,
  head_dim=8,
  mlp_dim=16,
  num_encoder_layers=1,
  num_decoder_layers=1,
  logits_via_embedding=True,
)
SECRET = "when does the red harbour ferry leave"
NOUNS = "river bridge tower garden market valley forest castle".split()


def curriculum(steps):
  phase = pretrain.Phase(
    steps=steps,
    input_length=40,
    target_length=24,
    tasks=("question", "heading", "fill", "copy"),
    batch_sizes=(2, 2, 2, 2),
  )
  quiet = loop.Settings(progress=False, log_every=1)
  return pretrain.Config(phases=(phase,), settings=quiet)


def name_folder(folder, path):
  """Writes the manifest of a folder's Markdown."""
  row = {
    "name": f"folder:{folder}",
    "version": "1",
    "licence": "CC0-1.0",
    "files": [["*.md", "markdown"]],
  }
  path.write_text(json.dumps([row]))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
  """Public text with a planted query, and a set that holds the query."""
  root = tmp_path_factory.mktemp("world")
  (root / "text").mkdir()
  for number, noun in enumerate(NOUNS):
    body = " ".join(
      f"The {noun} of part {i} was built by many people of the old {other}."
      for i, other in enumerate(NOUNS)
    )
    (root / "text" / f"{noun}.md").write_text(
      f"# The {noun} {number}\n\n{body}\n\n"
      f"## How old is the {noun}?\n\nIt is {number} years old. {body}\n\n"
      f"## {SECRET}?\n\nAnd {SECRET} at noon? The {noun} is very near.\n"
    )
  (root / "set.txt").write_text(f"1\t{SECRET}\n2\tno such words anywhere\n")
  name_folder(root / "text", root / "manifest.json")
  return root


@pytest.fixture(scope="module")
def config(world):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      environment_docs, "private_queries", lambda: ["the demo's query"]
    )
    patch.setattr(environment_docs, "digest", lambda: "versions")
    yield pretrain_recipe.Config(
      pretrain=curriculum(3),
      model=SHAPE,
      manifest=str(world / "manifest.json"),
      held_out=(str(world / "set.txt"),),
      extra_ids=8,
    )


@pytest.fixture(scope="module")
def made(config, tmp_path_factory):
  """A checkpoint, to be read by all tests, and where it lies."""
  folder = tmp_path_factory.mktemp("made")
  return pretrain_recipe.run(config, folder), folder


def params(folder):
  return t5_checkpoints.flatten(t5_checkpoints.load(folder)[0])


def equal(one, other):
  assert one.keys() == other.keys()
  return all(np.array_equal(one[name], other[name]) for name in one)


def test_a_checkpoint_is_made_and_made_again_to_the_bit(
  config, made, tmp_path, capsys
):
  made, folder = made
  assert made.num_repeated == 0
  assert made.dropped["titles"] == made.dropped["sentences"] == len(NOUNS)
  assert made.num_held_out == {"demo": 1, "set.txt": 2}
  assert made.num_records["question"] == len(NOUNS)
  assert [s.split(": ")[0] for s in made.sources] == [
    f"folder:{config.manifest.removesuffix('manifest.json')}text 1 (CC0-1.0)"
  ]
  again = pretrain_recipe.run(config, tmp_path)
  assert again.text_digest == made.text_digest
  first = params(folder)
  assert equal(first, params(tmp_path))
  assert made.num_parameters == sum(leaf.size for leaf in first.values())
  capsys.readouterr()
  assert pretrain_recipe.run(config, folder) == made
  assert "finished earlier, skipped" in capsys.readouterr().out


def test_nothing_that_is_held_out_is_in_the_tokens(made):
  _, folder = made
  (corpus,) = public_corpus.parts(str(folder / pretrain_recipe.CORPUS_NAME))
  read = list(corpus.texts())
  assert any("bridge" in text for text in read)
  assert not any("harbour ferry" in text for text in read)
  cache = pretrain_tasks.Cache.load(folder / pretrain_recipe.CACHE_NAME)
  words = vocabulary.load(folder / "vocabulary.model", extra_ids=8)
  texts = [
    words.decode(row[row > 0].tolist())
    for row in (*cache.passages, *cache.queries)
  ]
  assert any("bridge" in text for text in texts)
  assert not any("harbour ferry" in text for text in texts)


def test_the_tokens_alone_are_enough_elsewhere(config, made, tmp_path):
  _, folder = made
  shutil.copytree(folder / "text", tmp_path / "text")
  for name in ("tokens.npz", "vocabulary.model"):
    shutil.copy(folder / name, tmp_path)
  no_text = dataclasses.replace(config, manifest="not there")
  pretrain_recipe.run(no_text, tmp_path)
  assert equal(params(folder), params(tmp_path))


def test_a_further_sitting_goes_on_from_a_checkpoint(config, made, tmp_path):
  _, folder = made
  silent = dataclasses.replace(
    curriculum(1), learning_rate=0.0, other_learning_rate=0.0
  )
  further = dataclasses.replace(config, start_from=str(folder), pretrain=silent)
  again = pretrain_recipe.run(further, tmp_path)
  assert again.start_from == str(folder)
  assert equal(params(folder), params(tmp_path))
  one, two = (place / "vocabulary.model" for place in (folder, tmp_path))
  assert one.read_bytes() == two.read_bytes()


def test_a_private_start_is_refused(config, made, tmp_path):
  """What it makes says nothing of privacy: any later run took it for public."""
  start = shutil.copytree(made[1], tmp_path / "start")
  (start / artifacts.RESULT_NAME).unlink()
  t5_checkpoints.save_claim(start, made_up.promise(8.0))
  further = dataclasses.replace(config, start_from=str(start))
  with pytest.raises(ValueError, match="trained on private queries"):
    pretrain_recipe.run(further, tmp_path / "to")
  assert not (tmp_path / "to" / "tokens.npz").exists()


def test_dropout_and_half_precision_are_of_the_training_alone(
  config, made, tmp_path
):
  dropped = dataclasses.replace(
    config,
    model=dataclasses.replace(SHAPE, dropout_rate=0.5),
    half_precision=True,
  )
  pretrain_recipe.run(dropped, tmp_path / "one")
  pretrain_recipe.run(dropped, tmp_path / "two")
  first = params(tmp_path / "one")
  assert equal(first, params(tmp_path / "two"))
  _, folder = made
  assert not equal(first, params(folder))
  assert t5_checkpoints.load_config(tmp_path / "one") == SHAPE
  sizes = [
    (place / "params.safetensors").stat().st_size
    for place in (tmp_path / "one", folder)
  ]
  assert sizes[0] < 0.7 * sizes[1]
  assert all(leaf.dtype == np.float32 for leaf in first.values())


def test_a_title_that_stands_above_many_texts_is_none(config, tmp_path):
  for folder, count in (("few", 8), ("many", 9)):
    (tmp_path / folder).mkdir()
    for number in range(count):
      (tmp_path / folder / f"{number}.md").write_text(
        f"# Remarks\n\nThe {NOUNS[number % 8]} number {number} was built of"
        " old stones by many people who lived beside the river then.\n"
      )
  found = []
  for folder in ("few", "many"):
    manifest = tmp_path / f"{folder}.json"
    name_folder(tmp_path / folder, manifest)
    names, dropped = [], collections.Counter()
    made = pretrain_recipe._records(
      dataclasses.replace(config, manifest=str(manifest)),
      tmp_path, [], dropped, names,
    )  # fmt: skip
    kept = pretrain_recipe._drawn(config, list(made))
    found.append(sum(record.kind == "heading" for record in kept))
  assert found == [8, 0]


def test_what_was_pre_trained_before_a_setting_went_is_not_made_again():
  """Private trainings rest on it: made again, they would cost twice."""
  phase = pretrain.Phase(
    steps=1,
    input_length=32,
    target_length=16,
    tasks=("copy",),
    batch_sizes=(1,),
  )
  found = artifacts.fingerprint(pretrain.Config(phases=(phase,)))
  assert found == "5aa4004f7a890b3b"  # of commit 5b4f8e8
