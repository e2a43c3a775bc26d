"""Other libraries read exports with their own loaders, and give our numbers.

Each test is skipped where its library is not installed (the extra
`export-test`); nothing is downloaded.
"""

import json
import shutil

import jax
import numpy as np
import pytest

from synthq_jax.cli import main
from synthq_jax.data import beir, collection, sources, vocabulary
from synthq_jax.models import static_vectors, t5_checkpoints
from synthq_jax.models.checkpoints import tensors
from synthq_jax.privacy import wording
from synthq_jax.retrieval import encode
from synthq_jax.runtime import results, system_results
from synthq_jax.storage import artifacts
from synthq_jax.tools import export

RETRIEVERS = ("synthetic_eps8", "direct_dp_logit_eps8")  # one has a projection
RETRIEVER = f"train_retriever/{RETRIEVERS[0]}"
RANKING = "learn_to_rank/synthetic_eps8"
KINDS = {
  "finetune_dp": "checkpoint",
  "train_retriever": "checkpoint",
  "learn_to_rank": "ranking",
}
"""The flag of `synthq export` for a stage's results; of others "queries"."""
HARD = (
  "a document with <extra_id_0> in it",
  "<extra_id_31><extra_id_32><extra_id_99>",
  "it ends</s> here </s> and <pad> there <unk>",
  "  white \t space \n",
  "",
  "The otter of the harbor. " * 20,
)


@pytest.fixture(scope="module")
def exported(finished_run, tmp_path_factory):
  """Returns what exports a result of the shared run, once."""
  folder = tmp_path_factory.mktemp("exported")

  def export_(source: str, name: str) -> str:
    to = folder / f"{name}_{source.replace('/', '_')}"
    stage = source.partition("/")[0]
    kind = KINDS.get(stage, "queries")
    flag = f"--{kind}={finished_run.root / source}"
    if not to.exists():
      assert main.main(["export", flag, f"--format={name}", f"--to={to}"]) == 0
    return str(to)

  return export_


@pytest.fixture(scope="module", params=RETRIEVERS)
def retriever(request, finished_run, exported):
  """A retriever's name, our own encoder of texts, and the exported folder."""
  place = f"train_retriever/{request.param}"
  root = finished_run.root
  prepared = artifacts.load(root / "private/prepare_data", results.PreparedData)
  pieces = vocabulary.load(root / prepared.vocabulary, extra_ids=32)
  params, config = t5_checkpoints.load(root / place)

  def ours(texts, length):
    rows = vocabulary.tokenize(pieces, texts, length=length)
    return encode.encode(params, config, rows)

  return (
    request.param,
    lambda texts: ours(texts, prepared.query_length),
    lambda texts: ours(texts, prepared.document_length),
    exported(place, "sentence-transformers"),
  )


@pytest.fixture(scope="module")
def static(finished_run, tmp_path_factory):
  """A retriever of static vectors: our own encoder of texts, the export."""
  folder = tmp_path_factory.mktemp("static")
  source = folder / "vectors"
  vocabulary_path = finished_run.root / "prepare_data" / "vocabulary.model"
  pieces = vocabulary.load(vocabulary_path, extra_ids=0)
  shape = static_vectors.StaticConfig(vocab_size=pieces.vocab_size, emb_dim=6)
  ones = np.ones(pieces.vocab_size)
  params = static_vectors.init(jax.random.key(0), shape, ones)
  kernel = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
  params |= {"projection": {"kernel": kernel}}
  t5_checkpoints.save(source, params, shape)
  shutil.copy(vocabulary_path, source)

  def ours(texts, length=512):
    rows = vocabulary.tokenize(pieces, texts, length=length)
    return encode.encode(params, shape, rows)

  export.run(source, folder / "to", format="sentence-transformers")
  return ours, folder / "to"


LONG = "An otter swims. " * 400


