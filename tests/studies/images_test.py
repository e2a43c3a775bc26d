"""The study of image encoders: what it trains, claims, resumes and writes."""

import dataclasses
import json
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from synthq_jax import optim
from synthq_jax.data import images
from synthq_jax.losses import contrastive
from synthq_jax.models import dual_encoder
from synthq_jax.privacy import accounting, ledger, sampling, sensitivity
from synthq_jax.privacy import statement as statement_lib
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.report import blocks, plots
from synthq_jax.report import page as report_page
from synthq_jax.retrieval import neighbours
from synthq_jax.runtime import workspace
from synthq_jax.storage import artifacts
from synthq_jax.studies import frame
from synthq_jax.studies import images as study_lib
from synthq_jax.studies.images import page as page_lib
from synthq_jax.studies.images import published_noise, training
from synthq_jax.training import image_pairs, loop


def blobs(seed: int, per_class: int) -> images.Images:
  """Three classes, each a bright corner of a dark image with some noise."""
  rng = np.random.default_rng(seed)
  labels = np.repeat(np.arange(3, dtype=np.int32), per_class)
  pixels = rng.uniform(0, 0.3, (len(labels), 4, 4, 1))
  for label, corner in enumerate(((0, 0), (0, 2), (2, 0))):
    row, column = corner
    pixels[labels == label, row : row + 2, column : column + 2] += 0.7
  return images.Images(
    pixels=pixels.astype(np.float32), labels=labels, coarse_labels=labels % 2
  )


ROWS = (
  study_lib.Row(
    name="non_private",
    method=None,
    loss=contrastive.Softmax(temperature=1.0),
    learning_rate=0.02,
  ),
  study_lib.Row(
    name="logit",
    method=optim.Logit(norms="bound"),
    loss=contrastive.Spreadout(),
    learning_rate=0.01,
    clip_norm=0.5,
  ),
  study_lib.Row(
    name="naive",
    method=optim.Batch(),
    loss=contrastive.Softmax(temperature=1.0),
    learning_rate=0.01,
    clip_norm=0.25,
  ),
)
NET = study_lib.Encoder(
  name="small", net="embedding_net", rows=ROWS, steps=6, batch_size=6, dim=4
)
CONFIG = study_lib.Config(
  encoders=(NET,),
  held_out_pairs=9,
  public_data=True,
  settings=loop.Settings(log_every=3),
)


def run(config, root):
  return frame.run(study_lib.STUDY, config, root)


class Linear(nn.Module):
  """Stands in for the convolutions, which take half a minute to compile."""

  dim: int

  @nn.compact
  def __call__(self, pixels):
    flat = pixels.reshape(len(pixels), -1)
    return dual_encoder.normalize(nn.Dense(self.dim)(flat))


BUILD = study_lib.Encoder.build


def stand_in(patch):
  patch.setattr(study_lib.Encoder, "build", lambda self: Linear(dim=self.dim))


@pytest.fixture(autouse=True)
def source(monkeypatch):
  """Stands in for the digits."""
  stand_in(monkeypatch)
  calls = []

  def load(name, **options):
    calls.append((name, options))
    return blobs(0, 20), blobs(1, 10)

  monkeypatch.setattr(images, "load", load)
  return calls


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
  with pytest.MonkeyPatch.context() as patch:
    stand_in(patch)
    patch.setattr(images, "load", lambda *_, **__: (blobs(0, 20), blobs(1, 10)))
    root = tmp_path_factory.mktemp("study")
    text = run(CONFIG, root)
  return root, text, artifacts.load(root, training.Study)


def test_every_row_is_trained_scored_and_in_the_tables(studied):
  root, text, study = studied
  rows = ["untrained", *(row.name for row in ROWS)]
  assert [one.row for one in study.trainings] == rows
  assert (study.num_pairs, study.num_test) == (30, 30)
  page = (root / "study.md").read_text()
  for one in study.trainings:
    for written in (text, page.replace("\\", "")):
      assert one.row in written
      assert f"{one.neighbours.accuracy:.3f}" in written
    assert sum(map(sum, one.neighbours.confusion)) == 3 * 30
  assert (root / "study.svg").read_text().startswith("<svg")


