"""What NetworkPolicies allow, as Kubernetes reads them: by selectors, address ranges outside of the
cluster, and port numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Object = dict[str, Any]
Way = Literal["ingress", "egress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A pod, or with no namespace an address outside of the cluster. `about`: the labels of its namespace."""

    name: str
    namespace: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Traffic that a rule lets through. `peers` None: to or from any address; `port` None: any port."""

    peers: Sequence[Object] | None
    protocol: str = "TCP"
    port: int | None = None
    home: str

    def fits(self, peer: Peer) -> bool:
        return self.peers is None or any(self._selects(each, peer) for each in self.peers)

    @property
    def ranges(self) -> list[str]:
        """The addresses outside of the cluster that it names."""
        return [each["ipBlock"]["cidr"] for each in self.peers or () if "ipBlock" in each]

    def _selects(self, selectors: Object, peer: Peer) -> bool:
        if selectors.keys() == {"ipBlock"}:
            return False
        assert not selectors.keys() - {"podSelector", "namespaceSelector"}, f"not read here: {selectors}"
        if peer.namespace is None:
            return False
        if "namespaceSelector" in selectors:
            here = _matches(selectors["namespaceSelector"], peer.about)
        else:
            here = peer.namespace == self.home
        return here and _matches(selectors.get("podSelector", {}), peer.labels)


def openings(policies: Sequence[Object], pod: Peer, way: Way) -> list[Opening] | None:
    """Returns what may pass a pod's border in one direction; None: everything, as no policy is about it."""
    kind = way.capitalize()
    found = [
        each
        for each in policies
        if each["metadata"]["namespace"] == pod.namespace
        and kind in each["spec"]["policyTypes"]
        and _matches(each["spec"]["podSelector"], pod.labels)
    ]
    return [opening for each in found for opening in _read(each, way)] if found else None


def allows(policies: Sequence[Object], source: Peer, target: Peer, port: int) -> bool:
    """Returns whether a TCP connection passes the border of its source and that of its target."""

    def passes(pod: Peer, other: Peer, way: Way) -> bool:
        given = openings(policies, pod, way)
        return given is None or any(
            each.protocol == "TCP" and each.port in (None, port) and each.fits(other) for each in given
        )

    return passes(source, target, "egress") and passes(target, source, "ingress")


def _read(policy: Object, way: Way) -> Iterator[Opening]:
    home, side = policy["metadata"]["namespace"], "from" if way == "ingress" else "to"
    for rule in policy["spec"].get(way, ()):
        for port in rule.get("ports") or [{}]:
            protocol, number = port.get("protocol", "TCP"), port.get("port")
            yield Opening(peers=rule.get(side), protocol=protocol, port=number, home=home)


def _matches(selector: Object, labels: Mapping[str, str]) -> bool:
    wanted: Object = selector.get("matchLabels") or {}
    for expression in selector.get("matchExpressions") or ():
        assert expression["operator"] == "In", f"not read here: {expression}"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(key) == value for key, value in wanted.items())
