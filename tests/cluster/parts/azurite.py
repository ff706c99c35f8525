"""Azurite: Microsoft's emulator of Azure Blob Storage, from npm."""

from __future__ import annotations

from tests.cluster.part import FOLDER, npm_install

PACKAGE, VERSION = "azurite", "3.37.0"
PROGRAM = FOLDER / f"{PACKAGE}-{VERSION}" / "node_modules" / ".bin" / "azurite-blob"


def install() -> None:
    npm_install(PACKAGE, VERSION)