def test_private_rows_claim_what_their_noise_earns(studied):
  root, _, study = studied
  entries = ledger.read(root / "private/ledger.jsonl")
  by_row = {one.row: one for one in study.trainings}
  assert by_row["untrained"].statement.epsilon == 0
  assert by_row["non_private"].statement.epsilon == math.inf
  sampler = sampling.Poisson.with_margin(num_examples=30, expected_batch_size=6)
  for name, moved in (
    (
      "logit",
      sensitivity.spreadout(
        max_batch_size=sampler.max_batch_size,
        l2_clip_norm=0.5,
        relation="ADD_OR_REMOVE_ONE",
        unit="pair",
        declared_batch_size=sampler.max_batch_size,
      ),
    ),
    ("naive", 2 * 0.25),
  ):
    one = by_row[name]
    assert one.l2_sensitivity == pytest.approx(moved, rel=1e-12)
    claim = one.statement
    assert claim.unit == unit_lib.IMAGE_PAIR
    assert claim.delta == 1 / 60
    want = accounting.epsilon(
      noise_multiplier=one.noise_multiplier,
      delta=1 / 60,
      sampler=sampler,
      steps=6,
    )
    assert claim.epsilon == pytest.approx(want, rel=1e-12)
    assert 7.9 < want <= 8
    [release] = claim.ledger
    assert release.l2_sensitivity == one.l2_sensitivity
    assert entries[release.identifier].ledger == claim.ledger
  assert len(entries) == 3  # the untrained weights are no release


@pytest.mark.parametrize("row, divisor", [(ROWS[1], 6.0), (ROWS[2], 1.0)])
def test_the_noise_has_the_scale_that_is_claimed(
  row, divisor, tmp_path, monkeypatch
):
  monkeypatch.setattr(optax, "adam", lambda schedule: optax.identity())
  data = types.SimpleNamespace(digest="d", pairs=np.zeros((30, 2), np.int32))
  space = workspace.Workspace(tmp_path)
  job = training.Trainer(CONFIG, NET, row, 0, space, data)
  fn = training._make_clipped(NET.build(), row, job.sampler.max_batch_size)
  tx = job._optimizer(fn, 1.5, jax.random.key(3))
  zeros = {"a": jnp.zeros(40_000), "b": jnp.zeros(40_000)}
  drawn, _ = tx.update(zeros, tx.init(zeros), zeros)
  moved = fn.sensitivity("ADD_OR_REMOVE_ONE", "pair")
  for leaf in drawn.values():
    # Four standard errors of the standard deviation are 1.4%.
    assert float(jnp.std(leaf)) == pytest.approx(
      1.5 * moved / divisor, rel=0.015
    )
  # Leaves of one shape have noise of their own, unlike in the published code.
  shared = float(jnp.corrcoef(drawn["a"], drawn["b"])[0, 1])
  assert abs(shared) < 0.02


def test_results_without_privacy_lie_among_the_private_ones(studied):
  root, _, _ = studied
  found = {p.parent.name for p in root.glob("trainings/*/*/result.json")}
  assert found == {"untrained_seed0", "logit_seed0", "naive_seed0"}
  hidden = root / "private/trainings/small/non_private_seed0/result.json"
  first, last = json.loads(hidden.read_text())["result"]["curve_losses"]
  assert last < first
  assert not list(root.rglob("state_*"))


def ends_where_it_begins(grad_fn, make_tx, key, params, pairs, files, **_):
  """Stands in for a training."""
  files.metrics_path.parent.mkdir(parents=True, exist_ok=True)
  files.metrics_path.write_text("")
  return types.SimpleNamespace(params=params, examples_per_second=1.0)


def test_private_images_show_rows_without_privacy_below_private_alone(
  studied, tmp_path, monkeypatch
):
  public, _, _ = studied
  monkeypatch.setattr(image_pairs, "train", ends_where_it_begins)
  text = run(dataclasses.replace(CONFIG, public_data=False), tmp_path)
  shared = {
    path.relative_to(tmp_path).as_posix()
    for path in tmp_path.rglob("*")
    if path.is_file() and "private" not in path.relative_to(tmp_path).parts
  }
  shared -= {".lock"}
  rows = ("untrained", "logit", "naive")
  expected = {f"trainings/small/{row}_seed0/result.json" for row in rows}
  assert {name for name in shared if "metrics_" not in name} == expected
  assert not [name for name in shared if "non_private" in name]
  for name in ("study.md", "study.svg", "result.json"):
    assert (public / name).exists()  # where the images are public
    assert (tmp_path / "private" / name).exists()
  assert f"report: {tmp_path / 'private' / 'study.md'}" in text


