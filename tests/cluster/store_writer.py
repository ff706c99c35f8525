"""Programs that the tests of the object store run as processes: `python -m tests.cluster.store_writer ...`."""

import json
import sys
from pathlib import Path

from serin.errors import BundleBroken
from serin.store.artifacts import Bundle, Dataset
from serin.store.store import Store

SMALL, LARGE_BYTES = 3, 20 * 2**20  # files of a dataset; the large one is uploaded in parts


def publish_version(store: Store, model: str, version: int, content: str) -> Bundle:
    with store.workspace() as folder:
        (folder / "model.onnx").write_text(content)
        (folder / "metrics.json").write_text(json.dumps({"auc": 0.5}))
        (folder / "manifest.json").write_text(json.dumps({"content": content}))
        return store.publish_bundle(model, version, folder)


def publish_dataset(store: Store, key: str, digest: str) -> Dataset:
    with store.workspace() as folder:
        (folder / "train").mkdir()
        for number in range(SMALL):
            (folder / "train" / f"part-{number}").write_text(f"rows {number} " * 1000)
        (folder / "train" / "large").write_bytes(bytes(range(256)) * (LARGE_BYTES // 256))
        (folder / "dataset.json").write_text(json.dumps({"digest": digest, "splits": {"train": {"rows": 3}}}))
        return store.publish_dataset(key, digest, folder)


def race(writer: str, count: int, shared: int) -> None:
    """Publishes `count` versions, then tries to publish `shared` ones that all other writers try, too."""
    store = Store.open()
    for number in range(count):
        content = f"{writer} {number}"
        version = store.reserve_version("race")
        publish_version(store, "race", version, content)
        print(json.dumps({"version": version, "content": content}), flush=True)
    for number in range(1, shared + 1):
        try:
            publish_version(store, "shared", number, writer)
        except BundleBroken:
            continue
        print(json.dumps({"won": number}), flush=True)


def main() -> None:
    match sys.argv[1:]:
        case ["race", writer, count, shared]:
            race(writer, int(count), int(shared))
        case ["dataset", key, digest]:
            publish_dataset(Store.open(), key, digest)
            print("published", flush=True)
        case ["fetch", key]:
            found = Store.open().find_dataset(key)
            print(len((Path(found.path) / "train" / "large").read_bytes()), flush=True)
        case _:
            sys.exit("usage: race WRITER COUNT SHARED | dataset KEY DIGEST | fetch KEY")


if __name__ == "__main__":
    main()
