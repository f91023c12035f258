"""The volume arithmetic against the paper's numbers and the published table of models."""

import json

import pytest

from trace_store import plan
from trace_store.errors import InvalidRequest

REFERENCE = plan.MODELS["Qwen3.5-35B-A3B"]
KIB, TIB = 2**10, 2**40


def per_token(shape=REFERENCE, **keywords) -> plan.TokenBytes:
    return plan.bytes_per_token(shape, **{"form": "full", **keywords})


def test_full_records_are_45_kb_of_activations_and_5_6_kb_of_kv():
    token = per_token()
    assert (token.moe_in, token.kv, token.total) == (46_080, 5_760, 51_840)
    assert token.moe_in / KIB == 45.0
    assert token.kv / KIB == 5.625


def test_compact_records_are_61440_bits_without_kv_and_8_44_kib_with_it():
    token = per_token(form="b1", coverage="latter-half")
    assert token.moe_in * 8 == 61_440 == 2048 * 20 * 1.5
    assert token.moe_in / KIB == 7.5
    assert token.total / KIB == 8.4375


def test_compact_is_6_times_smaller_with_and_without_kv():
    full, compact = per_token(), per_token(form="b1", coverage="latter-half")
    assert full.moe_in / compact.moe_in == 6.0
    assert full.total / compact.total == 6.0


def test_mxfp4_is_6_8_times_smaller():
    full = per_token(format="mxfp4")
    assert full.total / per_token(form="b1", coverage="latter-half", format="mxfp4").total == 6.8


def test_a_step_of_full_records_is_51_tb():
    step = plan.bytes_per_step(per_token().total, trajectories=4096, tokens=2**18)
    assert step / TIB == 50.625
    assert round(step / TIB) == 51


def test_51_tb_takes_3_minutes_at_300_gb_s_and_3_hours_at_5():
    step = plan.bytes_per_step(per_token().total, trajectories=4096, tokens=2**18)
    assert plan.hours(51e12, bytes_per_second=300e9) * 3600 == pytest.approx(170)
    assert plan.hours(step, bytes_per_second=300e9) * 3600 == pytest.approx(185.5, abs=0.1)
    assert plan.hours(51e12, bytes_per_second=5e9) == pytest.approx(2.83, abs=0.005)
    assert plan.hours(step, bytes_per_second=5e9) == pytest.approx(3.09, abs=0.005)


# KiB per token: activations and KV in full, then b = 1 on the latter half, MXFP4 totals, TiB per step at 256K and 32K.
TABLE = {
    "Qwen3.5-35B-A3B": (45.0, 5.63, 50.6, 7.50, 0.938, 8.44, 47.8, 7.03, 50.6, 8.44, 6.33, 1.05),
    "Qwen3-30B-A3B": (54.0, 27.0, 81.0, 9.00, 4.50, 13.5, 76.5, 11.3, 81.0, 13.5, 10.1, 1.69),
    "gpt-oss-20b": (38.0, 13.5, 51.5, 6.33, 2.25, 8.58, 48.6, 7.15, 51.5, 8.58, 6.43, 1.07),
    "gpt-oss-120b": (57.0, 20.3, 77.2, 9.49, 3.38, 12.9, 72.9, 10.7, 77.2, 12.9, 9.65, 1.61),
    "DeepSeek-V3": (228, 17.2, 246, 38.1, 2.81, 40.9, 232, 34.1, 246, 40.9, 30.7, 5.11),
    "Kimi-K2": (236, 17.2, 253, 39.4, 2.81, 42.2, 239, 35.2, 253, 42.2, 31.7, 5.27),
}


@pytest.mark.parametrize("name", TABLE)
def test_published_table_of_models(name):
    shape = plan.MODELS[name]
    full, compact = per_token(shape), per_token(shape, form="b1", coverage="latter-half")
    mx_full = per_token(shape, format="mxfp4").total
    mx_compact = per_token(shape, form="b1", coverage="latter-half", format="mxfp4").total
    steps = [
        plan.bytes_per_step(size, trajectories=4096, tokens=tokens) / TIB
        for tokens in (2**18, 2**15)
        for size in (full.total, compact.total)
    ]
    token_sizes = (full.moe_in, full.kv, full.total, compact.moe_in, compact.kv, compact.total, mx_full, mx_compact)
    computed = [size / KIB for size in token_sizes] + steps
    # Three significant digits were published: half a unit of the last one, 0.5 % at the most.
    assert computed == pytest.approx(TABLE[name], rel=0.005)


def test_every_published_model_is_a_preset():
    assert set(plan.MODELS) == set(TABLE)


@pytest.mark.parametrize(("layers", "guided"), [(40, 20), (10, 5), (61, 30), (58, 29), (1, 0)])
def test_latter_half_is_floored_per_kind(layers, guided):
    assert plan.guided_layers(layers, "latter-half") == guided
    assert plan.guided_layers(layers, "all") == layers