def test_static_vectors_are_read_with_their_tokenizer(static):
  tokenizers = pytest.importorskip("tokenizers")
  ours, folder = static
  reader = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  tensor = tensors.read_safetensors(folder / "model.safetensors")
  table = tensor["embedding.weight"].read()
  texts = [*HARD, LONG]
  found = reader.encode_batch(texts, add_special_tokens=False)
  for text, one, vector in zip(texts, found, ours(texts), strict=True):
    total = table[one.ids].sum(axis=0)
    wanted = total / max(np.linalg.norm(total), 1e-12)
    np.testing.assert_allclose(vector, wanted, atol=1e-5, err_msg=text)
  assert len(found[-1].ids) == 511  # where EOS would be the last


def test_sentence_transformers_gives_our_static_vectors(static):
  library = pytest.importorskip("sentence_transformers")
  ours, folder = static
  model = library.SentenceTransformer(str(folder), device="cpu")
  texts = [*HARD, LONG]
  np.testing.assert_allclose(model.encode(texts), ours(texts), atol=1e-5)
  assert type(model[0]).__name__ == "StaticEmbedding"


def beir_set(root):
  data = beir.read_beir(root / "prepare_data" / "public_test")
  documents = {item.id: item.contents for item in data.documents}
  return data, documents, {item.id: item.text for item in data.queries}


def test_sentence_transformers_gives_our_dot_products(retriever, finished_run):
  library = pytest.importorskip("sentence_transformers")
  _, query, document, folder = retriever
  model = library.SentenceTransformer(folder, device="cpu")
  _, documents, queries = beir_set(finished_run.root)
  documents = [*documents.values(), *HARD]
  queries = [*queries.values(), *HARD]
  theirs = model.encode_query(queries) @ model.encode_document(documents).T
  ours = query(queries) @ document(documents).T
  np.testing.assert_allclose(theirs, ours, atol=1e-5)
  assert np.ptp(ours) > 1e-3  # texts are told apart
  np.testing.assert_allclose(  # and stay so when their library saves them
    model.similarity(model.encode(documents), model.encode(documents)),
    document(documents) @ document(documents).T,
    atol=1e-5,
  )


def test_beir_scores_an_export_as_the_report_does(retriever, finished_run):
  library = pytest.importorskip("sentence_transformers")
  evaluation = pytest.importorskip("beir.retrieval.evaluation")
  search = pytest.importorskip("beir.retrieval.search.dense")
  loader = pytest.importorskip("beir.datasets.data_loader")
  name, *_, folder = retriever
  public = finished_run.root / "prepare_data" / "public_test"
  asked = loader.GenericDataLoader(str(public)).load(split="test")
  corpus, queries, qrels = asked
  model = library.SentenceTransformer(folder, device="cpu")

  class Model:
    """Queries and documents are cut where they were in training."""

    def encode_queries(self, texts, **options):
      return model.encode_query(texts, convert_to_tensor=True)

    def encode_corpus(self, texts, **options):
      joined = [f"{one['title']} {one['text']}".strip() for one in texts]
      return model.encode_document(joined, convert_to_tensor=True)

  exact = search.DenseRetrievalExactSearch(Model(), batch_size=64)
  retrieved = evaluation.EvaluateRetrieval(exact, score_function="dot")
  run = retrieved.retrieve(corpus, queries)
  theirs, _, recall, _ = retrieved.evaluate(qrels, run, [10])
  place = finished_run.root / "evaluate" / "public" / name
  report = artifacts.load(place, results.Evaluation).measures
  assert report["nDCG@10"].mean > 0
  assert abs(theirs["NDCG@10"] - report["nDCG@10"].mean) <= 5.1e-6
  assert abs(recall["Recall@10"] - report["R@10"].mean) <= 5.1e-6


