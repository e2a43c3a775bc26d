"""What counts as released: the place decides, and nothing is left out."""

import dataclasses
import json
import math
import re
import shutil
import types

import made_up
import numpy as np
import pytest

from synthq_jax.models import encoders, t5_checkpoints
from synthq_jax.privacy import joint, ledger, rounding, sampling
from synthq_jax.runtime import (
  encoder_start,
  prepared_files,
  released_results,
  results,
  stage,
  workspace,
)
from synthq_jax.runtime import rows as rows_lib
from synthq_jax.stages import (
  encode_documents,
  evaluate,
  filter_queries,
  fuse,
  generate,
  plan,
  train_retriever,
)
from synthq_jax.storage import artifacts
from synthq_jax.tools import export

COMPARED = "direct_dp_group_eps8"  # of the finished run


def outside(root):
  """The files that are not under private/."""
  return [
    path
    for path in root.rglob("*")
    if path.is_file() and path.relative_to(root).parts[0] != results.PRIVATE
  ]


def identifiers(root):
  """Every release that a result outside of private/ names."""
  texts = (p.read_text() for p in outside(root) if p.name == "result.json")
  return {
    name
    for text in texts
    for name in re.findall(r'"identifier": "([^"]+)"', text)
  }


def test_whatever_lies_outside_of_private_is_in_the_joint_claim(finished_run):
  found = released_results.read(finished_run.root)
  named = identifiers(finished_run.root)
  # The generator, five of the six direct trainings, an adapter, weights beside
  # four retrievers.
  assert len(named) == 11
  assert named == {one.identifier for one in found.together.ledger}
  assert not found.unclaimed and not found.trials
  for path in outside(finished_run.root):
    if path.suffix == ".safetensors" or path.name == "queries.jsonl":
      place = path.parent.relative_to(finished_run.root).as_posix()
      assert place in found.shared or place.startswith(
        ("prepare_data", "prepare_test_set")
      ), place


def test_the_page_states_the_claim_of_all_that_lies_there(finished_run):
  claim = released_results.read(finished_run.root).together
  text = (finished_run.root / finished_run.report.markdown).read_text()
  section = text.partition("Everything that is released together")[2]
  shown = re.search(r"is \(([\d.]+), ([\d.e-]+)\)", section)
  assert shown[1] == rounding.epsilon(claim.epsilon)
  assert (
    f"**Privacy.** epsilon {shown[1]} for one query text. The claim" in text
  )
  claims = r"\(delta ([\d.e-]+)\)|is \([\d.]+, ([\d.e-]+)\)"
  deltas = {a or b for a, b in re.findall(claims, text)}
  assert deltas == {shown[2]}  # one on the whole page


def test_a_row_that_is_only_compared_lies_under_private_with_all_made_of_it(
  finished_run,
):
  root = finished_run.root
  found = released_results.read(root)
  place = f"train_retriever/{COMPARED}"
  assert place in found.compared and place not in found.shared
  name = found.compared[place].ledger[0].identifier
  for path in outside(root):
    assert COMPARED not in path.relative_to(root).as_posix(), path
    assert name.encode() not in path.read_bytes(), path
    assert b"direct dp group" not in path.read_bytes(), path
  assert found.everything.epsilon > found.together.epsilon
  assert found.everything.delta == found.together.delta
  assert len(found.started) == 14
  private = (root / finished_run.report.private_html).read_text()
  assert "direct dp group" in private and name in private


def test_what_earlier_settings_left_outside_of_private_counts(
  finished_run, tmp_path
):
  root = finished_run.copy(tmp_path)
  before = released_results.read(root)
  shutil.copytree(root / "generate/eps8", root / "generate/eps3")
  path = root / "generate/eps3/result.json"
  claim = made_up.claim(
    "finetune_dp/earlier",
    sampler=sampling.Poisson.with_margin(
      num_examples=60, expected_batch_size=16
    ),
    relation="ADD_OR_REMOVE_ONE",
    delta=before.together.delta,
  )
  content = json.loads(path.read_text())
  content["result"]["statement"] = artifacts.to_json(claim)
  del content["checksum"]
  path.write_text(json.dumps(content))
  after = released_results.read(root)
  assert claim.ledger[0] in after.together.ledger
  assert after.together.epsilon > before.together.epsilon


