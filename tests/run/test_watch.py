"""Tests the server of `hybridpar watch`: who gets an answer, and when there are new data."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from urllib.parse import urlsplit

import pytest

from hybridpar.errors import UsageError
from hybridpar.observe.metrics import MetricsWriter
from hybridpar.run.watch import PageServer
from tests.run.run_directories import a_run, step_record


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def server(tmp_path, clock):
    with PageServer([a_run(tmp_path / "a", 5)], clock=clock) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(server, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_only_who_knows_the_address_gets_the_page(server):
    place = urlsplit(server.address).path
    answer, text = asked(server, place)
    assert (answer.status, answer.getheader("Cache-Control")) == (200, "no-store")
    assert "connect-src 'self'" in text
    wrong = ["/", "/x/", "//", place[:-1], f"{place}../run.json", f"{place}run.json", "/" + "x" * 22 + "/data", "/%00/"]
    assert {asked(server, path)[0].status for path in wrong} == {404}
    assert asked(server, place, Host="evil.example:80")[0].status == 404
    assert asked(server, place, Host=f"localhost:{server.server_port}")[0].status == 200
    assert server.server_address[0] == "127.0.0.1"


def test_new_data_come_where_a_file_has_changed(server, tmp_path):
    data = f"{urlsplit(server.address).path}data"
    answer, text = asked(server, data)
    first = json.loads(text)
    assert first["runs"][0]["state"] == "running"
    assert asked(server, f"{data}?v={first['version']}")[0].status == 204
    with MetricsWriter(tmp_path / "a", resume_step=5) as writer:
        writer.write_step(step_record(6))
    answer, text = asked(server, f"{data}?v={first['version']}")
    assert (answer.status, answer.getheader("Content-Type")) == (200, "application/json; charset=utf-8")
    second = json.loads(text)
    assert second["version"] > first["version"]
    assert second["charts"][0]["lines"][0]["x"] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_is_replaced_leaves_what_was_read_last(server, tmp_path):
    data = f"{urlsplit(server.address).path}data"
    before = json.loads(asked(server, data)[1])
    (tmp_path / "a" / "run.json").unlink()
    answer, text = asked(server, data)
    assert answer.status == 200
    assert json.loads(text)["runs"] == before["runs"]


def test_a_run_that_stands_still_is_told_so(server, tmp_path, clock, monkeypatch):
    data = f"{urlsplit(server.address).path}data"
    assert json.loads(asked(server, data)[1])["runs"][0]["state"] == "running"
    monkeypatch.setattr("hybridpar.run.page_data._SILENT", -1.0)
    assert json.loads(asked(server, data)[1])["runs"][0]["state"] == "running"
    clock.now += 60
    assert json.loads(asked(server, data)[1])["runs"][0]["state"] == "stopped"


def test_a_port_that_is_taken_and_what_is_no_run_are_refused(tmp_path):
    run = a_run(tmp_path / "a", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="cannot listen on port"):
            PageServer([run], taken.getsockname()[1])
    for port in (-1, 70_000):
        with pytest.raises(UsageError, match="no such port"):
            PageServer([run], port)
    with pytest.raises(UsageError, match="not the directory of a run"):
        PageServer([tmp_path])
