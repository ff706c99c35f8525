"""What a run takes along, what stays, and what is refused, by the place of its workers."""

import json
import re
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml

from serin.errors import NotFound, SpecError, TablesNeeded
from serin.pipeline.pack import Package, _secrets, looks_secret, pack_spec
from serin.pipeline.tables import list_tables, push_tables, remove_tables
from serin.spec.load import read_spec
from serin.store.packages import publish_package
from serin.store.store import Store
from tests.fakes.own_project import write_project
from tests.kit.commands import serin
from tests.unit.serving import bundles


@pytest.fixture
def spec(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write_project(tmp_path / "project", rows=50)
    monkeypatch.syspath_prepend(tmp_path / "project")
    _secrets.cache_clear()
    return path


def packed(spec: Path, *, elsewhere: bool = True) -> Package:
    return pack_spec(read_spec(spec), elsewhere=elsewhere)


def change(spec: Path, section: str, **keys: Any) -> None:
    document = yaml.safe_load(spec.read_text())
    document[section].update(keys)
    spec.write_text(yaml.safe_dump(document))


def written(package: Package) -> dict[str, Any]:
    return yaml.safe_load(package.contents["spec.yaml"])


OURS = {f"imports/ours/{name}.py" for name in ("__init__", "limits", "steps")}
CODE = {*OURS, "layers.py", "net.py", "spec.yaml"}


def test_for_other_machines_code_and_small_files_travel(spec: Path) -> None:
    package = packed(spec)
    assert set(package.contents) == {*CODE, "parcels.parquet"}
    assert package.stays == ()
    document = written(package)
    assert (document["data"]["tables"], document["model"]["module"]) == (
        {"parcels": "parcels.parquet"},
        "net.py:Net",
    )


def test_on_this_machine_tables_stay_where_they_are_so_that_their_changes_are_seen(spec: Path) -> None:
    package, table = packed(spec, elsewhere=False), str(spec.parent / "parcels.parquet")
    assert set(package.contents) == CODE
    assert package.stays == ((table, "read where it is"),)
    assert written(package)["data"]["tables"] == {"parcels": table}


def test_the_digest_does_not_depend_on_the_folder_nor_on_comments(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = packed(spec).reference
    other = write_project(tmp_path / "elsewhere" / "deep", rows=50)
    other.write_text(f"# a comment\n{other.read_text()}")
    assert packed(other).reference == first
    (other.parent / "layers.py").write_text("def width():\n    return 9\n")
    assert packed(other).reference != first


def test_a_root_within_another_one_keeps_its_names(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with PYTHONPATH=src in the working folder."""
    monkeypatch.chdir(tmp_path)
    assert set(packed(spec, elsewhere=False).contents) == CODE
    reference = packed(spec).reference
    monkeypatch.chdir(spec.parent)
    assert packed(spec).reference == reference


def test_code_that_is_installed_for_editing_travels_and_what_is_nowhere_is_named(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip makes a finder of it; no folder of sys.path has it."""
    for name, text in {"edited": "from .inner import VALUE\n", "strange": ""}.items():
        place = tmp_path / "checkout" / "src" / name
        place.mkdir(parents=True)
        (place / "__init__.py").write_text(text)
        (place / "inner.py").write_text("VALUE = 1\n")
    places = {"edited": "edited", "renamed": "strange"}

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            file = tmp_path / "checkout" / "src" / places.get(name, "-") / "__init__.py"
            return spec_from_file_location(name, file) if name in places else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    imports = "import edited, renamed, numpy, json\ntry:\n    import nowhere\nexcept ImportError:\n    ...\n"
    (spec.parent / "layers.py").write_text(f"{imports}def width():\n    return 8\n")
    package = packed(spec)
    edited = {"imports/edited/__init__.py", "imports/edited/inner.py"}
    assert set(package.contents) == {*CODE, *edited, "parcels.parquet"}
    assert [path for path, _ in package.stays] == ["import nowhere", "import renamed"]
    assert "put its folder on PYTHONPATH" in package.stays[0][1]
    assert set(packed(spec, elsewhere=False).contents) == {*CODE, *edited}


def test_other_files_of_the_folder_never_travel(spec: Path) -> None:
    before = packed(spec).reference
    for name in (".env", "key.pem", "notes.txt", "unused.py", ".git/config"):
        file = spec.parent / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("SECRET=1")
    assert packed(spec).reference == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../shared.parquet", "is outside of .* and is not sent; move it there"),
        (".env.parquet", "looks like a secret and is not sent"),
        ("id_rsa.parquet", "looks like a secret"),
        ("link.parquet", "is outside of .* and is not sent"),
    ],
)
def test_a_table_that_must_not_travel_is_refused_by_its_key(spec: Path, name: str, words: str) -> None:
    file = spec.parent / name
    if name == "link.parquet":
        target = spec.parents[1] / "shared.parquet"
        target.write_bytes((spec.parent / "parcels.parquet").read_bytes())
        file.symlink_to(target)
    else:
        file.write_bytes((spec.parent / "parcels.parquet").read_bytes())
    change(spec, "data", tables={"parcels": name})
    with pytest.raises(SpecError, match=rf"data\.tables\.parcels: .*{words}"):
        packed(spec)
    assert packed(spec, elsewhere=False).contents.keys() == CODE


def test_a_link_in_a_folder_of_tables_is_refused(spec: Path) -> None:
    (spec.parent / "data").mkdir()
    (spec.parent / "data" / "link.parquet").symlink_to("/etc/hostname")
    change(spec, "data", tables={"parcels": "data"})
    with pytest.raises(SpecError, match=r"data/link\.parquet is a link to outside of"):
        packed(spec)


def test_absolute_paths_are_those_of_the_workers(spec: Path) -> None:
    change(spec, "data", tables={"parcels": "/mnt/tables/parcels.parquet"})
    package = packed(spec)
    assert package.stays == (("/mnt/tables/parcels.parquet", "a path of the workers"),)
    assert written(package)["data"]["tables"] == {"parcels": "/mnt/tables/parcels.parquet"}


def test_a_link_to_a_secret_in_the_folder_is_refused(spec: Path) -> None:
    """Under whatever name: a table, code, or a file in a folder of tables that is pushed."""
    (spec.parent / ".env.csv").write_text("a\n1\n")
    (spec.parent / "innocent.csv").symlink_to(".env.csv")
    (spec.parent / "layers.py").rename(spec.parent / ".layers.py")
    (spec.parent / "layers.py").symlink_to(".layers.py")
    limits = spec.parents[1] / "ours" / "limits.py"
    limits.rename(limits.with_name(".limits.py"))
    limits.symlink_to(".limits.py")
    change(spec, "data", tables={"parcels": "innocent.csv"})
    with pytest.raises(SpecError) as refused:
        packed(spec)
    for name in ("innocent.csv", "layers.py", "limits.py"):
        assert re.search(rf"/{name} looks like a secret and is not sent", str(refused.value))


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("_netrc", True),
        ("client_secret.json", True),
        ("client_secret_4711.apps.googleusercontent.com.json", True),
        ("keys/aws_credentials", True),
        ("aws-credentials.csv", True),
        ("kubeconfig", True),
        ("prod.kubeconfig.yaml", True),
        ("deploy_rsa", True),
        ("x.p8", True),
        ("http.keytab", True),
        ("parts/.env", True),
        ("credit.csv", False),
        ("keys.parquet", False),
        ("secretary.csv", False),
        ("kubeconfig_reader.py", False),
        ("trips_rsa.csv", False),
    ],
)
def test_secrets_are_known_by_their_names(tmp_path: Path, name: str, secret: bool) -> None:
    assert looks_secret(name, tmp_path / name, tmp_path) is secret


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"delta": "lake"}, "lake is a Delta table on this machine.*serin tables push"),
        (
            {"sql": "select 1", "connection": "file:uri.txt", "order_by": "a"},
            "may hold a password and is not sent",
        ),
    ],
)
def test_tables_that_are_not_files_are_refused_with_what_to_do(
    spec: Path, table: dict[str, str], words: str
) -> None:
    change(spec, "data", tables={"parcels": table})
    with pytest.raises(SpecError, match=words):
        packed(spec)


