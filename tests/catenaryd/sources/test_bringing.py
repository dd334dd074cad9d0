"""From a source to a version of the repository, with a tiny random model and the real importer."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from catenary_services.domain.ids import ModelKey
from catenary_services.errors import CatenaryError, InvalidInput, PlanInfeasible
from catenary_services.models.model_repository import ModelRepository
from catenaryd.sources import room
from catenaryd.sources.bringing import PulledModel, bring
from catenaryd.sources.downloads import DOWNLOADS_FOLDER, sweep
from catenaryd.sources.hub import HubAccess
from catenaryd.sources.source_names import source_of
from catenaryd.sources.steps import ImportPhase, ImportStep
from catenaryd.sources.versions import PullOptions
from shared_helpers.model_mirror import ModelMirror
from small_models.text_models import write_encoder
from tiny_language_models import worker_in_this_process

for _module in ("torch", "transformers"):
    pytest.importorskip(_module, reason="the extra [generation] is not installed")

KEY = ModelKey("tiny", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from catenary_agent.decoders.synthetic.random_models import RandomModel, write_random_model

    made = tmp_path_factory.mktemp("made")
    write_random_model(made, RandomModel("tiny", 0, "bfloat16", 0))
    return made


class Importing:
    """A repository, and what is told while models are brought into it."""

    def __init__(self, root: Path, mirror: ModelMirror | None = None) -> None:
        self.repository = ModelRepository(root)
        self.steps: list[ImportStep] = []
        self._hub = HubAccess(mirror.url if mirror is not None else "")

    def bring(self, source: str, **options: object) -> PulledModel:
        wanted = PullOptions(**{"target": "gpu", "hub": self._hub, **options})  # type: ignore[arg-type]
        with worker_in_this_process():
            return bring(self.repository, source_of(source), wanted, self.steps.append)

    def visible(self) -> list[str]:
        root = self.repository.root
        return sorted(path.name for path in root.iterdir()) if root.exists() else []


def test_a_model_of_a_hub_becomes_a_version_that_says_where_it_is_from(
    mirror: ModelMirror, tmp_path: Path, folder: Path
) -> None:
    commit = mirror.add_folder("org/tiny", folder)
    there = Importing(tmp_path / "models", mirror)
    brought = there.bring("hf:org/tiny")
    assert (brought.key, brought.known) == (KEY, False)
    first, *others = there.steps
    assert first.phase is ImportPhase.LISTED
    assert first.text.startswith(f"hf:org/tiny@{commit[:12]}: ")
    assert "to fetch" in first.text
    assert {each.phase for each in others} == {ImportPhase.FETCHING, ImportPhase.IMPORTING}
    assert max(each.done_bytes for each in others) == brought.total_bytes
    repository = there.repository
    record, source = repository.content(KEY), repository.source(KEY)
    assert record is not None
    assert source is not None
    assert (source.source, source.revision) == ("hf:org/tiny", commit)
    (weights,) = [name for name in source.files if name.endswith(".safetensors")]
    assert source.files[weights].sha256 == record.files[weights].sha256
    assert record.files["source.json"].derived  # equal weights of two places are equal
    assert repository.record_content(KEY).digest == record.digest
    assert there.visible() == [DOWNLOADS_FOLDER, "tiny"]
    assert list((repository.root / DOWNLOADS_FOLDER).iterdir()) == []  # it is imported


def test_an_encoder_of_a_hub_is_imported_with_its_pooling_and_takes_texts(
    mirror: ModelMirror, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    pooling = {"1_Pooling__config": {"pooling_mode": "cls"}}
    write_encoder(made, modules=[("Transformer", ""), ("Pooling", "1_Pooling")], **pooling)
    mirror.add_folder("org/minilm", made)
    there = Importing(tmp_path / "models", mirror)
    brought = there.bring("hf:org/minilm")
    assert str(brought.key) == "minilm:1"
    manifest = there.repository.manifest(brought.key)
    assert (manifest.platform, manifest.text_tokens) == ("onnxruntime_onnx", 24)
    source = there.repository.source(brought.key)
    assert source is not None
    assert "1_Pooling/config.json" in source.files


def test_the_same_revision_is_not_fetched_twice_and_another_is_the_next_version(
    mirror: ModelMirror, tmp_path: Path, folder: Path
) -> None:
    mirror.add_folder("org/tiny", folder)
    there = Importing(tmp_path / "models", mirror)
    there.bring("hf:org/tiny")
    mirror.sent.clear()
    again = there.bring("hf:org/tiny@main")
    assert (again.key, again.known) == (KEY, True)
    assert not mirror.sent
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    mirror.add("org/tiny", {**files, "README.md": b"new"})
    assert there.bring("hf:org/tiny").key == ModelKey("tiny", "2")
    with pytest.raises(InvalidInput, match=r"version: tiny:1 is another revision of hf:org/tiny"):
        there.bring("hf:org/tiny", version="1")
    mirror.add("other/tiny", files)
    with pytest.raises(InvalidInput, match=r"tiny:1 is taken: it came from hf:org/tiny"):
        there.bring("hf:other/tiny")
    with pytest.raises(InvalidInput, match=r"precision: tiny:2 is there with fp32"):
        there.bring("hf:org/tiny", precision="int8")


def test_offline_a_model_of_the_repository_is_there_without_asking(
    mirror: ModelMirror, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    commit = mirror.add_folder("org/tiny", folder)
    there = Importing(tmp_path / "models", mirror)
    there.bring("hf:org/tiny@main")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(mirror.requests)
    for source in ("hf:org/tiny", "hf:org/tiny@main", f"hf:org/tiny@{commit}"):
        assert there.bring(source).known
    with pytest.raises(CatenaryError, match=r"HF_HUB_OFFLINE"):
        there.bring("hf:org/tiny@v9")
    assert len(mirror.requests) == asked


def test_a_family_that_nobody_runs_is_refused_before_its_weights_are_fetched(
    mirror: ModelMirror, tmp_path: Path
) -> None:
    config = json.dumps({"architectures": ["NoSuchModel"], "model_type": "nosuch"}).encode()
    mirror.add("org/odd", {"config.json": config, "model.safetensors": bytes(20_000_000)})
    there = Importing(tmp_path / "models", mirror)
    with pytest.raises(InvalidInput, match=r"config.json: .*nosuch") as refused:
        there.bring("hf:org/odd")
    assert len(refused.value.message.splitlines()) == 1
    assert mirror.sent["model.safetensors"] < 20_000_000  # what was fetched to see how fast it is
    assert there.visible() == [DOWNLOADS_FOLDER]


def test_a_dry_run_lists_and_imports_nothing(
    mirror: ModelMirror, tmp_path: Path, folder: Path
) -> None:
    mirror.add_folder("org/tiny", folder)
    there = Importing(tmp_path / "models", mirror)
    assert there.bring("hf:org/tiny", dry_run=True).key == KEY
    assert [each.phase for each in there.steps] == [ImportPhase.LISTED]
    assert there.repository.list() == []


def test_without_room_nothing_is_fetched(
    mirror: ModelMirror, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.add_folder("org/tiny", folder)
    monkeypatch.setattr(room, "FREE_BYTES", shutil.disk_usage(tmp_path).total)
    with pytest.raises(PlanInfeasible, match=r"are needed below .*, and .* are free"):
        Importing(tmp_path / "models", mirror).bring("hf:org/tiny")
    assert not mirror.sent


def test_a_folder_of_this_machine_is_taken_as_it_is(tmp_path: Path, folder: Path) -> None:
    source = tmp_path / "my model"
    shutil.copytree(folder, source)
    there = Importing(tmp_path / "models")
    assert there.bring(str(source)).key == ModelKey("my-model", "1")
    record = there.repository.source(ModelKey("my-model", "1"))
    assert record is not None
    assert (record.source, record.files) == (f"file://{source}", {})
    assert there.bring(f"file://{source}").known
    os.utime(source / "config.json", (1, 1))
    assert there.bring(str(source)).key == ModelKey("my-model", "2")


def test_a_version_put_there_by_hand_is_not_taken_for_the_same(
    tmp_path: Path, folder: Path
) -> None:
    there = Importing(tmp_path / "models")
    there.bring(str(folder), name="tiny")
    (there.repository.folder(KEY) / "source.json").unlink()
    with pytest.raises(InvalidInput, match=r"tiny:1 is taken: it was put there by hand"):
        there.bring(str(folder), name="tiny")
    assert there.bring(str(folder), name="tiny", version="1", takes_unrecorded=True).known


def test_a_source_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^source: /no/such/model does not exist on "):
        Importing(tmp_path / "models").bring("/no/such/model")


def test_what_nobody_came_back_for_is_removed_after_a_week(tmp_path: Path) -> None:
    old, new = tmp_path / DOWNLOADS_FOLDER / "old", tmp_path / DOWNLOADS_FOLDER / "new"
    half = tmp_path / ".importing-half"
    for each in (old, new, half):
        each.mkdir(parents=True)
    os.utime(old, (1, 1))
    os.utime(half, (1, 1))
    sweep(tmp_path, now_s=os.stat(new).st_mtime + 60)
    assert [path.name for path in tmp_path.iterdir()] == [DOWNLOADS_FOLDER]
    assert new.is_dir()
    assert not old.exists()
