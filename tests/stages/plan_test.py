"""The whole pipeline on a few pairs: rows, skipping, and what may be shared."""

import dataclasses
import json
import pathlib
import re
import shutil

import finished_runs
import jax
import numpy as np
import pytest
import sentence_folder
import tiny_runs

from synthq_jax import stages
from synthq_jax.cli import main
from synthq_jax.data import shipped, splits
from synthq_jax.models import static_vectors, t5_checkpoints
from synthq_jax.privacy import rounding
from synthq_jax.privacy import unit as unit_lib
from synthq_jax.runtime import (
  encoder_start,
  fingerprints,
  private_training,
  results,
  rows,
  runner,
  stage,
  workspace,
)
from synthq_jax.stages import (
  _checks,
  audit,
  filter_queries,
  generate,
  plan,
  prepare_data,
  query_leakage,
  static_encoder,
)
from synthq_jax.storage import artifacts

ONE_METHOD = (finished_runs.DIRECT_METHODS["direct_dp"],)


def keep_rows(names):
  """Leaves out the rows of the other methods."""
  others = finished_runs.DIRECT_METHODS.keys() - {"direct_dp"}
  return tuple(x for x in names if x.removeprefix("ltr_") not in others)


@pytest.fixture
def made(monkeypatch):
  """The names of the stages that a run really runs."""
  names = []
  make = stage.Stage.make

  def noted(self, task, **named):
    names.append(task.result_path)
    return make(self, task, **named)

  monkeypatch.setattr(stage.Stage, "make", noted)
  return names


def _copy_data(run: finished_runs.Run, root: pathlib.Path) -> None:
  """Has the same data in another working directory, prepared already."""
  for name in ("prepare_data", "private/prepare_data"):
    shutil.copytree(run.root / name, root / name)


def _shareable(root: pathlib.Path) -> list[pathlib.Path]:
  return [
    path
    for path in sorted(root.rglob("*"))
    if path.is_file() and results.PRIVATE not in path.relative_to(root).parts
  ]


def test_the_table_has_every_row_and_both_pages_exist(finished_run):
  root, report = finished_run.root, finished_run.report
  for row in ("bm25", "public only", "original", "synthetic eps8"):
    assert row in report.table
  assert "direct dp eps8" in report.table
  for page in (report.html, report.markdown, report.private_html):
    assert (root / page).stat().st_size > 1000


def test_the_private_page_compares_queries_with_the_public_encoder(
  finished_run,
):
  root, report = finished_run.root, finished_run.report
  private = (root / report.private_html).read_text()
  assert "vectors from the dual encoder of t5" in private
  assert "tok:13a|smooth:exp|version:" in private
  for page in (report.html, report.markdown):
    text = (root / page).read_text()
    assert "MAUVE" not in text and "BLEU" not in text


_DELTA = re.compile(r"(?:delta|slack of|apart from delta) \(?([0-9.e-]+[0-9])")


def test_one_delta_stands_everywhere(finished_run, tmp_path, capsys):
  """On the screen, on both pages, in the ledger's sum and in an export."""
  root, report = finished_run.root, finished_run.report
  made = artifacts.load(root / "finetune_dp/eps8", results.Checkpoint)
  few = (
    r"finetune_dp|/direct_dp_(text_)?eps8|learn_adapter"  # each takes a second
  )
  lines = (root / "private/ledger.jsonl").read_text().splitlines(keepends=True)
  path = tmp_path / "ledger.jsonl"
  path.write_text("".join(line for line in lines if re.search(few, line)))
  given = f"--delta={made.statement.delta!r}"
  assert main.main(["privacy", f"--ledger={path}", given]) == 0
  sums = capsys.readouterr().out.partition("\n\n")[0]
  *_, together, _, _ = sums.splitlines()  # one has no claim
  to = tmp_path / "given"
  flags = [f"--queries={root / 'filter_queries/eps8'}", f"--to={to}"]
  assert main.main(["export", *flags, "--format=beir"]) == 0
  told = {
    "page": (root / report.markdown).read_text(),
    "private page": (root / report.private_html).read_text(),
    "screen": report.verdict,
    "ledger": together,
    "card": (to / "README.md").read_text(),
    "statement": (to / "PRIVACY.txt").read_text(),
  }
  written = rounding.delta(made.statement.delta)
  for where, text in told.items():
    found = set(_DELTA.findall(text))
    assert written in text, where
    assert found <= {written}, where