def shareable(root) -> tuple[dict[str, str], set[str]]:
  """Returns texts by path without times, and the fingerprints taken out."""
  folders = [path.parent for path in root.glob("trainings/*/*/result.json")]
  stages = {artifacts.read_fingerprint(one): f"<{one.name}>" for one in folders}
  found = {}
  for path in root.glob("trainings/**/*.json*"):
    name, text = path.relative_to(root).as_posix(), path.read_text()
    changing = r'"(seconds|examples_per_second|checksum)": .*'
    text = re.sub(changing, "", text)  # the checksum is that of times, too
    for digest, stage in stages.items():
      name, text = name.replace(digest, stage), text.replace(digest, stage)
    found[name] = text
  return found, set(stages)


def test_another_pair_shows_in_no_name_no_digest_and_no_size(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(image_pairs, "train", ends_where_it_begins)
  private = blobs(0, 20)
  labels = private.labels.copy()
  labels[-2:] = 3  # of a pair, whose class nobody else has
  other = dataclasses.replace(private, labels=labels)
  found, digests = {}, {}
  for name, one, secret in (
    ("", private, 7),
    ("other", other, 7),
    ("key", private, 8),
  ):
    monkeypatch.setattr(
      images, "load", lambda *_, o=one, **__: (o, blobs(1, 10))
    )
    config = dataclasses.replace(CONFIG, public_data=False, secret_seed=secret)
    run(config, tmp_path / f"run{name}")
    found[name], digests[name] = shareable(tmp_path / f"run{name}")
  assert len(found[""]) == 3  # results; metrics lie below private/
  assert found[""] == found["other"]
  fixed = [
    text for text in found[""].values() if '"secret_is_fixed": true' in text
  ]
  assert len(fixed) == 2  # the private rows
  # Without the secret a digest confirms no guess about the pairs.
  assert not digests[""] & digests["key"]


def test_what_is_finished_is_not_trained_again(studied, monkeypatch):
  root, text, _ = studied

  def refuse(*_, **__):
    raise AssertionError("trained again")

  monkeypatch.setattr(image_pairs, "train", refuse)
  assert run(CONFIG, root) == text
  changed = dataclasses.replace(
    NET, rows=(dataclasses.replace(ROWS[2], clip_norm=0.3),)
  )
  with pytest.raises(AssertionError, match="trained again"):
    run(dataclasses.replace(CONFIG, encoders=(changed,)), root)


@pytest.mark.parametrize("secret", [7, None])
def test_no_two_trainings_share_batches_or_noise(tmp_path, monkeypatch, secret):
  """Nor do two that differ in the secret alone, or one that is made again."""
  noise, batches = [], []

  def noted(grad_fn, *args, key, **named):
    noise.append(tuple(jax.random.key_data(key).tolist()))
    return optax.identity()

  def skipped(
    grad_fn, make_tx, key, params, pairs, files, *, batch_seed, **named
  ):
    make_tx(key)
    batches.append(tuple(batch_seed))
    files.metrics_path.parent.mkdir(parents=True, exist_ok=True)
    files.metrics_path.touch()
    return image_pairs.Trained(params, math.nan)

  monkeypatch.setattr(optim, "logit_dp", noted)
  scored = trained("any", 1.0, 0.5, 0, ())
  scores = {"neighbours": scored.neighbours, "coarse": scored.coarse}
  net = types.SimpleNamespace(
    init=lambda key, images: {"w": images.mean()},
    apply=lambda params, images: params["w"] * images,
  )
  monkeypatch.setattr(study_lib.Encoder, "build", lambda self: net)
  monkeypatch.setattr(image_pairs, "train", skipped)
  monkeypatch.setattr(training, "_compute_scores", lambda *_: scores)
  two = dataclasses.replace(NET, seeds=2)
  other = dataclasses.replace(two, name="other", dim=3)
  config = dataclasses.replace(
    CONFIG, secret_seed=secret, encoders=(two, other)
  )
  run(config, tmp_path)
  assert len(set(noise)) == len(noise) == 2 * 2 * 2  # without the plain rows
  assert len(set(batches)) == len(batches) == 2 * 3 * 2
  entered = list(ledger.read(tmp_path / "private/ledger.jsonl"))
  assert len(entered) == len(batches)
  for path in tmp_path.rglob("result.json"):
    path.unlink()
  run(config, tmp_path)
  again = list(ledger.read(tmp_path / "private/ledger.jsonl"))
  times = 1 if secret is not None else 2
  assert len(set(noise)) == times * 8 and len(set(batches)) == times * 12
  assert len(again) == times * 12 and again[:12] == entered


@pytest.mark.parametrize("secrets", [(7, 8), (None, None)])
def test_batches_and_noise_depend_on_the_secret(tmp_path, secrets):
  """At equal settings, fingerprint and drawn numbers."""
  draws = []
  for folder, secret in zip("ab", secrets, strict=True):
    data = types.SimpleNamespace(digest="d", pairs=np.zeros((30, 2), np.int32))
    space = workspace.Workspace(tmp_path / folder, secret_seed=secret)
    job = training.Trainer(CONFIG, NET, ROWS[1], 0, space, data)
    grad_fn = training._make_clipped(
      NET.build(), ROWS[1], job.sampler.max_batch_size
    )
    draws.append(job.release(job.claim(grad_fn)))
  one, other = draws
  assert not set(one.batch_seed) & set(other.batch_seed)
  assert not jnp.any(
    jax.random.key_data(one.noise_key) == jax.random.key_data(other.noise_key)
  )


@pytest.mark.slow
def test_nothing_of_an_unfinished_training_lies_outside_of_private(
  tmp_path, monkeypatch
):
  """Its steps after the last saved state are made again."""
  right = image_pairs.train

  def killed(*args, **named):
    right(*args, **named)
    raise KeyboardInterrupt

  monkeypatch.setattr(image_pairs, "train", killed)
  only = dataclasses.replace(NET, rows=ROWS[1:2])
  config = dataclasses.replace(CONFIG, encoders=(only,))
  with pytest.raises(KeyboardInterrupt):
    run(config, tmp_path)
  assert list(tmp_path.rglob("metrics_*"))
  public = [
    path.relative_to(tmp_path).as_posix()
    for path in tmp_path.rglob("*")
    if path.is_file() and "private" not in path.parts
  ]
  assert sorted(public) == [
    ".lock", "trainings/small/untrained_seed0/result.json"
  ]  # fmt: skip


def test_a_study_of_no_encoder_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"at least one images\.Encoder"):
    run(dataclasses.replace(CONFIG, encoders=()), tmp_path)