@pytest.mark.parametrize(("form", "bits"), [("full", 4.5), ("b3", 3.5), ("b2", 2.5), ("b1", 1.5)])
def test_bits_per_value_of_nvfp4(form, bits):
    assert plan.row_bytes(2048, form=form, format="nvfp4") * 8 / 2048 == bits


def test_a_decode_scale_per_token_adds_four_bytes_a_row():
    plain, dynamic = per_token(form="b1"), per_token(form="b1", token_scales=True)
    assert dynamic.moe_in - plain.moe_in == 4 * 40
    assert dynamic.kv - plain.kv == 4 * 2 * 10


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: plan.row_bytes(2050, form="b1", format="nvfp4"), "width"),
        (lambda: plan.row_bytes(0, form="b1", format="nvfp4"), "width"),
        (lambda: plan.row_bytes(2048, form="b9", format="nvfp4"), "form"),
        (lambda: plan.row_bytes(2048, form="b1", format="fp8"), "format"),
        (lambda: plan.guided_layers(4, "half"), "coverage"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, argument):
    with pytest.raises(InvalidRequest) as caught:
        call()
    assert caught.value.argument == argument


def test_command_prints_one_row_per_form_and_coverage_as_json(capsys):
    assert plan.command(["--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["model"]["name"] == "Qwen3.5-35B-A3B"
    rows = {(row["form"], row["coverage"]): row for row in printed["rows"]}
    assert set(rows) == {(form, coverage) for form in ("full", "b3", "b2", "b1") for coverage in plan.COVERAGES}
    full, compact, chain = rows["full", "all"], rows["b1", "latter-half"], rows["b1", "all"]
    assert full["bytes_per_token"] == 51_840
    assert full["hours_per_pass"] == pytest.approx(3.09, abs=0.005)
    assert (compact["bytes_per_token"], compact["times_smaller_than_full"]) == (8_640, 6.0)
    assert (chain["bytes_per_token"], chain["times_smaller_than_full"]) == (17_280, 3.0)
    assert compact["ingest_bytes_per_second"] == pytest.approx(173e6, rel=0.005)
    assert full["ingest_bytes_per_second"] == pytest.approx(1.04e9, rel=0.005)


def test_command_uses_the_shape_the_step_and_the_bandwidth_it_is_given(capsys):
    argv = [
        "--model",
        "Kimi-K2",
        "--hidden",
        "1024",
        "--moe-layers",
        "2",
        "--kv-width",
        "64",
        "--attention-layers",
        "3",
    ]
    argv += ["--kv-rows", "2", "--trajectories", "10", "--tokens", "100", "--bandwidth", "0.001", "--format", "mxfp4"]
    assert plan.command([*argv, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    row = printed["rows"][0]
    assert row["bytes_per_token"] == 2 * 1024 * 4.25 / 8 + 2 * 3 * 64 * 4.25 / 8
    assert row["bytes_per_step"] == 1000 * row["bytes_per_token"]
    assert row["hours_per_pass"] * 3600 == row["bytes_per_step"] / 1e6
    assert printed["model"]["name"] == "Kimi-K2, changed"


def test_command_prints_a_table_with_the_papers_sizes(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert plan.command([]) == 0
    text = capsys.readouterr().out
    for expected in ("45 KiB", "5.62 KiB", "50.6 KiB", "50.6 TiB", "3.09 h", "8.44 KiB", "8.44 TiB", "6.00x"):
        assert expected in text, expected


@pytest.mark.parametrize("name", plan.MODELS)
def test_the_table_keeps_its_numbers_on_a_terminal_of_80_columns(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert plan.command(["--model", name]) == 0
    text = capsys.readouterr().out
    assert "full, latter-half" in text
    assert "…" not in text


@pytest.mark.parametrize(
    "argv",
    [
        ["--model", "none"],
        ["--tokens", "0"],
        ["--bandwidth", "-1"],
        ["--bandwidth", "nan"],
        ["--hidden", "2050"],
        ["--x"],
    ],
)
def test_command_refuses_bad_arguments_with_status_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        plan.command(argv)
    assert caught.value.code == 2
    assert "usage: trace-store plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "text"),
    [(320, "320 B"), (8640, "8.44 KiB"), (50.625 * TIB, "50.6 TiB"), (2000 * TIB, "2000 TiB"), (1024, "1 KiB")],
)
def test_sizes_are_written_in_powers_of_1024(size, text):
    assert plan.size_text(size) == text


@pytest.mark.parametrize(("duration_h", "text"), [(0.01, "36 s"), (0.0515, "3.09 min"), (3.0927, "3.09 h")])
def test_times_are_written_in_their_unit(duration_h, text):
    assert plan.time_text(duration_h) == text