def test_a_second_run_makes_nothing(finished_run, made, tmp_path):
  copied = finished_run.copy(tmp_path)
  folder = copied / "generate/eps8"
  unfinished = folder / f"parts_{artifacts.read_fingerprint(folder)}"
  unfinished.mkdir()  # of a kill between the result and the end
  again = plan.run(finished_run.config, copied)
  assert made == [] and not unfinished.exists()
  assert again == finished_run.report


@pytest.mark.parametrize(
  "place, reader",
  [
    ("finetune_dp/eps8", "generate"),
    ("train_retriever/direct_dp_eps8", "encode_documents"),
  ],
)
def test_a_training_that_was_made_again_is_read_again(
  finished_run, tmp_path, place, reader
):
  root, config = finished_run.copy(tmp_path), finished_run.config
  wanted = stages.with_needs((reader,))
  before = dict(plan.outlook(config, str(root), wanted).progress)
  assert all(before[reader].values())
  path = next(root.rglob(f"{place}/{artifacts.RESULT_NAME}"))
  content = artifacts.read_json(path)
  for entry in content["result"]["statement"]["ledger"]:
    entry["identifier"] = "drawn once more"
  path.write_text(json.dumps(artifacts.sealed(content)))
  after = dict(plan.outlook(config, str(root), wanted).progress)
  row = place.rpartition("/")[2]
  changed = {k: v for k, v in before[reader].items() if after[reader][k] != v}
  assert list(changed) == [row]


def test_a_late_setting_reruns_only_what_depends_on_it(
  finished_run, made, tmp_path
):
  copied, config = finished_run.copy(tmp_path), finished_run.config
  late = dataclasses.replace(
    config,
    evaluate=dataclasses.replace(config.evaluate, relevance_level=2),
    query_leakage=query_leakage.Config(enabled=False),
    direct_dp_methods=ONE_METHOD,
    rows=dataclasses.replace(
      config.rows,
      ltr=keep_rows(config.rows.ltr),
      compared=keep_rows(config.rows.compared),
    ),
    test_sets=(),
  )
  before_it = [name for name in plan.STAGES if name != "report"]  # takes long
  plan.run(late, copied, stages=before_it)
  assert {x.split("/")[0] for x in made} == {"evaluate", "compare_queries"}
  assert dict(plan.outlook(late, copied, ["report"]).progress)["report"] == {
    "": False
  }
  scores = artifacts.load(copied / "evaluate/public/bm25", results.Evaluation)
  assert "Relevant is a grade of 2 or more" in " ".join(scores.traps)
  assert scores.measures["R@10"].mean == 0  # every grade is 1
  assert scores.measures["nDCG@10"].mean > 0.5  # whose gain is the grade


def test_no_private_query_stands_in_anything_shareable(finished_run):
  root = finished_run.root
  private = root / results.PRIVATE / "prepare_data"
  texts = [
    json.loads(line)["text"]
    for line in (private / "queries.jsonl").read_text().splitlines()
  ]
  secrets = {
    word for text in texts for word in text.split() if word[-1:].isdigit()
  }
  assert len(secrets) >= 100
  files = _shareable(root)
  assert len(files) > 10
  for path in files:
    content = path.read_bytes()
    for secret in secrets:
      assert secret.encode() not in content, f"{path.name} holds a query word"


def test_no_private_token_row_stands_in_shareable_arrays(finished_run):
  root = finished_run.root
  private = root / results.PRIVATE / "prepare_data"
  held = {
    tuple(row[row > 0])
    for split in ("train", "test")
    for row in np.load(private / f"{split}.npz")["tokens"]
  }
  seen = 0
  for path in _shareable(root):
    if path.suffix == ".npz":
      for name, values in np.load(path).items():
        if values.ndim == 2 and values.dtype == np.int32:
          rows = {tuple(row[row > 0]) for row in values}
          assert not rows & held, f"{path.name}: {name} holds a query"
          seen += len(rows)
  assert held and seen


def test_no_score_on_private_queries_and_no_loss_is_shareable(finished_run):
  root, metrics = finished_run.root, []
  for path in _shareable(root):
    relative = path.relative_to(root).as_posix()
    assert "evaluate/test" not in relative
    assert "original" not in relative
    if path.name.startswith("metrics"):
      is_of_written = {"train_retriever", "filter_queries"} & set(path.parts)
      assert is_of_written and "direct" not in relative, relative
      metrics.append(relative)
  assert metrics


