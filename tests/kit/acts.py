"""How each act of the table of roles (serin/spec/roles.py) is tried. Each act is in one of these at least."""

from typing import Final

OWN, NEAR, OTHER = MODELS = "fraud-eu", "fraudulent", "payments"
PATTERN: Final = "fraud-*"
SHOWN: Final = {
    "/": ("models list", "status"),
    "/rollouts": ("rollout status",),
    "/alerts": ("alerts list",),
    "/runs": ("runs list",),
    "/runs/{run}": ("runs show", "runs logs"),
    "/experiments": ("runs list",),
    "/experiments/compare": ("runs show",),
    "/experiments/searches": ("runs list",),
    "/experiments/searches/{run}": ("runs show",),
    "/gpus": ("gpus",),
    "/models/{model}": ("models show",),
    "/models/{model}/rollout": ("rollout status", "rollout watch", "rollout report"),
    "/models/{model}/traffic": ("slo",),
    "/models/{model}/drift": ("drift",),
    "/models/{model}/quality": ("quality", "labels show"),
    "/models/{model}/captures": ("captures list",),
    "/models/{model}/request": ("explain",),
}
"""The pages of the console, and the acts that read the same. tests/unit/console/test_roles.py opens them."""

STORED: Final = {
    "rollout status": ["{0}"],
    "rollout watch": ["{0}"],
    "rollout report": ["{0}", "--out", "{1}/{0}.html"],
    "rollout replay": ["{0}", "--log", "{1}/labels.csv"],
    "models show": ["{0}:1"],
    "models verify": ["{0}:1"],
    "models diff": ["{0}:1", "{0}:2"],
    "models list": [],
    "lookups show": ["{0}"],
    "captures list": ["{0}"],
    "captures show": ["{0}"],
    "captures export": ["{0}", "--out", "{1}/{0}.parquet"],
    "explain": ["{0}:1", "{1}/rows.parquet"],
    "predict": ["{0}:1", "{1}/rows.parquet", "--batch", "--out", "{1}/{0}.csv"],
    "check": ["{1}/{0}"],
    "score": ["{0}:1", "{1}/rows.parquet", "--out", "{1}/scored-{0}"],
    "events push": ["{0}:1", "{1}/rows.parquet"],
    "events backfill": ["{0}:1"],
    "events forget": ["{0}", "tailnum=N1", "--yes"],
    "alerts list": [],
    "drift": ["{0}"],
    "quality": ["{0}"],
    "labels show": ["{0}"],
    "slo": [],
    "status": [],
    "hosts list": [],
    "keys list": [],
    "keys issuer list": [],
    "tables list": [],
    "runs fetch": ["{2}", "--to", "{1}/fetched"],
    "rollout start": ["{0}:2", "--no-follow"],
    "rollout pause": ["{0}"],
    "rollout resume": ["{0}"],
    "rollout approve": ["{0}"],
    "rollout promote": ["{0}"],
    "rollout abort": ["{0}"],
    "rollout rollback": ["{0}:1", "--no-follow"],
    "lookups refresh": ["{0}", "--no-follow"],
    "retire": ["{0}", "--yes"],
    "labels add": ["{0}:1", "{1}/labels.csv"],
    "captures forget": ["{0}", "--where", "passenger_id = 17", "--wait", "0s", "--yes"],
    "models copy": ["{0}:4", "--to", "{4}"],
    "models import": ["{1}/version", "--name", "{0}"],
    "etl": ["{1}/{0}"],
    "train": ["{1}/{0}"],
    "search": ["{1}/{0}"],
    "export": ["{1}/{0}"],
    "tables push": ["{1}/tables"],
    "tables remove": ["{3}", "--yes"],
    "alerts ack": ["{0}/disk", "--note", "mine"],
    "models sign": ["{0}:1", "--key", "{1}/own.key"],
    "alerts silence": ["{0}/*"],
    "alerts unsilence": ["1"],
    "alerts receivers add": ["pager", "http://127.0.0.1:9/x"],
    "alerts receivers list": [],
    "alerts test": ["pager"],
    "alerts receivers remove": ["pager"],
    "keys create": ["ci"],
    "keys require": [],
    "keys share": [],
    "keys issuer add": [
        "idp", "--url", "https://idp.example", "--audience", "serin", "--jwks-file", "{1}/jwks.json",
    ],
    "keys issuer remove": ["idp"],
    "keys remove": ["ci"],
    "hosts remove": ["gone", "--yes"],
    "backup create": ["{1}/backup"],
    "gc": ["--remove"],
    "trust policy": ["--check", "gate"],
    "models remove": ["{0}:{5}", "--yes"],
}  # fmt: skip
"""Commands that go through a shared store, in the order in which one credential tries them: for the model {0}, with
the folder {1}, the package {2}, the tables {3}, the store {4} and the version {5}.
tests/cluster/test_store_rights.py tries them."""

WRITTEN: Final = {
    "run": "packages/{0}/package.json",
    "tune": "tuned/{0}/0-cores.yaml",
    "agent": "cluster/hosts/{0}/agent.json",
    "controller": "cluster/leader.json.{0}",
    "worker": "cluster/hosts/{0}/worker-1.json",
}
"""Commands that last or need a stack, with an object that each writes. The same tests try to write it."""

ENDS: Final = {
    **dict.fromkeys(
        ("events push", "events backfill", "events forget"), "has no windows with source: online"
    ),
    **dict.fromkeys(("quality", "labels show"), "nothing is recorded of"),
    "drift": "is not watched",
    "status": "NOT READY",
    "alerts test": "pager: ",
    "doctor": "Python",
    "keys share": "share keys already",
    **dict.fromkeys(("deploy", "down", "env", "runs cancel", "runs report"), "no stack is up"),
    "events show": "the process 'windows' does not answer",
    "logs": "no log of model",
    "backup restore": "no such file",
}
"""What a command says that the store lets through, or does not ask, and that lacks something else here."""

OF_AN_ACCOUNT: Final = {
    "console secret": [],
    "deploy": [],
    "doctor": [],
    "down": [],
    "env": [],
    "events show": [],
    "gpus": [],
    "init": ["{1}/drafted", "--table", "{1}/rows.parquet"],
    "logs": ["fraud-eu"],
    "runs list": [],
    "runs show": ["{2}"],
    "runs logs": ["{2}"],
    "runs report": ["{2}"],
    "runs cancel": ["{2}"],
    "schema": [],
    "trust create": ["{1}/another.key"],
    "trust add": ["own", "{1}/own.key.pub"],
    "trust list": [],
    "trust remove": ["own"],
    "trust off": [],
    "backup restore": ["{1}/none"],
}
"""Commands for which the store does not matter: they are tried with a credential that may do nothing. {2} is a run."""

NOT_TRIED: Final = ("console run", "install gateway", "install kernels", "install triton", "up")
"""They start or install something on the machine."""
