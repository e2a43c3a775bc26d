"""Checkpoints leave a run, and come into one, in every format."""

import dataclasses
import json
import math
import pathlib
import re
import shutil
import stat
import tempfile

import jax
import loop_store
import made_up
import numpy as np
import pytest
import small_data
import tiny_runs

from synthq_jax.cli import main
from synthq_jax.data import shipped
from synthq_jax.data import vocabulary as vocabulary_lib
from synthq_jax.models import dual_encoder, t5, t5_checkpoints, t5_config
from synthq_jax.privacy import sampling, statement, wording
from synthq_jax.runtime import fingerprints, model_files, results, workspace
from synthq_jax.stages import plan
from synthq_jax.storage import artifacts, stores
from synthq_jax.tools import cards, export

TINY = t5_config.get("tiny")
PUBLIC = "finetune_dp/eps8"
HIDDEN = "private/finetune_dp/inf"
WORDS = b"a vocabulary"


def make():
  """Random parameters of the tiny T5."""
  rng = np.random.default_rng(0)
  flat = {
    name: rng.normal(size=shape).astype(np.float32)
    for name, shape in t5.shapes(TINY).items()
  }
  return t5_checkpoints.unflatten(flat)


CLAIM = made_up.claim("x")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
  """A working directory with a private and a shareable generator."""
  root = tmp_path_factory.mktemp("run")
  (root / "prepare_data").mkdir()
  texts = [small_data.document(number) for number in range(64)]
  model = root / "prepare_data" / "vocabulary.model"
  vocabulary_lib.train(texts, model, vocab_size=80)
  claims = {PUBLIC: CLAIM, HIDDEN: statement.non_private()}
  for directory, made in claims.items():
    t5_checkpoints.save(root / directory, make(), TINY)
    result = made_up.checkpoint(directory=directory, statement=made)
    artifacts.save(root / directory, result, "digest")
  return root


def assert_same(left, right):
  left, right = t5_checkpoints.flatten(left), t5_checkpoints.flatten(right)
  assert sorted(left) == sorted(right)
  for name in left:
    np.testing.assert_array_equal(left[name], right[name], name)


@pytest.mark.parametrize(
  "name, made, vocabulary",
  [
    ("t5x", "checkpoint_7", "vocabulary.model"),
    ("huggingface", "", "spiece.model"),
    ("safetensors", "", "vocabulary.model"),
  ],
)
def test_an_export_holds_the_model_its_vocabulary_and_its_claim(
  name, made, vocabulary, run_folder, tmp_path, capsys
):
  to = tmp_path / "to"
  argv = [f"--checkpoint={run_folder / PUBLIC}", f"--to={to}"]
  argv += ["--step=7"] if name == "t5x" else []
  assert main.main(["export", f"--format={name}", *argv]) == 0
  params, config = t5_checkpoints.load(to)
  assert config == TINY
  assert_same(params, make())
  used = run_folder / "prepare_data" / "vocabulary.model"
  assert (to / made / vocabulary).read_bytes() == used.read_bytes()
  words = (to / made / export.CLAIM).read_text()
  assert words == f"{statement.in_words(CLAIM)}\n"
  printed = capsys.readouterr().out
  assert f"written: {to / made}" in printed
  numbers = re.search(r"epsilon = ([\d.]+), delta = ([\d.e-]+) for", printed)
  epsilon, delta = map(float, numbers.groups())
  assert CLAIM.epsilon <= epsilon <= 1.001 * CLAIM.epsilon  # not .8535
  assert CLAIM.delta <= delta <= 1.01 * CLAIM.delta


def test_a_release_of_epsilon_0_is_no_public_checkpoint(tmp_path):
  everything = sampling.Poisson(
    num_examples=150, expected_batch_size=150, max_batch_size=151
  )
  made = made_up.claim(
    sampler=everything,
    relation="ADD_OR_REMOVE_ONE",
    noise_multiplier=100.0,
    steps=1,
    delta=0.005,
  )
  assert made.epsilon == 0
  result = made_up.checkpoint(statement=made)
  artifacts.save(tmp_path, result, "digest")
  with pytest.raises(ValueError, match="trained on private queries"):
    model_files.load_public(tmp_path, None)


