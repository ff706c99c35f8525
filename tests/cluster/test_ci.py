"""The files of examples/ci on a host that shares no disk with the workers: their own steps, with the rights that the
docs give to CI, to workers and to the person who approves."""

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
import yaml

from serin.prefect.follow import FINAL
from serin.rollout.decide.state import Hold, Phase, Rollout
from serin.rollout.run.access import Rollouts
from serin.rollout.run.record import decision2rollout
from serin.store.open import open_objects
from serin.store.store import Store
from tests.cluster.documented_rights import IDENTITIES, URL
from tests.cluster.hosts_cluster import LOGIN, three_hosts
from tests.cluster.namespaces import end, wait_for
from tests.cluster.senders import Senders
from tests.fakes.github import TOKEN, FakeGitHub
from tests.fakes.own_project import write_project
from tests.fakes.small_pipeline import NAME
from tests.kit.ci_files import CI, GitHubActions, GitLab, Job
from tests.kit.web import in_a_thread

pytestmark = pytest.mark.timeout(2400)  # a busy machine; waits are bounded
SAMPLE = f"{NAME}-sample"
# No clients ask here: the rollout needs an approval and no requests.
ROLLOUT = {"steps": [100], "min_requests": 0, "bake": "0s", "deadline": "30m"}
NEVER = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "SERIN_STORE", "SERIN_HOME", "PYTHONPATH")
"""What no runner knows by itself: the files must give it to the scripts."""


class Repository:
    """A repository on host c with the model, and `ci/`, the folder of examples. Each run has a new checkout of it."""

    def __init__(self, senders: Senders, service: FakeGitHub) -> None:
        self.senders, self.service, self.runs = senders, service, 0
        self.root = senders.disks["c"] / "project"
        self.spec = write_project(self.root, rollout=ROLLOUT)
        shutil.copytree(CI, self.root / "ci")
        pushed = senders.serin("c", "tables", "push", self.spec.parent, "--json")
        tables = yaml.safe_load(pushed)["tables"]
        (self.spec.parent / "parcels.parquet").unlink()
        self.change(data={"tables": {"parcels": tables["parcels.parquet"]}})

    def change(self, **sections: dict[str, Any]) -> None:
        spec = yaml.safe_load(self.spec.read_text())
        changed = {name: {**spec.get(name, {}), **section} for name, section in sections.items()}
        self.spec.write_text(yaml.safe_dump(spec | changed, sort_keys=False))

    def github(self, event: str) -> dict[str, Job]:
        secrets = {
            "PREFECT_LOGIN": LOGIN,
            "STORE_KEY_ID": "ci",
            "STORE_KEY": self._secret,
            "GITHUB_TOKEN": TOKEN,
        }
        return GitHubActions(**self._runner(self.service.environment), secrets=secrets).run(event)

    def gitlab(self, source: str) -> dict[str, Job]:
        project = {
            "PREFECT_API_AUTH_STRING": LOGIN,
            "AWS_ACCESS_KEY_ID": "ci",
            "AWS_SECRET_ACCESS_KEY": self._secret,
            **self.service.gitlab_environment,
        }
        event = {"CI_PIPELINE_SOURCE": source, "CI_COMMIT_BRANCH": "main", "CI_DEFAULT_BRANCH": "main"}
        event |= {"CI_MERGE_REQUEST_IID": "7"} if source != "push" else {}
        return GitLab(**self._runner({}), project=project).run(**event)

    @property
    def _secret(self) -> str:
        return self.senders.cluster.store["AWS_SECRET_ACCESS_KEY"]

    def _runner(self, named: Mapping[str, str]) -> dict[str, Any]:
        self.runs += 1
        self.checkout = self.senders.disks["c"] / f"checkout-{self.runs}"
        shutil.copytree(self.root, self.checkout)
        runner = {name: value for name, value in self.senders.environment("c").items() if name not in NEVER}
        runner = {name: value for name, value in runner.items() if not name.startswith("PREFECT_")}
        runner |= {name: value for name, value in named.items() if name != "GITHUB_TOKEN"}
        return {
            "checkout": self.checkout,
            "execute": self._execute,
            "own": {"PREFECT_API_URL": self.senders.url, "SERIN_STORE": URL},
            "runner": {**runner, "GITHUB_STEP_SUMMARY": str(self.checkout / "summary.md")},
        }

    def _execute(self, script: str, variables: Mapping[str, str]) -> int:
        done = self.senders.cluster.network["c"].run(
            ["bash", "-c", script],
            env=dict(variables),
            cwd=self.checkout,
            within_s=900,
            check=False,
            stderr=subprocess.STDOUT,
        )
        print(f"{script}\n{done.stdout}exited with {done.returncode}")
        return done.returncode

    def read(self, name: str) -> str:
        return (self.checkout / name).read_text()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    folder = tmp_path_factory.mktemp("ci")
    with pytest.MonkeyPatch.context() as patch, three_hosts(folder, patch, others=IDENTITIES) as found:
        cluster = replace(found, store={**found.store, "SERIN_STORE": URL})
        patch.setenv("SERIN_STORE", URL)
        senders = Senders(cluster)
        with cluster.network["c"].inside():
            service = FakeGitHub([])
        try:
            made = Repository(senders, service)
            senders.hide_disks()
            senders.start(AWS_ACCESS_KEY_ID="worker")
            b = cluster.network["b"]
            senders.keep("b", "agent", "--address", b.address, "--port", str(b.free_port()))
            senders.keep("b", "controller", SERIN_HOME=str(senders.disks["b"] / "controller"))
            with in_a_thread(service.http):
                yield made
        finally:
            for process in reversed(senders.processes):
                end(process)


