"""A vocabulary's tokenizer.json against Hugging Face's own library."""

import json

import pytest
import small_vocabularies

from synthq_jax.data import shipped, tokenizer_json, vocabulary

tokenizers = pytest.importorskip("tokenizers")

TEXTS = (
  "",
  " ",
  "The unaffable  river,\trunning! ",
  "Cafés naïve Ångström façade",
  "日本語のテキスト 中文 한국어",
  "हिन्दी में एक प्रश्न",
  "a 😀 👩\u200d👩\u200d👧 b",
  "a\u0000b\u0007c\u001fd\u200be\ufeff",
  "½ ﬁne Ｆｕｌｌ ①",
  "</s> <pad> <extra_id_0> <unk>",
  "\u2581x \u2581\u2581 y",
)


def make(name, tmp_path):
  if name == "shipped":
    return shipped.VOCABULARY
  options = (
    {"byte_fallback": True, "vocab_size": 340} if name == "bytes" else {}
  )
  return small_vocabularies.write(
    tmp_path / "v.model", small_vocabularies.T5, **options
  )


def build(path, cut_at):
  """What the library writes of the same parts."""
  model, pieces = tokenizer_json._read(path)
  spec, ids = model.normalizer_spec, pieces.token_ids
  steps = []
  if spec.precompiled_charsmap:
    charsmap = spec.precompiled_charsmap
    steps.append(tokenizers.normalizers.Precompiled(charsmap))
  if spec.remove_extra_whitespaces:
    steps.append(tokenizers.normalizers.Strip())
    several = tokenizers.Regex(" {2,}")
    steps.append(tokenizers.normalizers.Replace(several, " "))
  spaces = {
    "replacement": "▁",
    "prepend_scheme": "always" if spec.add_dummy_prefix else "never",
    "split": model.trainer_spec.split_by_whitespace,
  }
  names = list(map(tokenizer_json._get_name, model.pieces))
  scores = [piece.score for piece in model.pieces]
  built = tokenizers.Tokenizer(
    tokenizers.models.Unigram(
      list(zip(names, scores, strict=True)),
      ids.unk,
      model.trainer_spec.byte_fallback,
    )
  )
  built.normalizer = tokenizers.normalizers.Sequence(steps)
  built.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(**spaces)
  built.decoder = tokenizers.decoders.Metaspace(**spaces)
  end = names[ids.eos]
  built.post_processor = tokenizers.processors.TemplateProcessing(
    single=["$A", end],
    pair=["$A", end, "$B", end],
    special_tokens=[(end, ids.eos)],
  )
  if cut_at:
    built.enable_truncation(cut_at)
  return json.loads(built.to_str())


@pytest.mark.parametrize("cut_at", [None, 5])
@pytest.mark.parametrize("name", ["shipped", "small", "bytes"])
def test_the_file_is_the_one_that_the_library_writes(name, cut_at, tmp_path):
  path = make(name, tmp_path)
  tokenizer_json.write(tmp_path, path, rows=10**6, max_length=64, cut_at=cut_at)
  written = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
  assert written == build(path, cut_at)


@pytest.mark.parametrize("name", ["shipped", "small", "bytes"])
def test_odd_texts_have_the_ids_of_sentencepiece(name, tmp_path):
  path = make(name, tmp_path)
  words = vocabulary.load(path)
  tokenizer_json.write(tmp_path, path, rows=10**6, max_length=64)
  reader = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  for text in TEXTS:
    expected = [*words.encode(text), words.token_ids.eos]
    assert reader.encode(text).ids == expected, text