def test_every_released_model_carries_its_statement(finished_run):
  root = finished_run.root
  generator = artifacts.load(root / "finetune_dp/eps8", results.Checkpoint)
  assert generator.statement.epsilon <= 8.0
  assert generator.statement.unit == unit_lib.QUERY
  queries = artifacts.load(root / "generate/eps8", results.SyntheticQueries)
  assert queries.statement.ledger == generator.statement.ledger
  public = artifacts.load(
    root / "generate/public_only", results.SyntheticQueries
  )
  assert public.statement.epsilon == 0
  direct = artifacts.load(
    root / "train_retriever/direct_dp_eps8", results.Checkpoint
  )
  (release,) = direct.statement.ledger
  assert release.l2_sensitivity == 2 * release.l2_clip_norm


def test_documents_are_chosen_without_looking_at_who_was_clicked(finished_run):
  config, root = finished_run.config, finished_run.root
  written = np.load(root / "generate/eps8/tokens.npz")["documents"]
  first = np.load(root / "generate/public_only/tokens.npz")["documents"]
  prepared = artifacts.load(root / "private/prepare_data", results.PreparedData)
  folders = workspace.Folders(root)
  expected = generate._choose(config.generate, folders, prepared)
  assert set(written) <= set(expected) and set(first) <= set(expected)


def test_queries_for_the_documents_asked_about_say_so(finished_run):
  root = finished_run.root
  prepared = artifacts.load(root / "private/prepare_data", results.PreparedData)
  asked = dataclasses.replace(prepared, num_asked=5)
  generator = artifacts.load(root / "finetune_dp/eps8", results.Checkpoint)
  notes = {
    documents.num_asked: " ".join(
      generate._statement(generator, documents).notes
    )
    for documents in (prepared, asked)
  }
  assert "without looking at private records" in notes[0]
  assert "that train queries ask about, whose list is public" in notes[5]
  space = workspace.Workspace(root, 7)
  settings = private_training.Settings(
    config=finished_run.config.finetune_dp, epsilon=8.0, mechanism="any"
  )
  told = [
    private_training._terms(settings, space, one).not_protected
    for one in (prepared, asked)
  ]
  (more,) = set(told[1]) - set(told[0])
  assert more == "asked"


@pytest.mark.slow
def test_another_secret_gives_another_model_and_the_same_one_the_same(
  finished_run, tmp_path
):
  name, models = "finetune_dp/eps8/params.safetensors", []
  for secret in (7, 8):
    other = dataclasses.replace(finished_run.config, secret_seed=secret)
    root = tmp_path / str(secret)
    plan.run(other, root, stages=["finetune_dp"])
    models.append((root / name).read_bytes())
  assert models[0] == (finished_run.root / name).read_bytes()
  assert models[0] != models[1]


@pytest.fixture(name="planted", scope="module")
def _planted(finished_run, tmp_path_factory):
  """Returns settings with canaries, where they ran, and the audit."""
  config = finished_run.config
  planted = dataclasses.replace(
    config,
    canaries=plan.Canaries(
      number=8, kinds=("own_query", "digits_document"), repetitions=(1, 2)
    ),
    audit=audit.Config(num_candidates=100, queries_per_canary=2),
    rows=plan.Rows(bm25=False, original=False, direct_dp=()),
    filter_queries=filter_queries.Config(),
    test_sets=(),
  )
  root = tmp_path_factory.mktemp("planted")
  _copy_data(finished_run, root)
  return planted, root, audited(planted, root)


def audited(config, root):
  made = {}
  plan.run(config, root, stages=["audit"], on_finished=made.update)
  (report,) = made["audit"]
  return report