def in_store(repository: Repository, read: Callable[[Store], Any]) -> Any:
    with repository.senders.cluster.network["store"].inside():
        return read(Store(URL))


def test_a_request_is_checked_tried_on_a_sample_trained_and_reported_by_both_services(
    repository: Repository,
) -> None:
    jobs = repository.github("pull_request")
    assert {name: job.code for name, job in jobs.items()} == {"check": 0, "train": 0}
    assert jobs["train"].artifacts == ["card.md", "report.md"]
    assert repository.read("out/card.md").startswith(f"# {NAME}, version 1\n")
    (_, path, comment) = repository.service.changes[-1]
    assert path == "/repos/birds/models/issues/7/comments"
    assert comment.endswith(repository.read("out/report.md"))
    for words in (f"## Completed: {NAME}", f"### {NAME} version 1", "| auc, each on its own test rows | 0."):
        assert words in comment
    assert in_store(repository, lambda store: (store.versions(NAME), store.versions(SAMPLE))) == ([1], [1])
    whole, sample = in_store(repository, lambda store: (_rows(store, NAME), _rows(store, SAMPLE)))
    assert 0 < 5 * sample < whole

    jobs = repository.gitlab("merge_request_event")  # the same content
    assert {name: job.code for name, job in jobs.items()} == {"check": 0, "train": 0}
    assert jobs["train"].artifacts == ["card.md", "report.md"]
    assert repository.service.changes[-1][1] == "/projects/42/merge_requests/7/notes/1"
    assert f"### {NAME} version 1" in repository.service.changes[-1][2]
    assert in_store(repository, lambda store: store.versions(NAME)) == [1]


def _rows(store: Store, model: str) -> int:
    facts = yaml.safe_load(store.read_file(model, 1, "gate.json") or b"")
    return int(facts["test_rows"])


def test_a_wrong_spec_ends_with_2_before_anything_is_sent(repository: Repository) -> None:
    right = repository.spec.read_text()
    changes = len(repository.service.changes)
    repository.change(training={"epochs": "many"})
    try:
        assert {name: job.code for name, job in repository.github("pull_request").items()} == {"check": 2}
        assert {name: job.code for name, job in repository.gitlab("merge_request_event").items()} == {
            "check": 2
        }
        jobs = repository.gitlab("push")
        assert {name: job.code for name, job in jobs.items()} == {"roll-out": 2}
        assert jobs["roll-out"].artifacts == ["report.md"]
        assert repository.read("out/report.md").startswith("## No run\n")
        assert "training.epochs" in repository.read("out/report.md")
    finally:
        repository.spec.write_text(right)
    assert len(repository.service.changes) == changes


class WaitingJob:
    """A job that waits for a rollout."""

    def __init__(self, repository: Repository, job: Callable[[], dict[str, Job]]) -> None:
        self.repository, self._pool = repository, ThreadPoolExecutor(1)
        self.job: Future[dict[str, Job]] = self._pool.submit(job)

    def now(self) -> Rollout | None:
        with self.repository.senders.cluster.network["store"].inside():
            found = Rollouts(open_objects(URL)).last(NAME)
        return decision2rollout(found) if found else None

    def wait_for_question(self, version: int) -> None:
        def asks() -> bool:
            assert not self.job.done(), self.job.result()
            now = self.now()
            return now is not None and now.candidate.version == version and now.hold is Hold.APPROVAL

        wait_for(asks, within_s=600, watching=self.repository.senders.processes, what="a rollout that waits")

    def end(self) -> Job:
        return self.job.result(timeout=600)["roll-out"]


