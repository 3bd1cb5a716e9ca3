"""Tests the file of the report page: it holds all it needs, runs nothing that stands in a run, replaces no other."""

import base64
import hashlib
import json
import re

import pytest
from plotly.graph_objects import Bar, Figure

from hybridpar.errors import UsageError
from hybridpar.observe.page import check_page_file, element, table, write_page

NAME = "</script><script>alert(1)</script><b>\udcff"


@pytest.fixture
def text(tmp_path):
    parts = [element("h2", NAME), table([[NAME]], [NAME], caption=NAME), table([[NAME]], caption=NAME, folded=True)]
    write_page(tmp_path / "page.html", NAME, [*parts, Figure([Bar(name=NAME, y=[NAME], x=[1])])])
    return (tmp_path / "page.html").read_text()


def test_names_in_runs_are_no_markup(text):
    assert text.count("alert(1)") == 10
    assert "<script>alert" not in text
    assert "<b>" not in text.partition("<script>")[0]
    assert text.count("</script>") == 1


def test_a_figure_is_drawn_from_its_json(text):
    call = r'Plotly\.newPlot\("part-3", \{"config": (\{.*?\}), \.\.\.(\{.*\})\}\);</script>'
    ((config, drawn),) = re.findall(call, text)
    assert json.loads(config) | {"showSendToCloud": False, "plotlyServerURL": ""} == json.loads(config)
    assert json.loads(drawn)["data"][0]["name"] == NAME
    assert '<div id="part-3"></div>' in text


def test_the_security_policy_allows_the_script_of_the_page_and_no_address(text):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = dict(rule.split(maxsplit=1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'none'",
        "script-src": f"'sha256-{digest}'",
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
    }
    assert not re.search(r"<script [^>]*src=|<link [^>]*href=\"http", text)


def test_only_an_earlier_report_is_replaced(tmp_path):
    check_page_file(tmp_path / "new.html")
    write_page(tmp_path / "new.html", "run", [])
    check_page_file(tmp_path / "new.html")
    (tmp_path / "mine.html").write_text("<html>mine</html>")
    for name, message in (("mine.html", "is no report"), ("none/new.html", "no folder"), (".", "cannot be replaced")):
        with pytest.raises(UsageError, match=message):
            check_page_file(tmp_path / name)