def test_files_without_a_result_take_the_claim_away(finished_run, tmp_path):
  root = finished_run.copy(tmp_path)
  (root / "finetune_dp/eps8/result.json").unlink()  # as a kill leaves it
  found = released_results.read(root)
  assert found.unclaimed == ("finetune_dp/eps8",)
  assert found.together is None
  place = root / "search/synthetic_eps8"  # an index of an earlier version
  place.mkdir(parents=True)
  (place / "documents.faiss").write_text("of some vectors")
  shutil.copy(root / "encode_documents/synthetic_eps8/result.json", place)
  assert place.relative_to(root).as_posix() in (
    released_results.read(root).unclaimed
  )


def test_exports_in_the_working_directory_count_with_their_claims(
  finished_run, tmp_path
):
  """They took every claim away: "files of no finished result"."""
  root = finished_run.copy(tmp_path)
  before = released_results.read(root)
  queries = root / "generate/eps8"
  export.run(queries, root / "exports/queries", format="hf")
  after = released_results.read(root)
  assert not after.unclaimed and after.together == before.together
  nested = root / "exports/queries/private"  # below another export
  export.run(
    root / "private/train_retriever/original",
    nested,
    format="safetensors",
    allow_private=True,
  )
  assert released_results.read(root).together.epsilon == math.inf
  shutil.rmtree(nested)
  path = root / "exports/queries/t5x" / t5_checkpoints.CLAIM_FILES[-1]
  path.parent.mkdir(parents=True)  # a MODEL_DIR of T5X, with its ledger
  path.write_text(ledger.line("other/1", made_up.claim("other/1")))
  together = released_results.read(root).together
  assert {x.identifier for x in together.ledger} >= {"other/1"}
  shutil.rmtree(root / "exports/queries/t5x")
  stored = artifacts.load(queries, results.SyntheticQueries)
  assert after.shared["exports/queries"] == stored.statement
  export.run(
    root / "private/train_retriever/original",
    root / "exports/private",
    format="safetensors",
    allow_private=True,
  )
  assert released_results.read(root).together.epsilon == math.inf
  (root / "exports/private/privacy.json").write_text("{}")  # damaged
  assert released_results.read(root).unclaimed == ("exports/private",)


def test_results_of_the_run_count_wherever_their_files_are(tmp_path):
  claim = made_up.claim()
  models = [
    made_up.checkpoint(statement=claim),
    made_up.checkpoint(directory="private/x", statement=made_up.claim("b/1")),
  ]
  found = released_results.read(tmp_path).including(models)
  assert found.together.ledger == claim.ledger


def test_trainings_without_a_result_are_trials(tmp_path):
  kept, gone = made_up.claim("a/1"), made_up.claim("a/2")
  path = tmp_path / "private/ledger.jsonl"
  for one in (kept, gone):
    ledger.enter(path, one.ledger[0].identifier, one)
  none = dataclasses.replace(kept, ledger=(), epsilon=math.inf)
  ledger.enter(path, "a/3", none)  # without privacy: it claims nothing
  made = made_up.checkpoint(statement=kept)
  artifacts.save(tmp_path / made.directory, made, "digest")
  found = released_results.read(tmp_path)
  assert found.trials == 1
  assert found.everything == joint.claim([kept, gone], delta=kept.delta)


def test_what_is_made_private_leaves_nothing_in_its_public_folder(tmp_path):
  task = stage.Task(
    result_path="train_retriever/x",
    digest="d",
    settings=None,
    inputs=None,
    folders=workspace.Folders(tmp_path),
  )
  (task.folder(private=False) / "params.safetensors").write_text("old")
  assert task.folder(private=True) == tmp_path / "private/train_retriever/x"
  assert not (tmp_path / "train_retriever/x").exists()


def test_a_task_without_the_secret_says_so(tmp_path):
  task = stage.Task(
    result_path="generate/eps8",
    digest="d",
    settings=None,
    inputs=None,
    folders=workspace.Folders(tmp_path),
  )
  with pytest.raises(TypeError, match="^generate/eps8: .*needs_secret=True"):
    task.space  # noqa: B018
  space = workspace.Workspace(tmp_path, 7)
  assert dataclasses.replace(task, folders=space).space is space


