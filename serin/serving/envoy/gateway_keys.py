"""Puts API keys, issuers of tokens and the rate limits of callers in force at the gateway, as their files have them."""

from __future__ import annotations

from pathlib import Path

from serin.errors import KeyFileBroken
from serin.serving.envoy.documents import Document, Documents, Kind
from serin.serving.envoy.guard import issuers_document, keys_document
from serin.serving.envoy.issuers import Issuer
from serin.serving.envoy.jwks import JwksFolder
from serin.serving.envoy.keys import CLOSED, KeyFile, KeyRing, lua_table
from serin.serving.envoy.rates import caller_rates


class GatewayKeys:
    """`path`: the file of keys. The public keys of issuers are in the folder `issuers` beside it."""

    def __init__(self, path: Path, documents: Documents, max_request_bytes: int) -> None:
        self._file = KeyFile(path=path, published=documents.file("keys"))
        self._documents = documents
        self._max_request_bytes = max_request_bytes
        self.jwks = JwksFolder(path.with_name("issuers"))
        self._issuers: tuple[Issuer, ...] = ()
        self._followed: object = None

    def place(self) -> None:
        """Writes the documents for an Envoy that is not running."""
        with self._file.locked():
            for kind, document in self._wanted()[0].items():
                self._documents.place(kind, [document])

    def follow(self) -> None:
        """Keys, issuers and limits as their files have them are in force when this returns. Cheap when nothing changed.

        Providers are asked for their keys from time to time, in the background. KeyFileBroken, once for every change,
        when the file of keys is lost or broken: then nobody is let in.
        """
        with self._file.locked():  # nobody may publish an older ring after us
            if self._followed != self._signature():
                documents, trouble = self._wanted()
                self._documents.push("keys", [documents.pop("keys")])
                for kind, document in documents.items():
                    self._documents.push_optional(kind, document)
                self._followed = self._signature()
            else:
                trouble = None
        self.jwks.refresh(self._issuers)
        if trouble:
            raise trouble

    def _signature(self) -> object:
        return self._file.signature(), self.jwks.signature(self._issuers)

    def _wanted(self) -> tuple[dict[Kind, Document], KeyFileBroken | None]:
        """Returns the documents that the files ask for."""
        trouble, ring = None, KeyRing()
        try:
            ring = self._file.read()
            self._file.remember(ring)
            table = lua_table(ring) if ring.required else None
        except KeyFileBroken as error:
            trouble, table = error, CLOSED
        self._issuers = ring.issuers if ring.required else ()
        known = {issuer: found.jwks for issuer in self._issuers if (found := self.jwks.known(issuer))}
        limits = {key.name: key.limit for key in ring.keys if key.limit and ring.required and not key.revoked}
        documents: dict[Kind, Document] = {
            "keys": keys_document(table, self._max_request_bytes),
            "issuers": issuers_document(known),
            "caller-rates": caller_rates(limits, self._issuers),
        }
        return documents, trouble