@pytest.mark.parametrize("form", t5_checkpoints.FORMATS)
def test_what_was_exported_is_no_public_start_either(
  run_folder, tmp_path, form
):
  """Its epsilon would be counted by nobody."""
  export.run(run_folder / PUBLIC, tmp_path / "to", format=form)
  assert t5_checkpoints.claim(tmp_path / "to") == CLAIM
  export.run(tmp_path / "to", tmp_path / "again", format="safetensors")
  (tmp_path / "link").symlink_to(tmp_path / "again")
  for start in ("to", "again", "link"):
    with pytest.raises(ValueError, match="trained on private queries"):
      model_files.load_public(tmp_path / start, Prepared("v", 1))
  (tmp_path / "again" / "privacy.json").unlink()
  with pytest.raises(ValueError, match="export this checkpoint again"):
    model_files.load_public(tmp_path / "again", None)


def test_a_file_in_the_place_of_a_statement_is_refused(tmp_path):
  (tmp_path / "privacy.json").write_text('{"policy": "of another program"}')
  with pytest.raises(ValueError, match="privacy.json: expected the statement"):
    t5_checkpoints.claim(tmp_path)


def test_a_result_that_was_damaged_is_no_public_start(run_folder, tmp_path):
  shutil.copytree(run_folder / PUBLIC, tmp_path / "start")
  path = tmp_path / "start" / artifacts.RESULT_NAME
  text = path.read_text()
  path.write_text(text.replace('"epsilon": ', '"epsilon": 1', 1))
  with pytest.raises(ValueError, match="restore it, or delete"):
    model_files.load_public(tmp_path / "start", None)


def test_a_model_of_other_data_than_lie_there_is_not_exported(
  run_folder, tmp_path
):
  """Else its card tells lengths, and its tokenizer ids, that are not its own."""
  root = tmp_path / "run"
  shutil.copytree(run_folder, root)
  data = root / "private/prepare_data"
  data.mkdir(parents=True)
  made = made_up.checkpoint(directory=PUBLIC, statement=CLAIM)
  artifacts.save(root / PUBLIC, made, "digest", data="of 64 tokens")
  prepared = made_up.prepared()
  folders = [data, root / "prepare_data"]
  options = {"to": tmp_path / "to", "format": "huggingface"}
  # A run is under way, and may have written its documents already.
  with pytest.raises(ValueError, match="expected the data that it was made of"):
    export.run(root / PUBLIC, **options)
  artifacts.save(data, prepared, "of 48 tokens", folders=folders)
  with pytest.raises(ValueError, match="prepared with other settings"):
    export.run(root / PUBLIC, **options)
  artifacts.save(data, prepared, "of 64 tokens", folders=folders)
  with open(root / "prepare_data/vocabulary.model", "ab") as stream:
    stream.write(b"x")
  with pytest.raises(ValueError, match="vocabulary.model"):
    export.run(root / PUBLIC, **options)
  assert not (tmp_path / "to").exists()


def test_numbers_of_a_card_are_numbers_to_readers_of_yaml():
  """YAML 1.1 wants a dot: 1 / (2n) of 50,000 queries is text without."""
  yaml = pytest.importorskip("yaml")
  for delta in (1e-05, 5e-05, 6.78e-05, 1e-12, 0.25):
    claim = dataclasses.replace(CLAIM, delta=delta, epsilon=8.0)
    read = yaml.safe_load(cards._write_yaml(cards._round_claim(claim)))
    assert isinstance(read["delta"], float) and read["delta"] >= delta
    assert isinstance(read["epsilon"], float)
    assert read["unit"] == str(claim.unit)


def test_a_private_model_is_not_exported_by_accident(
  run_folder, tmp_path, capsys
):
  argv = ["export", "--format=t5x", f"--to={tmp_path / 'to'}"]
  argv.append(f"--checkpoint={run_folder / HIDDEN}")
  assert main.main(argv) == 2
  [line] = capsys.readouterr().err.splitlines()
  assert "under private/" in line and "--allow_private" in line
  assert not list(tmp_path.iterdir())
  assert main.main([*argv, "--allow_private"]) == 0
  assert "PRIVATE" in capsys.readouterr().out
  assert_same(t5_checkpoints.load(tmp_path / "to")[0], make())
  (step,) = (tmp_path / "to").iterdir()
  assert stat.S_IMODE(step.stat().st_mode) == 0o700