def test_a_result_takes_away_what_an_earlier_one_left(tmp_path):
  digest, old = "0123456789abcdef", "fedcba9876543210"
  task = stage.Task(
    result_path="finetune_dp/eps8",
    digest=digest,
    settings=None,
    inputs=None,
    folders=workspace.Folders(tmp_path),
  )
  folder = task.folder(private=False)
  for name in (digest, old):
    (folder / f"metrics_{name}.jsonl").write_text("{}")
    (folder / f"parts_{name}").mkdir()
  (folder / "params.safetensors").write_text("weights")
  one = stage.Stage(
    name="finetune_dp",
    result=results.Checkpoint,
    needs=(),
    plan=stage.plan_one_result,
    job=lambda run, _: None,
    run=lambda task: made_up.checkpoint(),
  )
  one.make(task)
  assert sorted(path.name for path in folder.iterdir()) == [
    "files.json",
    f"metrics_{digest}.jsonl",
    "params.safetensors",
    "result.json",
  ]


@pytest.mark.parametrize(
  ("names", "row", "is_compared"),
  [
    (("direct_dp",), "direct_dp_eps8", True),
    (("direct_dp",), "direct_dp_logit_eps8", True),
    (("direct_dp_logit",), "direct_dp_eps8", False),
    (("synthetic_eps1",), "synthetic_eps16", False),
    (("synthetic_eps16",), "synthetic_eps16", True),
    ((), "direct_dp_eps8", False),
    (("adapter",), "ltr_adapter_eps8", True),
    (("ltr_adapter",), "ltr_adapter_eps8", True),
    (("ltr_synthetic",), "synthetic_eps8", False),
    (("ltr_untrained",), "ltr_public_only", False),
  ],
)
def test_rows_are_compared_by_whole_words_of_their_names(
  names, row, is_compared
):
  assert (
    rows_lib.Plan(
      config=plan.RunConfig(rows=plan.Rows(compared=names)), stages=()
    ).is_compared(made_up.row(row))
    == is_compared
  )


def test_scores_of_a_private_training_carry_its_claim(finished_run, tmp_path):
  """The last thing of a release that lies outside still counts."""
  root = finished_run.copy(tmp_path)
  place = "evaluate/public/synthetic_eps8"
  (entry,) = released_results.read(root).shared[place].ledger
  for path in [*root.iterdir()]:
    if path.name not in ("evaluate", results.PRIVATE):
      shutil.rmtree(path) if path.is_dir() else path.unlink()
  for path in [*(root / "evaluate").rglob("result.json")]:
    if path.parent != root / place:
      shutil.rmtree(path.parent)
  assert entry in released_results.read(root).together.ledger
  path = root / place / "result.json"
  content = json.loads(path.read_text())
  claim = content["result"].pop("statement")  # as earlier versions wrote it
  content["result"]["epsilon"] = claim["epsilon"]
  del content["checksum"]
  path.write_text(json.dumps(content))
  assert released_results.read(root).unclaimed == (place,)


def test_every_release_of_scores_that_was_begun_counts(finished_run, tmp_path):
  root = finished_run.copy(tmp_path)
  before = released_results.read(root)
  claim = made_up.claim(
    "release_scores/-earlier",
    sampler=sampling.Poisson.with_margin(
      num_examples=60, expected_batch_size=16
    ),
    relation="ADD_OR_REMOVE_ONE",
    delta=before.together.delta,
  )
  line = ledger.line(claim.ledger[0].identifier, claim)
  with (root / results.PRIVATE / ledger.NAME).open("a") as file:
    file.write(line)
  after = released_results.read(root)
  assert claim.ledger[0] in after.together.ledger
  assert after.trials == before.trials
  # What they scored is not known any more: it may be what is only compared now.
  hidden = {
    entry
    for one in before.started.values()
    if math.isfinite(one.epsilon)
    for entry in one.ledger
  }
  assert hidden > {*before.together.ledger}
  assert hidden < {*after.together.ledger}


def test_scores_of_systems_that_were_made_again_count_both(
  finished_run, tmp_path
):
  root, stage = finished_run.copy(tmp_path), "release_scores"
  before = released_results.read(root)
  options = {
    "sampler": sampling.Poisson.with_margin(
      num_examples=60, expected_batch_size=16
    ),
    "relation": "ADD_OR_REMOVE_ONE",
    "delta": before.together.delta,
  }
  old, scores = (
    made_up.claim(name, **options)
    for name in ("finetune_dp/eps8/-earlier", f"{stage}/-earlier")
  )
  with (root / results.PRIVATE / ledger.NAME).open("a") as file:
    for claim in (old, scores):
      file.write(ledger.line(claim.ledger[0].identifier, claim))
  result = {"statement": artifacts.to_json(scores), "systems": []}
  folder = root / stage
  if folder.exists():
    shutil.rmtree(folder)
  folder.mkdir()
  content = {"fingerprint": "", "result": result}
  (folder / "result.json").write_text(json.dumps(content))
  assert old.ledger[0] not in released_results.read(root).together.ledger
  result["systems"] = list(results.list_releases([made_up_result(old)]))
  (folder / "result.json").write_text(json.dumps(content))
  after = released_results.read(root)
  assert {old.ledger[0], scores.ledger[0]} <= {*after.together.ledger}
  assert after.trials == before.trials