@pytest.mark.filterwarnings("ignore::FutureWarning")  # mteb's own
def test_mteb_scores_an_export_as_the_report_does(retriever, finished_run):
  mteb = pytest.importorskip("mteb")
  library = pytest.importorskip("sentence_transformers")
  datasets = pytest.importorskip("datasets")
  from mteb.abstasks.retrieval import AbsTaskRetrieval
  from mteb.abstasks.task_metadata import TaskMetadata

  name, *_, folder = retriever
  data, *_ = beir_set(finished_run.root)
  documents = [
    {"id": one.id, "title": one.title, "text": one.text}
    for one in data.documents
  ]
  queries = [{"id": one.id, "text": one.text} for one in data.queries]

  class Public(AbsTaskRetrieval):
    metadata = TaskMetadata(
      name="PublicSentences",
      description="Sentences taken out of public documents.",
      type="Retrieval",
      category="t2t",
      modalities=["text"],
      eval_splits=["test"],
      eval_langs=["eng-Latn"],
      main_score="ndcg_at_10",
      dataset={"path": "local", "revision": "1"},
      date=None,
      domains=None,
      task_subtypes=None,
      license=None,
      annotations_creators=None,
      dialect=None,
      sample_creation=None,
      bibtex_citation=None,
      reference=None,
    )
    data_loaded = True
    dataset = {
      "default": {
        "test": {
          "corpus": datasets.Dataset.from_list(documents),
          "queries": datasets.Dataset.from_list(queries),
          "relevant_docs": data.qrels["test"],
          "top_ranked": None,
        }
      }
    }

    def load_data(self, *args, **options):
      """Nothing is downloaded."""

  model = library.SentenceTransformer(folder, device="cpu")
  scores = mteb.evaluate(model, [Public()], cache=None).task_results[0].scores
  place = finished_run.root / "evaluate" / "public" / name
  report = artifacts.load(place, results.Evaluation).measures["nDCG@10"]
  assert abs(scores["test"][0]["ndcg_at_10"] - report.mean) <= 5.1e-6


@pytest.mark.parametrize(
  "place", ["finetune_dp/eps8", "train_retriever/synthetic_eps8"]
)
def test_transformers_alone_loads_model_and_tokenizer(
  place, finished_run, exported
):
  from hugging_face import torch, transformers

  folder = exported(place, "huggingface")
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  has_decoder = place.startswith("finetune")
  kind = "AutoModelForSeq2SeqLM" if has_decoder else "AutoModelForTextEncoding"
  model = getattr(transformers, kind).from_pretrained(folder).eval()
  model_file = finished_run.root / "prepare_data" / "vocabulary.model"
  pieces = vocabulary.load(model_file, extra_ids=32)
  length = tokenizer.model_max_length
  rows = vocabulary.tokenize(pieces, HARD, length=length)
  batch = tokenizer(
    list(HARD), padding="max_length", truncation=True, return_tensors="pt"
  )
  np.testing.assert_array_equal(batch["input_ids"].numpy(), rows)
  assert tokenizer.decode(pieces.encode("the otter"), True) == "the otter"
  with torch.no_grad():
    if not has_decoder:
      assert model(**batch).last_hidden_state.isfinite().all()
      return
    written = model.generate(**batch, max_new_tokens=8).numpy()
  assert written.max() < pieces.vocab_size - pieces.extra_ids
  assert len(tokenizer.batch_decode(written, skip_special_tokens=True)) == 6


def our_queries(root, place) -> collection.Collection:
  return beir.read_written(
    root / place / "queries.jsonl", root / "prepare_data" / "corpus.jsonl"
  )


QUERIES = "filter_queries/eps8"


def test_beir_loads_exported_queries(finished_run, exported):
  loader = pytest.importorskip("beir.datasets.data_loader")
  data = our_queries(finished_run.root, QUERIES)
  corpus, queries, qrels = loader.GenericDataLoader(
    exported(QUERIES, "beir")
  ).load(split="train")
  assert queries == {one.id: one.text for one in data.queries}
  assert qrels == data.qrels["train"]
  assert corpus == {
    one.id: {"text": one.text, "title": one.title} for one in data.documents
  }


