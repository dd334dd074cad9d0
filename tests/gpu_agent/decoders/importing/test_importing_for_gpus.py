"""Models imported for GPUs: weights as they are, no graph, and identified by every shard."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from catenary_agent.decoders.base import CacheLayout
from catenary_agent.decoders.importing import importing
from catenary_agent.decoders.importing.importing import ImportOptions, import_decoder
from catenary_agent.decoders.loading import load_decoder
from catenary_agent.decoders.synthetic.random_models import RandomModel, write_random_model
from catenary_agent.executors.device import Device
from catenary_services.domain.ids import ModelKey, PartitionKey
from catenary_services.errors import ContentMismatch, InvalidInput, NotSupported
from catenary_services.jail.run import run_jailed
from catenary_services.models.model_repository import ModelRepository
from small_models.decoder_ring import DecoderRing
from small_models.tiny_decoders import LAYERS as TINY_LAYERS
from small_models.tiny_decoders import make_variant, reference_model
from tiny_language_models import LAYERS, greedy, worker_in_this_process, write_folder

for _module in ("torch", "transformers"):
    pytest.importorskip(_module, reason="the extra [generation] is not installed")

REAL_JAIL = run_jailed
GPU = ImportOptions(target="gpu")
KEY = ModelKey("model", "1")
PROMPTS = {1: [5, 9, 77, 30, 4, 151, 8], 2: [90, 3], 3: [*range(20, 45)]}


@pytest.fixture(autouse=True)
def worker() -> Iterator[None]:
    with worker_in_this_process():
        yield


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    return ModelRepository(tmp_path / "models")


def ring(repository: ModelRepository, layers: int, *cuts: int) -> DecoderRing:
    device = Device.parse("cpu")
    return DecoderRing(
        [
            load_decoder(
                repository,
                PartitionKey(KEY, a, b),
                device,
                CacheLayout((b - a) * 3, 64, (a,)),
                library="torch",
            )
            for a, b in pairwise([0, *cuts, layers])
        ]
    )


def test_shards_are_linked_and_agents_read_what_they_need(
    tmp_path: Path, repository: ModelRepository
) -> None:
    source = tmp_path / "source"
    model = write_folder(source, "llama3", dtype="bfloat16", shards=True)
    for path in source.glob("*.safetensors"):
        path.chmod(0o644)
    table = import_decoder(repository, source, KEY, GPU)
    folder = repository.folder(KEY)
    names = {path.name for path in folder.iterdir()}
    shards = {path.name for path in source.glob("*.safetensors")}
    assert len(shards) > 3
    assert shards < names
    assert not [name for name in names if name.startswith("onnx")]
    for name in shards:
        assert (folder / name).stat().st_ino == (source / name).stat().st_ino
    assert repository.manifest(KEY).file == "model.safetensors.index.json"
    assert repository.block_table(KEY).model_hash == table.model_hash
    expected = {session: greedy(model, prompt, 8) for session, prompt in PROMPTS.items()}
    assert ring(repository, LAYERS, 2).generate(PROMPTS, 8) == expected


@pytest.mark.parametrize("how", ["asked for", "private", "not ours alone"])
def test_weights_are_copied_where_links_should_not_be(
    how: str, tmp_path: Path, repository: ModelRepository
) -> None:
    write_folder(tmp_path / "source", "llama2")
    file = tmp_path / "source" / "model.safetensors"
    file.chmod({"asked for": 0o644, "private": 0o600, "not ours alone": 0o666}[how])
    import_decoder(
        repository, tmp_path / "source", KEY, ImportOptions(target="gpu", copies=how == "asked for")
    )
    made = repository.model_file(KEY)
    assert made.read_bytes() == file.read_bytes()
    assert made.stat().st_ino != file.stat().st_ino
    assert made.stat().st_mode & 0o777 == 0o644


def test_nothing_is_built_and_no_library_of_graphs_is_asked_for(
    tmp_path: Path, repository: ModelRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_model(tmp_path / "source", RandomModel("tiny"))
    for module in ("onnxruntime", "onnxruntime_genai", "accelerate", "gguf"):
        monkeypatch.setitem(sys.modules, module, None)
    told = list[str]()
    import_decoder(repository, tmp_path / "source", KEY, GPU, told.append)
    assert told == [
        "checking the weights",
        "taking over the weights",
        "recording what the files are",
    ]


@pytest.mark.parametrize("variant", ["mixtral", "gemma3_text", "granitemoe"])
def test_a_family_without_graph_is_imported_for_gpus_only(
    variant: str, tmp_path: Path, repository: ModelRepository
) -> None:
    made, key = make_variant(tmp_path / "tiny", variant)
    source = made.folder(key)
    for name in ("model.yaml", "decoder.json"):
        (source / name).unlink()
    with pytest.raises(InvalidInput, match=r"builder of graphs .*; import it with --target gpu"):
        import_decoder(repository, source, KEY)
    import_decoder(repository, source, KEY, GPU)
    model = reference_model(made, key)
    assert ring(repository, TINY_LAYERS, 1).generate({1: [5, 6]}, 4)[1] == greedy(model, [5, 6], 4)


def test_agents_on_a_cpu_say_what_to_do(tmp_path: Path, repository: ModelRepository) -> None:
    pytest.importorskip("onnxruntime")
    write_random_model(tmp_path / "source", RandomModel("tiny"))
    import_decoder(repository, tmp_path / "source", KEY, GPU)
    with pytest.raises(NotSupported, match="--target both"):
        load_decoder(
            repository, PartitionKey(KEY, 0, 4), Device.parse("cpu"), CacheLayout(4, 16, (0,))
        )
    assert not [path for path in repository.folder(KEY).iterdir() if path.is_dir()]


def test_two_models_of_one_shape_have_two_identities(tmp_path: Path) -> None:
    hashes = set()
    for seed in (0, 1):
        source = tmp_path / f"source-{seed}"
        write_random_model(source, RandomModel("tiny", seed=seed, shard_bytes=100_000))
        repository = ModelRepository(tmp_path / f"models-{seed}")
        hashes.add(import_decoder(repository, source, KEY, GPU).model_hash)
    assert len(hashes) == 2


def test_a_shard_that_changed_is_loaded_by_nobody_who_needs_it(
    tmp_path: Path, repository: ModelRepository
) -> None:
    source = tmp_path / "source"
    write_folder(source, "llama2", shards=True)
    import_decoder(repository, source, KEY, GPU)
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    shard = repository.folder(KEY) / weight_map["model.layers.4.mlp.down_proj.weight"]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)  # in place: the linked source as well
    with pytest.raises(ContentMismatch, match=shard.name):
        ring(repository, LAYERS)


def test_times_without_a_run_are_those_of_reading_weights(
    tmp_path: Path, repository: ModelRepository
) -> None:
    write_random_model(tmp_path / "source", RandomModel("smollm2-135m", layers=3))
    table = import_decoder(repository, tmp_path / "source", KEY, GPU)
    *blocks, last = repository.block_table(KEY).compute_ns
    assert len(set(blocks)) == 1
    # 3.5 million parameters of 2 bytes at 70 % of 300 GB/s, and 7 launches of 4 us.
    assert blocks[0] == pytest.approx(3_540_000 * 2 / (0.7 * 300) + 7 * 4000, rel=0.02)
    assert last - blocks[0] == pytest.approx(table.head_bytes / (0.7 * 300) + 4000, rel=0.02)
    assert table.block_bytes == 2 * 3_540_096  # as GPUs hold it


def broken(source: Path, what: str) -> None:
    shards = sorted(source.glob("*.safetensors"))
    index = source / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    if what == "ends within":
        shards[1].write_bytes(shards[1].read_bytes()[:-10])
    elif what == "ends behind":
        shards[1].write_bytes(shards[1].read_bytes() + b"more")
    elif what == "is missing or outside":
        shards[1].unlink()
    elif what == "which is":
        name = next(iter(document["weight_map"]))
        document["weight_map"][name] = next(
            each.name for each in shards if each.name != document["weight_map"][name]
        )
    elif what == "is in":
        shutil.copy(shards[0], source / "twin.safetensors")
        document["weight_map"]["twin"] = "twin.safetensors"
    elif what == "is not in the model's files":
        config = json.loads((source / "config.json").read_text())
        config["num_hidden_layers"] += 1
        (source / "config.json").write_text(json.dumps(config))
    elif what == "is no index":
        document = {"weight_map": [1]}
    index.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "what",
    [
        "ends within",
        "ends behind",
        "is missing or outside",
        "which is",
        "is in",
        "is not in the model's files",
        "is no index",
    ],
)
def test_weights_that_do_not_fit_are_refused_and_leave_nothing(
    what: str, tmp_path: Path, repository: ModelRepository
) -> None:
    source = tmp_path / "source"
    write_random_model(source, RandomModel("tiny", shard_bytes=60_000))
    broken(source, what)
    with pytest.raises(InvalidInput, match=what):
        import_decoder(repository, source, KEY, GPU)
    assert list(repository.root.iterdir()) == []


def test_the_jail_imports_without_a_copy(
    tmp_path: Path, repository: ModelRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "run_jailed", REAL_JAIL)
    source = tmp_path / "source"
    write_random_model(source, RandomModel("tiny", shard_bytes=100_000))
    import_decoder(repository, source, KEY, GPU)
    folder = repository.folder(KEY)
    for path in folder.iterdir():
        assert path.stat().st_uid == os.geteuid()
        assert path.stat().st_mode & 0o777 == 0o644
    links = [path.stat().st_nlink for path in folder.glob("*.safetensors")]
    assert len(links) > 2
    assert set(links) == {2}
