"""Tests the file of the report page: it holds all it needs, runs nothing that stands in the data, replaces no other."""

import base64
import hashlib
import json
import re

import pytest

from hybridpar.errors import UsageError
from hybridpar.observe.page import check_page_file, page_html, write_page

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
