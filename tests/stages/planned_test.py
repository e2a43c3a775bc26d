"""The plan of a run, which is printed before anything is made."""

import dataclasses
import shutil

import made_up
import pytest
import small_data
import tiny_runs

from synthq_jax import stages
from synthq_jax.cli import guide
from synthq_jax.privacy import ledger
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.runtime import results, rows
from synthq_jax.stages import direct_dp, finetune_dp, plan
from synthq_jax.storage import artifacts

FOLDERS = {"direct_dp": "train_retriever"}
"""Where a stage's results lie, if not under its name."""


def _made(root):
  """Returns the folders of finished results, without `private/`."""
  return {
    path.parent.relative_to(root).as_posix().removeprefix("private/")
    for path in root.rglob(artifacts.RESULT_NAME)
  }


def _planned_folders(rows):
  return {
    "/".join(filter(None, (FOLDERS.get(name, name), row)))
    for name, planned in rows.items()
    for row in planned
  }


def test_the_plan_names_the_stages_and_rows_that_then_ran(
  finished_run, tmp_path
):
  seen = plan.outlook(finished_run.config, tmp_path / "new", plan.STAGES)
  assert not (tmp_path / "new").exists()
  assert {rows for _, rows in seen.progress[1:]} == {None}
  ran, planned = _made(finished_run.root), _planned_folders(seen.rows)
  assert len(ran) > 150
  # 20 test queries are too few for scores with noise.
  assert planned - ran == {"release_scores"}
  assert ran <= planned
  # Nobody asked the public sentences: they tell of no row without privacy.
  public = [name for name in planned if name.startswith("evaluate/public/")]
  assert "evaluate/public/fused_synthetic_eps8" in public
  assert not [name for name in public if "original" in name]


@pytest.mark.parametrize("name", plan.STAGES)
def test_the_plan_of_a_stage_has_the_rows_of_its_jobs(finished_run, name):
  config = finished_run.config
  wanted = stages.with_needs([name])
  seen = plan.outlook(config, finished_run.root, wanted)
  for each, there in seen.progress:
    if there is not None and each != "release_scores":
      assert {*there} == {*seen.rows[each]}, each


def test_a_run_that_was_stopped_while_it_scored_has_a_plan(
  finished_run, tmp_path
):
  root = finished_run.copy(tmp_path)
  for name in ("bm25", "fused_untrained"):
    shutil.rmtree(root / "private/evaluate/test" / name)
  seen = plan.outlook(finished_run.config, root, ["evaluate"])
  there = dict(seen.progress)["evaluate"]
  missing = {name for name, is_there in there.items() if not is_there}
  assert {"test/bm25", "test/fused_untrained"} <= missing
  assert all(
    x.startswith(("test/bm25", "test/fused", "test/ltr")) for x in missing
  )


def test_the_plan_of_trainings_for_users_counts_users(finished_run):
  config = dataclasses.replace(
    finished_run.config,
    direct_dp=direct_dp.Config(),
    direct_dp_methods=(),
  )
  data = made_up.prepared(
    unit=unit_lib.user(2), num_queries={"train": 600}, num_users={"train": 400}
  )
  planned = rows.Plan(config=config, stages=("finetune_dp", "direct_dp"))
  trainings = plan.plan_trainings(planned, data)
  assert [(t.num_records, t.num_users, t.delta) for t in trainings] == [
    (400, 400, 1 / 800),
    (600, 400, 1 / 800),
  ]


def test_the_plan_of_the_trainings_is_what_their_claims_say(
  finished_run, tmp_path
):
  config, root = finished_run.config, finished_run.root
  known = plan.outlook(config, root, plan.STAGES).trainings
  claims = {}
  for entry in ledger.read(root / results.PRIVATE / ledger.NAME).values():
    for one in entry.ledger:
      claims[one.identifier.rpartition("/")[0]] = (entry, one)
  assert {one.result_path for one in known} == {*claims}
  assert len(claims) > 10
  for training in known:
    claim, released = claims[training.result_path]
    assert claim.delta == training.delta
    assert claim.epsilon <= training.epsilon < 1.05 * claim.epsilon
    assert released.num_examples == training.num_records
    assert released.expected_batch_size == training.batch_size
    assert released.max_batch_size == training.max_batch_size
    assert released.steps == training.steps
  # Before the data is read the same trainings, without what follows from n.
  before = plan.outlook(config, tmp_path / "new", plan.STAGES).trainings
  assert len(before) == len(known)
  for early, late in zip(before, known, strict=True):
    same = dataclasses.replace(late, delta=None, num_records=None)
    size = early.batch_size
    assert early == dataclasses.replace(
      same, max_batch_size=None, batch_size=size
    )
    assert late.batch_size == (late.num_records if size is None else size)


