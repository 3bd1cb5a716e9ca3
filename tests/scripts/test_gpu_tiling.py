"""The cases that show what virtual threads and phases are worth: an equal tile, and fewer predicted conflicts."""

from __future__ import annotations

from hybridpar.tvm_kernels.cuda_space import bank_conflicts
from hybridpar.tvm_kernels.space import reject
from scripts.gpu_tiling import Case, cases


def conflicts(case: Case) -> float:
    return bank_conflicts(case.variant.tiling)


def test_every_case_is_a_kernel_with_the_tile_of_its_shape() -> None:
    tiles: dict[str, set[int]] = {}
    for case in cases():
        variant = case.variant
        assert reject(case.key, variant.parameters) is None
        tiles.setdefault(case.shape, set()).add(variant.tiling.block[1])
    assert all(len(sizes) == 1 for sizes in tiles.values())


def test_virtual_threads_and_phases_that_lie_apart_have_fewer_conflicts() -> None:
    predicted = {case: conflicts(case) for case in cases()}
    for case, value in predicted.items():
        alone = next(
            other
            for other in predicted
            if (other.shape, other.direction, other.virtual) == (case.shape, case.direction, 1)
        )
        assert value <= predicted[alone]
        if case.virtual == 4:
            assert value < predicted[alone]
        mixed = Case(case.shape, case.direction, case.columns, case.virtual, apart=False)
        if mixed in predicted:
            assert (
                predicted[Case(case.shape, case.direction, case.columns, case.virtual, apart=True)] <= predicted[mixed]
            )
