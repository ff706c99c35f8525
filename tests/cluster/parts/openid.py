"""oauth2-mock-server: an OpenID provider with client credentials, from npm."""

from tests.cluster.part import FOLDER, npm_install

PACKAGE, VERSION = "oauth2-mock-server", "9.3.0"
PROGRAM = FOLDER / f"{PACKAGE}-{VERSION}" / "node_modules" / ".bin" / PACKAGE


def install() -> None:
    npm_install(PACKAGE, VERSION)