def test_what_is_too_large_is_named_with_its_size_and_the_way_out(spec: Path) -> None:
    (spec.parent / "parcels.parquet").write_bytes(b"0" * (17 << 20))
    with pytest.raises(
        SpecError, match=r"has 17\.8 MB: a run sends at most 16 MiB.*serin tables push FOLDER"
    ):
        packed(spec)
    assert packed(spec, elsewhere=False).contents.keys() == CODE


@pytest.mark.parametrize("line", ["KEY = 'hunter2-hunter2'", "-----BEGIN OPENSSH PRIVATE KEY-----"])
def test_code_with_a_secret_is_refused_without_showing_it(
    spec: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setenv("TEAM_PASSWORD", "hunter2-hunter2")
    (spec.parent / "layers.py").write_text(f"# {line}\ndef width():\n    return 8\n")
    with pytest.raises(SpecError, match=r"layers.py holds a secret and is not sent") as refused:
        packed(spec, elsewhere=False)
    assert "hunter2" not in str(refused.value)


def test_the_name_of_an_access_key_is_not_a_secret(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket is often called like the account that it belongs to."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "parcel-models")
    change(spec, "data", tables={"parcels": "s3://parcel-models/parcels.parquet"})
    assert written(packed(spec))["data"]["tables"] == {"parcels": "s3://parcel-models/parcels.parquet"}
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "parcel-models")
    _secrets.cache_clear()
    with pytest.raises(SpecError, match=r"holds a secret"):
        packed(spec)


def test_a_missing_module_is_named(spec: Path) -> None:
    change(spec, "model", module="no.py:Net")
    with pytest.raises(SpecError, match=r"model\.module: no file at .*/no\.py"):
        packed(spec)


def test_pushed_tables_are_sent_once_and_have_a_url_by_their_content(
    tmp_path: Path, bucket: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_STORE", bucket)
    folder = tmp_path / "tables"
    (folder / "parts").mkdir(parents=True)
    for name in ("trips.csv", "parts/1.csv", ".env", "server.key"):
        (folder / name).write_text("a\n1\n")
    (folder / "parts" / "link.csv").symlink_to("../.env")
    first = push_tables(folder)
    assert (first.sent, sorted(first.left_out)) == (True, [".env", "parts/link.csv", "server.key"])
    again = push_tables(folder)
    assert (again.sent, again.urls) == (False, first.urls)
    assert sorted(first.urls) == ["parts", "trips.csv"]
    from serin.etl.sources.files import find_files

    assert [file.size for url in first.urls.values() for file in find_files("t", url)] == [4, 4]


def test_pushed_tables_are_listed_and_removed_unless_a_package_or_a_version_names_them(
    tmp_path: Path, bucket: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_STORE", bucket)
    urls = {}
    for name in ("sent", "trained", "free"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.csv").write_text(f"a\n{name}\n")
        (urls[name],) = push_tables(tmp_path / name).urls.values()
    digests = {name: url.split("/")[-2] for name, url in urls.items()}
    store = Store.open()
    publish_package(store, {"spec.yaml": f"data: {{tables: {{t: {urls['sent']}}}}}".encode()})
    spec = f"name: flights\ndata: {{tables: {{t: {urls['trained']}}}}}\n"
    bundles.publish(store, bias=0.0, spec=spec)

    listed = json.loads(serin("tables", "list", "--json"))
    assert {each["digest"]: list(each["urls"].values()) for each in listed} == {
        digests[name]: [urls[name]] for name in urls
    }
    assert "sent.csv" in serin("tables", "list")
    with pytest.raises(TablesNeeded, match="package "):
        remove_tables(digests["sent"])
    with pytest.raises(TablesNeeded, match=f"{bundles.MODEL} version 1 would read them again"):
        remove_tables(digests["trained"][:12])
    for name in ("0" * 12, ""):
        with pytest.raises(NotFound):
            remove_tables(name)
    assert "removed" in serin("tables", "remove", digests["free"][:12], "--yes")
    assert {each.digest for each in list_tables()} == {digests["sent"], digests["trained"]}
    assert store.shared_files().entries(f"tables/{digests['free']}/") == []
    assert push_tables(tmp_path / "free").sent


def test_tables_are_not_pushed_to_a_store_that_others_cannot_read(tmp_path: Path, home: Path) -> None:
    with pytest.raises(SpecError, match="SERIN_STORE: is not set"):
        push_tables(tmp_path)
