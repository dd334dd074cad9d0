"""Random models: the same everywhere, any part alone, and usable as published ones are."""

from __future__ import annotations

import hashlib
import json
from math import sqrt
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from catenary_agent.decoders.model_files.checkpoint import Checkpoint
from catenary_agent.decoders.synthetic.model_shapes import SHAPES, shape_of, tensors_of
from catenary_agent.decoders.synthetic.random_models import RandomModel, write_random_model
from catenary_agent.decoders.synthetic.random_weights import random_pieces, random_values
from catenary_services.errors import InvalidInput

PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-2-7b": 6_738_415_616,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
}
"""Of the published models."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_have_as_many_parameters_as_the_published_models(name: str) -> None:
    total = sum(int(np.prod(tensor.shape)) for tensor in tensors_of(shape_of(name)))
    assert total == PARAMETERS[name]


@pytest.mark.parametrize(
    ("dtype", "digest"),
    [("BF16", "2083a258dcbe1346"), ("F16", "4c1b564102e4afd1"), ("F32", "6b6ef6558169aa5a")],
)
def test_weights_are_the_same_on_every_machine(dtype: str, digest: str) -> None:
    content = b"".join(random_pieces(7, "model.layers.3.mlp.up_proj.weight", 10_000, 0.02, dtype))
    assert hashlib.sha256(content).hexdigest()[:16] == digest


def test_any_part_of_a_tensor_can_be_made_alone() -> None:
    whole = random_values(3, "a", 0, 5000, 0.5, "F32")
    for first, count in ((0, 1), (1, 15), (15, 2), (16, 100), (4321, 679)):
        part = random_values(3, "a", first, count, 0.5, "F32")
        np.testing.assert_array_equal(part, whole[first : first + count])
    assert not np.array_equal(random_values(4, "a", 0, 5000, 0.5, "F32"), whole)
    assert not np.array_equal(random_values(3, "b", 0, 5000, 0.5, "F32"), whole)


def test_values_are_normal_with_the_spread_asked_for() -> None:
    values = np.sort(random_values(0, "w", 0, 1 << 18, 1 / sqrt(576), "F32") * sqrt(576))
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01
    normal = NormalDist()
    at = np.linspace(0.01, 0.99, 25)
    quantiles = values[(at * len(values)).astype(int)]
    np.testing.assert_allclose(quantiles, [normal.inv_cdf(p) for p in at], atol=0.02)


def test_bfloat16_is_float32_rounded_to_nearest() -> None:
    torch = pytest.importorskip("torch")
    full = torch.from_numpy(random_values(5, "x", 0, 20_000, 0.1, "F32"))
    bits = torch.from_numpy(random_values(5, "x", 0, 20_000, 0.1, "BF16").view(np.int16))
    assert torch.equal(bits.view(torch.bfloat16), full.to(torch.bfloat16))


def test_shards_hold_what_one_file_would(tmp_path: Path) -> None:
    one = RandomModel("tiny", seed=1, dtype="float16")
    total = write_random_model(tmp_path / "one", one)
    told = list[str]()
    many = RandomModel("tiny", seed=1, dtype="float16", shard_bytes=90_000)
    assert write_random_model(tmp_path / "many", many, told.append) == total
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) == len(told) > 3
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total
    contents = [contents_of(tmp_path / name) for name in ("one", "many")]
    assert contents[0] == contents[1]
    assert sum(map(len, contents[0].values())) == total


def contents_of(folder: Path) -> dict[str, bytes]:
    found = {}
    for name, (file, tensor) in Checkpoint.of(folder).tensors.items():
        found[name] = file.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
    return found


@pytest.mark.parametrize("like", SHAPES)
def test_tensors_are_those_transformers_wants(like: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = shape_of(like, 2)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config)
        )
    wanted = {name: tuple(p.shape) for name, p in made.named_parameters()}
    assert {tensor.name: tensor.shape for tensor in tensors_of(config)} == wanted


def test_transformers_loads_one_and_its_logits_are_finite(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    write_random_model(tmp_path / "made", RandomModel("tiny"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "made")
    ids = tokenizer("hello, world", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "hello, world"
    with torch.inference_mode():
        logits = loaded(ids).logits
    assert torch.isfinite(logits).all()
    assert 0.2 < logits.std() < 5


def test_every_token_has_a_text_of_its_own(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_random_model(tmp_path / "made", RandomModel("tiny"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "made" / "tokenizer.json"))
    words = SHAPES["tiny"]["vocab_size"]
    assert tokenizer.get_vocab_size() == words
    texts = {tokenizer.decode([token]) for token in range(259, words)}
    assert len(texts) == words - 259
    assert "" not in texts


def test_what_is_not_known_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="'gpt-9' is none of"):
        write_random_model(tmp_path / "made", RandomModel("gpt-9"))
    with pytest.raises(InvalidInput, match="'int3' is none of"):
        write_random_model(tmp_path / "made", RandomModel("tiny", dtype="int3"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    with pytest.raises(InvalidInput, match="is not empty"):
        write_random_model(tmp_path / "full", RandomModel("tiny"))
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["kept"]