def test_a_card_of_no_privacy_has_no_tag_of_it():
  """`original` was tagged, at an epsilon of inf, beside "NO ... is claimed"."""
  yaml = pytest.importorskip("yaml")
  nothing = statement.non_private("Trained on the queries.")
  public = dataclasses.replace(CLAIM, epsilon=0.0, delta=0.0, ledger=())
  for claim, is_tagged in ((nothing, False), (public, False), (CLAIM, True)):
    made = made_up.checkpoint(statement=claim)
    card = cards.render_retriever(made, {"max_seq_length": 8})
    header = yaml.safe_load(card.split("---\n")[1])
    assert ("differential-privacy" in header["tags"]) == is_tagged
    assert ("relation" in header["differential_privacy"]) == (claim != nothing)


def test_a_folder_above_the_run_may_have_any_name(run_folder, tmp_path, capsys):
  root = shutil.copytree(run_folder, tmp_path / "private" / "runs")
  argv = ["export", "--format=t5x", f"--to={tmp_path / 'to'}"]
  assert main.main([*argv, f"--checkpoint={root / PUBLIC}"]) == 0
  assert "PRIVATE" not in capsys.readouterr().out
  argv[-1] += "2"
  assert main.main([*argv, f"--checkpoint={root / HIDDEN}"]) == 2
  assert "under private/" in capsys.readouterr().err


def test_neither_moving_nor_linking_makes_a_private_model_shareable(
  run_folder, tmp_path
):
  refused = pytest.raises(ValueError, match="may be shared")
  to = tmp_path / "to"
  shutil.copytree(run_folder / HIDDEN, tmp_path / "moved")
  with refused:
    export.run(tmp_path / "moved", to, format="safetensors")
  # Nothing is said about these but where they lie.
  t5_checkpoints.save(tmp_path / "private" / "x", make(), TINY)
  (tmp_path / "link").symlink_to(tmp_path / "private" / "x")
  for place in ("private/x", "link"):
    with refused:
      export.run(tmp_path / place, to, format="safetensors")
  assert not to.exists()


def test_results_that_were_moved_out_of_their_run(finished_run, tmp_path):
  root, to = finished_run.copy(tmp_path), tmp_path / "to"
  short = pathlib.Path(tempfile.mkdtemp(dir="/tmp"))  # above it: one folder
  try:
    model = shutil.move(root / "finetune_dp/eps8", short / "m")
    export.run(model, to, format="safetensors")
    assert (to / export.CLAIM).exists()
    retriever = shutil.move(
      root / "train_retriever/synthetic_eps8", short / "r"
    )
    shutil.copy(root / "prepare_data/vocabulary.model", retriever)
    with pytest.raises(ValueError, match="at which length it was trained"):
      export.run(
        retriever, tmp_path / "lengths", format="sentence-transformers"
      )
    queries = shutil.move(root / "generate/eps8", short / "q")
    with pytest.raises(ValueError, match="in its run, at gen"):
      export.run(queries, tmp_path / "other", format="beir")
  finally:
    shutil.rmtree(short)


@pytest.mark.parametrize(
  ("flag", "place", "name"),
  [
    ("queries", "filter_queries/eps8", "beir"),
    ("ranking", "learn_to_rank/public_only", "ranker"),
  ],
)
def test_what_lies_in_a_store_is_exported_as_what_lies_in_a_folder(
  flag, place, name, finished_run, tmp_path, monkeypatch, capsys
):
  root = finished_run.root
  stores.local.cache_clear()
  monkeypatch.setattr(stores, "_mirrors_folder", tmp_path / "mirror")
  with loop_store.serving() as server:
    said = []
    for where, base in (("folder", root), ("store", server.put("b", root))):
      argv = [f"--{flag}={base}/{place}", f"--to={tmp_path / where / 'to'}"]
      assert main.main(["export", *argv, f"--format={name}"]) == 0
      said.append(capsys.readouterr().out.replace(f"/{where}/", "/"))
  assert said[0] == said[1] and "epsilon = " in said[0]
  here, there = (
    {p.relative_to(to): p.read_bytes() for p in to.rglob("*") if p.is_file()}
    for to in (tmp_path / "folder/to", tmp_path / "store/to")
  )
  assert len(here) > 1 and here == there
  # Vectors and rankings, which are most of a run, were left where they are.
  assert list(root.rglob("block_*.npy")) and list(root.rglob("*.trec"))
  fetched = tmp_path / "mirror"
  assert not [*fetched.rglob("block_*.npy"), *fetched.rglob("*.trec")]