def test_a_rollout_waits_for_an_approval_that_neither_ci_nor_its_run_can_give(repository: Repository) -> None:
    senders = repository.senders
    senders.serin("a", "trust", "policy", "--approval")
    rollout = WaitingJob(repository, lambda: repository.github("push"))
    rollout.wait_for_question(1)
    try:
        _ci_is_refused(senders)
        _a_run_that_ci_answers_is_refused(senders)
        now = rollout.now()
        assert now is not None
        assert (now.candidate.version, now.hold, now.phase) == (1, Hold.APPROVAL, Phase.VERIFYING)
        with senders.cluster.network["store"].inside():
            objects = open_objects(URL)
            assert objects.keys("rollouts/inbox/") == objects.keys("rollouts/approvals/") == []
        assert not in_store(repository, lambda store: store.aliases(NAME)).get("live")
    finally:
        said = senders.serin(
            "c", "rollout", "approve", NAME, "--why", "it was tried", AWS_ACCESS_KEY_ID="approver"
        )
    assert "accepted" in said
    assert rollout.end().code == 0
    assert in_store(repository, lambda store: store.aliases(NAME))["live"] == 1
    report = repository.read("out/report.md")
    assert f"## Completed: {NAME}" in report
    assert "100% of traffic waits for approval" in report
    assert repository.read("summary.md") == report


def _ci_is_refused(senders: Senders) -> None:
    """With what the runner has: its own rights in the store."""
    for kind in ("approve", "promote", "rollback", "start", "abort"):
        name = f"{NAME}:1" if kind in ("rollback", "start") else NAME
        said = senders.serin("c", "rollout", kind, name, code=1, AWS_ACCESS_KEY_ID="ci")
        assert "AccessDenied" in said


def _a_run_that_ci_answers_is_refused(senders: Senders) -> None:
    """With what the runner has: the login of Prefect, which may start every deployment and answer every question."""
    ask = _Prefect(senders)
    (deployment,) = ask("deployments/filter", flows={"name": {"any_": ["roll_out"]}})
    run = ask(f"deployments/{deployment['id']}/create_flow_run", parameters={"model": NAME, "version": 1})[
        "id"
    ]
    answer = {"run_input": {"approve": True, "why": "by itself"}}

    def answered() -> bool:
        return ask(f"flow_runs/{run}/resume", **answer).get("status") == "ACCEPT"

    wait_for(answered, within_s=300, watching=senders.processes, what="the question in Prefect")

    def ended() -> Any:
        state = ask("flow_runs/filter", flow_runs={"id": {"any_": [run]}})[0]["state"]
        return state if state["type"] in FINAL else None

    state = wait_for(ended, within_s=300, watching=senders.processes, what="the end of that run")
    assert state["type"] == "FAILED"
    assert "AccessDenied" in state["message"]


class _Prefect:
    """Prefect's own interface, as seen from host c."""

    def __init__(self, senders: Senders) -> None:
        self._senders = senders

    def __call__(self, path: str, **body: Any) -> Any:
        user, _, password = LOGIN.partition(":")
        url, login = f"{self._senders.url}/{path}", (user, password)
        with self._senders.cluster.network["c"].inside():
            answer = httpx.post(url, json=body, auth=login, timeout=30, trust_env=False)
            assert answer.is_success, f"{path}: {answer.status_code} {answer.text}"
            return answer.json()


def test_the_comment_has_the_live_version_and_a_worse_or_aborted_one_ends_with_1(
    repository: Repository,
) -> None:
    assert in_store(repository, lambda store: store.aliases(NAME)).get("live") == 1, (
        "the test above was not run"
    )
    repository.change(objectives={"latency_ms": 400})  # another version with the same weights
    assert repository.github("pull_request")["train"].code == 0
    comment = repository.service.changes[-1][2]
    assert "| metric | version 2 | live version 1 |" in comment
    (row,) = [line for line in comment.splitlines() if line.startswith("| auc, both on the newest")]
    _, _, new, old, _ = row.split("|")
    assert float(new) == float(old) > 0.8
    assert "better or equal: " in comment

    rollout = WaitingJob(repository, lambda: repository.gitlab("push"))
    rollout.wait_for_question(2)
    repository.senders.serin("b", "rollout", "abort", NAME, "--why", "not today")
    ended = rollout.end()
    assert (ended.code, ended.artifacts) == (1, ["card.md", "report.md"])
    assert f"## Failed: {NAME}" in repository.read("out/report.md")
    assert "not today" in repository.read("out/report.md")
    assert in_store(repository, lambda store: store.aliases(NAME))["live"] == 1

    repository.change(training={"learning_rate": 1e-9})
    jobs = repository.github("pull_request")
    assert (jobs["train"].code, jobs["train"].artifacts) == (1, ["report.md"])
    comment = repository.service.changes[-1][2]
    assert f"## Failed: {NAME}" in comment
    assert "worse" in comment
    assert in_store(repository, lambda store: store.versions(NAME)) == [1, 2]