def test_a_head_of_another_source_reads_that_source(
  source, tmp_path, monkeypatch
):
  monkeypatch.setattr(study_lib.Encoder, "build", BUILD)
  other = dataclasses.replace(
    CONFIG,
    source="cifar10",
    head_source="cifar100",
    encoders=(dataclasses.replace(NET, rows=(), image_size=6),),
  )
  text = run(other, tmp_path)
  assert [name for name, _ in source] == ["cifar10", "cifar100"]
  assert "the train images of cifar100" in text


# The training itself.


def pairs_of(part: images.Images) -> dict[str, np.ndarray]:
  rows = images.pairs(part.labels, seed=0)
  return {
    "queries": part.pixels[rows[:, 0]],
    "documents": part.pixels[rows[:, 1]],
  }


def test_padding_does_not_move_the_mean_of_a_batch_without_privacy():
  """As batch normalisation would have it: an encoder that centres a batch."""

  def encode(params, pixels):
    flat = pixels.reshape(len(pixels), -1) @ params
    return dual_encoder.normalize(flat - flat.mean(0, keepdims=True))

  fn = optim.contrastive_clipped_grad(
    encode,
    encode,
    loss=contrastive.Softmax(temperature=1.0),
    l2_clip_norm=1.0,
    method=optim.Batch(),
    max_batch_size=10,
  )
  gradient = jax.jit(image_pairs._make_unclipped(fn))
  real = {k: v[:5] for k, v in pairs_of(blobs(0, 20)).items()}
  padded = {k: np.concatenate([v, v[[0] * 5]]) for k, v in real.items()}
  params = jax.random.normal(jax.random.key(0), (16, 4))
  want, _ = gradient(params, real, is_padding_example=np.zeros(5, bool))
  with_padding, _ = gradient(
    params, padded, is_padding_example=np.arange(10) >= 5
  )
  np.testing.assert_allclose(with_padding, want, rtol=1e-4, atol=1e-5)