def test_a_model_from_elsewhere_is_exported_without_a_claim(tmp_path):
  t5_checkpoints.save(tmp_path / "public", make(), TINY)
  words = export.run(tmp_path / "public", tmp_path / "hf", format="huggingface")
  assert "no vocabulary" in words and "nothing is known" in words
  assert not (tmp_path / "hf" / export.CLAIM).exists()
  with pytest.raises(ValueError, match="taken"):
    export.run(tmp_path / "public", tmp_path / "hf", format="huggingface")


@pytest.mark.parametrize("name", ["t5x", "huggingface"])
def test_a_projection_is_not_lost_where_there_is_no_place_for_it(
  name, tmp_path
):
  params = dual_encoder.encoder_params(
    dual_encoder.with_projection(make(), TINY.emb_dim)
  )
  t5_checkpoints.save(tmp_path / "public", params, TINY)
  with pytest.raises(ValueError, match="write sentence-transformers or safet"):
    export.run(tmp_path / "public", tmp_path / "to", format=name)
  assert not list(tmp_path.glob("to/*"))
  export.run(tmp_path / "public", tmp_path / "to", format="safetensors")
  assert_same(t5_checkpoints.load(tmp_path / "to")[0], params)


@pytest.mark.parametrize(
  "flags, words",
  [
    (["--gin.X=1"], "takes no --gin.X=1"),
    (["--format=beir"], "expected SyntheticQueries for --format=beir"),
    (["--queries=somewhere"], "and --ranking=FOLDER, got 2"),
    (["--format=sentence-transformers"], "expected the vocabulary"),
    (["--step=-1"], "step must be at least 0"),
  ],
)
def test_a_wrong_export_is_one_line(flags, words, tmp_path, capsys):
  t5_checkpoints.save(tmp_path / "public", make(), TINY)
  argv = ["--format=t5x", f"--checkpoint={tmp_path / 'public'}"]
  assert main.main(["export", *argv, f"--to={tmp_path / 'to'}", *flags]) == 2
  [line] = capsys.readouterr().err.splitlines()
  assert words in line


@pytest.mark.parametrize("place", ["report", "generate/eps8/queries"])
def test_no_export_goes_into_a_folder_that_a_run_replaces(
  place, finished_run, tmp_path
):
  """The next run removed an export below report/."""
  root = finished_run.copy(tmp_path)
  for to in (root / place / "to", f"{root}/beside/../{place}/to/deep"):
    with pytest.raises(ValueError, match="belongs to a run, which removes"):
      export.run(root / PUBLIC, to, format="safetensors")
    assert not (root / place / "to").exists()


def test_a_fused_row_says_what_to_export_in_its_place(finished_run):
  """The verdict may name one."""
  fused = finished_run.root / "fuse/synthetic_eps8"
  with pytest.raises(ValueError) as refused:
    export.run(fused, finished_run.root / "never", format="huggingface")
  [line] = str(refused.value).splitlines()
  assert "export the checkpoint of the row synthetic_eps8" in line
  assert "beside BM25" in line
  assert not (finished_run.root / "never").exists()


# Public checkpoints of every format, and a run that starts from them.


@dataclasses.dataclass
class Prepared:
  vocabulary: str
  vocab_size: int = TINY.vocab_size
  token_ids: object = TINY.token_ids


@pytest.mark.parametrize("name", ["t5x", "huggingface", "safetensors"])
def test_a_run_may_start_from_a_checkpoint_of_any_format(name, tmp_path):
  t5_checkpoints.save(tmp_path / "public", make(), TINY)
  to = tmp_path / "to"
  t5_checkpoints.convert(tmp_path / "public", to, format=name)
  params, config = model_files.load_public(to, Prepared("v"))
  assert config == TINY
  assert_same(params, make())
  assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params))
  with pytest.raises(ValueError, match="expected a checkpoint for 129 ids"):
    model_files.load_public(to, Prepared("v", 129))


