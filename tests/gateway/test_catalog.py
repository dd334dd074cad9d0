"""Which models requests may be submitted to."""

from __future__ import annotations

import pytest

from catenary_gateway.catalog import Catalog
from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_services.errors import ModelNotFound, NoActivePlan, Unavailable


def table(**changes: object) -> scheduler_pb2.ModelTable:
    tensor = common_pb2.TensorSpec(name="x", datatype="FP32", shape=[-1, 4])
    served = scheduler_pb2.ServedModel(
        name="m", version="1", inputs=[tensor], outputs=[tensor], batched=True, **changes
    )
    return scheduler_pb2.ModelTable(models=[served])


def test_before_the_first_table_nobody_is_told_what_exists() -> None:
    with pytest.raises(Unavailable):
        Catalog().find_deployed("m", "")


def test_a_model_whose_agents_are_away_for_a_moment_takes_requests() -> None:
    catalog = Catalog()
    catalog.update(table(ready=False, not_ready_reason="agent-0 is lost"))
    assert catalog.find_deployed("m", "").key.name == "m"
    assert not catalog.all_ready


def test_a_model_that_cannot_be_deployed_is_refused_with_the_reason() -> None:
    catalog = Catalog()
    broken = table(ready=False, not_ready_reason="model.yaml is wrong")
    broken.models[0].ClearField("inputs")
    catalog.update(broken)
    with pytest.raises(NoActivePlan, match=r"model\.yaml is wrong"):
        catalog.find_deployed("m", "")


def test_an_unknown_model_or_version_is_not_found() -> None:
    catalog = Catalog()
    catalog.update(table(ready=True))
    for name, version in (("n", ""), ("m", "2")):
        with pytest.raises(ModelNotFound):
            catalog.find_deployed(name, version)


def with_adapters(name: str, **adapters: list[str]) -> list[scheduler_pb2.ServedModel]:
    return [
        scheduler_pb2.ServedModel(
            name=name, version=version[1:], ready=True, session_tokens=9, adapters=names
        )
        for version, names in adapters.items()
    ]


def test_an_adapter_is_asked_for_by_its_model_or_by_its_own_name() -> None:
    catalog = Catalog()
    models = [*with_adapters("chat", v1=["terse"], v2=["terse", "rhyming"], v3=[])]
    models += with_adapters("other", v1=["slow", "chat"])
    catalog.update(scheduler_pb2.ModelTable(models=models))
    for name, version, found in [
        ("chat", "", ("chat", "3", "")),
        ("chat", "terse", ("chat", "2", "terse")),
        ("terse", "", ("chat", "2", "terse")),
        ("terse", "1", ("chat", "1", "terse")),
        ("slow", "", ("other", "1", "slow")),
        ("other", "chat", ("other", "1", "chat")),
    ]:
        model = catalog.find_deployed(name, version)
        assert (*model.key, model.adapter) == found
    assert [catalog.model_name(each) for each in ("terse", "chat", "none")] == [
        *("chat", "chat", "none")
    ]
    for name, version in [
        ("chat", "slow"),
        ("rhyming", "1"),
        ("none", "terse"),
        ("terse", "terse"),
    ]:
        with pytest.raises(ModelNotFound):
            catalog.find_deployed(name, version)


def test_an_adapter_of_several_models_is_asked_for_by_its_model() -> None:
    catalog = Catalog()
    models = [*with_adapters("a", v1=["terse"]), *with_adapters("b", v1=["terse"])]
    catalog.update(scheduler_pb2.ModelTable(models=models))
    with pytest.raises(ModelNotFound, match="ask for a:terse or b:terse"):
        catalog.find_deployed("terse", "")
    assert catalog.find_deployed("b", "terse").key.name == "b"
