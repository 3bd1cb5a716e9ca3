"""Tests `name:key=value,...` as dataclasses, and the errors that name the value, its rule and the nearest key."""

from __future__ import annotations

from typing import Any

import pytest

from hybridpar.config import TrainConfig
from hybridpar.config.optimizer import Average, Cosine, MultiStep, Schedule, Steps
from hybridpar.config.sync import AllReduce, AsyncServers, Local, Outer, ParameterServers, SoftSync
from hybridpar.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("allreduce", AllReduce()),
        ("local:4", Local(every=4)),
        ("outer:16", Outer(every=16)),
        (
            "outer:16,opt=nesterov,lr=0.7,momentum=0.9,qsr=2,fragments=4,delay=2",
            Outer(every=16, opt="nesterov", lr=0.7, momentum=0.9, qsr=2.0, fragments=4, delay=2),
        ),
        (" outer: 4, lr = auto ", Outer(every=4)),
        ("ps", ParameterServers()),
        ("ps:servers=2,pull=fp16", ParameterServers(servers=2, pull="fp16")),
        ("ps-async:staleness=mean,max_staleness=4", AsyncServers(staleness="mean", max_staleness=4)),
        ("softsync:2,servers=0", SoftSync(split=2, servers=0)),
    ],
)
def test_ways_to_keep_replicas_in_step(text: str, value: object) -> None:
    assert TrainConfig(sync=text).sync_mode == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("constant:warmup_lr=1e-4,update=epoch", Schedule(warmup_lr=1e-4, update="epoch")),
        ("cosine:min=1e-6,warmup_prefix=off", Cosine(min=1e-6, warmup_prefix=False)),
        ("step", Steps(fractions=(0.5, 0.75))),
        ("multistep:at=30/60,rate=0.2", MultiStep(at=(30.0, 60.0), rate=0.2)),
    ],
)
def test_schedules(text: str, value: Schedule) -> None:
    assert TrainConfig(lr_schedule=text).rate_schedule == value


def test_averages() -> None:
    assert TrainConfig(model_ema="0.9998").ema == Average(decay=0.9998)
    assert TrainConfig(model_ema="0.99,warmup,every=32").ema == Average(decay=0.99, warmup=True, every=32)
    assert TrainConfig().ema is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sync": "pss"}, "--sync pss\nThere is no 'pss'.\nDid you mean ps, ps-async?"),
        ({"sync": "outer"}, "--sync outer without H\nIt has no default.\nGive H first."),
        ({"sync": "outer:4,opt=nestrov"}, "opt=nestrov\nIt must be 'mean' or 'nesterov'."),
        ({"sync": "outer:4,fragment=2"}, "has no option 'fragment'\nDid you mean fragments"),
        ({"sync": "outer:4,delay=2,delay=1"}, "delay is given twice in --sync"),
        ({"sync": "outer:4,delay="}, "'delay=' in --sync outer:4,delay=\nOptions are key=value"),
        ({"sync": "outer:4,delay=soon"}, "delay=soon\nIt must be a valid integer."),
        ({"sync": "allreduce:servers=2"}, "has no option 'servers'\nValid: bucket, hierarchy, lanes, late."),
        ({"lr_schedule": "cosin"}, "--lr-schedule cosin\nThere is no 'cosin'.\nDid you mean cosine?"),
        ({"lr_schedule": "cosine:min=-1"}, "--lr-schedule cosine:min=-1: min=-1\nIt must be at least 0."),
        ({"lr_schedule": "cosine:warmup_prefix=no-one"}, "warmup_prefix=no-one\nIt must be a valid boolean."),
        ({"lr_schedule": "step:fractions=0.5/1.5"}, "fractions=0.5/1.5\nIt must be less than 1."),
        ({"lr_schedule": "cosine:warmup=inf"}, "warmup=inf\nIt must be a finite number."),
        ({"lr_schedule": "multistep"}, "--lr-schedule multistep without at\nIt has no default.\nAdd at=VALUE."),
        ({"sync": "ps,servers=2"}, "There is no 'ps,servers=2'.\nDid you mean ps"),
    ],
)
def test_slips_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        TrainConfig(**options).check()
    assert said in str(caught.value)
