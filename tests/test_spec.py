"""Tests `name:key=value,...` as dataclasses, and the errors that name the value, its rule and the nearest key."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hybridpar.config import TrainConfig
from hybridpar.config.data import (
    Augmentation,
    AutoAugment,
    DropRates,
    HubOptions,
    Images,
    Mixing,
    RandAugment,
    Synthetic,
    TimmAugment,
)
from hybridpar.config.optimizer import Average, Cosine, MultiStep, Schedule, Steps
from hybridpar.config.sync import AllReduce, AsyncServers, Local, Outer, ParameterServers, SoftSync
from hybridpar.errors import UsageError

READ: list[tuple[dict[str, Any], str, object]] = [
    ({"sync": "allreduce"}, "sync_mode", AllReduce()),
    ({"sync": "local:4"}, "sync_mode", Local(every=4)),
    ({"sync": "outer:16"}, "sync_mode", Outer(every=16)),
    (
        {"sync": "outer:16,opt=nesterov,lr=0.7,momentum=0.9,qsr=2,fragments=4,delay=2"},
        "sync_mode",
        Outer(every=16, opt="nesterov", lr=0.7, momentum=0.9, qsr=2.0, fragments=4, delay=2),
    ),
    ({"sync": " outer: 4, lr = auto "}, "sync_mode", Outer(every=4)),
    ({"sync": "ps"}, "sync_mode", ParameterServers()),
    ({"sync": "ps:servers=2,pull=fp16"}, "sync_mode", ParameterServers(servers=2, pull="fp16")),
    ({"sync": "ps-async:staleness=mean,max_staleness=4"}, "sync_mode", AsyncServers(staleness="mean", max_staleness=4)),
    ({"sync": "softsync:2,servers=0"}, "sync_mode", SoftSync(split=2, servers=0)),
    (
        {"lr_schedule": "constant:warmup_lr=1e-4,update=epoch"},
        "rate_schedule",
        Schedule(warmup_lr=1e-4, update="epoch"),
    ),
    ({"lr_schedule": "cosine:min=1e-6,warmup_prefix=off"}, "rate_schedule", Cosine(min=1e-6, warmup_prefix=False)),
    ({"lr_schedule": "step"}, "rate_schedule", Steps(fractions=(0.5, 0.75))),
    ({"lr_schedule": "multistep:at=30/60,rate=0.2"}, "rate_schedule", MultiStep(at=(30.0, 60.0), rate=0.2)),
    ({"model_ema": "0.9998"}, "ema", Average(decay=0.9998)),
    ({"model_ema": "0.99,warmup,every=32"}, "ema", Average(decay=0.99, warmup=True, every=32)),
    ({}, "ema", None),
    ({"image_size": 64}, "images", Images(size=64)),
    ({"image_size": "test=288"}, "images", Images(test=288)),
    (
        {"image_size": "224,test=288,crop=0.95,mean=0.5/0.4/0.3,std=0.2/0.2/0.2,interpolation=bicubic"},
        "images",
        Images(size=224, test=288, crop=0.95, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2), interpolation="bicubic"),
    ),
    ({"image_size": "train_interpolation=random,test=auto"}, "images", Images(train_interpolation="random")),
    ({"augment": "hflip=0,vflip=0.1"}, "augmentation", Augmentation(hflip=0.0, vflip=0.1)),
    (
        {"augment": "ra:n=3,erase=0.25,erase_mode=pixel,scale=0.2/1,repeats=3"},
        "augmentation",
        RandAugment(n=3, m=9, erase=0.25, erase_mode="pixel", scale=(0.2, 1.0), repeats=3),
    ),
    ({"augment": "aa:set=svhn"}, "augmentation", AutoAugment(set="svhn")),
    ({"augment": "timm:rand-m9-mstd0.5,hflip=0"}, "augmentation", TimmAugment(spec="rand-m9-mstd0.5", hflip=0.0)),
    ({"mix": "mixup=0.2,cutmix=1,off=280"}, "mixing", Mixing(mixup=0.2, cutmix=1.0, off=280)),
    ({"drop": 0.1}, "drop_rates", DropRates(rate=0.1)),
    ({"drop": "path=0.2"}, "drop_rates", DropRates(path=0.2)),
    ({"data": "hf/some/thing:small,download"}, "data_options", HubOptions(configuration="small", download=True)),
    ({"data": "synthetic:samples=20"}, "data_options", Synthetic(samples=20)),
]


@pytest.mark.parametrize(("options", "name", "value"), READ)
def test_a_text_stands_for(options: dict[str, Any], name: str, value: object) -> None:
    config = TrainConfig(**options)
    config.check()
    assert getattr(config, name) == value


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sync": "pss"}, ("--sync pss\nThere is no 'pss'.\nDid you mean ps, ps-async?",)),
        ({"sync": "outer"}, ("--sync outer without H\nIt has no default.\nGive H first.",)),
        ({"sync": "outer:4,opt=nestrov"}, ("opt=nestrov\nIt must be 'mean' or 'nesterov'.",)),
        ({"sync": "outer:4,fragment=2"}, ("has no option 'fragment'\nDid you mean fragments",)),
        ({"sync": "outer:4,delay=2,delay=1"}, ("delay is given twice in --sync",)),
        ({"sync": "outer:4,delay="}, ("'delay=' in --sync outer:4,delay=\nOptions are key=value",)),
        ({"sync": "outer:4,delay=soon"}, ("delay=soon\nIt must be a valid integer.",)),
        ({"sync": "allreduce:servers=2"}, ("has no option 'servers'\nValid: bucket, hierarchy, lanes, late.",)),
        ({"lr_schedule": "cosin"}, ("--lr-schedule cosin\nThere is no 'cosin'.\nDid you mean cosine?",)),
        ({"lr_schedule": "cosine:min=-1"}, ("--lr-schedule cosine:min=-1: min=-1\nIt must be at least 0.",)),
        ({"lr_schedule": "cosine:warmup_prefix=no-one"}, ("warmup_prefix=no-one\nIt must be a valid boolean.",)),
        ({"lr_schedule": "step:fractions=0.5/1.5"}, ("fractions=0.5/1.5\nIt must be less than 1.",)),
        ({"lr_schedule": "cosine:warmup=inf"}, ("warmup=inf\nIt must be a finite number.",)),
        ({"lr_schedule": "multistep"}, ("--lr-schedule multistep without at\nIt has no default.\nAdd at=VALUE.",)),
        ({"sync": "ps,servers=2"}, ("There is no 'ps,servers=2'.\nDid you mean ps",)),
        ({"optimizer": "adamv"}, ("'adamv'", "adam")),
        ({"lr": 0.0}, ("--lr 0.0: rate=0.0", "greater than 0")),
        ({"lr": math.nan}, ("--lr is nan", "a finite number")),
        ({"loss": "ce:threshold=0.2"}, ("--loss ce:threshold=0.2", "'threshold'")),
        ({"optimizer": "sgd:momentum=none"}, ("momentum=None", "a number")),
        ({"optimizer": "sgd:momentum=0,nesterov"}, ("--optimizer sgd:momentum=0,nesterov", "needs momentum")),
        ({"recompute": ("all",), "sync": "ps"}, ("--recompute all with --sync ps", "whole model")),
        ({"recompute": ("all",), "batch_size": "auto"}, ("--recompute all with --batch-size auto", "whole model")),
        ({"optimizer": "adamw:layer_decay=2"}, ("layer_decay=2", "at most 1")),
        ({"recompute": ("all", 1)}, ("--recompute is ('all', 1)", "a valid integer")),
        ({"shares": "1,2", "replicas": 3, "stages": 2}, ("--shares 1,2 for 3 replicas", "as many numbers")),
        ({"shares": "1,2", "nproc": 3, "plan": "none"}, ("--shares 1,2 for 3 replicas", "as many numbers")),
        ({"sync": "allreduce:lanes=9"}, ("lanes=9", "at most 8")),
        ({"image_size": 4}, ("--image-size 4: size=4", "at least 8")),
        ({"image_size": "32,crop=1.5"}, ("--image-size 32,crop=1.5: crop=1.5", "at most 1")),
        ({"image_size": "mean=0.5/0.5"}, ("--image-size: mean has 2 numbers", "each of 3 channels")),
        ({"image_size": "interpolation=cubic"}, ("interpolation=cubic", "or 'bicubic'")),
        ({"augment": "timm"}, ("--augment timm without SPEC", "no default")),
        ({"augment": "scale=0.5/0.1"}, ("--augment: scale=0.5/0.1", "the smaller one first")),
        ({"data": "folder:bad=ignore"}, ("bad=ignore", "'skip' or 'error'")),
    ],
)
def test_slips_are_named(options: dict[str, Any], said: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        TrainConfig(**options).check()
    assert all(part in str(caught.value) for part in said), str(caught.value)
