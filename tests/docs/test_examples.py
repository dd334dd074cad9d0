"""The examples in the documents do what they say, run as a reader would run them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from catenaryd.command_line import cli
from cluster_harness import ROOT
from shared_helpers.model_mirror import model_mirror
from suite_rules.doc_examples import DocumentRun, documents, examples, simple_commands

DOCUMENTS = documents()
FAST = [path for path in DOCUMENTS if any(e.kind == "fast" for e in examples(path))]
LIVE = [path for path in DOCUMENTS if any(e.kind == "live" for e in examples(path))]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_are_examples_of_both_kinds() -> None:
    assert len(FAST) >= 3
    assert len(LIVE) >= 2


@pytest.mark.parametrize("document", FAST, ids=_name)
def test_examples_that_need_no_cluster_succeed(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for example in examples(document):
        if example.kind == "file":
            (tmp_path / example.file).write_text(example.code)
        if example.kind != "fast":
            continue
        if example.language == "python":
            exec(compile(example.code, document.name, "exec"), {"__name__": "__main__"})
            continue
        for program, *arguments in simple_commands(example.code):
            assert Path(program).name == "catenaryd", f"{document}:{example.line}"
            done = CliRunner().invoke(cli, arguments)
            assert done.exit_code == 0, f"{document}:{example.line}: {done.exception!r}"
            assert done.stdout.strip()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[DocumentRun]:
    """A run whose hub is a mirror with one tiny model."""
    from catenary_agent.decoders.synthetic.random_models import RandomModel, write_random_model

    made = tmp_path / "published"
    write_random_model(made, RandomModel("tiny", 0, "bfloat16", 0))
    folder = tmp_path / "reader"
    folder.mkdir()
    with model_mirror() as mirror:
        mirror.add_folder("my-organisation/my-model", made)
        variables = {"HF_ENDPOINT": mirror.url, "HF_HOME": str(tmp_path / "hub")}
        run = DocumentRun(folder, variables=variables)
        yield run
        run.close()


@pytest.mark.system
@pytest.mark.parametrize("document", LIVE, ids=_name)
def test_a_page_works_from_its_first_command_to_its_last(document: Path, run: DocumentRun) -> None:
    _photograph_of_a_cat(run.folder / "cat.jpg")
    run.run(examples(document))


def _photograph_of_a_cat(path: Path) -> None:
    images = pytest.importorskip("PIL.Image")
    skimage = pytest.importorskip("skimage.data")
    images.fromarray(skimage.chelsea()).save(path)