def test_a_plan_of_known_data_refuses_a_batch_above_n(finished_run):
  config = finished_run.config
  large = dataclasses.replace(config.finetune_dp, batch_size=106)
  with pytest.raises(ValueError, match="batch_size must be at most 105"):
    plan.outlook(
      dataclasses.replace(config, finetune_dp=large),
      finished_run.root,
      plan.STAGES,
    )


@pytest.mark.parametrize(
  ("rows", "words"),
  [
    (  # "adapter_eps1" counted as released
      {"adapted": (1.0,), "compared": ("adapter_eps1.0",)},
      r"COMPARED.* got adapter_eps1\.0: it has synthetic_eps8, direct_dp_eps8,"
      " adapter_eps1$",
    ),
    (
      {"adapted": (1.0,), "ltr": ("original", "adapter_eps2")},
      "LTR.* got adapter_eps2: it has untrained, public_only, .* adapter_eps1$",
    ),
    ({"ltr": ("adapter",)}, "got adapter: it has untrained,"),
    ({"compared": ("ltr_untrained", "adapter")}, None),  # as recipes have it
    ({"ltr": ("original", "adapter")}, None),
  ],
)
def test_names_of_rows_that_a_run_lacks_are_refused(tmp_path, rows, words):
  source = small_data.write_pairs(tmp_path / "pairs.jsonl", 40)
  config = tiny_runs.config(source, rows=plan.Rows(**rows))
  if words is None:
    plan.outlook(config, tmp_path / "run", plan.STAGES)
    return
  with pytest.raises(ValueError, match=words):
    plan.outlook(config, tmp_path / "run", plan.STAGES)
  with pytest.raises(ValueError, match=words):
    plan.run(config, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_a_batch_above_the_lines_is_refused_before_they_are_read(tmp_path):
  """A dry run listed all trainings, and the run met it after it read the data."""
  source = small_data.write_pairs(tmp_path / "pairs.jsonl", 40)
  base = tiny_runs.config(source)

  def look(**changes):
    config = dataclasses.replace(base, **changes)
    plan.outlook(config, tmp_path / "run", plan.STAGES)

  look()
  large = finetune_dp.Config(batch_size=64)
  with pytest.raises(
    ValueError,
    match=r"at most 4., .* --gin\.finetune_dp\.Config\.batch_size=8$",
  ):
    look(finetune_dp=large)
  look(finetune_dp=large, rows=plan.Rows(synthetic=()))  # trains none
  with pytest.raises(ValueError, match=r"direct_dp\.Config\.batch_size must"):
    look(direct_dp=direct_dp.Config(batch_size=64))
  many = dataclasses.replace(base.train_retriever, batch_size=64)
  original = plan.Rows(synthetic=(), public_only=False, direct_dp=())
  with pytest.raises(
    ValueError, match=r"at most 4., as there are no more real quer"
  ):
    look(train_retriever=many, rows=original)
  written = dataclasses.replace(base.generate, num_documents=None)
  with pytest.raises(
    ValueError, match=r"at most .*, as there are no more synth"
  ):
    look(
      train_retriever=dataclasses.replace(many, batch_size=4096),
      generate=written,
      rows=plan.Rows(original=False, direct_dp=()),
    )
  nothing = dataclasses.replace(original, original=False)
  look(train_retriever=many, rows=nothing)


def test_a_dry_run_prints_the_rows_and_the_trainings(finished_run, tmp_path):
  config, root = finished_run.config, finished_run.root
  before = guide.dry_run(config, tmp_path / "new", plan.STAGES, ())
  lines = before.splitlines()
  assert "generate: public_only, eps8" in lines
  rows = plan.outlook(config, tmp_path / "new", plan.STAGES).rows
  shown = next(line for line in lines if line.startswith("evaluate: "))
  listed = {
    f"{called}/{system}"
    for part in shown.removeprefix("evaluate: ").split("; ")
    for systems, _, sets in [part.partition(" on ")]
    for system in systems.split(", ")
    for called in sets.split(", ")
  }
  assert listed == {*rows["evaluate"]}
  assert (
    "finetune_dp/eps8: epsilon 8, delta 1/(2n), n is known once the data is"
    " read, batch 16 expected, at most what n allows, 2 steps" in lines
  )
  after = guide.dry_run(config, root, plan.STAGES, ()).splitlines()
  assert (
    "finetune_dp/eps8: epsilon 8, delta 0.00477, n 105, batch 16 expected, at"
    " most 56, 2 steps" in after
  )
