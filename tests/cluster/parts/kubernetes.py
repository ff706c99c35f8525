"""Kubernetes' control plane: etcd, kubectl and kustomize from Debian, the API server compiled from Debian's source.

No registry ships kube-apiserver, so it is built once (about four minutes on two free cores) and kept by version.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.part import FOLDER, Missing, making

VERSION = "1.20.2"
BUILT = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
UNPACKED = ("etcd", "kubectl", "kustomize")
_GO = "1.19"
_PACKAGES = {
    "bookworm": (f"golang-{_GO}-go", f"golang-{_GO}-src", "golang-github-modern-go-reflect2-dev"),
    "trixie": ("etcd-server", "kubectl", "kustomize"),
}
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_VERSION_PACKAGE = "k8s.io/kubernetes/vendor/k8s.io/component-base/version"


def binaries() -> Path:
    """Returns the folder of the programs."""
    return FOLDER / f"kubernetes-{VERSION}" / "bin"


def install() -> None:
    """Makes the programs unless they are there; a build that was interrupted continues from Go's cache."""
    home = binaries().parent
    if (home / "complete").exists():
        return
    if shutil.which("apt-get") is None:
        raise Missing("this is not Debian: no apt-get")
    making(f"Kubernetes {VERSION} from Debian's source: about four minutes on two free cores")
    work = home / "work"
    work.mkdir(parents=True, exist_ok=True)
    (home / "bin").mkdir(exist_ok=True)
    apt = _private_apt(work)
    _download(work, apt)
    for name in UNPACKED:
        shutil.copy2(work / "root" / "usr" / "bin" / name, home / "bin" / name)
    source = _source(work)
    variables = _go_variables(work)
    _generate_openapi(source, work, variables)
    flags = " ".join(
        f"-X {_VERSION_PACKAGE}.{key}={value}"
        for key, value in (("gitVersion", f"v{VERSION}"), ("gitMajor", "1"), ("gitMinor", "20"))
    )
    for name in BUILT:
        target = str(home / "bin" / name)
        build = [
            "go",
            "build",
            "-tags",
            "providerless",
            "-ldflags",
            f"-s -w {flags}",
            "-o",
            target,
            f"./cmd/{name}",
        ]
        _run(build, cwd=source, env=variables)
    (home / "complete").write_text(VERSION)
    shutil.rmtree(work, ignore_errors=True)


def _private_apt(work: Path) -> dict[str, str]:
    """Returns the variables of an apt that knows two suites and installs nothing on the machine."""
    for folder in ("lists/partial", "cache/archives/partial", "debs"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    mirror = _mirror()
    lines = [f"deb [signed-by={_KEYRING}] {mirror} {suite} main" for suite in _PACKAGES]
    lines.append(f"deb-src [signed-by={_KEYRING}] {mirror} bookworm main")
    (work / "sources.list").write_text("\n".join(lines) + "\n")
    configuration = (
        f'Dir::Etc::sourcelist "{work}/sources.list";\nDir::Etc::sourceparts "/nonexistent";\n'
        f'Dir::State::lists "{work}/lists";\nDir::Cache "{work}/cache";\nAPT::Sandbox::User "root";\n'
    )
    (work / "apt.conf").write_text(configuration)
    return {**os.environ, "APT_CONFIG": str(work / "apt.conf")}


def _mirror() -> str:
    listed = Path("/etc/apt/sources.list.d/debian.sources")
    for line in listed.read_text().splitlines() if listed.exists() else ():
        if line.startswith("URIs:"):
            return line.split()[1]
    return "http://deb.debian.org/debian"


def _download(work: Path, apt: Mapping[str, str]) -> None:
    _run(["apt-get", "update", "-q"], cwd=work, env=apt)
    wanted = [f"{name}/{suite}" for suite, names in _PACKAGES.items() for name in names]
    _run(["apt-get", "download", "-q", *wanted], cwd=work / "debs", env=apt)
    for package in sorted((work / "debs").glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(work / "root")], cwd=work, env=apt)
    _run(["apt-get", "source", "-q", "--download-only", "kubernetes/bookworm"], cwd=work, env=apt)


