"""Tests `hybridpar bench` for codecs: measured rates and bytes of the whole exchange, its table, wrong requests."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hybridpar.commands.bench import codecs
from hybridpar.commands.bench.codecs import (
    TimedCoder,
    measure_in_processes,
    measure_speeds,
    print_speeds,
    run_bench_codecs,
)
from hybridpar.commands.bench.request import BenchCodecs
from hybridpar.commands.bench.traffic import wire_bytes
from hybridpar.compress import Exchange, TensorSpec, bind, parse_codec, run_together
from hybridpar.compress.codec import CODECS
from hybridpar.errors import LaunchError, UsageError

SMALL = BenchCodecs(
    model="tests.small_nets:plain", classes=4, repeats=1, codec=("onebit:least=1,meet=shard", "fp16", "none")
)


def test_every_codec_can_be_measured() -> None:
    request = dataclasses.replace(SMALL, codec=tuple(CODECS), workers=3)
    speeds = measure_speeds(request)
    assert [speed.codec for speed in speeds] == list(CODECS)
    for speed in speeds:
        assert min(speed.encode, speed.decode, speed.memcpy) > 0
        assert speed.sent_bytes > 0
    by_name = {speed.codec: speed for speed in speeds}
    assert by_name["none"].ratio == 1
    assert by_name["fp16"].ratio == pytest.approx(2, rel=1e-3)


def test_only_what_has_owners_is_merged() -> None:
    onebit, fp16, _ = measure_speeds(SMALL)
    assert onebit.merge is not None
    assert onebit.decode_add is not None
    assert fp16.merge is fp16.decode_add is None


def test_a_timed_coder_changes_nothing() -> None:
    codec = parse_codec("onebit:least=1")
    gradients = [torch.randn(6 * 8), torch.randn(6 * 8)]
    results = []
    for timed in (False, True):
        exchanges = []
        for rank in range(2):
            coder = bind(codec, TensorSpec("w", (6, 8), rank, 2))
            exchanges.append(Exchange([TimedCoder(coder) if timed else coder]))
        outs = [torch.empty(48), torch.empty(48)]
        for _ in range(2):
            run_together(exchanges, [[one] for one in gradients], [[out] for out in outs])
            for exchange in exchanges:
                exchange.commit()
            run_together(exchanges, [[one] for one in gradients], [[out] for out in outs])
            for exchange in exchanges:
                exchange.rollback()
        results.append(outs[0])
    assert torch.equal(*results)


def test_bytes_are_those_after_the_warm_up() -> None:
    shapes = {"w": (64, 64), "b": (64,)}
    assert wire_bytes(parse_codec("none"), shapes, 2) == 4 * (64 * 64 + 64)
    warm = wire_bytes(parse_codec("onebit:warmup=5"), shapes, 2)
    assert warm == wire_bytes(parse_codec("onebit"), shapes, 2) < 4 * 64 * 64 / 8


@pytest.mark.parametrize("kernels", [False, True])
def test_each_kind_of_code_has_its_process_and_its_rows(monkeypatch: pytest.MonkeyPatch, kernels: bool) -> None:
    asked = []

    def run(command: list[str], env: dict[str, str], **more: object) -> object:
        asked.append((env.get(codecs.KERNELS_VARIABLE), env["OMP_NUM_THREADS"]))
        names = json.loads(command[-1])["codec"]
        off = not kernels or env.get(codecs.KERNELS_VARIABLE) == "off"
        kinds = {name: "torch" if off or name == "fp16" else "compiled" for name in names}
        speeds = [codecs.CodecSpeed(name, kind, 1, None, None, 1, 1, 2, 1) for name, kind in kinds.items()]
        line = json.dumps([dataclasses.asdict(speed) for speed in speeds])
        return type("Done", (), {"returncode": 0, "stdout": line, "stderr": ""})

    monkeypatch.setattr(codecs.subprocess, "run", run)
    monkeypatch.setenv(codecs.KERNELS_VARIABLE, "whatever")
    found = [(speed.codec, speed.code) for speed in measure_in_processes(SMALL)]
    assert found == [
        (codec, code)
        for codec in SMALL.codec
        for code in ("compiled", "torch")
        if code == "torch" or (kernels and codec != "fp16")
    ]
    assert asked == [(None, "1"), ("off", "1")]


@pytest.mark.sweep
def test_a_process_of_its_own_measures() -> None:
    (speed,) = measure_in_processes(dataclasses.replace(SMALL, codec=("fp16",)))
    assert (speed.codec, speed.code) == ("fp16", "torch")


def _here(capsys: pytest.CaptureFixture[str]) -> Callable[..., object]:
    """What the measuring process does, in this one."""

    def run(command: list[str], **more: object) -> object:
        threads = torch.get_num_threads()
        code: object = 0
        try:
            codecs._main(command[-1])
        except SystemExit as ended:
            code = ended.code
        finally:
            torch.set_num_threads(threads)
        said = capsys.readouterr()
        return type("Done", (), {"returncode": code, "stdout": said.out, "stderr": said.err})

    return run


def test_the_command_shows_the_figures_and_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(codecs.subprocess, "run", _here(capsys))
    path = tmp_path / "folder" / "speeds.csv"
    request = dataclasses.replace(SMALL, codec=("fp16",), csv=path)
    console = Console(record=True, width=80, file=io.StringIO())
    assert run_bench_codecs(request, console) == 0
    assert "fp16" in console.export_text()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["codec"], row["code"]) for row in rows] == [("fp16", "torch")]
    assert float(rows[-1]["ratio"]) == 2


def test_a_table_fits_into_80_columns() -> None:
    speeds = [codecs.CodecSpeed("qsgd_mn:meet=shard", "compiled", 12.34, 56.78, 9.1, 11.12, 23.45, 46758048, 7828720)]
    console = Console(record=True, width=80, file=io.StringIO())
    print_speeds(BenchCodecs(), speeds, console)
    text = console.export_text()
    for figure in ("12.34", "56.78", "9.10", "11.12", "23.45", "7.829", "5.97"):
        assert figure in text


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = type("Done", (), {"returncode": 1, "stdout": "", "stderr": "no memory left"})
    monkeypatch.setattr(codecs.subprocess, "run", lambda *arguments, **more: failed)
    with pytest.raises(LaunchError, match="no memory left"):
        measure_in_processes(SMALL)


def test_an_unknown_model_is_a_wrong_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(codecs.subprocess, "run", _here(capsys))
    with pytest.raises(UsageError, match="no factory 'nothing'"):
        run_bench_codecs(dataclasses.replace(SMALL, model="tests.small_nets:nothing"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"codec": ("onbit",)}, "unknown codec 'onbit'"),
        ({"codec": ()}, "--compress"),
        ({"workers": 1}, "--workers 1"),
        ({"repeats": 0}, "--repeats 0"),
    ],
)
def test_bad_requests(change: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_bench_codecs(dataclasses.replace(SMALL, **change))