def canary_lines(root, report):
  lines = (root / report.directory / "canaries.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_canaries_are_records_and_are_audited(planted):
  _, root, report = planted
  made = artifacts.load(root / "finetune_dp/eps8", results.Checkpoint)
  prepared = artifacts.load(
    root / results.PRIVATE / "prepare_data", results.PreparedData
  )
  assert report.claimed_epsilon == made.statement.epsilon
  assert report.claimed_delta == made.statement.delta
  # Every inserted canary is a record, as often as it stands there.
  (release,) = made.statement.ledger
  extra = release.num_examples - prepared.num_queries["train"]
  assert extra == sum(
    cell.repetitions * len(cell.ranks) for cell in report.cells
  )
  assert made.statement.delta == 1 / (2 * release.num_examples)
  for cell in report.cells:
    assert len(cell.ranks) + len(cell.held_out_ranks) == 8


@pytest.mark.slow
def test_no_canary_is_evaluated_or_shared(planted):
  _, root, report = planted
  secrets = [one["spelled"] for one in canary_lines(root, report)]
  private = root / results.PRIVATE
  shared = [p for p in root.rglob("*.json*") if private not in p.parents]
  judged = [*(private / "prepare_data").rglob("*.*sv"), *shared]
  judged += (private / "prepare_data").rglob("*.jsonl")
  assert len(judged) > 4
  for path in judged:
    text = path.read_text()
    assert not any(" ".join(secret) in text for secret in secrets), path
    assert not any(secret in text for secret in secrets), path


def test_an_audit_asks_the_generator_and_trains_nothing_else(planted):
  _, root, report = planted
  assert {one.attack for one in report.bounds} == {"likelihood"}
  made = {path.name for path in root.iterdir() if path.is_dir()}
  assert made == {"prepare_data", "finetune_dp", "generate", "private"}


@pytest.mark.slow
def test_canaries_that_no_audit_can_ask_for_are_refused_before_training(
  finished_run, planted, tmp_path
):
  config, _, _ = planted
  _copy_data(finished_run, tmp_path)
  for changes, message in (
    ({"digits": 2}, "at most 100 candidates in groups"),
    ({"number": 1, "kinds": ("own_query",), "repetitions": (1,)}, "held-out"),
    ({"digits": 18}, "secrets that fit"),
  ):
    wrong = dataclasses.replace(
      config,
      canaries=dataclasses.replace(config.canaries, **changes),
      audit=dataclasses.replace(config.audit, num_candidates=1000),
    )
    with pytest.raises(ValueError, match=message):
      plan.run(wrong, tmp_path, stages=["audit"])
  assert not (tmp_path / "finetune_dp").exists()


def test_another_version_of_numpy_is_another_release(
  finished_run, tmp_path, monkeypatch
):
  keys = []

  def noted(training, mechanism, *others):
    noise = jax.random.key_data(mechanism.noise_key)
    keys.append((bytes(noise), tuple(mechanism.batch_seed)))
    return {name: np.asarray(x) for name, x in training.params.items()}

  monkeypatch.setattr(private_training.dp_step, "train", noted)
  _copy_data(finished_run, tmp_path)
  for version in (np.__version__, "1.99"):
    monkeypatch.setattr(fingerprints.np, "__version__", version)
    plan.run(finished_run.config, tmp_path, stages=["finetune_dp"])
  assert len(set(keys)) == 2 and len({batch for _, batch in keys}) == 2
  ledger = tmp_path / results.PRIVATE / "ledger.jsonl"
  assert len(ledger.read_text().splitlines()) == 2


def test_a_fixed_secret_is_refused_for_private_data():
  source = prepare_data.Config(source="jsonl:log.jsonl")
  with pytest.raises(ValueError, match="recompute the noise"):
    plan.RunConfig(prepare_data=source, secret_seed=0)
  plan.RunConfig(prepare_data=source)
  plan.RunConfig(secret_seed=0)  # the demo's data is public


def test_one_query_less_changes_no_other_record():
  relevant = {f"q{i}": [f"d{i}", f"d{i + 1}", f"d{i + 2}"] for i in range(50)}
  kept = {q: splits.choose_document(d, q) for q, d in relevant.items()}
  del relevant["q7"]
  again = {q: splits.choose_document(d, q) for q, d in relevant.items()}
  assert again == {q: d for q, d in kept.items() if q != "q7"}
  positions = [int(d[1:]) - int(q[1:]) for q, d in kept.items()]
  assert set(positions) == {0, 1, 2}


def test_the_ledger_holds_every_private_training_once(finished_run):
  path = finished_run.root / results.PRIVATE / "ledger.jsonl"
  entered = [json.loads(line) for line in path.read_text().splitlines()]
  names = [one["identifier"].rsplit("/", 1)[0] for one in entered]
  direct = [f"train_retriever/{m}_eps8" for m in finished_runs.DIRECT_METHODS]
  weighed = [  # the claim of "text" is about another unit
    f"learn_to_rank/{name}"
    for name in ("untrained", "public_only", "synthetic_eps8", "original")
    + ("direct_dp_group_eps8", "adapter_eps8")
  ]
  adapter = "learn_adapter/adapter_eps8"
  expected = ["finetune_dp/eps8", *direct, adapter, *weighed]
  assert names == expected


@pytest.mark.slow
def test_retrievers_may_be_static_vectors(finished_run, made, tmp_path):
  own = dataclasses.replace(
    finished_run.config,
    static_encoder=static_encoder.Config(dim=6),
    direct_dp_methods=ONE_METHOD,
    rows=plan.Rows(public_only=False, fused=True, adapted=(8.0,)),
    test_sets=(),
  )
  root = finished_run.copy(tmp_path)
  plan.run(own, root, stages=["evaluate"])
  remade = {name.split("/")[0] for name in made}
  assert {"static_encoder", "train_retriever", "evaluate"} <= remade
  assert not remade & {"finetune_dp", "generate"}
  space = workspace.Workspace(root, own.secret_seed, may_draw=False)
  wanted = stages.with_needs(["evaluate"])
  run = runner.Run(
    rows.Plan(config=own, stages=wanted),
    space,
    [*map(stages.get, wanted)],
    say=lambda line: None,
  )
  assert all(all(there.values()) for _, there in run.survey() if there)
  assert run.encoder.folder == str(root / "static_encoder")
  assert run.t5 == run.start
  assert run.t5_data == run.data
  # Another T5 is nothing to them: it would be one more private release.
  params, t5 = t5_checkpoints.load(own.checkpoint)
  params["encoder"]["encoder_norm"]["scale"] *= 1.5
  shutil.copytree(own.checkpoint, tmp_path / "other")
  t5_checkpoints.save(tmp_path / "other", params, t5)
  other = dataclasses.replace(own, checkpoint=str(tmp_path / "other"))
  there = dict(plan.outlook(other, root, ["direct_dp"]).progress)
  assert there["static_encoder"] == {"": True}
  assert there["direct_dp"] and all(there["direct_dp"].values())
  start, shape = t5_checkpoints.load(root / "static_encoder")
  assert shape.emb_dim == 6
  for name in made:
    if name.startswith("train_retriever"):
      places = (root / name, root / results.PRIVATE / name)
      place = next(p for p in places if (p / "config.json").is_file())
      trained, its_shape = t5_checkpoints.load(place)
      assert its_shape == shape
      moved = np.abs(_table(trained) - _table(start)).max()
      assert (moved > 0) == (name != "train_retriever/untrained"), name
      assert moved < 0.1, name  # two small steps


def _table(params):
  return params["token_embedder"]["embedding"]


def test_static_vectors_follow_from_public_documents_alone(
  finished_run, tmp_path
):
  prepared = artifacts.load(
    finished_run.root / "private/prepare_data", results.PreparedData
  )
  documents = results.public_documents(prepared)
  root = finished_run.copy(tmp_path)
  shutil.rmtree(root / results.PRIVATE)
  drawn = [
    t5_checkpoints.load(root / made.directory)[0]
    for made in (
      tiny_runs.make(
        static_encoder.STAGE,
        static_encoder.Config(
          dim=4, seed=seed, steps=4, warmup_steps=1, batch_size=16
        ),
        workspace.Folders(root),
        row=rows.UNTRAINED,
        name="static",
        inputs=static_encoder.Inputs(documents=documents),
      )
      for seed in (0, 0, 1)
    )
  ]
  first, again, other = map(_table, drawn)
  np.testing.assert_array_equal(first, again)
  lengths = np.linalg.norm(first, axis=1)
  assert lengths[3:].std() > 0.1  # rare tokens are longer
  assert np.abs(first - other).max() > 0.1


def test_static_vectors_write_no_queries(finished_run, tmp_path):
  shape = static_vectors.StaticConfig(vocab_size=8192, emb_dim=2)
  table = {"token_embedder": {"embedding": np.zeros((8192, 2), np.float32)}}
  t5_checkpoints.save(tmp_path / "own", table, shape)
  own = dataclasses.replace(
    finished_run.config, checkpoint=str(tmp_path / "own")
  )
  for refused in (
    plan.run,
    lambda *of: plan.outlook(*of, ["generate"]).progress,
  ):
    with pytest.raises(ValueError, match="for queries or monoT5, got static"):
      refused(own, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_retrievers_of_another_vocabulary_are_refused(finished_run, tmp_path):
  other = tmp_path / "own"
  shutil.copytree(shipped.DIRECTORY, other)
  (other / "vocabulary.model").write_bytes(b"another")
  own = dataclasses.replace(
    finished_run.config,
    encoder=encoder_start.EncoderStart(folder=str(other)),
  )
  root = finished_run.copy(tmp_path)
  with pytest.raises(ValueError, match="belongs to vocabulary.model beside it"):
    plan.run(own, root)


def test_the_prompts_of_an_encoder_are_said_before_any_work(tmp_path):
  """E5's folder has none: it was trained and searched without, in silence."""
  folder = sentence_folder.save(tmp_path / "e5", "query passage otter")

  def said(**settings) -> list[str]:
    own = encoder_start.EncoderStart(folder=folder, **settings)
    config = plan.RunConfig(
      encoder=own, static_encoder=static_encoder.Config(dim=0)
    )
    assert not _checks.describe_prompts(config, ["prepare_data"])
    return _checks.describe_prompts(config, ["train_retriever"])

  note, _ = said()
  assert "reads nothing before queries and nothing before documents" in note
  note, _ = said(query_prompt="query: ", document_prompt="passage: ")
  assert "reads 'query: ' before queries and 'passage: ' before" in note
  _, note = said(length=128)
  # Static vectors have no limit: 512 tokens of 900 gave another vector.
  assert "first 128 tokens of a document, its folder all of them" in note
  assert "--gin.ENCODER_LENGTH=512" in note
  _, note = said()
  assert "first 512 tokens of a document, its folder all of them" in note
  longer = encoder_start.EncoderStart(folder=folder, length=2048).tokens()
  assert longer.length == 2048
  path = pathlib.Path(folder, "tokenizer.json")
  fields = json.loads(path.read_text())
  cut = {"direction": "Right", "max_length": 256, "strategy": "LongestFirst"}
  path.write_text(json.dumps(fields | {"truncation": cut | {"stride": 0}}))
  _, note = said(length=128)
  assert "its folder 256" in note and "--gin.ENCODER_LENGTH=0" in note
  assert len(said()) == 1


def test_an_encoder_of_dot_products_is_said_to_be_read_by_cosines(tmp_path):
  """Contriever's folder says nothing: its vectors were scaled in silence."""

  def said(folder: str) -> list[str]:
    config = plan.RunConfig(
      encoder=encoder_start.EncoderStart(folder=folder),
      static_encoder=static_encoder.Config(dim=0),
    )
    notes = _checks.describe_prompts(config, ["train_retriever"])
    return [note for note in notes if "compared by cosines" in note]

  words = "query passage otter"
  dot = sentence_folder.save(tmp_path / "dot", words, is_normal=False)
  assert len(said(dot)) == 1
  named = pathlib.Path(dot, "config_sentence_transformers.json")
  named.write_text('{"similarity_fn_name": "cosine"}')
  assert not said(dot)
  assert not said(sentence_folder.save(tmp_path / "normal", words))


def test_the_mean_of_a_folder_without_modules_is_said(tmp_path):
  """Of BGE's model without its pooling, other vectors were mapped in silence."""
  pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "otter"]
  (tmp_path / "vocab.txt").write_text("\n".join(pieces))
  shape = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
  shape |= {"model_type": "bert", "intermediate_size": 8, "vocab_size": 6}
  (tmp_path / "config.json").write_text(json.dumps(shape))

  def said() -> list[str]:
    own = encoder_start.EncoderStart(folder=str(tmp_path))
    config = plan.RunConfig(
      encoder=own, static_encoder=static_encoder.Config(dim=0)
    )
    notes = _checks.describe_prompts(config, ["train_retriever"])
    return [note for note in notes if "has no modules.json" in note]

  assert len(said()) == 1
  kinds = ["Transformer", "Pooling"]
  modules = [
    {"path": path, "type": f"sentence_transformers.models.{kind}"}
    for path, kind in zip(["", "1_Pooling"], kinds, strict=True)
  ]
  (tmp_path / "modules.json").write_text(json.dumps(modules))
  (tmp_path / "1_Pooling").mkdir()
  pooling = {"pooling_mode_cls_token": True}
  (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
  assert not said()


def test_a_generator_that_writes_nothing_is_refused(
  finished_run, tmp_path, monkeypatch
):
  """Here, where it can be told why, and not where its queries train something."""
  root = finished_run.copy(tmp_path)
  shutil.rmtree(root / "generate")

  def nothing(params, config, tokens, *, num_samples, max_length, **others):
    return np.zeros((len(tokens), num_samples, max_length), np.int32)

  monkeypatch.setattr(generate.decoding, "generate", nothing)
  with pytest.raises(ValueError, match="got none of .* texts, .*: train the"):
    plan.run(finished_run.config, root, stages=["generate"])
  assert not list(root.glob("generate/*/result.json"))