def _source(work: Path) -> Path:
    """Unpacks the source with Debian's newer reflect2: the vendored one crashes under Go 1.18 and newer."""
    unpacked = work / f"kubernetes-{VERSION}"
    if not unpacked.exists():
        archives = sorted(work.glob("kubernetes_*.orig.tar.*"))
        if not archives:
            raise Missing("Debian's source of kubernetes was not downloaded")
        _run(["tar", "xf", str(archives[0])], cwd=work, env=os.environ)
        if not unpacked.exists():
            raise Missing(f"Debian's source {archives[0].name} is not version {VERSION}")
    newer = work / "root" / "usr" / "share" / "gocode" / "src" / "github.com" / "modern-go" / "reflect2"
    vendored = unpacked / "vendor" / "github.com" / "modern-go" / "reflect2"
    shutil.rmtree(vendored)
    shutil.copytree(newer, vendored)
    place = work / "gopath" / "src" / "k8s.io"
    place.mkdir(parents=True, exist_ok=True)
    if not (place / "kubernetes").exists():
        (place / "kubernetes").symlink_to(unpacked)
    return place / "kubernetes"


def _go_variables(work: Path) -> dict[str, str]:
    root = work / "root" / "usr" / "lib" / f"go-{_GO}"
    # Debian's package links the parts that do not depend on the architecture to /usr/share, which was not installed.
    for link in root.rglob("*"):
        if link.is_symlink() and not link.exists():
            relative = os.path.relpath(work / "root" / "usr" / "share" / f"go-{_GO}" / link.name, link.parent)
            link.unlink()
            link.symlink_to(relative)
    return {
        **os.environ,
        "GOROOT": str(root),
        "PATH": f"{root / 'bin'}:{os.environ['PATH']}",
        "GOPATH": str(work / "gopath"),
        "GOCACHE": str(work / "gocache"),
        "HOME": str(work),
        "CGO_ENABLED": "0",
        "GOPROXY": "off",
        "GO111MODULE": "off",
        "PWD": "",
    }


def _generate_openapi(source: Path, work: Path, variables: Mapping[str, str]) -> None:
    """Generates the one file that Debian's source lacks."""
    generator = str(work / "openapi-gen")
    _run(
        ["go", "build", "-o", generator, "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"],
        cwd=source,
        env=variables,
    )
    packages = ",".join(sorted(_packages_with_openapi(source)))
    output = "k8s.io/kubernetes/pkg/generated/openapi"
    options = ["-i", packages, "-p", output, "-O", "zz_generated.openapi", "-r", str(work / "violations.txt")]
    places = [
        "-h",
        "hack/boilerplate/boilerplate.generatego.txt",
        "--output-base",
        str(work / "gopath" / "src"),
    ]
    _run([generator, "--logtostderr", *options, *places], cwd=source, env=variables)


def _packages_with_openapi(source: Path) -> set[str]:
    found = set()
    for start, prefix in (
        ("staging/src/k8s.io", "k8s.io/kubernetes/vendor/k8s.io"),
        ("pkg", "k8s.io/kubernetes/pkg"),
    ):
        for file in (source / start).rglob("*.go"):
            place = file.relative_to(source).as_posix()
            if any(word in place for word in ("_test.go", "sample-", "code-generator", "_examples")):
                continue
            if "+k8s:openapi-gen=" in file.read_text(errors="replace"):
                found.add(f"{prefix}/{file.parent.relative_to(source / start).as_posix()}".rstrip("/."))
    return found


def _run(command: list[str], *, cwd: Path, env: Mapping[str, str]) -> None:
    variables = {**env, "PWD": str(cwd)}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"{' '.join(command[:4])}: {(done.stderr or done.stdout).strip()[-500:]}")


if __name__ == "__main__":
    install()
    sys.stdout.write(f"{binaries()}\n")
