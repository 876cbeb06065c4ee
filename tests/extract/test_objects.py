"""Whole stores on object stores: fsspec's memory, and S3 as moto serves it on loopback."""

from __future__ import annotations

import os
import socket
import threading

import pytest
import torch

from tests.extract import jobs
from torchhook._extract.api import extract
from torchhook._features.api import open_features
from torchhook._features.storage import locate
from torchhook._features.verify import verify
from torchhook.errors import IncompleteStoreError, StoreMismatchError

pytest.importorskip("fsspec")


def do(out, model=None, **options):
    options = {"batch_size": 16, "rows_per_shard": 32, "progress": False, **options}
    return extract(jobs.Net() if model is None else model, jobs.data(100), ["first", "second"], out, **options)


def check(url):
    truth = jobs.oracle(jobs.Net(), jobs.data(100).tensors[0].split(16), "first", "second")
    features = do(url)
    for name, expected in truth.items():
        assert torch.equal(features[name][:], expected)
        assert torch.equal(features[name][33], expected[33])
        assert torch.equal(features[name][[99, 0, 33, 34, 33]], expected[[99, 0, 33, 34, 33]])
    assert torch.equal(features.labels[:], torch.arange(100) % 7)
    assert verify(url).ok
    where = locate(url)
    whole = {name: where.read(name) for name in where.sizes("shards")}
    assert len(whole) == 4
    where.remove("shards/s000000001.safetensors")
    with pytest.raises(IncompleteStoreError):
        open_features(url)
    where.replace("shards/s000000002.safetensors", whole["shards/s000000002.safetensors"][:-3])
    report = verify(url)
    assert {p.shard: p.kind for p in report.problems} == {1: "missing", 2: "truncated"}
    report.discard()
    with pytest.raises(StoreMismatchError, match="model"):
        do(url, jobs.Net(seed=4))
    do(url)
    assert {name: where.read(name) for name in where.sizes("shards")} == whole
    assert not where.create("shards/s000000001.safetensors", [b"late"])
    do(url, jobs.Net(seed=4), resume=False)


def test_a_store_in_memory(tmp_path):
    check(f"memory://{tmp_path.name}/features")


def test_a_store_by_file_url_is_a_folder(tmp_path):
    check(f"file://{tmp_path}/features")
    assert (tmp_path / "features" / "store.json").exists()


@pytest.fixture(scope="module")
def s3():
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    import s3fs
    from werkzeug.serving import make_server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = make_server(
        "127.0.0.1", port, server_module.DomainDispatcherApplication(server_module.create_backend_app), threaded=True
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    settings = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("shelf")
    yield "s3://shelf"
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    server.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_a_store_on_s3(s3):
    check(f"{s3}/deep/features")


@pytest.mark.filterwarnings("ignore")
def test_of_many_writers_on_s3_exactly_one_wins(s3):
    where = locate(s3)
    won: list[int] = []

    def write(i):
        if where.create("race", [bytes([i]) * 1000]):
            won.append(i)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert where.read("race") == bytes([won[0]]) * 1000