def test_several_batches_make_one_step_with_noise_of_their_own(tmp_path):
  row = dataclasses.replace(ROWS[2], accumulation=2)
  net = dataclasses.replace(NET, steps=4, rows=(row,))
  config = dataclasses.replace(
    CONFIG, encoders=(net,), secret_seed=3, head_layers=(8, 4), head_epochs=2
  )
  run(config, tmp_path)
  study = artifacts.load(tmp_path, training.Study)
  _, naive = study.trainings
  (release,) = naive.statement.ledger
  assert (naive.steps, release.steps, naive.accumulation) == (4, 4, 2)
  data = training.read(config)[None]
  trainer = training.Trainer(
    config, net, row, 0, workspace.Workspace(tmp_path, 3), data
  )
  grad_fn = training._make_clipped(net.build(), row, 30)
  tx = trainer._optimizer(grad_fn, 0.0, jax.random.key(0))
  params = {"w": jnp.zeros(3)}
  state, updates = tx.init(params), []
  for sign in (1.0, 2.0, 3.0, 4.0):
    update, state = tx.update({"w": sign * jnp.ones(3)}, state, params)
    updates.append(float(jnp.abs(update["w"]).max()))
  assert updates[0] == updates[2] == 0.0 and min(updates[1], updates[3]) > 0


# Noise of the published code.


def test_the_published_noise_lacks_about_one_over_the_temperature():
  size, temperature = 100, 0.2
  given = published_noise.published(batch_size=size, temperature=temperature)
  needed, needed_replace = published_noise.needed(
    batch_size=size, temperature=temperature
  )
  a = math.exp(2 / temperature)
  mass = (size - 1) * a / (1 + (size - 1) * a)
  moved = 2 / temperature * (mass + (size - 1) * a / (a + size - 1))
  assert needed == pytest.approx(moved / size, rel=1e-12)
  assert given == pytest.approx(1 / size + 2 * a / (size + a - 1), rel=1e-12)
  # Exact numbers, computed by hand for the paper's setting.
  assert given == pytest.approx(2.0011, abs=1e-4)
  assert needed == pytest.approx(9.956, abs=1e-3)
  assert needed_replace / given == pytest.approx(5.03, abs=0.01)


# What it writes.


def trained(row: str, epsilon: float, accuracy: float, seed: int, curve):
  right = round(100 * accuracy)
  counts = ((right, 100 - right), (100 - right, right))
  return training.Training(
    encoder="net",
    row=row,
    seed=seed,
    statement=statement_of(epsilon),
    num_parameters=10,
    steps=4,
    batch_size=8,
    max_batch_size=20,
    noise_multiplier=0.0,
    l2_sensitivity=0.0,
    l2_clip_norm=0.0,
    neighbours=neighbours.scores_of(np.array(counts)),
    coarse=neighbours.scores_of(np.array(((3, 1), (2, 2)))),
    curve_steps=(2, 4),
    curve_losses=curve,
    examples_per_second=100.0 * (seed + 1),
    seconds=1.0,
  )


def statement_of(epsilon: float):
  if math.isinf(epsilon):
    return statement_lib.non_private(unit=unit_lib.IMAGE_PAIR)
  return statement_lib.none(unit=unit_lib.IMAGE_PAIR)


