"""Capture: what the quantizer wrote arrives in the store, packed, in spans, under the right attempt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trace_client
from trace_client.recorder import KVRecorder, Recorder
from trace_store import Receipt, Site, codebook
from trace_store.errors import InvalidRequest, Unavailable

MOE = Site(0, "moe_in", 32)
DEEP = Site(1, "moe_in", 64, form="full")
K, V = Site(0, "k", 32), Site(0, "v", 32, form="b2")


class MemoryWriter:
    """Keeps what it is given. ``failures`` appends raise first."""

    def __init__(self, failures: int = 0) -> None:
        self.appends: list[tuple[str, int, dict[Site, Any], int, int]] = []
        self.seals: list[tuple[str, int, int, int]] = []
        self.failures = failures

    def append(self, trajectory: str, start: int, records: Any, *, attempt: int = 0, policy_version: int = 0) -> None:
        if self.failures:
            self.failures -= 1
            raise Unavailable("the server went away")
        self.appends.append((trajectory, start, dict(records), attempt, policy_version))

    def seal(self, trajectory: str, *, tokens: int, prompt_tokens: int, attempt: int = 0) -> Receipt:
        self.seals.append((trajectory, tokens, prompt_tokens, attempt))
        return Receipt("run", "step", trajectory, attempt, tokens, prompt_tokens, "synced", "memory")

    def spans(self, site: Site, trajectory: str) -> list[tuple[int, int]]:
        """(start, stop) of the site's appends, in order."""
        return [
            (start, start + len(records[site][0]))
            for name, start, records, *_ in self.appends
            if name == trajectory and site in records
        ]

    def rows(self, site: Site, trajectory: str) -> np.ndarray:
        """Code rows by position, over all appends."""
        return np.concatenate([r[site][0] for name, _, r, *_ in self.appends if name == trajectory and site in r])


