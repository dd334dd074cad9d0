"""Sampling parameters: ranges, what an agent is told, and the way over the wire."""

import pytest

from catenary_protos.catenary.v1 import generation_pb2
from catenary_services.domain.sampling import MAX_SEED, SamplingParameters
from catenary_services.errors import InvalidInput
from catenary_services.grpc.sampling_messages import message_of_sampling, sampling_of_message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("min_tokens", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("logit_bias", ((3, 100.5),)),
        ("logit_bias", ((3, float("nan")),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((3, 1.0), (3, 2.0))),
        ("logit_bias", tuple((token, 1.0) for token in range(1025))),
        ("grammar", "\u20ac" * 21_846),
        ("grammar", "\ud800"),
        ("seed", MAX_SEED + 1),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop", ("x" * 2000,)),
    ],
)
def test_a_value_outside_its_range_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        SamplingParameters(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_biased_token_must_be_in_the_vocabulary() -> None:
    parameters = SamplingParameters(logit_bias=((5, 1.0), (50, -1.0)))
    parameters.check_vocabulary(51)
    with pytest.raises(InvalidInput) as caught:
        parameters.check_vocabulary(50)
    assert caught.value.field == "logit_bias"


def test_more_least_tokens_than_most_are_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        SamplingParameters(max_tokens=3, min_tokens=4)
    assert caught.value.field == "min_tokens"


def test_an_unset_message_is_greedy_without_limits() -> None:
    parameters = sampling_of_message(generation_pb2.SamplingParameters())
    assert parameters == SamplingParameters()
    assert parameters.greedy
    assert not parameters.penalised
    assert parameters.seed is None


def test_parameters_survive_the_wire() -> None:
    parameters = SamplingParameters(
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        repetition_penalty=1.25,
        stop=("a", "b"),
        seed=0,
        ignore_eos=True,
        presence_penalty=-0.5,
        frequency_penalty=2.0,
        min_p=0.125,
        logit_bias=((7, -100.0), (0, 0.5)),
        grammar='start: "\u20ac"+',
    )
    assert sampling_of_message(message_of_sampling(parameters)) == parameters


@pytest.mark.parametrize("temperature", [0.7, 2.0, 1e-7])
def test_float32_of_the_wire_does_not_push_a_value_out_of_its_range(temperature: float) -> None:
    message = message_of_sampling(SamplingParameters(temperature=temperature, top_p=0.9999999))
    assert sampling_of_message(message).temperature == pytest.approx(temperature)


def test_resolving_fills_in_the_room_and_the_seed() -> None:
    resolved = SamplingParameters(min_tokens=200).resolved(28, 128, seed=9)
    assert (resolved.max_tokens, resolved.min_tokens, resolved.seed) == (100, 100, 9)
    kept = SamplingParameters(max_tokens=5, seed=0).resolved(28, 128, seed=9)
    assert (kept.max_tokens, kept.seed) == (5, 0)


@pytest.mark.parametrize(("prompt", "most", "field"), [(128, 0, "prompt"), (100, 29, "max_tokens")])
def test_a_session_that_does_not_fit_is_refused(prompt: int, most: int, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        SamplingParameters(max_tokens=most).resolved(prompt, 128, seed=1)
    assert caught.value.field == field
