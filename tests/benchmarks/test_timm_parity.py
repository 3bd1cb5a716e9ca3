"""The comparison with timm's loop: a few steps of it, and the table that is committed."""

from __future__ import annotations

import copy
import csv

import pytest
import torch

from benchmarks.recipes.timm_parity import RECIPES, RESULTS, batches_of, hybridpars, options_of, timms, write_images
from hybridpar.models import build_model


@pytest.mark.parametrize("recipe", list(RECIPES)[:1])  # the table has all
def test_first_steps_are_timms(recipe, tmp_path):
    write_images(tmp_path)
    options = options_of(recipe, tmp_path)
    batches, per_epoch, classes = batches_of(options, 2)
    batches = [(images[..., ::2, ::2].double(), labels) for images, labels in batches]
    torch.manual_seed(0)
    model = build_model("timm/resnet18", classes=classes).double()
    losses, state = hybridpars(copy.deepcopy(model), options, batches, per_epoch, classes)
    theirs, their_state = timms(model, options, batches, per_epoch, classes)
    assert losses == pytest.approx(theirs, rel=1e-12)
    for name, tensor in their_state.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-10)


def test_all_losses_of_the_table_agree():
    rows = list(csv.DictReader(RESULTS.open()))
    assert len(rows) == 2 * 50 * len(RECIPES)
    assert all(abs(float(row["timm"]) - float(row["hybridpar"])) < 1e-3 for row in rows)
