"""Hosts with agents, in one process: they follow desired states, and report releases and evidence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serin.cluster.desired import newest_state
from serin.formats.cluster.desired_state import DesiredState
from serin.formats.cluster.evidence import HostEvidence, ModelEvidence
from serin.formats.cluster.evidence import key_of as evidence_key
from serin.formats.cluster.host_report import AgentReport, ReleaseReport, agent_key
from serin.formats.serving.request import Request
from serin.rollout.decide.blocks import counts2json
from serin.rollout.decide.cutting import Arm, Mark, cut_requests
from serin.rollout.decide.plan import Plan
from serin.store.objects import Objects


def no_requests(_host: str, _state: DesiredState, _since: float, _until: float) -> Sequence[Request]:
    return ()


@dataclass
class FakeAgent:
    """A release is ready in the step after it was started, and verified at once, unless it is in `wrong` or `broken`.

    `requests`: what the gateway logged between two times, by the state it had in force.
    """

    objects: Objects
    host: str
    requests: Callable[[str, DesiredState, float, float], Sequence[Request]] = no_requests
    wrong: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    rejecting: str = ""  # why the gateway rejects new routes
    arriving: int = 0
    state: DesiredState | None = None
    releases: dict[str, ReleaseReport] = field(default_factory=dict)
    followed: list[DesiredState] = field(default_factory=list)
    _beat: int = 0
    _evidence: int = 0
    _read_to: float = 0.0
    _marks: dict[tuple[str, int], Mark] = field(default_factory=dict)
    _instances: int = 100

    def step(self, now: float) -> None:
        """One round: about a second of an agent."""
        self._gather(now)
        self._follow()
        self._run()
        self._report(now)

    def restart(self, release: str) -> None:
        """The release's process died, and is up again before anyone looked."""
        self._instances += 1
        self.releases[release] = ReleaseReport(state="ready", instance=self._instances, verified="")

    def _follow(self) -> None:
        found = newest_state(self.objects, after=self.state.seq if self.state else 0)
        if found is not None and not self.rejecting:
            self.state = found
            self.followed.append(found)

    def _run(self) -> None:
        hosts = self.state.hosts if self.state else {}
        wanted = {name for name, at in hosts.items() if self.host in at}
        for name in [name for name in self.releases if name not in wanted]:
            del self.releases[name]
        for name in sorted(wanted):
            before = self.releases.get(name)
            if name in self.broken:
                self.releases[name] = ReleaseReport(state="absent", problem="no memory left")
            elif before is None:
                self._instances += 1
                self.releases[name] = ReleaseReport(state="starting", instance=self._instances)
            elif before.state == "starting":
                verified = "score 0.1 instead of 0.9" if name in self.wrong else ""
                self.releases[name] = ReleaseReport(
                    state="ready", instance=before.instance, verified=verified
                )

    def _gather(self, now: float) -> None:
        """Cuts the requests since the last step, by the state that was in force."""
        if self.state is not None and self.state.arms:
            found = self.requests(self.host, self.state, self._read_to, now)
            models, complete = {}, []
            for model, arm in self.state.arms.items():
                key = (arm.rollout, arm.since_epoch)
                epoch = max(arm.shares)
                mark, cut = cut_requests(
                    self._marks.get(key, Mark()),
                    [each for each in found if each.model == model],
                    arm=Arm(candidate=arm.candidate, stable=arm.stable, epoch=epoch, share=arm.shares[epoch],
                            since=arm.since_epoch),
                    shares=arm.shares,
                    plan=Plan.from_json(arm.plan),
                    now=now,
                )  # fmt: skip
                self._marks[key] = mark
                complete.append(mark.complete_to)
                models[model] = ModelEvidence(
                    rollout=arm.rollout,
                    since_epoch=arm.since_epoch,
                    newest=mark.newest,
                    blocks=tuple((second, block.to_json()) for second, block in sorted(cut.blocks.items())),
                    before=None if cut.before is None else counts2json(cut.before),
                )
            self._upload(models, min(complete))
        self._read_to = now

    def _upload(self, models: dict[str, ModelEvidence], complete_to: int) -> None:
        assert self.state is not None
        evidence = HostEvidence(
            host=self.host, seq=self._evidence + 1, complete_to=complete_to, desired_seq=self.state.seq,
            models=models,
        )  # fmt: skip
        self.objects.create(evidence_key(self.host, evidence.seq), evidence.dump())
        self._evidence = evidence.seq

    def _report(self, now: float) -> None:
        self._beat += 1
        report = AgentReport(
            host=self.host,
            beat=self._beat,
            t=now,
            address=f"{self.host}:8080",
            peer=f"{self.host}:9443",
            desired_seq=self.state.seq if self.state else 0,
            evidence_seq=self._evidence,
            releases=dict(self.releases),
            problem=self.rejecting,
            arriving_requests=self.arriving,
        )
        self.objects.put(agent_key(self.host), report.dump())