def made_up_result(claim):
  return types.SimpleNamespace(statement=claim)


def test_a_kill_while_a_file_is_written_takes_no_claim_away(tmp_path):
  folder = tmp_path / "encode_documents" / "synthetic_eps8"
  folder.mkdir(parents=True)
  for name in (".lock", ".vectors.npy.partial"):
    (folder / name).write_bytes(b"half")
  assert released_results.read(tmp_path).unclaimed == ()
  (folder / "vectors.npy").write_bytes(b"all, of a result that is gone")
  unclaimed = ("encode_documents/synthetic_eps8",)
  assert released_results.read(tmp_path).unclaimed == unclaimed


def test_nothing_is_claimed_beside_files_that_no_result_accounts_for():
  one = made_up.claim()
  found = released_results.Released(
    shared={"finetune_dp/eps8": one}, compared={}, started={}, unclaimed=()
  )
  assert found.together == one
  torn = dataclasses.replace(found, unclaimed=("generate/eps8",))
  assert torn.together is None and torn.everything == one


class Placed(Exception):  # noqa: N818
  """A stage has asked for a folder; nothing was made."""


STAGES = {
  "encode_documents": (encode_documents, "retriever"),
  "evaluate": (evaluate, "system"),
  "filter_queries": (filter_queries, "synthetic"),
  "fuse": (fuse, "retriever"),
  "generate": (generate, "generator"),
  "train_retriever": (train_retriever, "synthetic"),
}
"""Stages that only go on with a part, and what they call it."""
OF_REAL_QUERIES = ("train_retriever",)
"""Those that read the private queries where there are no synthetic ones."""


@pytest.fixture(name="placed")
def fixture_placed(monkeypatch):
  """Asks a stage whether what it makes of a part lies under private/."""
  nothing = np.zeros(0, int)
  passages = types.SimpleNamespace(
    ids=nothing, owners=nothing, tokens=np.zeros((0, 1), int)
  )
  passages.cut_at = lambda length: passages
  encoder = types.SimpleNamespace(select=lambda params: params)
  for name in ("corpus", "vocabulary"):
    monkeypatch.setattr(prepared_files, name, lambda *_: None)
  monkeypatch.setattr(prepared_files, "document_tokens", lambda *_: passages)
  start = encoder_start.EncoderStart
  monkeypatch.setattr(start, "load_public", lambda *_: ({}, None))
  monkeypatch.setattr(encoders, "of", lambda _: encoder)
  monkeypatch.setattr(generate, "_choose", lambda *_: nothing)

  def ask(name, part):
    def folder(*, private):
      raise Placed(private)

    module, what = STAGES[name]
    fields = [field.name for field in dataclasses.fields(module.Inputs)]
    known = {"documents": made_up.prepared(), "test_set": "public", what: part}
    known["encoder"] = start(folder="nowhere")
    settings = module.Config() if hasattr(module, "Config") else None
    if name == "filter_queries":
      settings = module.Config(top_k=1)
    task = types.SimpleNamespace(
      settings=settings,
      folders=workspace.Folders("nowhere"),
      folder=folder,
      inputs=module.Inputs(**{key: known.get(key) for key in fields}),
      get_row=lambda: made_up.row("synthetic_eps8"),
      digest="digest",
    )
    with pytest.raises(Placed) as found:
      module.run(task)
    return found.value.args[0]

  return ask


@pytest.mark.parametrize("name", STAGES)
def test_what_is_made_of_a_part_under_private_lies_there_too(placed, name):
  """A row that is only compared, or claims nothing, draws all after it there."""
  for folder, is_private in (("{}", False), ("private/{}", True)):
    part = types.SimpleNamespace(directory=folder.format("stage/row"))
    assert placed(name, part) is is_private


@pytest.mark.parametrize("name", OF_REAL_QUERIES)
def test_what_is_made_of_real_queries_lies_under_private(placed, name):
  assert placed(name, None) is True
