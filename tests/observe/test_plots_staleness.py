"""Why: a picture of gradients' ages is drawn from counts alone, and a run without any says why there is none."""

from __future__ import annotations

from hybridpar.observe import draw_staleness


def test_a_picture_of_ages(tmp_path):
    path = draw_staleness(tmp_path, {0: 3, 1: 10, 7: 1}, expected=1.5)
    assert path == tmp_path / "staleness.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_gradients_there_is_none(tmp_path):
    said = []
    assert draw_staleness(tmp_path, {}, say=said.append) is None
    assert said == ["staleness.png was not drawn: no gradient arrived"]
