"""Tokens that kernels choose are NumPy's: in Triton's interpreter, or on a GPU if there is one."""

# ruff: noqa: E402 - Triton looks at its variable when it is imported
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported to compile, not to interpret", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton", reason="Triton comes with PyTorch for CUDA only")

from catenary_agent.decoders.sampling import kernel_sampler, torch_arrays
from catenary_agent.decoders.sampling.choosing import TokenSampler
from catenary_agent.decoders.sampling.kernel_sampler import KernelSampler, why_not_kernels
from catenary_agent.decoders.sampling.numpy_arrays import numpy_chooser
from catenary_agent.decoders.sampling.sampling import NOT_FINITE, NOTHING_ALLOWED, SessionSampler
from catenary_agent.decoders.triton_kernels import sampling as kernels
from catenary_services.domain.sampler_sizes import CPU_BLOCK_NUMBERS, sampler_sizes
from catenary_services.domain.sampling import SamplingParameters
from small_models.allocations import torch_peak_bytes
from small_models.sampling_cases import random_logits, random_sampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def by_kernels(logits: np.ndarray, samplers: Sequence[SessionSampler]) -> list[int]:
    vocabulary = logits.shape[1]
    chooser = KernelSampler(torch_arrays.TorchArrayBackend(DEVICE, vocabulary), vocabulary, DEVICE)
    rows = torch.from_numpy(logits).to(DEVICE)
    return chooser.choose(rows, list(enumerate(samplers)), range(len(samplers)))


def in_numpy(logits: np.ndarray, samplers: Sequence[SessionSampler]) -> list[int]:
    chooser = numpy_chooser(logits.shape[1])
    return chooser.choose(logits, list(enumerate(samplers)), range(len(samplers)))


