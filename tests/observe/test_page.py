"""Tests the file of the report page: it holds all it needs, runs nothing that stands in the data, replaces no other."""

import base64
import hashlib
import json
import re

import pytest

from hybridpar.errors import UsageError
from hybridpar.observe.page import check_page_file, lanes_block, page_html, write_page
from tests.observe.timelines import a_timeline

DATA = {"title": "</script><script>alert(1)</script>", "runs": []}


def test_what_stands_in_the_data_is_no_markup():
    text = page_html(DATA)
    assert "<script>alert" not in text
    held = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(held[1]) == DATA


def test_the_security_policy_allows_script_and_style_of_the_page_and_nothing_else():
    text = page_html(DATA)
    policy = dict(
        one.split(" ", 1) for one in re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1].split("; ")
    )
    for tag, name in (("style", "style-src"), ("script", "script-src")):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        assert policy.pop(name) == f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
    assert policy == {"default-src": "'none'", "img-src": "data:"}


def test_the_page_names_no_other_address():
    assert set(re.findall(r"https?://[^\"'\s)]*", page_html(DATA))) == {"http://www.w3.org/2000/svg"}


def test_only_an_earlier_report_is_replaced(tmp_path):
    check_page_file(tmp_path / "new.html")
    write_page(tmp_path / "new.html", DATA)
    check_page_file(tmp_path / "new.html")
    (tmp_path / "mine.html").write_text("<html>mine</html>")
    for name, said in (("mine.html", "is no report"), ("none/new.html", "no folder"), (".", "cannot be replaced")):
        with pytest.raises(UsageError, match=said):
            check_page_file(tmp_path / name)


def test_lanes_are_those_of_the_drawn_timeline():
    block = lanes_block(a_timeline())
    predicted, measured = block["panels"]
    assert predicted["title"].startswith("predicted:  step")
    assert measured["title"].startswith("measured, step")
    assert predicted["length"] < measured["length"]
    assert [row["name"] for row in predicted["rows"] if row["compute"]] == ["worker 0", "worker 2"]
    boxes = [box for row in measured["rows"] for box in row["boxes"]]
    assert sum(box[4] == "F3 stage 1" for box in boxes) == 2  # of each replica
    assert all(start <= joined <= end for start, joined, end, *_ in boxes)
    assert {kind for kind, _ in block["kinds"]} == {"F", "B", "STEP", "SEND_F", "SYNC"}
    json.dumps(block, allow_nan=False)