@pytest.mark.parametrize("name", ["hf", "beir"])
def test_datasets_loads_exported_queries_by_the_card(
  name, finished_run, exported, tmp_path
):
  datasets = pytest.importorskip("datasets")
  data, folder = (
    our_queries(finished_run.root, QUERIES),
    exported(QUERIES, name),
  )

  def load(config, split):
    return datasets.load_dataset(
      folder, config, split=split, cache_dir=str(tmp_path)
    )

  queries = load("queries", "train" if name == "hf" else "queries")
  assert list(zip(queries["_id"], queries["text"], strict=True)) == [
    (one.id, one.text) for one in data.queries
  ]
  corpus = load("corpus", "corpus")
  assert list(zip(corpus["_id"], corpus["text"], strict=True)) == [
    (one.id, one.text) for one in data.documents
  ]
  if name == "hf":
    qrels = load("qrels", "train")
    pairs = list(zip(qrels["query-id"], qrels["corpus-id"], strict=True))
    assert pairs == data.pairs("train")
    made = artifacts.load(finished_run.root / QUERIES, results.SyntheticQueries)
    assert queries["document"] == [document for _, document in pairs]
    assert set(queries["generator"]) == {"eps8"}
    assert set(queries["epsilon"]) == {made.statement.epsilon}
    default = datasets.load_dataset(folder, cache_dir=str(tmp_path))
    assert default["train"].column_names == queries.column_names


def test_a_source_reads_what_datasets_saves(finished_run, exported, tmp_path):
  datasets = pytest.importorskip("datasets")
  data, folder = (
    our_queries(finished_run.root, QUERIES),
    exported(QUERIES, "hf"),
  )
  for name in ("queries", "corpus", "qrels"):
    table = datasets.load_dataset(folder, name, cache_dir=str(tmp_path / "c"))
    table.save_to_disk(tmp_path / "saved" / name)
  read = sources.open(f"hf:{tmp_path / 'saved'}").read()
  assert tuple(read.documents) == tuple(data.documents)
  assert set(read.queries) == set(data.queries)
  assert read.qrels == data.qrels


@pytest.mark.parametrize("name", ["hf", "beir"])
def test_a_card_says_what_holds_and_what_does_not(name, finished_run, exported):
  cards = pytest.importorskip("huggingface_hub")
  folder = exported(QUERIES, name)
  card = cards.DatasetCard.load(f"{folder}/README.md")
  claim = card.data.to_dict()["differential_privacy"]
  made = artifacts.load(finished_run.root / QUERIES, results.SyntheticQueries)
  assert 8.0 >= claim["epsilon"] >= made.statement.epsilon
  assert claim["delta"] >= made.statement.delta
  for section in ("public", "assumptions", "not_protected"):
    said = wording.sentences(made.statement, section)
    assert claim[section] == [*said] and all(x in card.text for x in said)
  assert f"**{wording.FIXED_SECRET}**" in card.text  # of this very run


# The run has no adapter: learn_adapter_test reads what "map" writes.
@pytest.mark.parametrize("name", sorted({*export.FORMATS} - {"map"}))
def test_no_export_holds_a_private_text(name, finished_run, exported):
  log = (finished_run.root.parent / "log.jsonl").read_text().splitlines()
  private = {json.loads(line)["query"] for line in log}
  assert len(private) > 100
  given = {
    results.Checkpoint: RETRIEVER,
    results.SyntheticQueries: QUERIES,
    system_results.Ranking: RANKING,
  }
  folder = exported(given[export.FORMATS[name].result_type], name)
  texts = []
  for path in sorted(export.pathlib.Path(folder).rglob("*")):
    if path.suffix == ".parquet":
      parquet = pytest.importorskip("pyarrow.parquet")
      texts.append(str(parquet.read_table(path).to_pylist()))
    elif path.is_file():
      texts.append(path.read_bytes().decode("utf-8", "replace"))
  held = "\n".join(texts).casefold()
  assert len(held) > 1000
  assert not [one for one in private if one.casefold() in held]