def quantized(site: Site, tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Codes [tokens, W] and scales that a quantizer could have written."""
    x = np.random.default_rng([seed, site.layer]).standard_normal((tokens, site.width)).astype(np.float32)
    codes, scales, _ = codebook.quantize(x, format="nvfp4", tensor_scale=0.01)
    return codes, scales


def decode(recorder: Recorder, site: Site, trajectories: list[str], positions: list[int], seed: int = 0) -> np.ndarray:
    """One forward of one token per trajectory at ``site``; the codes."""
    codes, scales = quantized(site, len(trajectories), seed)
    recorder.record(site, trajectories, positions, codes, scales, 0.01)
    return codes


def test_interleaved_trajectories_are_kept_apart_in_token_order() -> None:
    writer = MemoryWriter()
    recorder = Recorder(writer, [MOE], span_tokens=4)
    steps = [decode(recorder, MOE, ["a", "b"], [step, step + 7], seed=step) for step in range(10)]
    for name, row in (("a", 0), ("b", 1)):
        recorder.finish(name, tokens=20, prompt_tokens=0)
        expected = codebook.pack(np.stack([codes[row] for codes in steps]), bits=1)
        assert np.array_equal(writer.rows(MOE, name), expected)
    assert writer.spans(MOE, "a") == [(0, 4), (4, 8), (8, 10)]
    assert writer.spans(MOE, "b") == [(7, 11), (11, 15), (15, 17)]


def test_a_prefill_of_many_tokens_is_cut_into_spans() -> None:
    writer = MemoryWriter()
    recorder = Recorder(writer, [DEEP], span_tokens=64)
    codes, scales = quantized(DEEP, 150)
    recorder.record(DEEP, ["a"] * 150, np.arange(150), codes, scales, 0.01)
    assert writer.spans(DEEP, "a") == [(0, 64), (64, 128)]
    recorder.finish("a", tokens=151, prompt_tokens=150)
    assert writer.spans(DEEP, "a") == [(0, 64), (64, 128), (128, 150)]
    assert np.array_equal(writer.rows(DEEP, "a"), codebook.pack_full(codes))


def test_a_span_waits_for_every_site_and_goes_out_as_one_append() -> None:
    writer = MemoryWriter()
    recorder = Recorder(writer, [MOE, DEEP], span_tokens=2)
    for step in range(2):
        decode(recorder, MOE, ["a"], [step])
    assert writer.appends == []
    for step in range(2):
        decode(recorder, DEEP, ["a"], [step])
    assert [set(records) for _, _, records, *_ in writer.appends] == [{MOE, DEEP}]


def test_a_gap_starts_a_new_span_and_stays_a_hole() -> None:
    writer = MemoryWriter()
    recorder = Recorder(writer, [MOE], span_tokens=8)
    for position in (0, 1, 5, 6):
        decode(recorder, MOE, ["a"], [position])
    recorder.finish("a", tokens=8, prompt_tokens=0)
    assert writer.spans(MOE, "a") == [(0, 2), (5, 7)]


def test_a_static_scale_is_one_value_and_a_per_token_scale_is_kept() -> None:
    writer = MemoryWriter()
    recorder = Recorder(writer, [MOE], span_tokens=3)
    codes, scales = quantized(MOE, 6)
    per_token = np.array([1, 1, 1, 1, 2, 3], np.float32)
    recorder.record(MOE, ["a"] * 6, range(6), codes, scales, per_token)
    assert [records[MOE][2].tolist() for _, _, records, *_ in writer.appends] == [[1.0], [1.0, 2.0, 3.0]]


@pytest.mark.parametrize("positions", [[2], [1], [0, 0]])
def test_a_position_that_comes_twice_is_refused_and_nothing_is_taken(positions: list[int]) -> None:
    writer = MemoryWriter()
    recorder = Recorder(writer, [MOE], span_tokens=8)
    before = [0, 1, 2] if positions != [0, 0] else []
    for position in before:
        decode(recorder, MOE, ["a"], [position])
    with pytest.raises(InvalidRequest, match="recorded before") as caught:
        decode(recorder, MOE, ["b", "a", "a"][-len(positions) :], positions)
    assert caught.value.argument == "positions"
    decode(recorder, MOE, ["a"], [len(before)])
    recorder.finish("a", tokens=len(before) + 2, prompt_tokens=0)
    assert writer.spans(MOE, "a") == [(0, len(before) + 1)]


def test_restart_moves_the_trajectory_to_the_next_attempt() -> None:
    writer = MemoryWriter()
    recorder = Recorder(writer, [MOE], span_tokens=2, policy_version=5)
    for position in range(3):
        decode(recorder, MOE, ["a"], [position], seed=1)
    assert recorder.restart("a") == 1
    codes = [decode(recorder, MOE, ["a"], [position], seed=2) for position in range(3)]
    recorder.finish("a", tokens=4, prompt_tokens=0)
    assert [(start, attempt, version) for _, start, _, attempt, version in writer.appends] == [
        (0, 0, 5), (0, 1, 5), (2, 1, 5),
    ]  # fmt: skip
    assert writer.seals == [("a", 4, 0, 1)]
    newest = np.concatenate([records[MOE][0] for _, _, records, attempt, _ in writer.appends if attempt])
    assert np.array_equal(newest, codebook.pack(np.concatenate(codes), bits=1))


def test_a_finished_name_can_be_used_again() -> None:
    writer = MemoryWriter()
    recorder = Recorder(writer, [MOE], span_tokens=2)
    for _ in range(2):
        decode(recorder, MOE, ["a"], [0])
        recorder.finish("a", tokens=2, prompt_tokens=0)
    assert writer.seals == [("a", 2, 0, 0)] * 2


def test_rows_survive_a_failed_append_and_are_sent_again() -> None:
    writer = MemoryWriter(failures=1)
    recorder = Recorder(writer, [MOE], span_tokens=2)
    codes, scales = quantized(MOE, 5)
    with pytest.raises(Unavailable):
        recorder.record(MOE, ["a"] * 5, range(5), codes, scales, 0.01)
    recorder.finish("a", tokens=6, prompt_tokens=0)
    assert writer.spans(MOE, "a") == [(0, 2), (2, 4), (4, 5)]
    assert np.array_equal(writer.rows(MOE, "a"), codebook.pack(codes, bits=1))


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("site", {"site": DEEP}),
        ("codes", {"codes": np.zeros((2, 16), np.uint8)}),
        ("trajectories", {"trajectories": ["a"]}),
        ("positions", {"positions": [0]}),
        ("scales", {"scales": np.zeros((2, 3), np.uint8)}),
        ("tensor_scale", {"tensor_scale": np.ones(3, np.float32)}),
    ],
)
def test_bad_input_names_the_argument_and_takes_nothing(argument: str, arguments: dict[str, Any]) -> None:
    writer = MemoryWriter()
    recorder = Recorder(writer, [MOE], span_tokens=1)
    codes, scales = quantized(MOE, 2)
    good = {
        "site": MOE, "trajectories": ["a", "b"], "positions": [0, 0], "codes": codes, "scales": scales,
        "tensor_scale": 0.01,
    }  # fmt: skip
    with pytest.raises(InvalidRequest) as caught:
        recorder.record(**(good | arguments))
    assert caught.value.argument == argument
    assert writer.appends == []
    recorder.record(**good)
    assert len(writer.appends) == 2


class ArrayCache:
    """An FP4 cache that is two arrays per site."""

    def __init__(self, sites: tuple[Site, ...], tokens: int) -> None:
        self.arrays = {site: quantized(site, tokens, seed=7) for site in sites}

    def rows(self, site: Site, trajectory: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, float]:
        codes, scales = self.arrays[site]
        return codes[start:stop], scales[start:stop], 0.01


def test_kv_is_gathered_for_every_token_that_ran_a_forward() -> None:
    writer, cache = MemoryWriter(), ArrayCache((K, V), 11)
    assert KVRecorder(writer, [K, V], cache, span_tokens=4).gather("a", tokens=11, attempt=2) == 10
    assert writer.spans(K, "a") == [(0, 4), (4, 8), (8, 10)]
    assert np.array_equal(writer.rows(V, "a"), codebook.pack(cache.arrays[V][0][:10], bits=2))
    assert {attempt for *_, attempt, _ in writer.appends} == {2}


def test_a_cache_that_gives_too_few_rows_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="another number of rows"):
        KVRecorder(MemoryWriter(), [K], ArrayCache((K,), 5)).gather("a", tokens=11)


def test_recorded_rows_come_back_from_a_server(client: trace_client.Client) -> None:
    sites, tokens, prompt = (MOE, K, V), 20, 6
    client.register("recorder", sites)
    cache = ArrayCache((K, V), tokens)
    with client.writer("recorder", "step") as writer:
        recorder = Recorder(writer, [MOE], span_tokens=4)
        codes, scales = quantized(MOE, tokens)
        for position in range(prompt, tokens - 1):
            row = slice(position, position + 1)
            recorder.record(MOE, ["a"], [position], codes[row], scales[row], 0.01)
        KVRecorder(writer, [K, V], cache).gather("a", tokens=tokens)
        receipt = recorder.finish("a", tokens=tokens, prompt_tokens=prompt)
    assert (receipt.tokens, receipt.durability, receipt.holes) == (tokens, "synced", ())
    batch = client.reader("recorder", "step").read([("a", 0, tokens, 0)])
    assert batch.valid[MOE].tolist() == [prompt <= position < tokens - 1 for position in range(tokens)]
    assert np.array_equal(batch.planes[MOE][prompt:-1], codebook.pack(codes[prompt:-1], bits=1))
    assert np.array_equal(batch.scales[MOE][prompt:-1], scales[prompt:-1])
    for site in (K, V):
        assert batch.valid[site].tolist() == [True] * (tokens - 1) + [False]
        packed = codebook.pack(cache.arrays[site][0][:-1], bits=site.code_form.bits)
        assert np.array_equal(batch.planes[site][:-1], packed)
        assert batch.tensor_scales[site][:-1].tolist() == [np.float32(0.01)] * (tokens - 1)