def test_figures_are_means_over_seeds_beside_the_row_without_privacy(
  monkeypatch,
):
  study = training.Study(
    source="digits",
    num_pairs=10,
    num_test=20,
    epsilon=8.0,
    delta=0.05,
    neighbours=3,
    head="something",
    trainings=(
      trained("plain", math.inf, 0.8, 0, (4.0, 2.0)),
      trained("plain", math.inf, 0.9, 1, (4.0, 2.0)),
      trained("other", 0.0, 0.6, 0, (6.0, 5.0)),
      trained("other", 0.0, 0.7, 1, (2.0, 5.0)),
    ),
    seconds=4.0,
  )
  drawn = []
  monkeypatch.setattr(
    plots, "together", lambda panels, **_: drawn.append(panels) or "<svg/>"
  )
  page = page_lib.make_page(study)
  scored, described = page.parts[0].blocks[0], page.parts[1].blocks[0]
  cells = [dict(zip(scored.header, row, strict=True)) for row in scored.rows]
  assert [one["k-NN accuracy"] for one in cells] == [
    "0.850 +- 0.071",
    "0.650 +- 0.071",
  ]
  assert [one["Relative"] for one in cells] == ["1.000", "0.765"]
  assert [row[9] for row in described.rows] == ["150", "150"]
  assert drawn[0] == {
    "net": {"plain": ([2, 4], [1.0, 1.0]), "other": ([2, 4], [1.0, 2.5])}
  }
  # 8 pairs a step, 150 pairs a second.
  times = [2 * 8 / 150, 4 * 8 / 150]
  assert drawn[1] == {
    "net": {"plain": (times, [4.0, 2.0]), "other": (times, [4.0, 5.0])}
  }
  assert not drawn[2:]  # one batch size
  assert [one["Most recall"] for one in cells] == ["0.850", "0.650"]
  head = page.parts[0].blocks[2]
  assert dict(zip(head.header, head.rows[0], strict=True)) == {
    "Encoder": "net",
    "Row": "plain",
    "epsilon": "inf",
    "Seeds": "2",
    "Head accuracy": "0.625 +- 0.000",
    "Relative": "1.000",
    "Precision": "0.633",
    "Recall": "0.625",
    "F1": "0.619",
    "Most precision": "0.667",
    "Most recall": "0.750",
    "Most F1": "0.667",
  }
  figures = [
    block.file
    for part in page.parts
    for block in part.blocks
    if isinstance(block, blocks.Figure)
  ]
  assert figures == ["study.svg", "time.svg", "confusion.svg"]
  larger = dataclasses.replace(
    trained("other", 0.0, 0.7, 0, (3.0, 4.5)), encoder="wide", batch_size=64
  )
  page_lib.make_page(
    dataclasses.replace(study, trainings=(*study.trainings, larger))
  )
  assert drawn[-1] == {"net": {"other": ([8, 64], [5.0, 4.5])}}
  # Counts of both seeds.
  assert "| 0 | 130 | 70 |" in report_page.markdown(page)


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda: dataclasses.replace(NET, net="vgg"), "net='vgg'"),
    (lambda: dataclasses.replace(NET, rows=ROWS[:1] * 2), "different names"),
    (lambda: dataclasses.replace(NET, name="../net"), "'../net'"),
    (lambda: dataclasses.replace(CONFIG, encoders=(NET, NET)), "different nam"),
    (lambda: dataclasses.replace(NET, steps=0), "steps must be at least 1"),
    (
      lambda: dataclasses.replace(
        NET, rows=(dataclasses.replace(ROWS[1], accumulation=4),)
      ),
      "accumulation=4 of row 'logit', got 6",
    ),
    (lambda: dataclasses.replace(ROWS[1], accumulation=0), "accumulation must"),
    (lambda: dataclasses.replace(NET, norm="batch"), "norm='batch'.*'logit'"),
    (lambda: dataclasses.replace(NET, norm="layer"), "norm='layer'"),
    (lambda: dataclasses.replace(ROWS[0], name="untrained"), "'untrained'"),
    (lambda: dataclasses.replace(ROWS[0], name="a/b"), "'a/b'"),
    (lambda: dataclasses.replace(ROWS[1], clip_norm=0.0), "above 0, got 0.0"),
    (lambda: dataclasses.replace(CONFIG, source="mnist"), "'mnist'"),
    (lambda: dataclasses.replace(CONFIG, epsilon=0.0), "epsilon must be above"),
  ],
)
def test_settings_without_sense_are_refused(change, words):
  with pytest.raises(ValueError, match=words):
    change()