def sampler_of(**values: Any) -> SessionSampler:
    return SessionSampler(SamplingParameters(**values), (0, 0, 0), 3, (0,))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that cut small vocabularies into pieces and tiles, as they do with large ones."""
    monkeypatch.setattr(kernels, "_PIECE", 64)
    monkeypatch.setattr(kernels, "_TILE", 32)
    kernels._launchers.cache_clear()
    yield
    kernels._launchers.cache_clear()


NUMBERS = st.one_of(
    st.floats(-20, 20, width=32),
    st.sampled_from([0.0, -0.0, 1.5, -3.25]),
    st.floats(-(2.0**-20), 2.0**-20, width=32),
    st.just(float("-inf")),
)
BAD = st.sampled_from([float("nan"), float("inf"), float("-inf")])


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, list[SessionSampler]]:
    rows, vocabulary = draw(st.integers(1, 4)), draw(st.integers(1, 300))
    logits = draw(arrays.arrays(np.float32, (rows, vocabulary), elements=NUMBERS, fill=NUMBERS))
    token = st.integers(0, vocabulary - 1)
    samplers = []
    for row in range(rows):
        if draw(st.booleans()):
            logits[row] += np.random.default_rng(draw(st.integers(0, 99))).normal(size=vocabulary)
        if draw(st.integers(0, 9)) == 0:
            logits[row, draw(token)] = draw(BAD)
        values: dict[str, Any] = {
            "temperature": draw(st.sampled_from([0.0, 0.01, 0.37, 1.0, 1.9])),
            "top_k": draw(st.sampled_from([0, 0, 1, 2, 7, 50, 299])),
            "top_p": draw(st.sampled_from([1.0, 1.0, 1e-6, 0.3701, 0.9013, 0.99907])),
            "min_p": draw(st.sampled_from([0.0, 0.0, 1e-9, 0.0213, 1.0])),
            "seed": draw(st.integers(0, 2**64 - 1)),
        }
        if draw(st.integers(0, 4)) == 0:
            values["logit_bias"] = ((draw(token), draw(st.sampled_from([-100.0, 2.5]))),)
        if draw(st.integers(0, 9)) == 0:
            values["allowed_token_ids"] = tuple(draw(st.sets(token, min_size=1, max_size=3)))
        samplers.append(sampler_of(**values))
    return logits, samplers


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_any_rows_have_the_tokens_of_numpy(
    small_pieces: None, case: tuple[np.ndarray, list[SessionSampler]]
) -> None:
    assert by_kernels(*case) == in_numpy(*case)


def test_rows_as_models_make_them_have_the_tokens_of_numpy() -> None:
    random = np.random.default_rng(5)
    for vocabulary in (999, 8192, 20_011) if DEVICE.type == "cpu" else (999, 50_257, 128_256):
        logits = random_logits(random, 6, vocabulary)
        samplers = [random_sampler(random, vocabulary) for _ in logits]
        before = logits.copy()
        assert by_kernels(logits, samplers) == in_numpy(logits, samplers)
        np.testing.assert_array_equal(logits, before)


def test_rows_without_a_token_say_why() -> None:
    logits = np.zeros((4, 100), np.float32)
    logits[0, 3], logits[1, 99], logits[2] = np.nan, np.inf, -np.inf
    logits[3, 1:] = -np.inf
    ways = {"temperature": 1.0, "top_k": 3, "top_p": 0.9}
    found = by_kernels(
        logits, [sampler_of(**ways) for _ in range(3)] + [sampler_of(allowed_token_ids=(4, 5))]
    )
    assert found == [NOT_FINITE] * 3 + [NOTHING_ALLOWED]


def test_equal_logits_at_the_end_of_a_filter_all_stay() -> None:
    logits = np.zeros((32, 2000), np.float32)
    logits[:, [5, 9, 11]] = (4, 3, 3)
    for values in ({"top_k": 2}, {"top_p": 0.03}, {"top_k": 2, "top_p": 0.9}):
        ways = [sampler_of(temperature=1.0, seed=seed, **values) for seed in range(32)]
        assert set(by_kernels(logits, ways)) == {5, 9, 11}


@pytest.mark.skipif(DEVICE.type != "cpu", reason="counts what PyTorch allocates on a CPU")
@pytest.mark.parametrize("vocabulary", [kernel_sampler.VOCABULARIES[0], 32_000])
def test_choosing_takes_no_more_memory_than_the_table_says(vocabulary: int) -> None:
    sizes = sampler_sizes(vocabulary, CPU_BLOCK_NUMBERS, in_torch=True)
    arrays_ = torch_arrays.TorchArrayBackend(DEVICE, vocabulary)
    chooser = KernelSampler(arrays_, vocabulary, DEVICE)
    for rows in (1, 3):
        logits = torch.randn(rows, vocabulary)
        for values in ({}, {"frequency_penalty": 0.5}):
            asked = [
                (each, sampler_of(temperature=1.0, top_k=50, top_p=0.9, **values))
                for each in range(rows)
            ]
            chooser.choose(logits, asked, range(rows))  # what is kept is there from now on
            took = torch_peak_bytes(lambda: chooser.choose(logits, asked, range(rows)))  # noqa: B023
            assert took <= sizes.scratch_bytes(rows)


def test_kernels_are_compiled_for_every_vocabulary_that_they_serve() -> None:
    assert kernel_sampler.VOCABULARIES[-1] == kernels.MOST_WORDS


def test_kernels_that_work_are_used_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":  # Triton's interpreter takes long for what a device does at once
        monkeypatch.setattr(kernel_sampler, "_TRIED_WORDS", 999)
    why_not_kernels.cache_clear()
    assert why_not_kernels(DEVICE) is None
    wrong = kernels.finalists

    def fails(*_: object) -> None:
        raise RuntimeError("no compiler\nwas found")

    for broken, reason in (
        (fails, "no compiler"),
        (lambda *given: wrong(*given) + 1, "tokens differ"),
    ):
        monkeypatch.setattr(kernels, "finalists", broken)
        why_not_kernels.cache_clear()
        assert reason in (why_not_kernels(DEVICE) or "")
        if DEVICE.type == "cuda":
            assert type(kernel_sampler.torch_chooser(DEVICE, 50_000)) is TokenSampler
    why_not_kernels.cache_clear()


COMPILES = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from catenary_agent.decoders.triton_kernels.sampling import _launchers

TYPES = {"logits": "*fp32", "found": "*i32", "table": "*i64", "work": "*i64", "best": "*i64"}
for launcher in _launchers():
    names, constants = launcher._kernel.arg_names, launcher._constants
    signature = {
        name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(launcher._kernel, signature, constexprs=places)
    made = triton.compile(
        source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=launcher._options
    )
    print(made.metadata.shared)
"""


@pytest.mark.parametrize("architecture", [75, 90])
def test_kernels_compile_for_devices_that_are_not_here(architecture: int) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILES, str(architecture)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert max(map(int, done.stdout.split())) <= 48 * 1024