@pytest.mark.parametrize("name", ["t5x", "huggingface", "safetensors"])
def test_results_rest_on_every_parameter_of_the_checkpoint(name, tmp_path):
  params, digests = make(), []
  for place in ("a", "b", "c"):
    t5_checkpoints.save(tmp_path / place, params, TINY)
    to = tmp_path / f"{place}_{name}"
    t5_checkpoints.convert(tmp_path / place, to, format=name)
    digests.append(fingerprints.of_checkpoint(to))
    if place == "b":
      params["decoder"]["decoder_norm"]["scale"][3] += 1
  assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
  "name", ["vocabulary.model", "spiece.model", "sentencepiece.model"]
)
def test_the_vocabulary_beside_a_checkpoint_is_found_and_checked(
  name, tmp_path
):
  space = workspace.Workspace(tmp_path / "run", secret_seed=1)
  space.public("prepare_data").mkdir(parents=True)
  used = space.public("prepare_data") / "vocabulary.model"
  used.write_bytes(WORDS)
  prepared = Prepared("prepare_data/vocabulary.model")
  folder = tmp_path / "public"
  folder.mkdir()
  model_files.check_vocabulary(folder, space, prepared)  # none: nothing to say
  (folder / name).write_bytes(WORDS)
  assert model_files.vocabulary_beside(folder) == folder / name
  model_files.check_vocabulary(folder, space, prepared)
  (folder / name).write_bytes(b"another")
  with pytest.raises(ValueError, match=f"belongs to {name} beside it"):
    model_files.check_vocabulary(folder, space, prepared)


def test_a_run_prepares_data_with_the_vocabulary_of_a_hugging_face_folder(
  tmp_path,
):
  folder = tmp_path / "hf"
  export.run(shipped.DIRECTORY, folder, format="huggingface")
  assert (folder / "spiece.model").is_file()
  lines = '{"query": "who wrote %d", "document": "A report of ours, %d."}\n'
  source = tmp_path / "pairs.jsonl"
  source.write_text("".join(lines % (i, i) for i in range(40)))
  config = tiny_runs.config(f"jsonl:{source}", checkpoint=str(folder))
  plan.run(config, tmp_path / "run", stages=("prepare_data",))
  used = tmp_path / "run" / "prepare_data" / "vocabulary.model"
  assert used.read_bytes() == shipped.VOCABULARY.read_bytes()


@pytest.mark.parametrize(
  "place, kind, name",
  [
    ("generate/public_only", results.SyntheticQueries, "beir"),
    ("train_retriever/untrained", results.Checkpoint, "huggingface"),
  ],
)
def test_an_export_over_documents_of_queries_does_not_claim_to_say_nothing(
  place, kind, name, finished_run, tmp_path
):
  """Public queries are written for documents that private ones asked about."""
  root = finished_run.root
  assert artifacts.load(root / place, kind).statement.is_public
  told = export.run(root / place, tmp_path / "to", format=name)
  data = artifacts.load(root / "private" / "prepare_data", results.PreparedData)
  caveat = wording.write(*data.not_protected, data.unit)
  for text in (
    told,
    (tmp_path / "to" / export.CLAIM).read_text(),
    (tmp_path / "to" / "README.md").read_text(),
  ):
    assert caveat in text
    assert "No private record" not in text and "no private record" not in text
    assert "public documents" not in text


def test_everything_that_reads_documents_of_queries_says_so(finished_run):
  found = set()
  for path in finished_run.root.rglob("result.json"):
    result = json.loads(path.read_text())["result"]
    claim = result.get("statement")
    if claim and claim["epsilon"] != "inf" and claim["epsilon"] < math.inf:
      assert "from_pairs" in claim["not_protected"], path
      found.add(path.parent.parent.name)
  assert found >= {
    "generate", "train_retriever", "fuse", "encode_documents",
  }  # fmt: skip


def test_one_record_more_shows_in_the_collection_of_its_own_documents(tmp_path):
  collections = {}
  for count in (40, 41):
    source = small_data.write_pairs(tmp_path / f"{count}.jsonl", count)
    config = tiny_runs.config(source, checkpoint=str(shipped.DIRECTORY))
    root = tmp_path / f"run{count}"
    plan.run(config, root, stages=("prepare_data",))
    data = artifacts.load(root / "private/prepare_data", results.PreparedData)
    collections[count] = (root / "prepare_data/corpus.jsonl").read_bytes()
    claim = results.public_documents(data).statement()
    assert claim.is_public and claim.not_protected
    assert "may tell" in statement.in_words(claim)
  assert collections[40] != collections[41]
  elsewhere = results.public_documents(made_up.prepared(source="beir:b"))
  assert elsewhere.statement() == statement.none()


def test_an_export_names_what_can_read_the_length_of_its_queries():
  """sentence-transformers 5 fails at `query_length`, 6 reads it."""
  needed = '"sentence-transformers>=6"'
  card = cards.render_retriever(None, {"max_seq_length": 8, "query_length": 4})
  assert f"pip install {needed}" in card
  assets = pathlib.Path(cards.__file__).parents[1] / "assets"
  assert needed in (assets / "ranker.py").read_text()
